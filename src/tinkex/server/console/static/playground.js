// Talk to a model, or to two of them side by side with the same seed.
"use strict";

const $ = (id) => document.getElementById(id);
const token = document.querySelector("meta[name=form-token]").content;
const talks = { left: [], right: [] };
let stopping = null;

function show(side, kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  $(`talk-${side}`).append(line);
  return line;
}

function asked(side) {
  const messages = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  return {
    model: $(side).value,
    messages: messages.concat(talks[side]),
    temperature: Number($("temperature").value),
    max_tokens: Number($("max").value),
    seed: Number($("seed").value),
  };
}

async function talk(side, text, signal) {
  talks[side].push({ role: "user", content: text });
  show(side, "you", text);
  const line = show(side, "model", "");
  const body = { ...asked(side), stream: true, stream_options: { include_usage: true } };
  const began = performance.now();
  let said = "", tokens = 0;
  try {
    const answer = await fetch("/console/api/chat", {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "content-type": "application/json", "x-form-token": token },
    });
    if (!answer.ok) { const told = await answer.json(); throw new Error(told.detail || "The server refused."); }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") continue;
        const told = JSON.parse(data);
        if (told.error) throw new Error(told.error.message);
        if (told.usage) tokens = told.usage.completion_tokens;
        const delta = told.choices.length ? told.choices[0].delta : {};
        said += (delta.reasoning_content || "") + (delta.content || "");
        line.textContent = said;
      }
    }
  } catch (problem) {
    if (problem.name !== "AbortError") { line.className = "wrong"; line.textContent = problem.message; talks[side].pop(); return; }
  }
  talks[side].push({ role: "assistant", content: said });
  const seconds = (performance.now() - began) / 1000;
  show(side, "meta", `${$(side).value}: ${tokens || "?"} tokens in ${seconds.toFixed(1)} s`);
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value;
  $("text").value = "";
  stopping = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const sides = $("right").value ? ["left", "right"] : ["left"];
  await Promise.all(sides.map((side) => talk(side, text, stopping.signal)));
  $("send").disabled = false;
  $("stop").disabled = true;
  const { model, messages, ...rest } = asked("left");
  $("code").textContent =
    "from openai import OpenAI\n\nclient = OpenAI(base_url=\"" + location.origin + "/v1\", api_key=\"tml-...\")\n" +
    "client.chat.completions.create(\n    model=" + JSON.stringify(model) + ",\n    messages=" + JSON.stringify(messages.slice(0, -1)) +
    Object.entries(rest).map(([name, value]) => `,\n    ${name}=${value}`).join("") + ",\n)";
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => stopping && stopping.abort());
$("clear").addEventListener("click", () => {
  for (const side of ["left", "right"]) { talks[side] = []; $(`talk-${side}`).replaceChildren(); }
});
