// One request's explanation as a picture with words: a bar of its time, sums by cause, and what the cache did.

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
  not_granted: "waiting",
  preempted: "preempted",
  recompute: "recompute",
  failed_step: "failed",
};

const group = (cause) => GROUPS[cause] ?? (cause.startsWith("waiting") ? "waiting" : "host");

export function renderExplanation(found) {
  const wall = Math.max(found.wall_ms, 1e-6);
  const bar = el("div", { class: "timeline", role: "img", "aria-label": describe(found) });
  for (const span of joined(found.spans, wall)) {
    const words = `${found.causes?.[span.cause] ?? span.cause}: ${duration(span.length_ms)}`;
    const place = `left:${(100 * span.start_ms) / wall}%;width:${Math.max((100 * span.length_ms) / wall, 0.1)}%`;
    bar.append(el("span", { class: `cause-${group(span.cause)}`, style: place, title: words }));
  }
  const rows = Object.entries(found.totals_ms).map(([cause, ms]) =>
    el(
      "tr",
      {},
      el("td", {}, el("i", { class: `dot cause-${group(cause)}` }), found.causes?.[cause] ?? cause.replaceAll("_", " ")),
      el("td", { class: "number" }, duration(ms)),
      el("td", { class: "number" }, `${number((100 * ms) / wall, 1)} %`),
    ),
  );
  const body = el(
    "div",
    { class: "explanation" },
    el("p", { class: "headline" }, describe(found)),
    bar,
    el("div", { class: "scale" }, el("span", {}, "0"), el("span", {}, duration(wall))),
    el("table", { class: "causes" }, el("tbody", {}, ...rows)),
  );
  for (const line of notes(found)) body.append(el("p", { class: "note" }, line));
  return body;
}

function describe(found) {
  const end = found.finish_reason ? ` (${found.finish_reason})` : "";
  return `${found.state}${end}, ${duration(found.wall_ms)}, ${number(100 * found.attributed_share, 1)} % explained`;
}

// Neighbours too thin to see are drawn as one.
function joined(spans, wall) {
  const drawn = [];
  for (const span of spans) {
    const last = drawn.at(-1);
    const near = last && span.start_ms - (last.start_ms + last.length_ms) < wall / 2000;
    if (near && group(last.cause) === group(span.cause)) last.length_ms = span.start_ms + span.length_ms - last.start_ms;
    else drawn.push({ ...span });
  }
  return drawn;
}

function notes(found) {
  const lines = found.preemptions.map(
    (one) => `Preempted at ${duration(one.at_ms)} for ${one.for === found.id ? "its own sake" : one.for} (${one.cause}).`,
  );
  const prefix = found.prefix;
  if (prefix.num_prompt_tokens) {
    lines.push(`${prefix.local_hit} of ${prefix.num_prompt_tokens} prompt tokens came from the prefix cache.`);
    if (prefix.miss) lines.push(`First miss: ${missText(prefix.miss)}.`);
  }
  return lines;
}

function missText(miss) {
  const where = miss.block === undefined ? "" : `block ${miss.block} (from token ${miss.first_token}): `;
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
