// The parts of the dashboard below the numbers: what each panel shows of a tick, of a step, of the setup.

import { OWNERS } from "./charts.js";
import { $, colourOf, duration, el, number, words } from "./dom.js";
import { groupOf } from "./timeline.js";

const PHASES = { schedule: "waiting", prepare: "client", forward: "decode", sample: "prefill", update: "recompute", output: "host" };

// One bar cut into parts, with its parts named below; `group` gives the name of a colour, whose shades tell its parts.
function parts(title, rows, group, format) {
  const known = rows.filter(([, value]) => value > 0);
  const shade = (name) => {
    const same = known.filter(([other]) => group(other) === group(name)).findIndex(([other]) => other === name);
    return `color-mix(in srgb, var(--${group(name)}) ${Math.max(34, 100 - 22 * same)}%, var(--panel))`;
  };
  const whole = known.reduce((sum, [, value]) => sum + value, 0);
  return el(
    "div",
    { class: "parts" },
    el("h3", {}, el("span", {}, title), el("span", { class: "number" }, format(whole))),
    el(
      "div",
      { class: "stack", role: "img", "aria-label": title },
      ...known.map(([name, value]) => el("i", { style: `flex:${value / whole};background:${shade(name)}`, title: words(name) })),
    ),
    el(
      "ul",
      {},
      ...known.map(([name, value]) =>
        el("li", {}, el("i", { class: "dot", style: `background:${shade(name)}` }), el("span", {}, words(name)), el("span", {}, format(value))),
      ),
    ),
  );
}

const byValue = (values) => Object.entries(values ?? {}).sort((a, b) => b[1] - a[1]);
const inMs = (rows) => rows.map(([name, seconds]) => [name, 1000 * seconds]);

export function showReasons(stats) {
  const waiting = byValue(stats.waiting_reasons);
  const causes = inMs(byValue(stats.cause_seconds));
  const phases = inMs(Object.entries(stats.phase_seconds ?? {}));
  const shown = [
    waiting.length ? parts("requests that wait now, by reason", waiting, () => "waiting", number) : null,
    causes.length ? parts("requests: time in the engine, by cause", causes, groupOf, duration) : null,
    phases.length ? parts("steps: time by phase", phases, (name) => PHASES[name] ?? "host", duration) : null,
  ].filter(Boolean);
  $("reasons").replaceChildren(...(shown.length ? shown : [el("p", { class: "quiet" }, "Nothing has run so far.")]));
}

export function showBlockLegend(states) {
  const counts = {};
  for (const state of states) counts[state] = (counts[state] ?? 0) + 1;
  $("block-legend").replaceChildren(
    ...OWNERS.map(([state, name, text]) =>
      el("span", {}, el("i", { class: "dot", style: `background:var(--${name})` }), `${text} ${number(counts[state] ?? 0)}`),
    ),
  );
  $("block-note").textContent = `${number(states.length)} blocks`;
}

export function showRequests(requests, open) {
  const body = $("requests").tBodies[0];
  const focused = document.activeElement?.dataset?.request;
  body.replaceChildren(...requests.map((one) => requestRow(one, open)));
  if (focused) body.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
  if (!requests.length) body.append(el("tr", {}, el("td", { colspan: 7, class: "quiet" }, "No request so far.")));
}

function requestRow(one, open) {
  const ended = one.state === "finished";
  const state = ended ? one.finish_reason : one.state;
  const text = one.waiting_reason && state === "waiting" ? `waiting: ${words(one.waiting_reason)}` : words(state);
  const act = (event) => {
    if (event.type === "keydown" && event.key !== "Enter") return;
    // Or the same key would press the first button of what it opens.
    event.preventDefault();
    open(one.id);
  };
  const row = el(
    "tr",
    { tabindex: 0, role: "button", onclick: act, onkeydown: act },
    el("td", {}, el("i", { class: "dot", style: `background:${colourOf(one.id)}` }), one.id),
    el("td", {}, el("span", { class: "pill", "data-state": state }, text)),
    el("td", { class: "number optional" }, number(one.num_prompt_tokens)),
    el("td", { class: "number optional" }, number(one.num_cached_tokens)),
    el("td", { class: "number" }, one.num_output_tokens ? number(one.num_output_tokens) : ""),
    el("td", { class: "number optional" }, one.num_preemptions ? number(one.num_preemptions) : ""),
    el("td", { class: "number" }, duration(1000 * one.length_s)),
  );
  row.dataset.request = one.request_id;
  return row;
}

export function showStep(step) {
  const phases = Object.entries(step.phases_ms).filter(([, ms]) => ms > 0);
  const grants = step.granted.slice(0, 8).map(([name, count]) => `${name} ${count}`);
  const more = step.num_requests > 8 ? ` and ${step.num_requests - 8} more` : "";
  const preempted = step.preempted.map((one) => `${one.victim}${one.for === one.victim ? "" : ` for ${one.for}`} (${words(one.cause)})`);
  const skipped = step.skipped.map(([reason, count]) => `${count}: ${words(reason)}`);
  const rows = [
    ["tokens", `${grants.join(", ")}${more}`],
    ["phases", phases.map(([name, ms]) => `${name} ${duration(ms)}`).join(", ")],
    ["graph", step.graph_mode ? `${step.graph_mode}${step.graph_reason ? `, ${step.graph_reason}` : ""}` : ""],
    ["waiting", step.num_waiting ? `${step.num_waiting}${step.waiting_reason ? `: ${words(step.waiting_reason)}` : ""}` : ""],
    ["got nothing", skipped.join(", ")],
    ["preempted", preempted.join(", ")],
  ];
  $("step-detail").replaceChildren(
    el("b", {}, `Step ${step.step}: ${number(step.num_tokens)} tokens in ${duration(step.length_ms)}`),
    el("dl", {}, ...rows.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
  );
}

// How many steps ran in each graph mode, and why the latest one ran in its own.
export function showGraphs(stats, steps) {
  const modes = Object.entries(stats.graph_steps ?? {}).map(([mode, count]) => `${mode} ${number(count)}`);
  const why = new Map(steps.filter((step) => step.graph_mode).map((step) => [step.graph_mode, step.graph_reason]));
  const items = [...why].map(([mode, reason]) => el("li", {}, `${mode}: ${reason || "no reason told"}`));
  $("graphs").replaceChildren(
    modes.length ? el("p", { class: "choice" }, el("b", {}, "Graphs "), `${modes.join(", ")} steps`) : "",
    el("ul", { class: "plain quiet" }, ...items),
  );
}

function captured(graphs) {
  if (!graphs) return "";
  const sizes = (graphs.sizes ?? []).map(([tokens, requests]) => `${number(tokens)} tokens of ${number(requests)} requests`);
  const most = sizes.length ? `, up to ${sizes.join(", ")}` : "";
  return el("p", { class: "choice" }, el("b", {}, "Captured "), `${graphs.mode}: ${graphs.reason}${most}`);
}

export function showSetup(setup) {
  $("model").textContent = `${setup.model} · context of ${number(setup.max_model_len)} tokens`;
  const most = setup.config.find((row) => row.name === "scheduler.max_num_seqs");
  $("most-running").textContent = most ? `at most ${number(most.value)} at once` : "";
  const refused = Object.entries(setup.attention.refused ?? {});
  $("choices").replaceChildren(
    el("p", { class: "choice" }, el("b", {}, "Attention "), setup.attention.chosen || "not told"),
    refused.length ? el("p", { class: "quiet" }, "Not chosen") : "",
    el("ul", { class: "plain quiet" }, ...refused.map(([name, why]) => el("li", {}, `${name}: ${why}`))),
    captured(setup.graphs),
    el("div", { id: "graphs" }),
  );
  const colours = ["host", "prefill", "decode", "waiting", "client", "recompute", "beside", "shared", "cached"];
  const shades = (rows) => (name) => colours[rows.findIndex(([one]) => one === name) % colours.length];
  const outer = Object.entries(setup.start_up_ms);
  const engine = Object.entries(setup.engine_ms);
  const whole = outer.reduce((sum, [, ms]) => sum + ms, 0);
  $("start-up-note").textContent = whole ? `ready after ${duration(whole)}` : "";
  $("start-up").replaceChildren(
    ...[["until ready", outer], ["inside the engine", engine]]
      .filter(([, rows]) => rows.length)
      .map(([title, rows]) => parts(title, rows, shades(rows), duration)),
  );
  $("config").tBodies[0].replaceChildren(
    ...setup.config.map((row) =>
      el(
        "tr",
        { "data-decided": row.reason && row.reason !== "default" },
        el("td", {}, row.name),
        el("td", {}, String(row.value ?? "–")),
        el("td", { class: "quiet" }, row.reason),
      ),
    ),
  );
}
