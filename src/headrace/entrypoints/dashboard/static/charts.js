// Canvas drawings: steps as stacked bars, KV blocks as squares, lines of the last minutes. They draw what they are given
// and keep nothing.

import { colourOf, styled } from "./dom.js";

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

export const BAR = 10;
const GAP = 2;
const LEFT = 38;
const FOOT = 26;
const TOP = 10;

export function stepsThatFit(canvas) {
  return Math.max(10, Math.floor((canvas.clientWidth - LEFT) / BAR));
}

// The place of a step under a point, or -1.
export function stepAt(canvas, x, count) {
  const place = count - 1 - Math.floor((canvas.clientWidth - x) / BAR);
  return place >= 0 && place < count ? place : -1;
}

// The next number whose quarter is whole: the scale is a root, so that one long prompt does not flatten all others.
function roundScale(most) {
  let scale = 4;
  while (scale < most) scale *= 2;
  return scale;
}

// Bars from the right edge, the newest last, as high as the root of their tokens; a line for those that wait.
export function drawSteps(canvas, steps, chosen) {
  const { pen, width, height } = prepare(canvas);
  const base = height - FOOT;
  const tall = base - TOP;
  const most = roundScale(Math.max(4, ...steps.map((step) => step.num_tokens)));
  const left = width - steps.length * BAR;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  for (const share of [0, 0.25, 1]) {
    const y = Math.round(base - Math.sqrt(share) * tall) + 0.5;
    pen.strokeStyle = styled("line");
    pen.beginPath();
    pen.moveTo(LEFT, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.fillStyle = styled("quiet");
    pen.fillText(String(share * most), LEFT - 7, y + 4);
  }
  const [light, chroma, host, preempted] = ["light", "chroma", "host", "preempted"].map(styled);
  steps.forEach((step, index) => {
    const x = left + index * BAR;
    if (step.step === chosen) {
      pen.fillStyle = styled("sunk");
      pen.fillRect(x - GAP / 2, TOP, BAR, base - TOP + 12);
    }
    let y = base;
    let rest = step.num_tokens;
    const height = Math.sqrt(step.num_tokens / most) * tall;
    const put = (count, fill) => {
      const part = (count / step.num_tokens) * height;
      pen.fillStyle = fill;
      pen.fillRect(x, y - part, BAR - GAP, Math.max(part - (part > 3 ? 1 : 0), 0.8));
      y -= part;
    };
    for (const [name, count] of step.granted) {
      put(count, colourOf(name, light, chroma));
      rest -= count;
    }
    if (rest > 0) put(rest, host);
    if (step.preempted.length) {
      pen.fillStyle = preempted;
      pen.beginPath();
      pen.arc(x + (BAR - GAP) / 2, base + 7, 3, 0, 2 * Math.PI);
      pen.fill();
    }
  });
  drawWaiting(pen, steps, left, base, tall);
  pen.fillStyle = styled("quiet");
  pen.textAlign = "left";
  if (steps.length) pen.fillText(`step ${steps[0].step}`, Math.max(LEFT, left), height - 4);
  pen.textAlign = "right";
  pen.fillText(`${steps.at(-1)?.step ?? ""}`, width, height - 4);
}

function drawWaiting(pen, steps, left, base, tall) {
  const waiting = Math.max(...steps.map((step) => step.num_waiting), 0);
  if (!waiting) return;
  pen.strokeStyle = styled("waiting");
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  pen.beginPath();
  steps.forEach((step, index) => {
    pen.lineTo(left + index * BAR + (BAR - GAP) / 2, base - (step.num_waiting / waiting) * tall);
  });
  pen.stroke();
  pen.lineWidth = 1;
}

export const OWNERS = [
  [1, "free", "free"],
  [2, "cached", "cached, free to take"],
  [3, "owned", "running"],
  [4, "shared", "shared"],
  [5, "pending", "pending"],
];

const MOST_TALL = 200;

export function drawBlocks(canvas, states) {
  const width = canvas.clientWidth;
  const height = MOST_TALL;
  const count = Math.max(states.length, 1);
  let size = Math.max(1.5, Math.floor(Math.sqrt((width * height) / count)));
  while (size > 1.5 && Math.ceil(count / Math.floor(width / size)) * size > height) size -= 0.5;
  size = Math.min(size, 30);
  const columns = Math.max(1, Math.floor(width / size));
  canvas.style.height = `${Math.ceil(count / columns) * size}px`;
  const { pen } = prepare(canvas);
  const fills = Object.fromEntries(OWNERS.map(([state, name]) => [state, styled(name)]));
  const space = size > 8 ? 2 : size > 4 ? 1 : size > 3 ? 0.5 : 0;
  const radius = size > 18 ? 5 : size > 8 ? 3 : 0;
  states.forEach((state, index) => {
    pen.fillStyle = fills[state] ?? fills[1];
    const x = (index % columns) * size;
    const y = Math.floor(index / columns) * size;
    if (!radius) {
      pen.fillRect(x, y, size - space, size - space);
      return;
    }
    pen.beginPath();
    pen.roundRect(x, y, size - space, size - space, radius);
    pen.fill();
  });
}

// A line over a soft area, scaled to its own highest value; further lines share the scale.
export function drawLine(canvas, values, colour, ...others) {
  const { pen, width, height } = prepare(canvas);
  if (values.length < 2) return;
  const most = Math.max(...values, ...others.flatMap(([more]) => more), 1e-9);
  const place = (value, index, all) => [(index / (all.length - 1)) * width, height - 3 - (value / most) * (height - 8)];
  const trace = (all) => {
    pen.beginPath();
    all.forEach((value, index) => pen.lineTo(...place(value, index, all)));
  };
  trace(values);
  pen.lineTo(width, height);
  pen.lineTo(0, height);
  pen.closePath();
  pen.globalAlpha = 0.13;
  pen.fillStyle = styled(colour);
  pen.fill();
  pen.globalAlpha = 0.9;
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  for (const [all, name] of [[values, colour], ...others]) {
    trace(all);
    pen.strokeStyle = styled(name);
    pen.stroke();
  }
  pen.globalAlpha = 1;
}
