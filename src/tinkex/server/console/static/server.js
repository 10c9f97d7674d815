// The server's page: what moves is asked for again every few seconds.
"use strict";

function size(bytes) {
  for (const [unit, factor] of [["GB", 2 ** 30], ["MB", 2 ** 20], ["KB", 2 ** 10]]) if (bytes >= factor) return `${(bytes / factor).toFixed(1)} ${unit}`;
  return `${bytes} B`;
}

// What ails the server, or for how long it is up; "up for" is written as in server.html.
function health(trouble, uptime_s = 0) {
  const [word, why] = document.querySelectorAll("#health > *");
  word.className = `status ${trouble ? "lost" : "running"}`;
  word.textContent = trouble ? "trouble" : "healthy";
  const up = uptime_s < 120 ? `${Math.floor(uptime_s)} seconds` : uptime_s < 7200 ? `${Math.floor(uptime_s / 60)} minutes` : `${(uptime_s / 3600).toFixed(1)} hours`;
  why.textContent = trouble || `up for ${up}`;
}

let before = null;
async function look() {
  if (document.hidden) return;
  const answer = await fetch("/console/api/server?brief=true").catch(() => null);
  if (!answer?.ok) { health(answer && answer.status < 500 ? "no longer updated; load the page again" : "connection lost, trying again"); return; }
  const told = await answer.json();
  health(told.trouble, told.uptime_s);
  // The server adds tokens up every few seconds; in between it tells the same again.
  const isNew = !before || told.at > before.at;
  for (const place of before && isNew ? document.querySelectorAll("[data-rate]") : []) {
    const kind = place.dataset.rate;
    const made = (told.tokens[kind] || 0) - (before.tokens[kind] || 0);
    place.textContent = short(Math.max(0, made / (told.at - before.at)));
  }
  for (const line of told.queues) {
    const place = document.querySelector(`[data-waiting="${CSS.escape(line.name)}"]`);
    if (place) place.textContent = line.waiting;
  }
  for (const worker of told.workers) {
    const sizes = { ...worker.held_bytes, process: worker.memory_bytes };
    for (const [kind, bytes] of Object.entries(sizes)) {
      const place = document.querySelector(`[data-held="${CSS.escape(worker.name)} ${kind}"]`);
      if (place) place.textContent = size(bytes);
    }
  }
  if (isNew) before = told;
}
look();
setTimeout(look, 1500);
setInterval(look, 5000);
