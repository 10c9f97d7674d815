// A run's page: curves that grow while it trains, and where the time of a step goes.
"use strict";

const place = document.getElementById("charts");
const known = Object.create(null); // a metric may be called anything, __proto__ too
const run = { name: place.dataset.name, color: Number(place.dataset.color), isBaseline: false, curves: known };
const board = new Board(place, async (name) => {
  const answer = await fetch(`/console/api/curves?${new URLSearchParams({ runs: place.dataset.run, names: name })}`);
  if (answer.ok) take((await answer.json())[place.dataset.run]);
});

function take(curves) {
  const fresh = Object.entries(curves).filter(([name, grown]) => !grown.isMore || known[name]);
  for (const [name, grown] of fresh) grow(known, name, grown);
  if (fresh.length) { board.take([run], fresh.map(([name]) => name)); split(); }
}

// Where the time of a step goes: the median of the last twenty steps, part by part: a pause of the client is no part of a step.
const PARTS = new Map([["pass_time_s", "forward and backward"], ["optim_time_s", "optimizer"], ["save_time_s", "saving"], ["other_time_s", "client, sampling, waiting"]]);

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
    const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(facts)) element.setAttribute(name, value);
    return element;
  };
  const bar = svg("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": "Time of a step by part" });
  const list = made("ul", { class: "legend" });
  let at = 0;
  parts.forEach(([says, value], index) => {
    bar.append(svg("rect", { x: at, y: 0, width: 1000 * value / whole, height: 20, class: `f${index}` }));
    at += 1000 * value / whole;
    list.append(made("li", {}, made("span", { class: `dot p${index}` }), `${says} ${short(value)} s (${Math.round(100 * value / whole)} %)`));
  });
  box.replaceChildren(made("h3", {}, `Time of a step: ${short(whole)} s (median of the last 20)`), bar, list);
}

// The status at the top follows what the server does.
const status = document.getElementById("status"), doing = document.getElementById("doing");
const first = [status.textContent, doing.textContent];
function say(now) {
  const busy = ["running", "waiting"];
  const rest = busy.includes(first[0]) && place.dataset.follows ? ["idle", "waiting for its client"] : first;
  const [word, why] = now ? [/^(waiting|restoring|the worker)/.test(now) ? "waiting" : "running", now] : rest;
  status.textContent = word;
  status.className = `status ${word}`;
  doing.textContent = why;
}

let live = null;
function follow() {
  live = new EventSource(place.dataset.live);
  live.onmessage = (event) => {
    const told = JSON.parse(event.data);
    take(told.curves);
    board.say(["finished", "stopped", "failed", "lost"].includes(first[0]) ? "This run has no metrics." : "No metrics yet. They appear with the first step.");
    say(told.doing);
  };
  // The browser tries again by itself, unless the server refuses: then the login has ended, or the run is gone.
  live.onerror = () => {
    const isOver = live.readyState === EventSource.CLOSED;
    board.say("The metrics could not be loaded.");
    doing.textContent = isOver ? "no longer updated; load the page again" : "connection lost, trying again";
  };
}
follow();
// A browser has six connections to a host, for all its tabs together: a tab that nobody sees takes none.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) live.close();
  else if (live.readyState === EventSource.CLOSED) follow();
});
addEventListener("pagehide", () => live.close());
