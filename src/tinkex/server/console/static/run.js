// A run's page: curves that grow while it trains.
"use strict";

const place = document.getElementById("charts");
const charts = new Map();
const view = controls((now) => { for (const chart of charts.values()) chart.show(now); });
const FIRST = ["loss_per_token", "reward", "grad_norm", "tokens_per_s", "learning_rate"];

function take(curves) {
  const rank = (name) => (FIRST.indexOf(name) < 0 ? FIRST.length : FIRST.indexOf(name));
  const names = Object.keys(curves).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  for (const name of names) {
    if (!charts.has(name)) {
      const chart = new Chart(place, name);
      chart.view = view();
      charts.set(name, chart);
    }
    charts.get(name).set([curves[name]]);
  }
}

const live = new EventSource(place.dataset.live);
live.onmessage = (event) => {
  const told = JSON.parse(event.data);
  take(told.curves);
  if (told.doing) document.getElementById("doing").textContent = told.doing;
};
addEventListener("pagehide", () => live.close());

for (const form of document.querySelectorAll("form.asks")) {
  form.addEventListener("submit", (event) => { if (!confirm(form.dataset.question)) event.preventDefault(); });
}
