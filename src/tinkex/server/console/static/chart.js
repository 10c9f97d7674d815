// A line chart on a canvas: several series, hover or arrow keys, zoom by dragging, smoothing, log scale.
"use strict";

const COLORS = ["#2456c9", "#c2410c", "#17733c", "#8b3fb5", "#b3261e", "#0e7490", "#8a5300", "#be185d", "#4d7c0f", "#475569", "#6d28d9", "#a16207"];
const LIGHT = ["#86abff", "#fb9a63", "#6fd495", "#cf9bf0", "#ff8f86", "#67d0e6", "#f0b95c", "#f590bd", "#b3d86a", "#a5b4c8", "#b79bff", "#e8c15a"];

class Chart {
  constructor(parent, title) {
    this.series = [];
    this.view = { smooth: 0, log: false, axis: "step" };
    this.zoom = null;
    const box = document.createElement("div");
    box.className = "chart";
    const head = document.createElement("h3");
    head.append(title);
    this.last = document.createElement("span");
    head.append(this.last);
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", title);
    this.canvas.tabIndex = 0;
    this.said = document.createElement("span");
    this.said.className = "hidden";
    this.said.setAttribute("role", "status");
    box.append(head, this.canvas, this.said);
    parent.append(box);
    this.title = title;
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.canvas.addEventListener("pointerdown", (event) => { this.from = this.valueAt(event.offsetX); });
    this.canvas.addEventListener("pointerup", (event) => this.zoomTo(event));
    this.canvas.addEventListener("dblclick", () => { this.zoom = null; this.draw(); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => { this.at = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  set(series) { this.series = series; this.draw(); }
  show(view) { this.view = view; this.zoom = null; this.draw(); }

  points(one) {
    const start = one.at.length ? one.at[0] : 0;
    const axis = this.view.axis;
    const xs = axis === "time" ? one.at.map((at) => (at - start) / 60) : axis === "tokens" ? tokensAt(one) : one.steps;
    let mean = null;
    const ys = one.values.map((value) => {
      mean = mean === null ? value : this.view.smooth * mean + (1 - this.view.smooth) * value;
      return mean;
    });
    const shown = [];
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isFinite(ys[i])) continue;
      if (this.view.log && ys[i] <= 0) continue;
      if (this.zoom && (xs[i] < this.zoom[0] || xs[i] > this.zoom[1])) continue;
      shown.push([xs[i], this.view.log ? Math.log10(ys[i]) : ys[i], one.values[i]]);
    }
    return shown.sort((one, other) => one[0] - other[0]); // numbers sent at once may arrive in any order
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight, scale = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.body);
    const soft = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line"), ink = style.getPropertyValue("--ink");
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const all = this.series.map((one) => this.points(one));
    const flat = all.flat();
    pen.font = "11px system-ui, sans-serif";
    if (!flat.length) { pen.fillStyle = soft; pen.fillText("No points yet", 12, 24); return; }
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const [x, y] of flat) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= pad; y1 += pad; }
    const left = 52, right = 8, top = 6, bottom = 20;
    const px = (x) => left + (width - left - right) * (x - x0) / (x1 - x0);
    const py = (y) => top + (height - top - bottom) * (y1 - y) / (y1 - y0);
    this.frame = { left, right, width, x0, x1 };
    pen.strokeStyle = line; pen.fillStyle = soft; pen.lineWidth = 1;
    const rows = ticks(y0, y1), columns = ticks(x0, x1);
    const says = labels(rows.map((y) => (this.view.log ? 10 ** y : y))), below = labels(columns);
    rows.forEach((y, index) => {
      pen.beginPath(); pen.moveTo(left, py(y)); pen.lineTo(width - right, py(y)); pen.stroke();
      pen.textAlign = "right"; pen.fillText(says[index], left - 6, py(y) + 4);
    });
    columns.forEach((x, index) => {
      pen.textAlign = px(x) > width - 20 ? "right" : "center"; pen.fillText(below[index], px(x), height - 5);
    });
    all.forEach((points, index) => {
      pen.strokeStyle = (dark ? LIGHT : COLORS)[index % COLORS.length];
      pen.lineWidth = this.series[index].isBaseline ? 3 : 1.6;
      pen.setLineDash(this.series[index].isBaseline ? [6, 4] : []);
      pen.beginPath();
      points.forEach(([x, y], i) => (i ? pen.lineTo(px(x), py(y)) : pen.moveTo(px(x), py(y))));
      pen.stroke();
      pen.setLineDash([]);
      if (points.length === 1) { pen.fillStyle = pen.strokeStyle; pen.beginPath(); pen.arc(px(points[0][0]), py(points[0][1]), 2.5, 0, 7); pen.fill(); }
    });
    const ends = this.series.length === 1 && all[0].length ? all[0][all[0].length - 1] : null;
    this.last.textContent = ends ? short(ends[2]) : "";
    const what = ends ? `last ${short(ends[2])} at ${short(ends[0])}` : `${this.series.length} runs`;
    this.canvas.setAttribute("aria-label", `${this.title}: ${what}. Arrow keys read it.`);
    if (this.at === null || this.at === undefined) return;
    const x = this.valueAt(this.at);
    pen.strokeStyle = soft; pen.beginPath(); pen.moveTo(this.at, top); pen.lineTo(this.at, height - bottom); pen.stroke();
    pen.textAlign = this.at > width / 2 ? "right" : "left";
    let row = 0;
    all.forEach((points, index) => {
      let best = null;
      for (const point of points) if (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
      if (!best) return;
      pen.fillStyle = (dark ? LIGHT : COLORS)[index % COLORS.length];
      pen.beginPath(); pen.arc(px(best[0]), py(best[1]), 3, 0, 7); pen.fill();
      pen.fillStyle = ink;
      pen.fillText(`${short(best[2])} at ${short(best[0])}`, this.at + (this.at > width / 2 ? -8 : 8), top + 12 + 14 * row++);
    });
  }

  valueAt(offset) {
    const { left, right, width, x0, x1 } = this.frame || { left: 0, right: 0, width: 1, x0: 0, x1: 1 };
    return x0 + (x1 - x0) * (offset - left) / (width - left - right);
  }
  hover(event) { this.at = event.offsetX; this.draw(); }
  // Left and right go from point to point of the first line, and say it; Escape ends that and the zoom.
  key(event) {
    if (event.key === "Escape") { this.zoom = this.at = null; this.draw(); return; }
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const points = this.series.map((one) => this.points(one)).find((one) => one.length);
    if (!by || !points || !this.frame) return;
    event.preventDefault();
    const { left, right, width, x0, x1 } = this.frame;
    const offsets = points.map(([x]) => left + (width - left - right) * (x - x0) / (x1 - x0));
    const near = this.at === null || this.at === undefined ? (by > 0 ? -1 : points.length) : offsets.reduce((best, offset, i) => (Math.abs(offset - this.at) < Math.abs(offsets[best] - this.at) ? i : best), 0);
    const index = Math.min(Math.max(near + by, 0), points.length - 1);
    this.at = offsets[index];
    this.said.textContent = `${short(points[index][2])} at ${short(points[index][0])}`;
    this.draw();
  }
  zoomTo(event) {
    const to = this.valueAt(event.offsetX);
    if (this.from !== undefined && Math.abs(event.offsetX - this.from) > 0 && this.from !== to) {
      const range = [Math.min(this.from, to), Math.max(this.from, to)];
      if (this.frame && range[1] - range[0] > (this.frame.x1 - this.frame.x0) * 0.02) { this.zoom = range; this.draw(); }
    }
    this.from = undefined;
  }
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

// Four or so round numbers between two others.
function ticks(low, high) {
  const rough = (high - low) / 4, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((times) => times * size >= rough) * size;
  const found = [];
  const first = Math.ceil(low / step) * step;
  for (let i = 0; i < 8; i++) { // counted: where numbers are so large that a step is less than their last digit, it gets nowhere
    const at = first + i * step;
    if (!(at <= high + step * 1e-9)) break;
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

// Numbers beside each other, with as many digits as tell them apart.
function labels(numbers) {
  const plain = numbers.map(short);
  if (new Set(plain).size === plain.length) return plain;
  for (let digits = 4; digits <= 8; digits++) {
    const longer = numbers.map((number) => String(Number(number.toPrecision(digits))));
    if (new Set(longer).size === longer.length) return longer;
  }
  return plain;
}

function short(number) {
  const size = Math.abs(number);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return number.toExponential(1);
  return size >= 100 ? String(Math.round(number)) : String(Number(number.toPrecision(3)));
}

// The three controls above the charts, the same on every page that has charts. The address has what
// they are set to, so a link shows the same picture.
function controls(change) {
  const kept = new URLSearchParams(location.hash.slice(1));
  const [smooth, log, axis] = ["smooth", "log", "axis"].map((id) => document.getElementById(id));
  if (kept.has("smooth")) smooth.value = kept.get("smooth");
  log.checked = kept.get("log") === "1";
  if ([...axis.options].some((one) => one.value === kept.get("axis"))) axis.value = kept.get("axis");
  const view = () => ({
    smooth: Number(smooth.value),
    log: log.checked,
    axis: axis.value,
  });
  const keep = () => {
    const now = new URLSearchParams();
    if (Number(smooth.value)) now.set("smooth", smooth.value);
    if (log.checked) now.set("log", "1");
    if (axis.value !== "step") now.set("axis", axis.value);
    history.replaceState(null, "", now.size ? `#${now}` : location.pathname + location.search);
  };
  for (const one of [smooth, log, axis]) one.addEventListener("input", () => { keep(); change(view()); });
  return view;
}

// Where the time of a step goes: shown together, not one chart each.
const PARTS = new Map([["pass_time_s", "forward and backward"], ["optim_time_s", "optimizer"], ["save_time_s", "saving"], ["other_time_s", "client, samples, waiting"]]);

// What people look at first stands first.
const FIRST = ["loss", "loss_per_token", "reward", "held_out_loss", "held_out_reward", "env/all/reward/total", "grad_norm", "tokens_per_s", "learning_rate"];
function byInterest(one, other) {
  const rank = (name) => (FIRST.indexOf(name) < 0 ? FIRST.length : FIRST.indexOf(name));
  return rank(one) - rank(other) || one.localeCompare(other);
}
