// Executions: the list, and one of them with its output.

import { call, Failure, follow, query } from "./api.js";
import { confirm } from "./dialogs.js";
import { announce, attribute, button, by, facts, long, node, state, text, time } from "./page.js";
import { pages, SIZE } from "./pages.js";
import { filters, link } from "./route.js";
import { keyed, matching } from "./rows.js";
import { Output } from "./terminal.js";
import { ago, bytes, command, count, duration, executionState, visible } from "./words.js";

const path = (id) => `v1/execs/${encodeURIComponent(id)}`;
const wake = () => dispatchEvent(new Event("refresh"));
const running = (exec) => exec.state === "Running" || exec.state === "Pending";

export function lasted(exec, now) {
  if (exec.durationMs !== null && exec.durationMs !== undefined) return duration(exec.durationMs);
  if (exec.state !== "Running") return "–";
  // Whole seconds while it runs: tenths would only flicker.
  return duration(Math.floor((now - Date.parse(exec.startedAt)) / 1000) * 1000).replace(".0 s", " s");
}

function killer(current) {
  const kill = button("Kill", () => {
    const exec = current();
    confirm({
      title: "Kill this execution?", target: command(exec.command).slice(0, 400), verb: "Kill", done: "The execution is killed.",
      words: "All of its processes end at once. The sandbox and its files stay.",
      work: () => call(`${path(exec.id)}/kill`, { method: "POST" }).then(wake),
    });
  });
  return {
    root: kill,
    fill(exec) {
      kill.hidden = !running(exec);
      attribute(kill, "aria-label", `Kill ${command(exec.command).slice(0, 60)}`);
    },
  };
}

// `sandbox`: with the columns of agent and sandbox.
export function executionRow({ sandbox = true } = {}) {
  let exec = null;
  const what = node("a", { class: "mono" });
  const status = node("span");
  const owner = node("td", { "data-scope": "admin" });
  const where = node("a", { class: "mono" });
  const started = node("time");
  const [took, cpu, memory] = [node("td", { class: "number" }), node("td", { class: "wide number" }), node("td", { class: "wide number" })];
  const kill = killer(() => exec);
  const root = node("tr", {}, node("th", { scope: "row", class: "cut" }, what), node("td", {}, status),
    ...(sandbox ? [owner, node("td", { class: "wide" }, where)] : []),
    node("td", { class: "wide" }, started), took, cpu, memory, node("td", { class: "apart" }, node("span", { class: "actions" }, kill.root)));
  return {
    root,
    fill(item) {
      exec = item;
      const now = Date.now();
      attribute(what, "href", link("executions", exec.id));
      long(what, command(exec.command).replaceAll("\n", "⏎") || "–");
      state(status, executionState(exec));
      long(owner, visible(exec.owner ?? "–"));
      attribute(where, "href", link("sandboxes", exec.sandboxId));
      attribute(where, "title", exec.sandboxId);
      text(where, `${visible(exec.sandboxId).slice(0, 12)}…`);
      time(started, exec.startedAt, ago(exec.startedAt, now));
      text(took, lasted(exec, now));
      text(cpu, running(exec) ? "–" : duration(exec.cpuMs));
      text(memory, running(exec) || !exec.maxRssKb ? "–" : bytes(exec.maxRssKb * 1024));
      kill.fill(exec);
    },
  };
}

// --- the list

const section = by("view-executions");
const table = keyed(by("executions").tBodies[0], { make: executionRow, key: (exec) => exec.id, held: section.querySelector(".held") });
const turn = pages(section.querySelector(".pages"), "executions");
const sync = filters(section.querySelector("form"), { now: ["q"] });
const empty = section.querySelector(".empty");

export const executions = {
  section, title: "Executions",
  enter: sync,
  async refresh(place, { signal, now, told }) {
    sync(place);
    const [wanted, box, status, after] = ["q", "sandbox", "state", "after"].map((name) => place.query.get(name) ?? "");
    const list = await call(query("v1/execs", { sandbox: box, state: status, after, order: "desc", limit: SIZE }), { signal });
    const shown = matching(list.items, wanted, (exec) => [exec.id, exec.owner, exec.sandboxId, command(exec.command), executionState(exec).text]);
    table.update(shown, { now });
    turn.show(place, { shown: shown.length, loaded: list.items.length, more: list.next });
    text(empty, wanted || box || status || after
      ? "No execution matches. Clear the filter to see all."
      : "Nothing was run yet. An agent runs a command with: sandboxctl remote run -- COMMAND");
    empty.hidden = shown.length > 0;
    if (told) announce(count(shown.length, "execution", "executions"));
  },
};

// --- one

const one = by("view-execution");
const pane = by("output");
const keep = by("follow");
let shownExec = null;
let stream = null;
const kill = killer(() => shownExec);
by("execution-actions").append(kill.root);
const times = { started: node("time"), ended: node("time") };
const where = node("a", { class: "mono" });

const output = new Output(pane, {
  cut: () => { by("output-cut").hidden = false; },
  written: () => { by("output-empty").hidden = pane.hasChildNodes(); },
  following: () => keep.checked,
});
// Scrolling up to read lets go of the end; scrolling down to it takes hold again.
pane.addEventListener("scroll", () => {
  keep.checked = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 24;
});
keep.addEventListener("change", () => { if (keep.checked) pane.scrollTop = pane.scrollHeight; });
by("wrap").addEventListener("change", (event) => pane.classList.toggle("wrap", event.target.checked));

// The bytes as they came: what is shown has no escape sequences any more.
by("download").addEventListener("click", () => {
  const address = URL.createObjectURL(new Blob(output.raw, { type: "application/octet-stream" }));
  node("a", { href: address, download: `${shownExec?.id ?? "output"}.log` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
});

function streaming(kind, words) {
  attribute(by("stream-state"), "data-state", kind);
  text(by("stream-state"), words);
}

// Whether it was the last event. The first and the last one carry the execution itself, so that
// nobody has to ask for it again and again with all of its output.
function take({ event, data }) {
  const value = JSON.parse(data);
  if (event === "stdout" || event === "stderr") {
    output.write(event, value);
    return false;
  }
  // What came before is of a start that was lost.
  if (event === "retry") output.clear();
  if (event === "start" || event === "retry" || event === "exit" || (event === "error" && value.id)) render(value);
  return event === "exit" || event === "error";
}

async function listen(id, signal) {
  streaming("", "connecting");
  try {
    await follow(`${path(id)}/events`, {
      take, signal,
      changed: (now) => streaming(now, now === "live" ? "live" : "connection lost, trying again"),
    });
    if (signal.aborted) return;
    output.end();
    streaming("", "complete");
    text(by("output-empty"), "It wrote no output.");
  } catch (failure) {
    if (signal.aborted) return;
    output.end();
    streaming("broken", failure instanceof Failure ? `${failure.message} (${failure.code})` : "the output cannot be read");
    if (failure.status === 401 || failure.status === 404) dispatchEvent(new CustomEvent("trouble", { detail: failure }));
  }
}

function render(exec) {
  const before = shownExec;
  shownExec = exec;
  const now = Date.now();
  const status = executionState(exec);
  if (before && running(before) && !running(exec)) announce(`The execution has ended: ${status.text}.`);
  text(by("execution-title"), visible(exec.id));
  state(by("execution-state"), status);
  kill.fill(exec);
  text(by("execution-command"), command(exec.command));
  attribute(where, "href", link("sandboxes", exec.sandboxId));
  text(where, visible(exec.sandboxId));
  time(times.started, exec.startedAt, ago(exec.startedAt, now));
  time(times.ended, exec.endedAt, ago(exec.endedAt, now));
  const done = !running(exec);
  facts(by("execution-facts"), [
    ["Agent", visible(exec.owner)], ["Sandbox", where], ["Error", visible(exec.error)], ["Started", exec.startedAt ? times.started : ""],
    ["Ended", exec.endedAt ? times.ended : ""], ["Duration", lasted(exec, now)], ["Time limit", exec.timeout ? duration(exec.timeout * 1000) : ""],
    ["CPU", done ? duration(exec.cpuMs) : ""], ["Peak memory", done && exec.maxRssKb ? bytes(exec.maxRssKb * 1024) : ""],
    ["Exit code", exec.exitCode === null ? "" : String(exec.exitCode)], ["Signal", visible(exec.signal)],
    ["Output", done ? `${bytes(exec.stdoutBytes)} stdout, ${bytes(exec.stderrBytes)} stderr${exec.truncated ? ", cut at the limit" : ""}` : ""],
    ["Directory", visible(exec.cwd)], ["Terminal", exec.tty ? "yes" : ""],
  ]);
}

export const execution = {
  section: one, title: "Execution",
  enter(place) {
    stream?.abort();
    stream = new AbortController();
    shownExec = null;
    output.clear();
    keep.checked = true;
    by("output-cut").hidden = true;
    by("output-empty").hidden = false;
    text(by("output-empty"), "No output yet.");
    text(by("execution-title"), visible(place.id));
    text(by("execution-command"), "");
    by("execution-state").removeAttribute("data-glyph");
    text(by("execution-state"), "");
    kill.root.hidden = true;
    facts(by("execution-facts"), []);
    listen(place.id, stream.signal);
  },
  leave() {
    stream?.abort();
    output.clear();
  },
  async refresh(_place, { signal }) {
    // The stream brings what is new; this one finds out that the session is over.
    await call("v1/session", { signal });
    if (shownExec) render(shownExec);
  },
};
