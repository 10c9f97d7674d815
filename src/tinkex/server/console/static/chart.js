// A line chart on a canvas: several series, values under the pointer or by arrow keys, zoom by dragging.
"use strict";

const FRAME = { right: 10, top: 8, bottom: 22 };
const MAX_LEFT = 120; // room for the labels of values

class Chart {
  // `title` names the metric; `box` is the card that the chart fills.
  constructor(box, title) {
    this.title = title;
    this.series = [];
    this.view = { smooth: 0, log: false, axis: "step" };
    this.zoom = null;
    this.at = null;
    this.canvas = made("canvas", { role: "img", "aria-label": title, tabindex: "0" });
    this.said = made("span", { class: "hidden", role: "status" });
    box.append(this.canvas, this.said);
    const on = (event, act) => this.canvas.addEventListener(event, act);
    on("pointermove", (event) => { this.at = event.offsetX; this.draw(); tip.show(this, event); });
    on("pointerleave", () => this.leave());
    on("pointerdown", (event) => { this.from = event.offsetX; });
    on("pointerup", (event) => this.zoomTo(event.offsetX));
    on("dblclick", () => this.zoomTo(null));
    on("keydown", (event) => this.key(event));
    on("blur", () => this.leave());
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.canvas);
  }

  set(series) { this.series = series; this.cached = null; this.draw(); }
  show(view) { this.view = view; this.cached = null; this.zoom = null; this.draw(); }
  leave() { this.at = null; tip.hide(); this.draw(); }

  // A canvas that nobody sees needs no memory.
  rest() { this.isResting = true; this.canvas.width = this.canvas.height = 0; }
  wake() { this.isResting = false; this.draw(); }

  // The points of each series as [x, y, value, y before smoothing], smoothed and zoomed.
  lines() {
    if (!this.cached) this.cached = this.series.map((one) => points(one, this.view, this.zoom));
    return this.cached;
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight, scale = devicePixelRatio || 1;
    if (!width || this.isResting) return;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.scene = sceneOf(this.lines(), width, height, this.view);
    paint(pen, this.scene, this);
    this.label();
  }

  label() {
    const last = this.series.length === 1 ? this.lines()[0].at(-1) : null;
    const what = last ? `last ${short(last[2])} at ${short(last[0])}` : `${this.series.length} runs`;
    this.canvas.setAttribute("aria-label", `${this.title}: ${what}. Arrow keys read it.`);
  }

  // What each run has nearest to a place on the axis: [{series, point}].
  nearest(offset) {
    if (!this.scene || this.scene.isEmpty) return [];
    const x = this.scene.valueAt(offset);
    return this.lines().flatMap((line, index) => {
      const point = closest(line, x);
      return point ? [{ series: this.series[index], point }] : [];
    });
  }

  // Left and right go from point to point of the first line, and say it; Escape ends that and the zoom.
  key(event) {
    if (event.key === "Escape") { this.zoomTo(null); this.leave(); return; }
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const line = this.lines().find((one) => one.length);
    if (!by || !line || !this.scene || this.scene.isEmpty) return;
    event.preventDefault();
    const offsets = line.map(([x]) => this.scene.px(x));
    const away = (i) => Math.abs(offsets[i] - this.at);
    const near = this.at === null ? (by > 0 ? -1 : line.length) : offsets.reduce((best, _, i) => (away(i) < away(best) ? i : best), 0);
    const index = Math.min(Math.max(near + by, 0), line.length - 1);
    this.at = offsets[index];
    const found = this.nearest(this.at);
    const values = found.map(({ series, point }) => (found.length > 1 ? `${series.name} ` : "") + short(point[2]));
    this.said.textContent = `${values.join(", ")} at ${exact(line[index][0])}`;
    this.draw();
    tip.show(this, { offsetX: this.at, offsetY: 20 });
  }

  zoomTo(offset) {
    const from = this.from;
    this.from = undefined;
    if (offset === null) { this.zoom = null; }
    else {
      if (from === undefined || !this.scene || this.scene.isEmpty || Math.abs(offset - from) < 8) return;
      this.zoom = [this.scene.valueAt(Math.min(from, offset)), this.scene.valueAt(Math.max(from, offset))];
    }
    this.cached = null;
    this.draw();
  }
}

function points(one, view, zoom) {
  const start = one.at.length ? one.at[0] : 0;
  const xs = view.axis === "time" ? one.at.map((at) => (at - start) / 60) : view.axis === "tokens" ? tokensAt(one) : one.steps;
  let mean = null;
  const shown = [];
  for (let i = 0; i < xs.length; i++) {
    const value = one.values[i];
    mean = mean === null ? value : view.smooth * mean + (1 - view.smooth) * value;
    if (!Number.isFinite(mean) || (view.log && mean <= 0)) continue;
    if (zoom && (xs[i] < zoom[0] || xs[i] > zoom[1])) continue;
    const y = view.log ? Math.log10(mean) : mean;
    shown.push([xs[i], y, value, view.log ? (value > 0 ? Math.log10(value) : y) : value]);
  }
  return shown.sort((one, other) => one[0] - other[0]); // by time they may have another order than by step
}

// Tokens trained on up to each point of a series; its run's curve of tokens says how many a step had.
function tokensAt(one) {
  const tokens = one.tokens;
  if (!tokens) return one.steps;
  const upTo = [];
  let sum = 0, i = 0;
  for (const step of one.steps) {
    while (i < tokens.steps.length && tokens.steps[i] <= step) sum += tokens.values[i++] * (tokens.stride || 1);
    upTo.push(sum);
  }
  return upTo;
}

function closest(line, x) {
  let low = 0, high = line.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (line[middle][0] < x) low = middle; else high = middle;
  }
  if (high < 0) return null;
  return Math.abs(line[low][0] - x) <= Math.abs(line[high][0] - x) ? line[low] : line[high];
}

// ------------------------------------------------------------------------ drawing

// Where things are in a picture of this size; `rows` are the values with a line and a label.
function sceneOf(lines, width, height, view, around = FRAME) {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const line of lines) for (const [x, y, , raw] of line) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y, raw); y1 = Math.max(y1, y, raw); }
  if (x0 > x1) return { isEmpty: true, width, height, lines };
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const pad = y0 === y1 ? Math.abs(y0) * 0.1 || 1 : (y1 - y0) * 0.04;
  if (Number.isFinite(y1 + pad - (y0 - pad))) { y0 -= pad; y1 += pad; }
  const rows = ticks(y0, y1, 5);
  const says = labels(rows.map((y) => (view.log ? 10 ** y : y)));
  const left = Math.min(Math.max(24, ...says.map(widthOf)) + 14, MAX_LEFT);
  const frame = { ...around, left }, { right, top, bottom } = frame;
  return {
    width, height, lines, frame, y0, y1, x0, x1, rows, says,
    px: (x) => left + (width - left - right) * (x - x0) / (x1 - x0),
    py: (y) => top + (height - top - bottom) * (y1 - y) / (y1 - y0),
    valueAt: (offset) => x0 + (x1 - x0) * (offset - left) / (width - left - right),
  };
}

// With a canvas's pen, or with one that writes SVG (download.js).
function paint(pen, scene, { series, view, at = null }) {
  pen.font = `11px ${theme("font")}`;
  pen.fillStyle = theme("--soft");
  if (scene.isEmpty) { pen.fillText("No points yet", 14, 26); return; }
  const { px, py, width, height, frame, rows, says } = scene;
  const axis = view.axis === "time" ? "minutes" : view.axis;
  const columns = ticks(scene.x0, scene.x1, 6, view.axis !== "time").filter((x) => px(x) < width - frame.right - 8 * axis.length);
  const below = labels(columns);
  pen.strokeStyle = theme("--line");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  rows.forEach((y, index) => {
    stroke(pen, [[frame.left, py(y)], [width - frame.right, py(y)]]);
    pen.fillText(says[index], frame.left - 7, py(y) + 4);
  });
  pen.textAlign = "center";
  columns.forEach((x, index) => pen.fillText(below[index], px(x), height - 6));
  pen.textAlign = "right";
  pen.fillText(axis, width - frame.right, height - 6);
  scene.lines.forEach((line, index) => {
    const { color, isBaseline } = series[index];
    pen.strokeStyle = pen.fillStyle = runColor(color);
    pen.lineWidth = isBaseline ? 2.6 : 1.7;
    if (view.smooth) { // what was measured, behind the mean of it
      pen.globalAlpha = 0.25;
      stroke(pen, line.map(([x, , , raw]) => [px(x), py(raw)]));
      pen.globalAlpha = 1;
    }
    pen.setLineDash(isBaseline ? [6, 4] : []);
    stroke(pen, line.map(([x, y]) => [px(x), py(y)]));
    pen.setLineDash([]);
    if (line.length === 1) spot(pen, px(line[0][0]), py(line[0][1]), 2.5);
  });
  if (at === null) return;
  const x = scene.valueAt(at);
  pen.strokeStyle = theme("--soft");
  pen.lineWidth = 1;
  stroke(pen, [[at, frame.top], [at, height - frame.bottom]]);
  scene.lines.forEach((line, index) => {
    const point = closest(line, x);
    pen.fillStyle = runColor(series[index].color);
    if (point) spot(pen, px(point[0]), py(point[1]), 3.5);
  });
}

function stroke(pen, path) {
  pen.beginPath();
  path.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.stroke();
}

function spot(pen, x, y, size) {
  pen.beginPath();
  pen.arc(x, y, size, 0, 7);
  pen.fill();
}

// ------------------------------------------------------------------------ colours of the style sheet

const probe = made("i", { class: "hidden", "aria-hidden": "true" });
const resolved = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => resolved.clear());

// A colour as a canvas takes it: the style sheet has one for each scheme.
function theme(name) {
  if (!resolved.has(name)) {
    if (!probe.isConnected) document.body.append(probe);
    if (name === "font") resolved.set(name, getComputedStyle(document.body).fontFamily);
    else {
      probe.className = name.startsWith("--") ? "hidden" : `hidden dot ${name}`;
      probe.style.color = name.startsWith("--") ? `var(${name})` : "";
      resolved.set(name, getComputedStyle(probe).color);
    }
  }
  return resolved.get(name);
}

function runColor(number) { return theme(`c${number}`); }

// ------------------------------------------------------------------------ values under the pointer

const tip = {
  box: made("div", { class: "tip", hidden: "" }),
  show(chart, { offsetX, offsetY }) {
    const found = chart.nearest(offsetX).sort((one, other) => other.point[2] - one.point[2]);
    if (!found.length) { this.hide(); return; }
    if (!this.box.isConnected) document.body.append(this.box);
    const axis = chart.view.axis;
    const says = (x) => (axis === "time" ? `${short(x)} min` : `${axis} ${exact(x)}`);
    const x = closest(found.map(({ point }) => point).sort((a, b) => a[0] - b[0]), chart.scene.valueAt(offsetX))[0];
    const table = made("table");
    for (const { series, point } of found) {
      const row = table.insertRow(), name = row.insertCell();
      name.append(made("span", { class: `dot c${series.color}` }), series.name);
      row.insertCell().textContent = exact(point[2]);
      const mean = chart.view.smooth ? `smoothed ${short(chart.view.log ? 10 ** point[1] : point[1])}` : "";
      row.insertCell().textContent = [mean, point[0] === x ? "" : says(point[0])].filter(Boolean).join(", ");
    }
    this.box.replaceChildren(made("strong", {}, says(x)), table);
    this.box.hidden = false;
    const at = chart.canvas.getBoundingClientRect(), { offsetWidth, offsetHeight } = this.box;
    const isLeft = at.left + offsetX + offsetWidth + 24 > innerWidth;
    const top = Math.min(at.top + offsetY + 14, innerHeight - offsetHeight - 8);
    this.box.style.left = `${Math.max(4, at.left + offsetX + (isLeft ? -offsetWidth - 14 : 14)) + scrollX}px`;
    this.box.style.top = `${Math.max(4, top) + scrollY}px`;
  },
  hide() { this.box.hidden = true; },
};

// ------------------------------------------------------------------------ numbers and elements

// At most `count` round numbers, and rarely less than half, between two others. Steps and tokens are whole, so is what is between them.
function ticks(low, high, count, isWhole = false) {
  const rough = (high - low) / count, size = 10 ** Math.floor(Math.log10(rough));
  const rounds = isWhole && size < 10 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
  const step = Math.max(rounds.find((times) => times * size >= rough) * size, isWhole ? 1 : 0);
  const found = [];
  const first = Math.ceil(low / step) * step;
  for (let i = 0; i <= count; i++) { // counted: where numbers are so large that a step is less than their last digit, it gets nowhere
    const at = first + i * step;
    if (!(at <= high + step * 1e-9)) break;
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

// Numbers beside each other: of one unit, with as many digits as they have themselves.
function labels(numbers) {
  const largest = Math.max(...numbers.map(Math.abs));
  const gap = Math.min(...numbers.slice(1).map((number, i) => Math.abs(number - numbers[i])));
  let digits = 3;
  while (digits < 12 && numbers.some((number) => Math.abs(Number(number.toPrecision(digits)) - number) > 0.01 * gap)) digits++;
  return numbers.map((number) => short(number, digits, largest));
}

const UNITS = [["T", 1e12, 1e12], ["B", 1e9, 1e9], ["M", 1e6, 1e6], ["k", 1e3, 1e4]]; // with its size, and from where on it is used

// In little room: 0.0661, 533, 12.3k, 1.5M, 2e-5; the unit may be that of a larger number beside it.
function short(number, digits = 3, largest = Math.abs(number)) {
  if (number !== 0 && (largest < 0.001 || largest >= 1e15)) return number.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  const [unit, factor] = UNITS.find(([, , least]) => digits < 6 && largest >= 0.9995 * least) || ["", 1];
  const scaled = number / factor;
  const isLong = Math.abs(scaled) >= 10 ** digits; // whole numbers keep their digits
  return `${isLong ? Math.round(scaled) : Number(scaled.toPrecision(digits))}${scaled ? unit : ""}`;
}

// As it was measured: whole numbers with all their digits, others with six.
function exact(number) {
  if (Number.isInteger(number) && Math.abs(number) < 1e15) return number.toLocaleString("en");
  return String(Number(number.toPrecision(6)));
}

const ruler = document.createElement("canvas").getContext("2d");

function widthOf(text) {
  ruler.font = `11px ${theme("font")}`;
  return ruler.measureText(text).width;
}

function made(kind, facts = {}, ...inside) {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(facts)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}
