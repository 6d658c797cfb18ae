// The audit: what was denied first, then everything, newest first.

import { call, query } from "./api.js";
import { announce, attribute, by, long, node, state, text, time } from "./page.js";
import { pages, SIZE } from "./pages.js";
import { filters, link } from "./route.js";
import { keyed } from "./rows.js";
import { ago, command, count, duration, visible } from "./words.js";

const ACTIONS = "sandbox.create sandbox.delete sandbox.renew sandbox.pause sandbox.resume sandbox.expire sandbox.reap exec.start exec.end exec.signal exec.stdin file.get file.put file.delete token.new token.revoke token.rotate auth.fail limit.refuse".split(" ");
by("audit-actions").append(...ACTIONS.map((value) => node("option", { value })));

const denied = (line) => line.decision !== "allow";
const who = (line) => visible(line.actor?.agent || line.actor?.addr || line.request?.addr || "nobody");

function target(line) {
  const { type = "", id = "" } = line.target ?? {};
  return visible([type, id].filter(Boolean).join(" "));
}

// What was asked for, in a line.
function what(line) {
  const { cmd, image, path, method } = line.request ?? {};
  if (line.reason) return visible(line.reason);
  if (cmd) return command(cmd);
  return visible([image, path ? [method, path].filter(Boolean).join(" ") : ""].filter(Boolean).join(" "));
}

function result(line) {
  const { status, state: ended, exitCode, durationMs, timedOut } = line.result ?? {};
  const parts = [
    status === undefined || status === null ? "" : String(status),
    exitCode === undefined || exitCode === null ? (ended ?? "") : `exit ${exitCode}`,
    timedOut ? "timed out" : "",
    durationMs === undefined || durationMs === null ? "" : duration(durationMs),
  ];
  return visible(parts.filter(Boolean).join(" · "));
}

function targetLink(cell, line) {
  const view = { sandbox: "sandboxes", exec: "executions", execution: "executions" }[line.target?.type];
  const words = target(line);
  if (!view || !line.target?.id) {
    long(cell, words);
    return;
  }
  let inner = cell.firstElementChild;
  if (!inner) {
    inner = node("a");
    cell.replaceChildren(inner);
  }
  attribute(inner, "href", link(view, line.target.id));
  long(inner, words);
}

const cell = (name) => node("td", { class: name });

// One for both tables: columns by name.
export function auditRow(columns) {
  const when = node("time");
  const decision = node("span");
  const cells = {
    when: () => node("th", { scope: "row" }, when), decision: () => node("td", {}, decision),
    agent: () => cell("cut"), action: () => cell("mono"), reason: () => cell("fold"), rule: () => cell("wide mono"), what: () => cell("wide cut"),
    target: () => cell("wide cut mono"), result: () => cell("wide"), record: () => cell("wide mono"),
  };
  const made = Object.fromEntries(columns.map((name) => [name, cells[name]()]));
  const root = node("tr", {}, ...Object.values(made));
  const fills = {
    agent: (line) => long(made.agent, who(line)),
    action: (line) => text(made.action, visible(line.action)),
    reason: (line) => text(made.reason, visible(line.reason) || what(line)),
    rule: (line) => text(made.rule, visible(line.rule)),
    what: (line) => long(made.what, what(line)),
    target: (line) => targetLink(made.target, line),
    result: (line) => text(made.result, result(line)),
    record: (line) => {
      text(made.record, `#${line.seq}`);
      attribute(made.record, "title", `request ${visible(line.requestId)}\nhash ${visible(line.hash)}`);
    },
    when: (line) => time(when, line.ts, ago(line.ts, Date.now())),
    decision: (line) => state(decision, denied(line) ? { kind: "bad", glyph: "✕", text: visible(line.decision) } : { kind: "good", glyph: "✓", text: "allow" }),
  };
  return {
    root,
    fill(line) {
      root.classList.toggle("deny", denied(line));
      for (const name of columns) fills[name](line);
    },
  };
}

const section = by("view-audit");
const key = (line) => String(line.seq);
const first = keyed(by("denials").tBodies[0], { make: () => auditRow(["when", "agent", "reason", "action", "rule", "target", "record"]), key });
const all = keyed(by("records").tBodies[0], {
  make: () => auditRow(["when", "decision", "agent", "action", "what", "target", "result", "record"]), key, held: section.querySelector(".held"),
});
const turn = pages(section.querySelector(".pages"), "audit");
const sync = filters(section.querySelector("form"));

const SPANS = { "15m": 900, "1h": 3600, "24h": 86400, "7d": 604800 };
// To the minute, so that pages of one look stay the same.
const since = (name) => (SPANS[name] ? new Date((Math.floor(Date.now() / 60000) * 60 - SPANS[name]) * 1000).toISOString() : "");

export const audit = {
  section, title: "Audit",
  enter: sync,
  async refresh(place, { signal, now, told }) {
    sync(place);
    const [agent, action, decision, after] = ["agent", "action", "decision", "after"].map((name) => place.query.get(name) ?? "");
    const asked = { agent, action, since: since(place.query.get("since")) };
    // Denials stand first, on the first page of an unsorted look.
    const apart = !decision && !after;
    const [denials, list] = await Promise.all([
      apart ? call(query("v1/audit", { ...asked, decision: "deny", limit: 10 }), { signal }) : { items: [], next: null },
      call(query("v1/audit", { ...asked, decision, after, limit: SIZE }), { signal }),
    ]);
    by("audit-denied").hidden = !apart;
    by("all-denials").hidden = !denials.next;
    attribute(by("all-denials"), "href", link("audit", "", { agent, action, since: place.query.get("since"), decision: "deny" }));
    first.update(denials.items, { now });
    by("audit-denied").querySelector(".empty").hidden = denials.items.length > 0;
    text(by("audit-all-title"), { deny: "Denied, newest first", allow: "Allowed, newest first" }[decision] ?? "Everything, newest first");
    all.update(list.items, { now });
    by("audit-all").querySelector(".empty").hidden = list.items.length > 0;
    turn.show(place, { shown: list.items.length, loaded: list.items.length, more: list.next });
    if (told) announce(count(list.items.length, "record", "records"));
  },
};
