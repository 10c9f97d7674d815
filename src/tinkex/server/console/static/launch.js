// A command that runs: its output and its status, asked for again every two seconds.
"use strict";

const log = document.getElementById("log"), state = document.getElementById("status");

async function look() {
  if (document.hidden) return;
  const answer = await fetch(log.dataset.log).catch(() => null);
  if (!answer || !answer.ok) return;
  const told = await answer.json();
  const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
  if (log.textContent !== told.log) log.textContent = told.log;
  if (isAtEnd) log.scrollTop = log.scrollHeight;
  state.textContent = told.status;
  state.className = `status ${told.status}`;
  document.getElementById("stop").hidden = told.status !== "running";
  document.getElementById("again").hidden = told.status === "running";
  if (told.status === "running") return;
  const hint = document.getElementById("hint"); // of recipes; an export has nothing to resume
  if (hint) hint.textContent = hint.dataset.ended;
  clearInterval(timer);
}
const timer = setInterval(look, 2000);
look();
