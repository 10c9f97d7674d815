// Talk to a model, or to two of them side by side with the same seed.
"use strict";

const $ = (id) => document.getElementById(id);
const token = document.querySelector("meta[name=form-token]").content;
const talks = { left: [], right: [] };
let stopping = null;

function show(side, kind, text) {
  $("start-hint").hidden = true;
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  $(`talk-${side}`).append(line);
  return line;
}

// What is asked, as the OpenAI API takes it; `text` is what is typed and not sent yet.
function asked(side, text = "") {
  const shared = {
    model: $(side).value,
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    max_tokens: Number($("max").value),
    seed: Number($("seed").value),
  };
  if ($("mode").value === "completion") return { prompt: text, ...shared };
  const messages = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  return { messages: messages.concat(talks[side], text ? [{ role: "user", content: text }] : []), ...shared };
}

function post(path, body, signal) {
  return fetch(path, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "content-type": "application/json", "x-form-token": token },
  });
}

// The objects of a stream, one after the other.
async function* objects(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// [{text, logprob, others: [[text, logprob]]}] of either API.
function scored(logprobs) {
  if (logprobs.content) return logprobs.content.map((one) => ({ text: one.token, logprob: one.logprob, others: one.top_logprobs.map((other) => [other.token, other.logprob]) }));
  return logprobs.tokens.map((text, i) => ({ text, logprob: logprobs.token_logprobs[i], others: Object.entries(logprobs.top_logprobs[i] || {}) }));
}

async function talk(side, text, signal) {
  const turns = talks[side];
  const isChat = $("mode").value === "chat";
  const model = $(side).selectedOptions[0].label;
  const body = { ...asked(side, text), stream: true, stream_options: { include_usage: true } };
  if (isChat) { body.logprobs = true; body.top_logprobs = 5; turns.push({ role: "user", content: text }); } else body.logprobs = 5;
  show(side, "you", text);
  const line = show(side, "model", "");
  const began = performance.now();
  let said = "", usage = null, tokens = [];
  try {
    const answer = await post(isChat ? "/console/api/chat" : "/console/api/completion", body, signal);
    if (!answer.ok) { const told = await answer.json(); throw new Error(told.detail || "The server refused."); }
    for await (const told of objects(answer)) {
      if (told.error) throw new Error(told.error.message);
      if (told.usage) usage = told.usage;
      const choice = told.choices[0];
      if (!choice) continue;
      const delta = choice.delta || {};
      said += isChat ? (delta.reasoning_content || "") + (delta.content || "") : choice.text || "";
      if (choice.logprobs) tokens = tokens.concat(scored(choice.logprobs));
      line.textContent = said;
    }
  } catch (problem) {
    if (problem.name !== "AbortError") { line.className = "wrong"; line.textContent = problem instanceof TypeError ? "The connection to the server was lost." : problem.message; if (isChat) turns.pop(); return; }
  }
  if (turns !== talks[side]) return; // a new conversation began meanwhile
  if (isChat) turns.push({ role: "assistant", content: said });
  explain(line, said, tokens);
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  show(side, "meta", usage ? `${model}: ${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} generated in ${seconds} s` : `${model}: stopped after ${seconds} s`);
}

// Put the tokens in place of the text, each with its alternatives; the mark that ends an answer is left out.
function explain(line, said, tokens) {
  let text = "";
  const shown = [];
  for (const one of tokens) {
    if (text.length >= said.length && !said.startsWith(text + one.text)) break;
    text += one.text;
    shown.push(one);
  }
  if (!shown.length) return;
  line.replaceChildren(...shown.map((one) => {
    const span = document.createElement("span");
    span.textContent = one.text;
    span.className = "token";
    span.tabIndex = 0;
    span.addEventListener("pointerenter", () => tell(span, one));
    span.addEventListener("focus", () => tell(span, one));
    for (const end of ["pointerleave", "blur"]) span.addEventListener(end, () => { $("others").hidden = true; });
    return span;
  }));
}

function tell(span, one) {
  const box = $("others");
  const rows = one.others.length ? one.others : [[one.text, one.logprob]];
  const list = document.createElement("table");
  for (const [text, logprob] of rows) {
    const row = list.insertRow();
    if (text === one.text) row.className = "chosen";
    const name = document.createElement("code");
    name.textContent = JSON.stringify(text).slice(1, -1);
    row.insertCell().append(name);
    row.insertCell().textContent = `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  }
  box.replaceChildren(list);
  box.hidden = false;
  const at = span.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8)) + scrollX}px`;
  box.style.top = `${at.bottom + scrollY + 4}px`;
}

// ------------------------------------------------------------------------ as code

function code(text) {
  const body = asked("left", text);
  const isChat = $("mode").value === "chat";
  const path = isChat ? "chat/completions" : "completions";
  if ($("language").value === "curl") {
    const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
    return `curl ${location.origin}/v1/${path} \\\n  -H "Authorization: Bearer $TINKER_API_KEY" -H "Content-Type: application/json" \\\n  -d '${quoted}'`;
  }
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");
  const call = isChat ? "chat.completions" : "completions";
  return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=os.environ["TINKER_API_KEY"])\nanswer = client.${call}.create(\n${given})\nprint(answer.choices[0].${isChat ? "message.content" : "text"})`;
}

// Texts, numbers, and lists of messages: what JSON and Python write alike.
function python(value) { return JSON.stringify(value).replaceAll("\u007f", "\\u007f"); }

function showCode() {
  $("code").textContent = code($("text").value || lastAsked);
  $("copy-code").dataset.text = $("code").textContent;
}

let lastAsked = "", counting = null;
async function count() {
  showCode();
  const text = $("text").value;
  if (!text) { $("count").textContent = ""; return; }
  const answer = await post(`/console/api/count/${$("mode").value}`, asked("left", text)).catch(() => null);
  if (answer && answer.ok && $("text").value === text) $("count").textContent = `${(await answer.json()).num_tokens} prompt tokens`;
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if ($("send").disabled) return; // the Enter key while an answer is written
  const text = $("text").value;
  lastAsked = $("mode").value === "completion" ? text : "";
  if ($("mode").value === "chat") $("text").value = "";
  $("count").textContent = "";
  stopping = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const sides = $("right").value ? ["left", "right"] : ["left"];
  await Promise.all(sides.map((side) => talk(side, text, stopping.signal)));
  $("send").disabled = false;
  $("stop").disabled = true;
  showCode();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && $("mode").value === "chat") { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => stopping && stopping.abort());
$("clear").addEventListener("click", () => {
  stopping?.abort();
  for (const side of ["left", "right"]) { talks[side] = []; $(`talk-${side}`).replaceChildren(); }
  $("start-hint").hidden = false;
});
$("ask").addEventListener("input", () => { clearTimeout(counting); counting = setTimeout(count, 300); });
$("language").addEventListener("change", showCode);
// A completion has no system message.
const adapt = () => { $("system").disabled = $("mode").value === "completion"; };
$("mode").addEventListener("change", adapt);
adapt(); // a browser that goes back restores the choice
showCode();
