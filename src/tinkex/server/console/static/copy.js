// Buttons that copy a text.
"use strict";

for (const button of document.querySelectorAll("button.copies")) {
  button.addEventListener("click", async () => {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(button.dataset.text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";  // browsers copy on HTTPS and localhost only
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  });
}
