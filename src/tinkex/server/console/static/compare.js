// Several runs over each other, one chart a metric; the baseline's line is broken and thick.
"use strict";

const place = document.getElementById("charts");
const runs = place ? JSON.parse(place.dataset.runs).map((run) => ({ ...run, curves: Object.create(null) })) : [];
const board = place && new Board(place, (name) => fetched({ names: name }));

async function fetched(more) {
  const asked = new URLSearchParams({ runs: runs.map((run) => run.id).join(","), ...more });
  const answer = await fetch(`/console/api/curves?${asked}`).catch(() => null);
  if (!answer?.ok) { board.say("The metrics could not be loaded. Load the page again."); return; }
  const told = await answer.json();
  const names = new Set();
  for (const run of runs) {
    for (const [name, curve] of Object.entries(told[run.id] || {})) { grow(run.curves, name, curve); names.add(name); }
  }
  board.take(runs, names);
  board.say("None of these runs has metrics yet.");
}
if (board) fetched({});
