// A form of a recipe: the command it stands for, as one fills it in.
"use strict";

const form = document.getElementById("recipe");
const shown = document.getElementById("command"), copier = document.getElementById("copy-command");
let waiting = null;

async function ask() {
  const body = new URLSearchParams(new FormData(form));
  const answer = await fetch(form.dataset.command, { method: "POST", body }).catch(() => null);
  const told = answer ? await answer.json().catch(() => null) : null;
  if (!told) return;
  shown.textContent = told.command || told.missing || told.detail;
  shown.className = told.command ? "" : "count";
  copier.dataset.text = told.command || "";
  copier.disabled = !told.command;
}
form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(ask, 250); });
ask();
