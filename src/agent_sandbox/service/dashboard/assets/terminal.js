// Output of commands as text that hides nothing. Escape sequences of terminals are taken out,
// never obeyed: text that a terminal would overwrite, erase or paint black stays readable here.

import { node } from "./page.js";
import { visible } from "./words.js";

// Beyond this a sequence is none: an unfinished one must not swallow what follows.
const LONGEST = 2048;
const CSI = /^\x1b\[[0-?]*[ -/]*[@-~]/;
const TEXTUAL = /^\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)/;
const SHORT = /^\x1b(?:[ -/]+[0-~]|[0-OQ-WYZ\\`-~])/;
const OPEN = /^\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)$/;

export class Plain {
  #rest = "";

  // Readable text; an unfinished sequence at the end waits for the next piece.
  feed(piece) {
    const input = this.#rest + piece;
    this.#rest = "";
    let out = "";
    let at = 0;
    while (at < input.length) {
      const next = input.indexOf("\x1b", at);
      if (next < 0) break;
      out += input.slice(at, next);
      const tail = input.slice(next, next + LONGEST);
      const whole = CSI.exec(tail) ?? TEXTUAL.exec(tail) ?? SHORT.exec(tail);
      if (whole) at = next + whole[0].length;
      else if (next + tail.length === input.length && tail.length < LONGEST && OPEN.test(tail)) {
        this.#rest = tail;
        return this.#lines(out);
      } else {
        out += "\u241b";
        at = next + 1;
      }
    }
    return this.#lines(out + input.slice(at));
  }

  end() {
    const rest = this.#rest;
    this.#rest = "";
    return visible(rest);
  }

  // A lone carriage return would hide the line before it.
  #lines(text) {
    if (text.endsWith("\r")) {
      this.#rest = `\r${this.#rest}`;
      text = text.slice(0, -1);
    }
    return visible(text.replace(/\r+\n/g, "\n").replaceAll("\r", "\n"));
  }
}

// The pane. It keeps the last MOST characters, in parts of one stream each.
const MOST = 1_000_000;
const PART = 32_768;
// Bytes that are kept for a download.
const KEPT = 64 << 20;
const decoders = () => ({ stdout: new TextDecoder(), stderr: new TextDecoder() });

export class Output {
  #encoder = new TextEncoder();
  #decoders = decoders();
  #plain = { stdout: new Plain(), stderr: new Plain() };
  #queue = [];
  #queued = 0;
  #shown = 0;
  #kept = 0;
  raw = [];
  #timer = null;

  constructor(pane, { cut, written, following }) {
    Object.assign(this, { pane, cut, written, following });
  }

  // Bytes, too: a character may be cut between two events.
  write(stream, { data, dataBase64 }) {
    const raw = data === undefined ? Uint8Array.from(atob(dataBase64), (one) => one.charCodeAt(0)) : this.#encoder.encode(data);
    if (this.#kept + raw.length <= KEPT) {
      this.raw.push(raw);
      this.#kept += raw.length;
    }
    this.#push(stream, this.#decoders[stream].decode(raw, { stream: true }));
  }

  #push(stream, text) {
    this.#queue.push([stream, text]);
    this.#queued += text.length;
    // A hidden page has slow timers: what would be dropped anyway is not kept.
    while (this.#queued > 2 * MOST && this.#queue.length > 1) {
      this.#queued -= this.#queue.shift()[1].length;
      this.cut();
    }
    this.#timer ??= setTimeout(() => this.flush(), 40);
  }

  end() {
    for (const stream of ["stdout", "stderr"]) this.#push(stream, this.#decoders[stream].decode());
    this.flush();
    for (const stream of ["stdout", "stderr"]) this.#add(stream, this.#plain[stream].end());
    this.flush();
  }

  clear() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#queue = [];
    this.#queued = this.#shown = this.#kept = 0;
    this.raw = [];
    this.#decoders = decoders();
    this.#plain = { stdout: new Plain(), stderr: new Plain() };
    this.pane.replaceChildren();
  }

  flush() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const atEnd = this.following();
    for (const [stream, text] of this.#queue) this.#add(stream, this.#plain[stream].feed(text));
    this.#queue = [];
    this.#queued = 0;
    while (this.#shown > MOST && this.pane.children.length > 1) {
      this.#shown -= this.pane.firstChild.textContent.length;
      this.pane.firstChild.remove();
      this.cut();
    }
    if (atEnd) this.pane.scrollTop = this.pane.scrollHeight;
    this.written();
  }

  #add(stream, text) {
    this.#shown += text.length;
    while (text) {
      let part = this.pane.lastElementChild;
      if (!part || part.dataset.stream !== stream || part.firstChild.length >= PART) {
        const words = stream === "stderr" ? { "aria-label": "stderr", role: "group" } : {};
        part = node("div", { class: `part ${stream}`, "data-stream": stream, ...words }, "");
        this.pane.append(part);
      }
      const piece = this.#piece(part, text);
      part.firstChild.appendData(piece);
      text = text.slice(piece.length);
    }
  }

  // Parts end at line ends where they can: a part is a block of its own.
  #piece(part, text) {
    const room = PART - part.firstChild.length;
    if (text.length <= room) return text;
    const line = text.lastIndexOf("\n", room - 1);
    if (line >= 0) return text.slice(0, line + 1);
    // Not between the halves of a character.
    const end = Math.max(2, room);
    return text.slice(0, /[\ud800-\udbff]/.test(text[end - 1]) ? end - 1 : end);
  }
}
