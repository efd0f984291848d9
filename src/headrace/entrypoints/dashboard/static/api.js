// Talking to the server: the key, plain calls, and event streams read by fetch, since EventSource sends no key.

const KEY = "headrace-key";

let onKeyWanted = () => {};

export function whenKeyIsWanted(handler) {
  onKeyWanted = handler;
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function open(path, { body, extra, signal } = {}) {
  const options = { headers: headers(extra), signal };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const reply = await fetch(path, options);
  if (reply.ok) return reply;
  let message = `the server answered ${reply.status}`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // Not an answer of this server; its status says enough.
  }
  if (reply.status === 401) onKeyWanted();
  throw new CallError(reply.status, message);
}

export async function get(path) {
  return (await open(path)).json();
}

// Yields the parsed data of each event; ends with the stream.
export async function* events(path, options) {
  const reply = await open(path, options);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const data = rest.slice(0, end).replace(/^data: /, "");
        rest = rest.slice(end + 2);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
