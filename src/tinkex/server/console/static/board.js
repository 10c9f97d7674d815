// The metrics of one or more runs: sections by prefix, search, pins, an order of one's own, constants folded.
"use strict";

// What is declared here is about well-known names; every other name falls into the section of its prefix.
const REWARD = /^(reward$|rewards?[/_]|tokens_per_reward$|env\/all\/reward)/;
const SPEED = /(^|\/)(tokens|num_tokens|tokens_per_s|[a-z_]*time_s|time)($|\/)/;
const FIRST = ["reward", "env/all/reward/total", "held_out_reward", "loss", "loss_per_token", "held_out_loss", "kl", "entropy", "grad_norm", "learning_rate", "tokens_per_s"];
const SECTIONS = ["pinned", "reward", "train", "eval"]; // these lead, "speed" ends, others stand between by name
const MIN_CONSTANT = 5; // points without a change before a metric is called constant
const MAX_KEPT = 500;

function sectionOf(name) {
  if (REWARD.test(name)) return "reward";
  if (/^(held_out_|eval[/_])/.test(name)) return "eval";
  if (SPEED.test(name)) return "speed";
  return name.includes("/") ? name.slice(0, name.indexOf("/")) || "train" : "train";
}

function sectionRank(section) {
  if (section === "speed") return SECTIONS.length + 1;
  return SECTIONS.includes(section) ? SECTIONS.indexOf(section) : SECTIONS.length;
}

function byInterest(one, other) {
  const rank = (name) => (FIRST.indexOf(name) < 0 ? FIRST.length : FIRST.indexOf(name));
  return rank(one) - rank(other) || one.localeCompare(other, "en", { numeric: true });
}

// What this browser keeps of a person's arrangement, for all runs: metrics of one name belong together.
const arrangement = {
  key: "tinkex.metrics",
  read() {
    let kept = {};
    try { kept = JSON.parse(localStorage.getItem(this.key)) || {}; } catch { /* none, or not allowed */ }
    const names = (list) => (Array.isArray(list) ? list.filter((one) => typeof one === "string").slice(0, MAX_KEPT) : []);
    return { pins: names(kept.pins), order: names(kept.order), folded: names(kept.folded), wide: names(kept.wide) };
  },
  write(kept) { try { localStorage.setItem(this.key, JSON.stringify(kept)); } catch { /* for this page only, then */ } },
};

function heading(name, count) { return made("summary", {}, made("h2", {}, name, made("span", { class: "count" }, ` ${count}`))); }

class Board {
  // `fetchWhole(name)` brings all points of a metric of which the page has a part.
  constructor(place, fetchWhole) {
    this.place = place;
    this.fetchWhole = fetchWhole;
    this.runs = [];
    this.cards = new Map();
    this.kept = arrangement.read();
    this.search = document.getElementById("find-metric");
    this.count = document.getElementById("num-metrics");
    this.search.addEventListener("input", () => this.arrange());
    this.view = controls((view) => { for (const card of this.cards.values()) card.chart?.show(view); });
    const look = (entries) => { for (const one of entries) this.cards.get(one.target.dataset.metric)?.seen(one.isIntersecting); };
    this.eyes = new IntersectionObserver(look, { rootMargin: "300px" });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const card of this.cards.values()) card.chart?.draw(); });
    this.say("Loading metrics …");
  }

  // `runs`: [{id, name, color, isBaseline, curves: {name: {steps, values, at, stride}}}]; `changed`: names to draw again.
  take(runs, changed) {
    this.runs = runs;
    for (const run of runs) for (const name of Object.keys(run.curves)) if (!this.cards.has(name)) this.cards.set(name, new Card(this, name));
    for (const name of changed) this.cards.get(name)?.refresh();
    this.arrange();
  }

  // In place of charts, while there are none.
  say(text) { if (!this.cards.size) this.place.replaceChildren(made("p", { class: "card empty", role: "status" }, text)); }

  series(name) {
    return this.runs.filter((run) => run.curves[name]).map((run) => ({
      ...run.curves[name], name: run.name, color: run.color, isBaseline: run.isBaseline, tokens: run.curves.tokens || run.curves.num_tokens,
    }));
  }

  isConstant(name) {
    const curves = this.runs.map((run) => run.curves[name]).filter(Boolean);
    return curves.every((curve) => curve.values.length >= MIN_CONSTANT && curve.low === curve.high);
  }

  // Put every metric where it belongs. Cards that stay are not moved, so nothing flickers while a run grows.
  arrange() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const isPinned = (name) => this.kept.pins.includes(name);
    const found = [...this.cards.keys()].filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    const constants = found.filter((name) => !isPinned(name) && this.isConstant(name));
    const shown = found.filter((name) => !constants.includes(name));
    const sections = new Map();
    for (const name of shown) {
      const section = isPinned(name) ? "pinned" : sectionOf(name);
      if (!sections.has(section)) sections.set(section, []);
      sections.get(section).push(name);
    }
    const ordered = [...sections].sort(([one], [other]) => sectionRank(one) - sectionRank(other) || one.localeCompare(other));
    for (const [, names] of ordered) names.sort((one, other) => this.compare(one, other));
    const all = `${this.cards.size} metric${this.cards.size === 1 ? "" : "s"}`;
    this.count.textContent = words.length ? `${found.length} of ${all}` : all;
    const layout = JSON.stringify([ordered, constants, constants.map((name) => this.lasts(name))]);
    if (layout === this.layout) return;
    this.layout = layout;
    this.place.replaceChildren(...ordered.map(([section, names]) => this.section(section, names)), ...this.constants(constants));
    if (!found.length && this.cards.size) this.place.append(made("p", { class: "hint" }, "No metric has all of these words in its name."));
  }

  // A person's own order first, then what people look at first.
  compare(one, other) {
    const at = (name) => { const index = this.kept.order.indexOf(name); return index < 0 ? Infinity : index; };
    return (at(one) - at(other) || 0) || byInterest(one, other);
  }

  section(name, metrics) {
    const box = made("details", { class: "section" });
    box.open = !this.kept.folded.includes(name);
    box.dataset.section = name;
    const grid = made("div", { class: "charts" }, ...metrics.map((metric) => this.cards.get(metric).box));
    box.append(heading(name, metrics.length), grid);
    box.addEventListener("toggle", () => {
      this.kept.folded = [...this.kept.folded.filter((one) => one !== name), ...(box.open ? [] : [name])];
      arrangement.write(this.kept);
    });
    return box;
  }

  lasts(name) { return this.runs.map((run) => run.curves[name]?.values.at(-1)); }

  constants(names) {
    if (!names.length) return [];
    const table = made("table");
    if (this.runs.length > 1) {
      const head = table.createTHead().insertRow();
      head.append(made("th", {}, "Metric"), ...this.runs.map((run) => made("th", { class: "num named" }, made("span", { class: `dot c${run.color}` }), run.name)));
    }
    const body = table.createTBody();
    for (const name of names.sort(byInterest)) {
      const values = this.lasts(name).map((value, at) => made("td", { class: "num long", "data-label": this.runs[at].name }, value === undefined ? "–" : exact(value)));
      body.insertRow().append(made("th", { scope: "row" }, name), ...values);
    }
    const box = made("details", { class: "section constants" }, heading("Constant", names.length), made("div", { class: `scroll narrow card${this.runs.length > 1 ? " cards" : ""}`, tabindex: "0" }, table));
    return [box];
  }

  // ---------------------------------------------------------------------- what a person changes

  change(name, act) {
    act(this.kept);
    arrangement.write(this.kept);
    this.layout = null;
    this.arrange();
    this.cards.get(name).summary?.focus();
  }

  pin(name) {
    this.change(name, (kept) => { kept.pins = kept.pins.includes(name) ? kept.pins.filter((one) => one !== name) : [...kept.pins, name]; });
  }

  // Before another metric of the same section; -1 and 1 are one place to the left and right.
  move(name, to) {
    const names = [...this.cards.get(name).box.parentElement.children].map((box) => box.dataset.metric);
    const from = names.indexOf(name);
    const index = typeof to === "number" ? from + to : names.indexOf(to);
    if (index < 0 || index >= names.length || index === from) return;
    names.splice(index, 0, ...names.splice(from, 1));
    this.change(name, (kept) => { kept.order = [...names, ...kept.order.filter((one) => !names.includes(one))].slice(0, MAX_KEPT); });
  }
}

// One metric. It has no chart before it is seen: a thousand metrics are a thousand empty boxes.
class Card {
  constructor(board, name) {
    this.board = board;
    this.name = name;
    this.box = made("div", { class: "chart" });
    this.box.dataset.metric = name;
    this.box.classList.toggle("wide-chart", board.kept.wide.includes(name));
    board.eyes.observe(this.box);
  }

  seen(isSeen) {
    if (!isSeen) { this.chart?.rest(); return; }
    if (!this.chart) this.fill();
    else if (this.chart.isResting) this.chart.wake();
    this.complete();
  }

  // Of runs with very many points the page gets every so-manieth at first, and all of what is looked at.
  complete() {
    if (this.fetching || this.chart.isResting || !this.board.series(this.name).some((one) => one.isPart)) return;
    this.fetching = this.board.fetchWhole(this.name).finally(() => { this.fetching = null; });
  }

  fill() {
    this.last = made("span", { class: "last" });
    this.head = made("h3", { draggable: "true", title: `${this.name} (drag to reorder)` }, made("span", { class: "metric" }, this.name), this.last, this.menu());
    this.box.append(this.head);
    this.chart = new Chart(this.box, this.name);
    this.chart.view = this.board.view();
    this.dragging();
    this.refresh();
  }

  refresh() {
    if (!this.chart) return;
    const series = this.board.series(this.name);
    this.last.textContent = series.length === 1 && series[0].values.length ? short(series[0].values.at(-1), 4) : "";
    this.chart.set(series);
    this.complete();
  }

  menu() {
    const name = this.name, board = this.board;
    this.summary = made("summary", { "aria-label": `Options of ${name}` }, "⋯");
    const isPinned = board.kept.pins.includes(name);
    const file = (kind) => () => download(this.chart, kind);
    const acts = [
      [isPinned ? "Unpin" : "Pin to the top", () => board.pin(name)],
      ["Change width", () => this.widen()],
      ["Move left", () => board.move(name, -1)],
      ["Move right", () => board.move(name, 1)],
      ["Download SVG", file("svg")], ["Download PNG", file("png")], ["Download CSV", file("csv")], ["Download JSONL", file("jsonl")],
    ];
    const list = made("div", { class: "menu-items" });
    const menu = made("details", { class: "menu" }, this.summary, list);
    for (const [says, act] of acts) {
      const button = made("button", { type: "button" }, says);
      button.addEventListener("click", () => { menu.open = false; act(); });
      list.append(button);
    }
    menu.addEventListener("toggle", () => {
      if (menu.open) list.firstChild.textContent = board.kept.pins.includes(name) ? "Unpin" : "Pin to the top";
    });
    menu.addEventListener("keydown", (event) => { if (event.key === "Escape") { menu.open = false; this.summary.focus(); } });
    menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; });
    return menu;
  }

  widen() {
    const { kept } = this.board;
    const isWide = this.box.classList.toggle("wide-chart");
    kept.wide = [...kept.wide.filter((one) => one !== this.name), ...(isWide ? [this.name] : [])];
    arrangement.write(kept);
    this.chart.draw();
  }

  dragging() {
    this.head.addEventListener("dragstart", (event) => { Card.dragged = this; event.dataTransfer.effectAllowed = "move"; });
    this.head.addEventListener("dragend", () => { Card.dragged = null; });
    const fits = () => Card.dragged && Card.dragged !== this && Card.dragged.box.parentElement === this.box.parentElement;
    this.box.addEventListener("dragover", (event) => { if (fits()) { event.preventDefault(); this.box.classList.add("target"); } });
    this.box.addEventListener("dragleave", () => this.box.classList.remove("target"));
    this.box.addEventListener("drop", (event) => {
      this.box.classList.remove("target");
      if (fits()) { event.preventDefault(); this.board.move(Card.dragged.name, this.name); }
    });
  }
}

// The controls above the charts. The address has what they are set to, so a link shows the same picture.
function controls(change) {
  const kept = new URLSearchParams(location.hash.slice(1));
  const [smooth, log, axis] = ["smooth", "log", "axis"].map((id) => document.getElementById(id));
  if (kept.has("smooth")) smooth.value = kept.get("smooth");
  log.checked = kept.get("log") === "1";
  if ([...axis.options].some((one) => one.value === kept.get("axis"))) axis.value = kept.get("axis");
  const view = () => ({ smooth: Number(smooth.value), log: log.checked, axis: axis.value });
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

// Add points to a curve, or begin it, in the order of steps; its lowest and highest value are kept at hand.
function grow(known, name, grown) {
  const first = grown.isMore ? known[name].steps.length : 0;
  const curve = grown.isMore ? known[name] : { ...grown, low: Infinity, high: -Infinity };
  if (grown.isMore) for (const part of ["steps", "values", "at"]) for (const one of grown[part]) curve[part].push(one);
  for (const value of grown.values) { curve.low = Math.min(curve.low, value); curve.high = Math.max(curve.high, value); }
  order(curve, first);
  known[name] = curve;
}

// Numbers that are sent at once may arrive in any order; those before `first` are in theirs.
function order(curve, first) {
  const { steps } = curve;
  const isOrdered = (i) => i === 0 || steps[i - 1] <= steps[i];
  for (let i = first; i < steps.length; i++) {
    if (isOrdered(i)) continue;
    const indexes = [...steps.keys()].sort((one, other) => steps[one] - steps[other]);
    for (const part of ["steps", "values", "at"]) { const all = curve[part]; curve[part] = indexes.map((index) => all[index]); }
    return;
  }
}
