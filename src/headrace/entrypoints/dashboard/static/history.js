// What the dashboard remembers of the feed: a bounded number of steps and ticks, for pause and rewind.

const MAX_STEPS = 4000;
const MAX_TICKS = 900;
const MAX_POINTS = 120;

export class History {
  steps = [];
  ticks = [];

  // Takes a tick of the feed; its steps go to the one list of all steps.
  take(tick) {
    const known = this.steps.at(-1)?.step ?? -1;
    this.steps.push(...tick.steps.filter((step) => step.step > known));
    this.steps.splice(0, Math.max(0, this.steps.length - MAX_STEPS));
    tick.blocks = Array.from(atob(tick.blocks), (char) => char.charCodeAt(0)).slice(1);
    tick.last_step = this.steps.at(-1)?.step ?? -1;
    tick.taken = Date.now();
    delete tick.steps;
    this.ticks.push(tick);
    this.ticks.splice(0, Math.max(0, this.ticks.length - MAX_TICKS));
  }

  // The newest `count` steps that a tick knew.
  stepsUntil(tick, count) {
    const until = tick ? tick.last_step : Infinity;
    let end = this.steps.length;
    while (end > 0 && this.steps[end - 1].step > until) end -= 1;
    return this.steps.slice(Math.max(0, end - count), end);
  }

  find(id) {
    return this.steps.find((step) => step.step === id);
  }

  // A number of the ticks up to one, oldest first.
  series(tick, pick) {
    const end = tick ? this.ticks.indexOf(tick) + 1 : this.ticks.length;
    return this.ticks.slice(Math.max(0, end - MAX_POINTS), end).map(pick);
  }
}
