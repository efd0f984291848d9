// Small helpers: elements, numbers, colours, and the form that asks for the key.

import { setKey, whenKeyIsWanted } from "./api.js";

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value, digits = 0) {
  return Number(value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function duration(ms) {
  if (ms < 1) return `${number(ms, 2)} ms`;
  if (ms < 1000) return `${number(ms, ms < 10 ? 1 : 0)} ms`;
  return `${number(ms / 1000, ms < 10000 ? 2 : 1)} s`;
}

export const words = (name) => name.replaceAll("_", " ");

// The value of a colour or number of the style sheet, in the scheme that is shown.
export const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// The same text always gets the same hue; how light and how strong is up to the scheme.
export function colourOf(text, light = styled("light"), chroma = styled("chroma")) {
  let hash = 2166136261;
  for (const char of text) hash = Math.imul(hash ^ char.codePointAt(0), 16777619);
  hash = Math.imul(hash ^ (hash >>> 15), 0x2c1b3c6d) >>> 0;
  return `oklch(${Number(light) + ((hash >>> 20) % 3) * 0.045} ${chroma} ${(hash >>> 8) % 360})`;
}

export function askForKey(again) {
  const form = $("key-form");
  whenKeyIsWanted(() => {
    form.hidden = false;
    $("key").focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value);
    form.hidden = true;
    again();
  });
}
