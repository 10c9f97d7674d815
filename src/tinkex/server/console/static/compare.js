// Several runs over each other, one chart a metric; the baseline's line is broken and thick.
"use strict";

const place = document.getElementById("charts");
if (place) {
  const charts = [];
  const view = controls((now) => { for (const chart of charts) chart.show(now); });
  const asked = new URLSearchParams({ runs: place.dataset.runs, baseline: place.dataset.baseline });
  fetch(`/console/api/compare?${asked}`).then((answer) => answer.json()).then((told) => {
    const names = [...new Set(told.runs.flatMap((run) => Object.keys(run.curves)))].sort(byInterest);
    const empty = { steps: [], values: [], at: [] };
    const curve = (run, name) => (Object.hasOwn(run.curves, name) ? run.curves[name] : undefined);
    for (const name of names) {
      const chart = new Chart(place, name);
      chart.view = view();
      chart.set(told.runs.map((run) => ({
        ...(curve(run, name) || empty),
        tokens: curve(run, "tokens") || curve(run, "num_tokens"),
        isBaseline: run.run_id === told.baseline,
      })));
      charts.push(chart);
    }
  });
}
