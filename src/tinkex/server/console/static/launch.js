// A command that runs: its output and its status, asked for again every two seconds.
"use strict";

const log = document.getElementById("log"), state = document.getElementById("status");

async function look() {
  if (document.hidden) return;
  const answer = await fetch(log.dataset.log).catch(() => null);
  const age = state.nextElementSibling;
  age.dataset.said ??= age.textContent;
  if (!answer?.ok) { // a server that was started again knows nothing of this command
    const isOver = answer && answer.status < 500;
    age.textContent = isOver ? "no longer updated; load the page again" : "connection lost, trying again";
    if (isOver) clearInterval(timer);
    return;
  }
  age.textContent = age.dataset.said;
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
log.scrollTop = log.scrollHeight;
const timer = setInterval(look, 2000);
look();
