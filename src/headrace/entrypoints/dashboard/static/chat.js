// The chat page: streams an answer and shows beside it where its time went.

import { events, get } from "./api.js";
import { $, askForKey, el } from "./dom.js";
import { renderExplanation } from "./timeline.js";

const messages = [];
let busy = null;

function append(role, text = "") {
  const body = el("div", { class: "text" }, text);
  const aside = el("aside", { "aria-label": "Where the time went" });
  const row = el("article", { class: `message ${role}` }, body, role === "assistant" ? aside : null);
  $("messages").append(row);
  row.scrollIntoView({ block: "end" });
  return { body, aside };
}

async function explain(id, aside) {
  try {
    const found = await get(`v1/requests/${id}/explain`);
    aside.replaceChildren(renderExplanation(found));
  } catch {
    // Not known yet, or forgotten: the answer matters more.
  }
}

async function send(text) {
  messages.push({ role: "user", content: text });
  append("user", text);
  const { body, aside } = append("assistant");
  const id = `chat-${crypto.randomUUID().slice(0, 8)}`;
  busy = new AbortController();
  $("send").textContent = "Stop";
  const ticking = setInterval(() => explain(id, aside), 1000);
  let answer = "";
  try {
    const request = { messages, stream: true, max_tokens: Number($("max-tokens").value) || undefined };
    const options = { body: request, extra: { "X-Request-Id": id }, signal: busy.signal };
    for await (const event of events("v1/chat/completions", options)) {
      if (event.error) throw new Error(event.error.message);
      answer += event.choices[0]?.delta.content ?? "";
      body.textContent = answer;
    }
  } catch (error) {
    if (error.name !== "AbortError") body.append(el("p", { class: "error" }, error.message));
  } finally {
    clearInterval(ticking);
    busy = null;
    $("send").textContent = "Send";
  }
  messages.push({ role: "assistant", content: answer });
  await explain(id, aside);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy) {
    busy.abort();
    return;
  }
  const text = $("prompt").value.trim();
  if (!text) return;
  $("prompt").value = "";
  send(text);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});

$("clear").addEventListener("click", () => {
  messages.length = 0;
  $("messages").replaceChildren();
  $("prompt").focus();
});

async function greet() {
  const { data } = await get("v1/models");
  $("model").textContent = data[0].id;
}

askForKey(greet);
greet().catch((error) => {
  $("model").textContent = error.message;
});
$("prompt").focus();
