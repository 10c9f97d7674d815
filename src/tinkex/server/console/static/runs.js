// The list: chosen runs are compared.
"use strict";

const form = document.getElementById("chosen");
if (form) {
  const chosen = () => [...form.querySelectorAll("input[type=checkbox]:checked")].map((box) => box.value);
  form.addEventListener("change", () => { document.getElementById("compare").disabled = chosen().length < 2; });
  form.addEventListener("submit", () => { document.getElementById("ids").value = chosen().join(","); });
}
