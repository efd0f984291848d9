// The dashboard: follows the feed, shows the newest tick or the one that was rewound to, and opens explanations.

import { CallError, events, get } from "./api.js";
import { drawBlocks, drawLine, drawSteps, stepAt, stepsThatFit } from "./charts.js";
import { $, askForKey, duration, el, number } from "./dom.js";
import { History } from "./history.js";
import { showBlockLegend, showGraphs, showReasons, showRequests, showSetup, showStep } from "./panels.js";
import { renderExplanation } from "./timeline.js";

const RETRY_MS = 2000;
const REFRESH_MS = 1000;
const HIDDEN = "hidden";

const history = new History();
let frozen = null;
let chosen = null;
let following = 0;

// What is shown: the newest tick, or of those that were there when the picture was stopped the one rewound to.
function shownTick() {
  if (!frozen) return history.ticks.at(-1);
  return frozen[Math.min(Number($("rewind").value), frozen.length - 1)];
}

const shownSteps = (tick) => history.stepsUntil(tick, stepsThatFit($("steps")));

function draw() {
  const tick = shownTick();
  const steps = shownSteps(tick);
  drawSteps($("steps"), steps, chosen);
  const waiting = Math.max(0, ...steps.map((step) => step.num_waiting));
  $("step-note").textContent = waiting ? `line: waiting requests, at most ${waiting}` : "";
  if (!tick) return;
  $("when").textContent = frozen ? `${duration(Math.max(0, frozen.at(-1).taken - tick.taken))} back` : "now";
  showFigures(tick);
  drawBlocks($("blocks"), tick.blocks);
  showBlockLegend(tick.blocks);
  showReasons(tick.stats);
  showRequests(tick.requests, explain);
}

function showFigures(tick) {
  const { stats, latency, totals } = tick;
  const text = {
    rate: number(tick.tokens_per_s, 1),
    "rate-in": `${number(tick.prompt_tokens_per_s, 1)} prompt tokens/s`,
    running: number(stats.num_running),
    waiting: number(stats.num_waiting),
    kv: `${number(100 * stats.kv_cache_usage, 1)} %`,
    "kv-blocks": `${number(tick.blocks.filter((state) => state > 2).length)} of ${number(tick.blocks.length)}`,
    "hit-rate": stats.prefix_queries ? `${number((100 * stats.prefix_hits) / stats.prefix_queries, 1)} %` : "–",
    "hit-tokens": stats.prefix_queries ? `${number(stats.prefix_hits)} of ${number(stats.prefix_queries)} tokens` : "",
    preemptions: number(stats.num_preemptions),
    recomputed: stats.recompute_tokens ? `${number(stats.recompute_tokens)} tokens computed again` : "",
    generated: number(totals.generation_tokens),
    prompted: `for ${number(totals.prompt_tokens)} prompt tokens`,
    ttft: median(latency.ttft),
    "ttft-more": tails(latency.ttft),
    gap: median(latency.gap),
    "gap-more": tails(latency.gap),
  };
  for (const [id, value] of Object.entries(text)) $(id).textContent = value;
  drawLine($("rate-line"), history.series(tick, (one) => one.tokens_per_s), "accent");
  const waiting = history.series(tick, (one) => one.stats.num_waiting);
  drawLine($("running-line"), history.series(tick, (one) => one.stats.num_running), "decode", [waiting, "waiting"]);
  drawLine($("kv-line"), history.series(tick, (one) => one.stats.kv_cache_usage), "prefill");
}

const median = (known) => (known ? duration(1000 * known.values[0]) : "–");

function tails(known) {
  if (!known) return "";
  const [, p95, p99] = known.values.map((seconds) => duration(1000 * seconds));
  return `p95 ${p95}, p99 ${p99}, ${known.of}`;
}

async function explain(id) {
  $("explain-id").textContent = id;
  $("explain-body").replaceChildren(el("p", { class: "quiet" }, "asking"));
  if (!$("explain").open) $("explain").showModal();
  // One that lives is asked about again, as long as somebody looks.
  const isShown = () => $("explain").open && $("explain-id").textContent === id;
  for (let live = true; live && isShown(); ) {
    try {
      const found = await get(`v1/requests/${encodeURIComponent(id)}/explain`);
      const answers = found.answers ?? [found];
      if (isShown()) $("explain-body").replaceChildren(...answers.map((answer) => renderExplanation(answer)));
      live = answers.some((answer) => answer.state !== "finished");
    } catch (error) {
      if (isShown()) $("explain-body").replaceChildren(el("p", { class: "error" }, error.message));
      return;
    }
    if (live) await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

function choose(step) {
  chosen = step.step;
  showStep(step);
  drawSteps($("steps"), shownSteps(shownTick()), chosen);
}

function setPaused(value) {
  frozen = value ? [...history.ticks] : null;
  $("pause").textContent = value ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", value);
  const slider = $("rewind");
  slider.disabled = !value;
  slider.max = Math.max(1, history.ticks.length - 1);
  slider.value = slider.max;
  draw();
}

function setLink(state, text) {
  $("link").dataset.state = state;
  $("link").textContent = text;
}

async function follow() {
  const mine = ++following;
  while (mine === following) {
    try {
      setLink("waiting", "connecting");
      showSetup(await get("v1/dashboard/setup"));
      for await (const tick of events("v1/dashboard/feed")) {
        if (mine !== following) return;
        setLink("live", "live");
        history.take(tick);
        showGraphs(tick.stats, history.steps);
        if (!frozen && document.visibilityState !== HIDDEN) draw();
      }
      setLink("error", "the server ended the feed");
    } catch (error) {
      setLink("error", error.message);
      if (error instanceof CallError && error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function chooseAt(event) {
  const steps = shownSteps(shownTick());
  const step = steps[stepAt($("steps"), event.offsetX, steps.length)];
  if (step && step.step !== chosen) choose(step);
}

$("pause").addEventListener("click", () => setPaused(!frozen));
$("rewind").addEventListener("input", draw);
$("steps").addEventListener("click", chooseAt);
$("steps").addEventListener("pointermove", chooseAt);
$("steps").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const steps = shownSteps(shownTick());
  const place = steps.findIndex((step) => step.step === chosen);
  const next = steps[place < 0 ? steps.length - 1 : Math.min(steps.length - 1, Math.max(0, place + by))];
  if (next) choose(next);
});
$("explain").addEventListener("click", (event) => {
  if (event.target === $("explain")) $("explain").close();
});
$("filter").addEventListener("input", () => {
  const wanted = $("filter").value.trim().toLowerCase();
  for (const row of $("config").tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, dialog");
  if (event.key === "p" && !event.ctrlKey && !event.metaKey && !typing) setPaused(!frozen);
});
document.addEventListener("visibilitychange", draw);
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

askForKey(follow);
follow();
