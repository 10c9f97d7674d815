// A run's page: curves that grow while it trains, and where the time of a step goes.
"use strict";

const place = document.getElementById("charts");
const charts = new Map();
const known = Object.create(null); // a metric may be called anything, __proto__ too
const view = controls((now) => { for (const chart of charts.values()) chart.show(now); });

function take(curves) {
  for (const [name, grown] of Object.entries(curves)) {
    if (!grown.isMore) known[name] = grown;
    else for (const part of ["steps", "values", "at"]) known[name][part].push(...grown[part]);
  }
  for (const name of Object.keys(curves).filter((one) => !PARTS.has(one)).sort(byInterest)) {
    if (!charts.has(name)) {
      const chart = new Chart(place, name);
      chart.view = view();
      charts.set(name, chart);
    }
    charts.get(name).set([{ ...known[name], tokens: known.tokens || known.num_tokens }]);
  }
  split();
}

// The median of the last twenty steps, part by part: a pause of the client is no part of a step.
function split() {
  const box = document.getElementById("split");
  const middle = (name) => {
    const last = known[name] ? known[name].values.slice(-20).sort((a, b) => a - b) : [];
    return last.length ? last[Math.floor(last.length / 2)] : 0;
  };
  const parts = [...PARTS].map(([name, says]) => [says, middle(name)]);
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  box.hidden = !whole;
  if (!whole) return;
  const svg = (kind, facts) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(facts)) made.setAttribute(name, value);
    return made;
  };
  const bar = svg("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": "Time of a step by part" });
  const list = document.createElement("ul");
  list.className = "legend";
  let at = 0;
  parts.forEach(([says, value], index) => {
    bar.append(svg("rect", { x: at, y: 0, width: 1000 * value / whole, height: 20, class: `f${index}` }));
    at += 1000 * value / whole;
    const entry = document.createElement("li");
    const dot = document.createElement("span");
    dot.className = `dot c${index}`;
    entry.append(dot, `${says} ${short(value)} s (${Math.round(100 * value / whole)} %)`);
    list.append(entry);
  });
  const head = document.createElement("h3");
  head.textContent = `A step takes ${short(whole)} s`;
  box.replaceChildren(head, bar, list);
}

// The status at the top follows what the server does.
const status = document.getElementById("status"), doing = document.getElementById("doing");
const first = [status.textContent, doing.textContent];
function say(now) {
  const busy = ["running", "waiting"];
  const rest = busy.includes(first[0]) ? ["idle", "waiting for its client"] : first;
  const [word, why] = now ? [/^(waiting|restoring|the worker)/.test(now) ? "waiting" : "running", now] : rest;
  status.textContent = word;
  status.className = `status ${word}`;
  doing.textContent = why;
}

const live = new EventSource(place.dataset.live);
live.onmessage = (event) => {
  const told = JSON.parse(event.data);
  take(told.curves);
  say(told.doing);
};
addEventListener("pagehide", () => live.close());

for (const form of document.querySelectorAll("form.asks")) {
  form.addEventListener("submit", (event) => { if (!confirm(form.dataset.question)) event.preventDefault(); });
}
