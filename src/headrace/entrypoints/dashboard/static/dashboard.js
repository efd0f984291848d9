// The dashboard: follows the feed, keeps a bounded history for pause and rewind, and opens explanations.

import { CallError, events, get } from "./api.js";
import { drawBlocks, drawSteps, OWNERS, stepsThatFit, BAR } from "./charts.js";
import { $, askForKey, duration, el, number } from "./dom.js";
import { renderExplanation } from "./timeline.js";

const MAX_STEPS = 2000;
const MAX_TICKS = 900;
const RETRY_MS = 2000;

const history = { steps: [], ticks: [] };
let paused = false;
let chosen = null;
let following = 0;

// What is shown: the newest tick, or the one that was rewound to.
function shownTick() {
  if (!paused) return history.ticks.at(-1);
  return history.ticks[Number($("rewind").value)] ?? history.ticks.at(-1);
}

function shownSteps(tick) {
  const until = tick ? tick.last_step : Infinity;
  const steps = history.steps.filter((step) => step.step <= until);
  return steps.slice(-stepsThatFit($("steps")));
}

function draw() {
  const tick = shownTick();
  const steps = shownSteps(tick);
  drawSteps($("steps"), steps, chosen);
  const waiting = Math.max(0, ...steps.map((step) => step.num_waiting));
  $("step-note").textContent = waiting ? `the line: waiting requests, at most ${waiting}` : "";
  if (!tick) return;
  figures(tick);
  drawBlocks($("blocks"), tick.blocks);
  blockLegend(tick.blocks);
  reasons(tick);
  requestRows(tick.requests);
}

function figures(tick) {
  const { stats, latency, totals } = tick;
  $("running").textContent = number(stats.num_running);
  $("waiting").textContent = number(stats.num_waiting);
  $("kv").textContent = `${number(100 * stats.kv_cache_usage, 1)} %`;
  $("hit-rate").textContent = stats.prefix_queries ? `${number((100 * stats.prefix_hits) / stats.prefix_queries, 1)} %` : "–";
  $("preemptions").textContent = number(stats.num_preemptions);
  $("generated").textContent = number(totals.generation_tokens);
  $("rate").textContent = number(tick.tokens_per_s, 1);
  $("ttft").textContent = pair(latency.ttft);
  $("gap").textContent = pair(latency.gap);
}

const pair = (values) => (values ? values.map((seconds) => duration(1000 * seconds)).join(" / ") : "–");

function blockLegend(states) {
  const counts = {};
  for (const state of states) counts[state] = (counts[state] ?? 0) + 1;
  $("block-legend").replaceChildren(
    ...OWNERS.map(([state, name, words]) =>
      el("span", {}, el("i", { class: "dot", style: `background:var(--${name})` }), `${words} ${number(counts[state] ?? 0)}`),
    ),
  );
  $("block-note").textContent = `${number(states.length)} blocks`;
}

function meters(rows, format) {
  const most = Math.max(...rows.map(([, value]) => value), 1e-9);
  return el(
    "div",
    { class: "meter" },
    ...rows.flatMap(([name, value]) => [
      el("span", {}, name.replaceAll("_", " ")),
      el("i", { style: `width:${(100 * value) / most}%` }),
      el("span", { class: "number" }, format(value)),
    ]),
  );
}

function reasons(tick) {
  const waiting = Object.entries(tick.stats.waiting_reasons ?? {});
  const causes = Object.entries(tick.stats.cause_seconds ?? {}).sort((a, b) => b[1] - a[1]);
  const phases = Object.entries(tick.stats.phase_seconds ?? {});
  const parts = [];
  if (waiting.length) parts.push(el("p", { class: "note" }, "Waiting now, by reason"), meters(waiting, number));
  if (causes.length) {
    const inMs = causes.map(([name, seconds]) => [name, 1000 * seconds]);
    parts.push(el("p", { class: "note" }, "Time of all requests since start"), meters(inMs.slice(0, 8), duration));
  }
  if (phases.length) {
    const inMs = phases.map(([name, seconds]) => [name, 1000 * seconds]);
    parts.push(el("p", { class: "note" }, "Time of all steps since start"), meters(inMs, duration));
  }
  $("reasons").replaceChildren(...(parts.length ? parts : [el("p", { class: "note" }, "Nothing has run so far.")]));
}

function requestRows(requests) {
  const body = $("requests").tBodies[0];
  const focused = document.activeElement?.dataset?.request;
  body.replaceChildren(
    ...requests.map((one) => {
      const state = one.state === "finished" ? one.finish_reason : one.waiting_reason ? `waiting: ${one.waiting_reason}` : one.state;
      const open = (event) => {
        if (event.type === "keydown" && event.key !== "Enter") return;
        // Or the same key would press the first button of what it opens.
        event.preventDefault();
        explain(one.id);
      };
      const row = el(
        "tr",
        { tabindex: 0, role: "button", onclick: open, onkeydown: open },
        el("td", {}, one.id),
        el("td", {}, state.replaceAll("_", " ")),
        ...[one.num_prompt_tokens, one.num_cached_tokens, one.num_output_tokens || "", one.num_preemptions || ""].map((value) =>
          el("td", { class: "number" }, value === "" ? "" : number(value)),
        ),
        el("td", { class: "number" }, duration(1000 * one.length_s)),
      );
      row.dataset.request = one.request_id;
      return row;
    }),
  );
  if (focused) body.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
  if (!requests.length) body.append(el("tr", {}, el("td", { colspan: 7, class: "quiet" }, "No request so far.")));
}

async function explain(id) {
  $("explain-id").textContent = id;
  $("explain-body").replaceChildren();
  if (!$("explain").open) $("explain").showModal();
  try {
    const found = await get(`v1/requests/${encodeURIComponent(id)}/explain`);
    $("explain-body").replaceChildren(...(found.answers ?? [found]).map(renderExplanation));
  } catch (error) {
    $("explain-body").replaceChildren(el("p", { class: "error" }, error.message));
  }
}

function stepDetail() {
  const step = history.steps.find((one) => one.step === chosen);
  if (!step) return;
  const phases = Object.entries(step.phases_ms).map(([name, ms]) => `${name} ${duration(ms)}`);
  const grants = step.granted.slice(0, 6).map(([name, count]) => `${name} ${count}`);
  const more = step.num_requests > 6 ? ` and ${step.num_requests - 6} more` : "";
  const graph = step.graph_mode ? `${step.graph_mode}${step.graph_reason ? ` (${step.graph_reason})` : ""}` : "";
  const preempted = step.num_preempted ? `preempted ${step.num_preempted}` : "";
  const waiting = step.num_waiting ? `${step.num_waiting} wait${step.waiting_reason ? ` (${step.waiting_reason})` : ""}` : "";
  const parts = [`${step.num_tokens} tokens: ${grants.join(", ")}${more}`, waiting, preempted, graph, phases.join(", ")];
  $("step-detail").textContent = `Step ${step.step}: ${parts.filter(Boolean).join("; ")}`;
}

function choose(step) {
  chosen = step;
  stepDetail();
  draw();
}

function setPaused(value) {
  paused = value;
  $("pause").textContent = paused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", paused);
  const slider = $("rewind");
  slider.disabled = !paused;
  slider.max = Math.max(0, history.ticks.length - 1);
  slider.value = slider.max;
  draw();
}

function take(tick) {
  const known = history.steps.at(-1)?.step ?? -1;
  history.steps.push(...tick.steps.filter((step) => step.step > known));
  history.steps.splice(0, Math.max(0, history.steps.length - MAX_STEPS));
  tick.blocks = Array.from(atob(tick.blocks), (char) => char.charCodeAt(0)).slice(1);
  tick.last_step = history.steps.at(-1)?.step ?? -1;
  delete tick.steps;
  // While paused nothing moves under the slider; the steps are kept all the same.
  if (!paused) {
    history.ticks.push(tick);
    history.ticks.splice(0, Math.max(0, history.ticks.length - MAX_TICKS));
    draw();
  }
}

async function showSetup() {
  const setup = await get("v1/dashboard/setup");
  $("model").textContent = `${setup.model}, context of ${number(setup.max_model_len)} tokens`;
  const refused = Object.entries(setup.attention.refused ?? {});
  $("choices").replaceChildren(
    el("p", {}, `Attention: ${setup.attention.chosen || "not told"}`),
    refused.length ? el("p", { class: "note" }, "Not chosen:") : "",
    el("ul", { class: "note" }, ...refused.map(([name, why]) => el("li", {}, `${name}: ${why}`))),
    el("p", { class: "note", id: "graphs" }),
  );
  const phases = [...Object.entries(setup.start_up_ms), ...Object.entries(setup.engine_ms).map(([n, ms]) => [`engine: ${n}`, ms])];
  $("start-up").replaceChildren(meters(phases, duration));
  $("config").tBodies[0].replaceChildren(
    ...setup.config.map((row) =>
      el("tr", {}, el("td", {}, row.name), el("td", {}, String(row.value ?? "–")), el("td", { class: "quiet" }, row.reason)),
    ),
  );
}

async function follow() {
  const mine = ++following;
  while (mine === following) {
    try {
      await showSetup();
      for await (const tick of events("v1/dashboard/feed")) {
        if (mine !== following) return;
        $("link").textContent = "live";
        take(tick);
        const modes = Object.entries(tick.stats.graph_steps ?? {}).map(([mode, count]) => `${mode} ${number(count)}`);
        $("graphs").textContent = modes.length ? `Steps by graph mode: ${modes.join(", ")}` : "";
      }
      $("link").textContent = "the server ended the feed";
    } catch (error) {
      $("link").textContent = error.message;
      if (error instanceof CallError && error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

$("pause").addEventListener("click", () => setPaused(!paused));
$("rewind").addEventListener("input", draw);
$("steps").addEventListener("click", (event) => {
  const steps = shownSteps(shownTick());
  const place = steps.length - 1 - Math.floor(($("steps").clientWidth - event.offsetX) / BAR);
  if (steps[place]) choose(steps[place].step);
});
$("steps").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const steps = shownSteps(shownTick());
  const place = steps.findIndex((step) => step.step === chosen);
  const next = steps[place < 0 ? steps.length - 1 : Math.min(steps.length - 1, Math.max(0, place + by))];
  if (next) choose(next.step);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "p" && !event.target.closest("input, textarea, dialog")) setPaused(!paused);
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

askForKey(follow);
follow();
