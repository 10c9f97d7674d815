// What every page has: a question before a form that cannot be undone, forms that apply when changed, menus that close.
"use strict";

// A form asks with `data-question`, `data-detail` and `data-verb`. The server asks by itself when nobody did here.
const asker = document.createElement("dialog");
asker.className = "asker card";
asker.innerHTML = '<form method="dialog"><h2 id="asker-question"></h2><p></p><div class="actions"><button class="quiet" value="">Cancel</button><button class="danger firm" value="yes"></button></div></form>';
asker.setAttribute("aria-labelledby", "asker-question");

function ask(form) {
  if (!asker.isConnected) document.body.append(asker);
  asker.querySelector("h2").textContent = form.dataset.question;
  asker.querySelector("p").textContent = form.dataset.detail || "";
  const verb = form.dataset.verb || form.querySelector("button").textContent;
  const yes = asker.querySelector("button[value=yes]");
  yes.textContent = verb;
  yes.classList.toggle("danger", Boolean(form.querySelector("button.danger")));
  asker.returnValue = "";
  asker.onclose = () => {
    if (asker.returnValue !== "yes") return;
    const agreed = document.createElement("input");
    Object.assign(agreed, { type: "hidden", name: "confirmed", value: "yes" });
    form.append(agreed);
    form.submit(); // asks no second time
  };
  asker.showModal();
}

document.addEventListener("submit", (event) => {
  if (!event.target.classList.contains("asks") || !event.target.dataset.question) return;
  event.preventDefault();
  ask(event.target);
});

document.addEventListener("change", (event) => {
  const form = event.target.closest("form.auto");
  if (form && event.target.tagName === "SELECT") form.requestSubmit();
});

// A menu closes by Escape, when one of its links is followed, and when something else is clicked or focused.
document.addEventListener("keydown", (event) => {
  const menu = event.key === "Escape" && event.target.closest?.(".menu[open]");
  if (menu) { menu.open = false; menu.querySelector("summary").focus(); }
});
document.addEventListener("click", (event) => {
  const menu = event.target.closest(".menu-items > a")?.closest(".menu");
  if (menu) menu.open = false;
});
for (const kind of ["click", "focusin"]) {
  document.addEventListener(kind, (event) => {
    for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });
}
