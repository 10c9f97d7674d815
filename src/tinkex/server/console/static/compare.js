// Several runs over each other, one chart a metric.
"use strict";

const place = document.getElementById("charts");
if (place) {
  const charts = [];
  const view = controls((now) => { for (const chart of charts) chart.show(now); });
  fetch(`/console/api/compare?runs=${encodeURIComponent(place.dataset.runs)}`).then((answer) => answer.json()).then((told) => {
    const names = [...new Set(told.runs.flatMap((run) => Object.keys(run.curves)))].sort();
    const empty = { steps: [], values: [], at: [] };
    for (const name of names) {
      const chart = new Chart(place, name);
      chart.view = view();
      chart.set(told.runs.map((run) => run.curves[name] || empty));
      charts.push(chart);
    }
  });
}
