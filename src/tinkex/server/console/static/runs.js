// The list: two or more chosen runs can be compared; filters apply when they are changed.
"use strict";

const form = document.getElementById("chosen");
if (form) {
  const show = () => { document.getElementById("compare").disabled = form.querySelectorAll("input:checked").length < 2; };
  form.addEventListener("change", show);
  show();
}
const filters = document.getElementById("filters");
for (const choice of filters.querySelectorAll("select")) choice.addEventListener("change", () => filters.requestSubmit());
