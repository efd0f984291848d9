// Canvas drawings: steps as stacked bars, KV blocks as squares. They draw what they are given and keep nothing.

import { colourOf } from "./dom.js";

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const BAR = 9;

export function stepsThatFit(canvas) {
  return Math.max(10, Math.floor((canvas.clientWidth - 44) / BAR));
}

// Bars from the right edge, the newest last; above them the waiting requests as a line.
export function drawSteps(canvas, steps, chosen) {
  const { pen, width, height } = prepare(canvas);
  const base = height - 18;
  const most = Math.max(4, ...steps.map((step) => step.num_tokens));
  const waiting = Math.max(1, ...steps.map((step) => step.num_waiting));
  const left = width - steps.length * BAR;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = colour("quiet");
  pen.strokeStyle = colour("line");
  for (const share of [0, 0.5, 1]) {
    const y = base - share * (base - 8);
    pen.beginPath();
    pen.moveTo(40, y + 0.5);
    pen.lineTo(width, y + 0.5);
    pen.stroke();
    pen.fillText(String(Math.round(share * most)), 2, y + 4);
  }
  steps.forEach((step, index) => {
    const x = left + index * BAR;
    let y = base;
    let rest = step.num_tokens;
    for (const [name, count] of step.granted) {
      const tall = (count / most) * (base - 8);
      pen.fillStyle = colourOf(name);
      pen.fillRect(x, y - tall, BAR - 2, Math.max(tall - (tall > 4 ? 0.6 : 0), 0.6));
      y -= tall;
      rest -= count;
    }
    if (rest > 0) {
      pen.fillStyle = colour("host");
      const tall = (rest / most) * (base - 8);
      pen.fillRect(x, y - tall, BAR - 2, tall);
    }
    if (step.num_preempted) {
      pen.fillStyle = colour("preempted");
      pen.fillRect(x, base + 3, BAR - 2, 4);
    }
    if (step.step === chosen) {
      pen.strokeStyle = colour("ink");
      pen.strokeRect(x - 1.5, 2.5, BAR + 1, base - 1);
    }
  });
  pen.strokeStyle = colour("waiting");
  pen.beginPath();
  steps.forEach((step, index) => {
    const y = base - (step.num_waiting / waiting) * (base - 8);
    pen.lineTo(left + index * BAR + BAR / 2, y);
  });
  if (steps.some((step) => step.num_waiting)) pen.stroke();
  pen.fillStyle = colour("quiet");
  if (steps.length) pen.fillText(`step ${steps[0].step}`, Math.max(40, left), height - 3);
  const last = `${steps.at(-1)?.step ?? ""}`;
  pen.fillText(last, width - pen.measureText(last).width, height - 3);
}

export const OWNERS = [
  [1, "free", "free"],
  [2, "cached", "cached, free to take"],
  [3, "decode", "running"],
  [4, "shared", "shared"],
  [5, "pending", "pending"],
];

export function drawBlocks(canvas, states) {
  const { pen, width, height } = prepare(canvas);
  const count = Math.max(states.length, 1);
  let size = Math.max(1.5, Math.floor(Math.sqrt((width * height) / count)));
  while (size > 1.5 && Math.ceil(count / Math.floor(width / size)) * size > height) size -= 0.5;
  size = Math.min(size, 22);
  const columns = Math.max(1, Math.floor(width / size));
  const fills = Object.fromEntries(OWNERS.map(([state, name]) => [state, colour(name)]));
  const space = size > 5 ? 1 : size > 3 ? 0.5 : 0;
  states.forEach((state, index) => {
    pen.fillStyle = fills[state] ?? fills[1];
    pen.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - space, size - space);
  });
}
