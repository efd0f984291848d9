// One request's explanation as a picture with words: a bar of its time, a lane for each cause, and what the cache did.

import { duration, el, number } from "./dom.js";

const GROUPS = {
  edge: "host",
  tokenise: "host",
  to_core: "host",
  from_core: "host",
  detokenise: "host",
  between_steps: "host",
  socket_wait: "client",
  prefill: "prefill",
  decode: "decode",
  decode_beside_prefill: "beside",
  step_running: "decode",
  step_in_flight: "waiting",
  preempted: "preempted",
  recompute: "recompute",
  failed_step: "failed",
};

export function groupOf(cause) {
  return GROUPS[cause] ?? (/^(waiting|not_granted)/.test(cause) ? "waiting" : "host");
}

// `short` shows the causes that matter and hides the crumbs.
export function renderExplanation(found, { short = false } = {}) {
  const wall = Math.max(found.wall_ms, 1e-6);
  const nameOf = (cause) => found.causes?.[cause] ?? cause;
  const bar = el("div", { class: "timeline", role: "img", "aria-label": describe(found) });
  for (const span of joined(found.spans, wall, groupOf)) {
    bar.append(slice(span, wall, `${nameOf(span.cause)}: ${duration(span.length_ms)}`));
  }
  const totals = Object.entries(found.totals_ms);
  const shown = short ? totals.filter(([, ms], index) => index < 5 && (index < 2 || ms > wall / 200)) : totals;
  const lanes = shown.map(([cause, ms]) =>
    el(
      "tr",
      {},
      el("td", {}, el("i", { class: `dot cause-${groupOf(cause)}` }), nameOf(cause)),
      short ? null : el("td", {}, lane(found.spans, cause, wall)),
      el("td", { class: "number" }, duration(ms)),
      el("td", { class: "number share" }, `${number((100 * ms) / wall, 1)} %`),
    ),
  );
  const body = el(
    "div",
    { class: "explanation" },
    headline(found),
    bar,
    el("div", { class: "scale" }, el("span", {}, "0"), el("span", {}, duration(wall))),
    el("table", { class: short ? "lanes" : "lanes wide-lanes" }, el("tbody", {}, ...lanes)),
  );
  body.append(...notes(found));
  return body;
}

function describe(found) {
  const end = found.finish_reason ? ` (${found.finish_reason})` : "";
  return `${found.state}${end}, ${duration(found.wall_ms)}, ${number(100 * found.attributed_share, 1)} % explained`;
}

function headline(found) {
  const end = found.finish_reason ? ` (${found.finish_reason})` : "";
  const speed = found.num_output_tokens && found.first_token_ms !== null && found.wall_ms > found.first_token_ms;
  const rate = speed ? ((found.num_output_tokens - 1) / (found.wall_ms - found.first_token_ms)) * 1000 : 0;
  const facts = [
    `${found.state}${end}`,
    `${number(100 * found.attributed_share, 1)} % explained`,
    found.first_token_ms === null ? "" : `first token after ${duration(found.first_token_ms)}`,
    found.num_output_tokens ? `${number(found.num_output_tokens)} tokens` : "",
    rate ? `${number(rate, 1)} tokens/s` : "",
  ];
  return el(
    "p",
    { class: "headline" },
    el("b", {}, duration(found.wall_ms)),
    el("span", { class: "quiet" }, facts.filter(Boolean).join(" · ")),
  );
}

function slice(span, wall, title) {
  const place = `left:${(100 * span.start_ms) / wall}%;width:${Math.max((100 * span.length_ms) / wall, 0.15)}%`;
  return el("span", { class: `cause-${groupOf(span.cause)}`, style: place, title });
}

function lane(spans, cause, wall) {
  const own = joined(spans.filter((span) => span.cause === cause), wall, (name) => name);
  return el("div", { class: "lane" }, ...own.map((span) => slice(span, wall, duration(span.length_ms))));
}

// Neighbours too thin to see are drawn as one.
function joined(spans, wall, kindOf) {
  const drawn = [];
  for (const span of spans) {
    const last = drawn.at(-1);
    const near = last && span.start_ms - (last.start_ms + last.length_ms) < wall / 2000;
    if (near && kindOf(last.cause) === kindOf(span.cause)) last.length_ms = span.start_ms + span.length_ms - last.start_ms;
    else drawn.push({ ...span });
  }
  return drawn;
}

function notes(found) {
  const lines = found.preemptions.map((one) => {
    return el("p", { class: "note strong" }, `Preempted at ${duration(one.at_ms)}: ${one.why}.`);
  });
  const prefix = found.prefix;
  if (prefix.num_prompt_tokens) {
    const hit = `${prefix.local_hit} of ${prefix.num_prompt_tokens} prompt tokens came from the prefix cache.`;
    const miss = prefix.miss ? ` First miss: ${missText(prefix.miss)}.` : "";
    lines.push(el("p", { class: "note" }, hit + miss));
  }
  return lines;
}

function missText(miss) {
  const where = miss.block === undefined ? "" : `block ${miss.block} (from token ${miss.first_token}), `;
  const words = {
    never_seen: "never seen here",
    evicted: `evicted at step ${miss.step}`,
    cleared: `the cache was emptied at step ${miss.step}`,
    different_adapter: `computed for another adapter (${miss.other})`,
    different_media: "computed with other media",
    different_salt: "belongs to another cache salt",
    text_differs: `the text differs at token ${miss.token}`,
    left_index: "unknown, it left the bounded index",
    prompt_logprobs: "prompt logprobs need the whole prompt computed",
    caching_off: "prefix caching is off",
  };
  return where + (words[miss.reason] ?? miss.reason);
}
