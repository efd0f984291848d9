// The chat page: streams an answer and shows beside it where its time went.

import { events, get } from "./api.js";
import { $, askForKey, el } from "./dom.js";
import { renderExplanation } from "./timeline.js";

const IDEAS = ["What is a headrace?", "Write a haiku about rivers", "Explain caching to a child", "Count from one to ten"];
const FOLLOW_PX = 80;

let messages = [];
let busy = null;

function append(role, text = "") {
  const body = el("div", { class: "text" }, text);
  const aside = el("aside", { "aria-label": "Where the time went" });
  $("welcome").hidden = true;
  $("clear").hidden = false;
  $("messages").append(el("article", { class: `message ${role}` }, body, role === "assistant" ? aside : null));
  follow(true);
  return { body, aside };
}

// Keeps the end in sight, unless the reader has scrolled away from it.
function follow(always = false) {
  const box = $("scroller");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < FOLLOW_PX) box.scrollTop = box.scrollHeight;
}

async function explain(id, aside) {
  try {
    const found = await get(`v1/requests/${id}/explain`);
    aside.replaceChildren(renderExplanation(found, { short: true }));
    follow();
  } catch {
    // Not known yet, or forgotten: the answer matters more.
  }
}

async function send(text) {
  const mine = messages;
  mine.push({ role: "user", content: text });
  append("user", text);
  const { body, aside } = append("assistant");
  const id = `chat-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
  busy = new AbortController();
  $("send").textContent = "Stop";
  body.classList.add("busy");
  const ticking = setInterval(() => explain(id, aside), 1000);
  let answer = "";
  try {
    const request = { messages: mine, stream: true, max_tokens: Number($("max-tokens").value) || undefined };
    const options = { body: request, extra: { "X-Request-Id": id }, signal: busy.signal };
    for await (const event of events("v1/chat/completions", options)) {
      if (event.error) throw new Error(event.error.message);
      answer += event.choices[0]?.delta.content ?? "";
      body.textContent = answer;
      follow();
    }
  } catch (error) {
    if (error.name !== "AbortError") body.append(el("p", { class: "error" }, error.message));
  } finally {
    clearInterval(ticking);
    busy = null;
    body.classList.remove("busy");
    $("send").textContent = "Send";
  }
  mine.push({ role: "assistant", content: answer });
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
  busy?.abort();
  messages = [];
  $("messages").replaceChildren();
  $("welcome").hidden = false;
  $("clear").hidden = true;
  $("prompt").focus();
});

$("ideas").append(
  ...IDEAS.map((idea) => {
    const ask = () => {
      $("prompt").value = idea;
      $("ask").requestSubmit();
    };
    return el("button", { type: "button", onclick: ask }, idea);
  }),
);

async function greet() {
  const { data } = await get("v1/models");
  $("model").textContent = data[0].id;
}

askForKey(greet);
greet().catch((error) => {
  $("model").textContent = error.message;
});
$("prompt").focus();
