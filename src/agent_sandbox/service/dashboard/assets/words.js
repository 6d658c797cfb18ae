// Values as people read them. Pure: no document, no clock of its own.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

// What would hide, turn around or end text: controls, marks of direction, invisible characters.
// Newline and tab stay. Joiners (U+200C, U+200D) stay: scripts and emoji need them.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

function mark(character) {
  const code = character.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
}

// Text of others with every hidden character made visible.
export function visible(value) {
  return String(value ?? "").replace(UNSEEN, mark);
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = Number(count);
  let unit = 0;
  while (value >= 1024 && unit < SIZES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 || Number.isInteger(value) ? 0 : 1;
  return `${value.toFixed(digits)} ${SIZES[unit]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const two = (number) => String(number).padStart(2, "0");
  const whole = Math.floor(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// Coarse, so that a cell does not change at every refresh.
export function span(ms) {
  const seconds = Math.floor(Math.abs(ms) / 1000);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function ago(text, now) {
  const then = Date.parse(text ?? "");
  if (Number.isNaN(then)) return "–";
  return then > now + 1000 ? `in ${span(then - now)}` : `${span(now - then)} ago`;
}

export function until(text, now) {
  const then = Date.parse(text ?? "");
  if (Number.isNaN(then)) return "never";
  return then <= now ? "due" : `in ${span(then - now)}`;
}

export function exact(text) {
  const then = new Date(text ?? "");
  return Number.isNaN(then.getTime()) ? "" : then.toISOString().replace("T", " ").replace(/\.(\d\d\d)Z$/, ".$1 UTC");
}

// An argument list as a shell would take it.
export function command(argv) {
  if (!Array.isArray(argv)) return visible(argv);
  const quote = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  return visible(argv.map((word) => quote(String(word))).join(" "));
}

export function count(number, one, many) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// --- states: [kind, glyph]; the word is always there, colour and glyph only support it.

const SANDBOX = {
  Running: ["good", "●"], Pending: ["warn", "◌"], Paused: ["plain", "Ⅱ"], Stopping: ["warn", "◌"],
  Terminated: ["plain", "○"], Failed: ["bad", "✕"],
};

export function sandboxState(box) {
  const [kind, glyph] = SANDBOX[box.state] ?? ["plain", "○"];
  return { kind, glyph, text: visible(box.state) };
}

export function executionState(exec) {
  const bad = (text) => ({ kind: "bad", glyph: "✕", text });
  if (exec.state === "Running") return { kind: "good", glyph: "●", text: "running" };
  if (exec.state === "Pending") return { kind: "warn", glyph: "◌", text: "queued" };
  if (exec.state === "Lost") return bad("lost");
  if (exec.state === "Failed") return bad("did not start");
  if (exec.timedOut) return bad("timed out");
  if (exec.oomKilled) return bad("out of memory");
  if (exec.exceeded) return bad(`over ${visible(exec.exceeded)} limit`);
  if (exec.signal) return bad(visible(exec.signal));
  if (exec.exitCode === 0) return { kind: "good", glyph: "✓", text: "exit 0" };
  return bad(`exit ${visible(exec.exitCode)}`);
}
