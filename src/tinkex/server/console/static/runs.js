// The list: it follows what runs do, chosen ones are compared or deleted, filters apply when they are changed.
"use strict";

const form = document.getElementById("chosen");
if (form) {
  const all = document.getElementById("choose-all"), said = document.getElementById("num-chosen");
  const compare = document.getElementById("compare"), remove = document.getElementById("delete-chosen");
  const body = form.querySelector("tbody"), idle = said.textContent;
  const show = () => {
    const boxes = [...body.querySelectorAll("input[name=runs]")], chosen = boxes.filter((box) => box.checked);
    compare.disabled = chosen.length < 2;
    all.checked = chosen.length === boxes.length;
    all.indeterminate = chosen.length > 0 && !all.checked;
    said.textContent = chosen.length ? `${chosen.length} selected` : idle;
    if (!remove) return;
    remove.querySelector("button").disabled = !chosen.length;
    for (const old of remove.querySelectorAll("input[name=runs]")) old.remove();
    for (const box of chosen) {
      const input = document.createElement("input");
      Object.assign(input, { type: "hidden", name: "runs", value: box.value });
      remove.append(input);
    }
    const names = chosen.map((box) => box.getAttribute("aria-label").replace(/^Select /, ""));
    Object.assign(remove.dataset, {
      question: chosen.length === 1 ? `Delete the run ${names[0]}?` : `Delete ${chosen.length} runs?`,
      detail: chosen.length === 1 ? "Its checkpoints, curves and state are deleted for good." : `Their checkpoints, curves and state are deleted for good: ${names.slice(0, 10).join(", ")}${names.length > 10 ? " and others" : ""}.`,
      verb: chosen.length === 1 ? "Delete run" : `Delete ${chosen.length} runs`,
    });
  };
  all.addEventListener("change", () => { for (const box of body.querySelectorAll("input[name=runs]")) box.checked = all.checked; show(); });
  form.addEventListener("change", show);
  addEventListener("pageshow", show); // a browser that goes back restores the ticks
  show();
}

// Take what changed from the same page of now; what is ticked, focused or marked stays.
function renew(fresh) {
  const body = form?.querySelector("tbody"), now = fresh.querySelector("#chosen tbody");
  if (!body || !now) { if (body || now) location.reload(); return; } // the first run came, or the last one went
  const idOf = (row) => row.querySelector("input[name=runs]").value;
  const known = new Map([...body.rows].map((row) => [idOf(row), row]));
  const rows = [...now.rows].map((row) => {
    const old = known.get(idOf(row));
    if (!old) return row;
    [...row.cells].slice(1).forEach((cell, at) => {
      const shown = old.cells[at + 1];
      if (shown.innerHTML !== cell.innerHTML && !shown.contains(document.activeElement)) shown.replaceWith(cell);
    });
    return old;
  });
  if (rows.length !== body.rows.length || rows.some((row, at) => row !== body.rows[at])) body.replaceChildren(...rows);
  document.querySelector("h1 .count").textContent = fresh.querySelector("h1 .count").textContent;
  form.dispatchEvent(new Event("change"));
}

const LOOK_MS = 10000;
async function look() {
  const began = performance.now();
  const answer = document.hidden || !getSelection().isCollapsed ? null : await fetch(location.href).catch(() => null);
  if (answer?.ok && !answer.redirected) renew(new DOMParser().parseFromString(await answer.text(), "text/html"));
  setTimeout(look, Math.max(LOOK_MS, 50 * (performance.now() - began))); // what takes long is asked for less often
}
if (!document.querySelector(".settings-table")) setTimeout(look, LOOK_MS);

const filters = document.getElementById("filters");
for (const choice of filters.querySelectorAll("select")) choice.addEventListener("change", () => filters.requestSubmit());
