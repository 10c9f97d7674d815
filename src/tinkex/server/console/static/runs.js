// The list: chosen runs are compared or deleted; filters apply when they are changed.
"use strict";

const form = document.getElementById("chosen");
if (form) {
  const all = document.getElementById("choose-all"), said = document.getElementById("num-chosen");
  const compare = document.getElementById("compare"), remove = document.getElementById("delete-chosen");
  const boxes = [...form.querySelectorAll("input[name=runs]")], idle = said.textContent;
  const show = () => {
    const chosen = boxes.filter((box) => box.checked);
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
  all.addEventListener("change", () => { for (const box of boxes) box.checked = all.checked; show(); });
  form.addEventListener("change", show);
  addEventListener("pageshow", show); // a browser that goes back restores the ticks
  show();
}
const filters = document.getElementById("filters");
for (const choice of filters.querySelectorAll("select")) choice.addEventListener("change", () => filters.requestSubmit());
