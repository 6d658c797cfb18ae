// The overview: what is used of what is allowed, what was denied, what runs.

import { call, measurements, query } from "./api.js";
import { auditRow } from "./audit.js";
import { lasted } from "./executions.js";
import { attribute, by, long, meters, node, text } from "./page.js";
import { link } from "./route.js";
import { keyed } from "./rows.js";
import { session } from "./session.js";
import { bytes, command, duration, visible } from "./words.js";

const section = by("view-overview");

// Usage by its name in the answer, the limit that bounds it, and words.
const USED = [
  ["sandboxes", "maxSandboxesPerAgent", "Sandboxes"],
  ["runningExecs", "maxConcurrentExecsPerAgent", "Running executions"],
  ["queuedExecs", "maxQueuedExecsPerAgent", "Waiting executions"],
];

// Of all agents together, for who may know it.
const TOTAL = [
  ["sandbox_sandboxes", "maxSandboxes", "Sandboxes, all agents"],
  ["sandbox_execs_running", "maxConcurrentExecs", "Running, all agents"],
];

function used(table, usage, limits) {
  return table.filter(([name]) => usage?.[name] !== undefined).map(([name, limit, words]) => ({
    name: words, used: usage[name], most: limits[limit] ?? null, show: (value) => value.toLocaleString("en"),
  }));
}

// By the name that a quota and the server's environment have: maxMemory is MAX_MEMORY.
function limitWords(name, value) {
  if (Array.isArray(value)) return value.map(visible).join(" ") || "none";
  if (value === null || value === "") return "–";
  if (typeof value !== "number") return visible(value);
  if (/memory|disk|bytes/i.test(name)) return bytes(value);
  if (/time|seconds|keep/i.test(name)) return duration(value * 1000).replace(".0 s", " s").replace(/ 00 (min|s)$/, "");
  return value.toLocaleString("en");
}

function runningRow() {
  const what = node("a", { class: "mono" });
  const [owner, took] = [node("td"), node("td", { class: "number" })];
  const where = node("a", { class: "mono" });
  return {
    root: node("tr", {}, node("th", { scope: "row", class: "cut" }, what), owner, node("td", { class: "wide" }, where), took),
    fill(exec) {
      attribute(what, "href", link("executions", exec.id));
      long(what, command(exec.command).replaceAll("\n", "⏎"));
      text(owner, visible(exec.owner ?? "–"));
      attribute(where, "href", link("sandboxes", exec.sandboxId));
      text(where, visible(exec.sandboxId).slice(0, 12));
      text(took, lasted(exec, Date.now()));
    },
  };
}

function limitRow() {
  const [name, value] = [node("th", { scope: "row", class: "mono" }), node("td", { class: "number" })];
  return {
    root: node("tr", {}, name, value),
    fill([key, content]) {
      text(name, visible(key.replace(/[A-Z]/g, "_$&").toUpperCase()));
      text(value, limitWords(key, content));
    },
  };
}

const running = keyed(by("overview-running").tBodies[0], { make: runningRow, key: (exec) => exec.id });
const denials = keyed(by("overview-denials").tBodies[0], { make: () => auditRow(["when", "agent", "reason", "action", "rule"]), key: (line) => String(line.seq) });
const limits = keyed(by("limits").tBodies[0], { make: limitRow, key: ([name]) => name });

text(by("example"), `export SANDBOX_API=${location.origin}\nexport SANDBOX_TOKEN=…            # sandboxctl token new NAME\nsandboxctl remote run -- echo hello`);

export const overview = {
  section, title: "Overview",
  async refresh(_place, { signal, now }) {
    const sees = session.has("audit:read");
    const [me, runs, lines, all] = await Promise.all([
      call("v1/whoami", { signal }),
      call(query("v1/execs", { state: "Running", order: "desc", limit: 10 }), { signal }),
      sees ? call(query("v1/audit", { decision: "deny", limit: 5 }), { signal }) : { items: [] },
      sees ? measurements({ signal }) : {},
    ]);
    meters(by("usage"), [...used(USED, me.usage, me.limits), ...used(TOTAL, all, me.limits)]);
    running.update(runs.items, { now });
    by("running-title").parentElement.querySelector(".empty").hidden = runs.items.length > 0;
    denials.update(lines.items, { now });
    by("denials-title").parentElement.querySelector(".empty").hidden = lines.items.length > 0;
    limits.update(Object.entries(me.limits).sort(([a], [b]) => a.localeCompare(b)), { now });
  },
};
