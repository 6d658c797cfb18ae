// The API. One way for a request, one for a stream of events; both end in a Failure or a value.

export class Failure extends Error {
  constructor({ status = 0, code = "UNREACHABLE", message = "", hint = "", rule = "", request = "", retry = 0 }) {
    super(message);
    Object.assign(this, { status, code, hint, rule, request, retry });
  }
}

let csrf = "";
export function useSession(session) {
  csrf = session?.csrfToken ?? "";
}

// Relative, so that a proxy may put the whole service below a path.
const address = (path) => new URL(path.replace(/^\//, ""), document.baseURI);

async function refusal(answer) {
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // A proxy's page, or nothing: the status must do.
  }
  return new Failure({
    // Somebody has signed in anew from this browser: the session of this page is over.
    status: body.code === "CSRF" ? 401 : answer.status,
    code: body.code ?? `HTTP_${answer.status}`,
    message: body.message ?? `The server answered ${answer.status} ${answer.statusText}.`.replace(" .", "."),
    hint: body.hint ?? "",
    rule: body.rule ?? "",
    request: body.requestId ?? "",
    retry: Number(answer.headers.get("Retry-After")) || 0,
  });
}

async function send(path, { method = "GET", body, headers = {}, signal }) {
  const options = { method, signal, headers: { Accept: "application/json", ...headers }, credentials: "same-origin", cache: "no-store", redirect: "error" };
  if (csrf) options.headers["X-CSRF-Token"] = csrf;
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(address(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure({ message: "The server does not answer.", hint: "Is it running, and is the network up? This page tries again by itself." });
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

export async function call(path, options = {}) {
  const answer = await send(path, options);
  if (answer.status === 204) return null;
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure({ status: answer.status, code: "BAD_ANSWER", message: "The server's answer is not JSON.", hint: "Something between this page and the server may have changed it." });
  }
}

// Sums of the server's measurements by name: {sandbox_sandboxes: 12, …}.
export async function measurements(options) {
  const answer = await send("metrics", { headers: { Accept: "text/plain" }, ...options });
  const sums = {};
  for (const line of (await answer.text()).split("\n")) {
    const found = /^([a-z_]+)(?:\{.*\})? ([0-9.e+]+)$/.exec(line);
    if (found) sums[found[1]] = (sums[found[1]] ?? 0) + Number(found[2]);
  }
  return sums;
}

// A path with a query of those values that are set.
export function query(path, values) {
  const set = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return set.length ? `${path}?${new URLSearchParams(set)}` : path;
}

// --- Server-Sent Events, by fetch: EventSource can neither send a header nor tell a status.

export class EventReader {
  #rest = "";
  #event = "";
  #data = [];
  #id = null;

  // The events that are complete with this piece of text.
  feed(piece) {
    const found = [];
    const lines = (this.#rest + piece).split("\n");
    this.#rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (this.#data.length || this.#event) found.push({ event: this.#event || "message", data: this.#data.join("\n"), id: this.#id });
        this.#event = "";
        this.#data = [];
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "event") this.#event = value;
      else if (field === "data") this.#data.push(value);
      else if (field === "id") this.#id = value;
    }
    return found;
  }
}

const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });

// Follows a stream until take(event) says true, from where it broke: Last-Event-ID.
export async function follow(path, { take, changed, signal }) {
  let seen = null;
  let wait = 500;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...(seen === null ? {} : { "Last-Event-ID": seen }) };
      const answer = await send(path, { headers, signal });
      changed("live");
      const reader = new EventReader();
      const text = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await text.read();
        if (done) break;
        for (const event of reader.feed(value)) {
          wait = 500;
          const ended = take(event);
          if (event.id !== null) seen = event.id;
          if (ended) {
            text.cancel().catch(() => {});
            return;
          }
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      // What the server refuses stays refused, but for "later".
      if (error instanceof Failure && error.status >= 400 && error.status < 500 && error.status !== 429) throw error;
    }
    changed("broken");
    await pause(wait, signal);
    wait = Math.min(wait * 2, 15000);
  }
}
