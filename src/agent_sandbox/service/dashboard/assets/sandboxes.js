// Sandboxes: the list, and one of them.

import { call, query } from "./api.js";
import { confirm } from "./dialogs.js";
import { executionRow } from "./executions.js";
import { announce, attribute, button, by, facts, long, meters, node, state, tags, text, time, toast } from "./page.js";
import { pages, SIZE } from "./pages.js";
import { filters, link } from "./route.js";
import { keyed, matching } from "./rows.js";
import { session } from "./session.js";
import { ago, bytes, count, sandboxState, until, visible } from "./words.js";

const path = (id) => `v1/sandboxes/${encodeURIComponent(id)}`;
export const short = (id) => (id.length > 16 ? `${id.slice(0, 12)}…` : id);
const wake = () => dispatchEvent(new Event("refresh"));

const from = (box) => [box.template, box.image].filter(Boolean).map(visible).join(" · ") || visible(box.backend);
const network = ({ mode, allowOut = [], denyOut = [] }) => [visible(mode), ...allowOut.map((host) => `+${visible(host)}`), ...denyOut.map((host) => `−${visible(host)}`)].join(" ");
const labels = (box) => Object.entries(box.metadata ?? {}).map(([name, value]) => `${name}=${value}`);

// Pause or resume, and delete, for the sandbox of that moment.
function actions(current) {
  const set = async (verb, done) => {
    try {
      await call(`${path(current().id)}/${verb}`, { method: "POST" });
      announce(done);
    } catch (failure) {
      toast(failure);
    }
    wake();
  };
  const pause = button("Pause", () => (current().state === "Paused" ? set("resume", "The sandbox goes on.") : set("pause", "The sandbox is paused.")));
  const remove = button("Delete", () => {
    const box = current();
    confirm({
      title: "Delete this sandbox?", target: `${box.id}  (${box.owner})`, verb: "Delete", done: "The sandbox is deleted.",
      words: "What runs in it ends, and its files are gone for good.",
      work: () => call(path(box.id), { method: "DELETE" }).then(wake),
    });
  });
  const root = node("span", { class: "actions" }, pause, remove);
  return {
    root,
    fill(box) {
      const can = box.state === "Paused" || (box.state === "Running" && session.canPause(box.backend));
      pause.hidden = !can;
      text(pause, box.state === "Paused" ? "Resume" : "Pause");
      attribute(pause, "aria-label", `${pause.textContent} ${short(box.id)}`);
      attribute(remove, "aria-label", `Delete ${short(box.id)}`);
      remove.disabled = box.state === "Stopping" || box.state === "Terminated";
    },
  };
}

function row() {
  let box = null;
  const id = node("a", { class: "mono" });
  const [status, owner, origin, words, memory, net] = ["span", "td", "td", "div", "td", "td"].map((name) => node(name));
  const [created, expires] = [node("time"), node("time")];
  const deeds = actions(() => box);
  attribute(owner, "data-scope", "admin");
  origin.className = words.className = net.className = "wide cut";
  memory.className = "wide number";
  const root = node("tr", {}, node("th", { scope: "row" }, id), node("td", {}, status), owner, origin, node("td", { class: "wide" }, words), memory, net,
    node("td", { class: "wide" }, created), node("td", {}, expires), node("td", { class: "apart" }, deeds.root));
  return {
    root,
    fill(item) {
      box = item;
      const now = Date.now();
      attribute(id, "href", link("sandboxes", box.id));
      attribute(id, "title", box.id);
      text(id, short(visible(box.id)));
      state(status, sandboxState(box));
      long(owner, visible(box.owner));
      long(origin, from(box));
      tags(words, labels(box));
      text(memory, bytes(box.effective?.memory?.limit));
      long(net, network(box.network ?? { mode: "off" }));
      time(created, box.createdAt, ago(box.createdAt, now));
      time(expires, box.expiresAt, until(box.expiresAt, now));
      deeds.fill(box);
    },
  };
}

// --- the list

const section = by("view-sandboxes");
const table = keyed(by("sandboxes").tBodies[0], { make: row, key: (box) => box.id, held: section.querySelector(".held") });
const turn = pages(section.querySelector(".pages"), "sandboxes");
const sync = filters(section.querySelector("form"), { now: ["q"] });
const empty = section.querySelector(".empty");

function nothing(filtered) {
  if (filtered) return [node("p", {}, "No sandbox matches on this page. Clear the filter, or write key=value to look for metadata on all pages.")];
  return [
    node("p", {}, "There is no sandbox. An agent makes one with:"),
    node("pre", { tabindex: "0", "aria-label": "Example" }, `export SANDBOX_API=${location.origin} SANDBOX_TOKEN=…\nsandboxctl remote create`),
  ];
}

export const sandboxes = {
  section, title: "Sandboxes",
  enter: sync,
  async refresh(place, { signal, now, told }) {
    sync(place);
    const wanted = place.query.get("q") ?? "";
    // A whole key=value is the server's to find; the rest narrows what is here.
    const metadata = /^[\w./-]+=.+$/.test(wanted) ? wanted : "";
    const list = await call(query("v1/sandboxes", { state: place.query.get("state"), metadata, after: place.query.get("after"), order: "desc", limit: SIZE }), { signal });
    const shown = metadata ? list.items : matching(list.items, wanted, (box) => [box.id, box.owner, box.state, box.template, box.image, box.backend, ...labels(box)]);
    table.update(shown, { now });
    turn.show(place, { shown: shown.length, loaded: list.items.length, more: list.next });
    const filtered = Boolean(wanted || place.query.get("state") || place.query.get("after"));
    if (empty.hidden !== shown.length > 0 || empty.dataset.filtered !== String(filtered)) {
      empty.replaceChildren(...nothing(filtered));
      empty.dataset.filtered = String(filtered);
      empty.hidden = shown.length > 0;
    }
    if (told) announce(count(shown.length, "sandbox", "sandboxes"));
  },
};

// --- one

const one = by("view-sandbox");
let shownBox = null;
const deeds = actions(() => shownBox);
by("sandbox-actions").replaceWith(deeds.root);
const runs = keyed(by("sandbox-execs").tBodies[0], { make: () => executionRow({ sandbox: false }), key: (exec) => exec.id });
const times = { created: node("time"), expires: node("time"), used: node("time") };

const BOUNDS = [["memory", "Memory", bytes], ["cpu", "Processors", String], ["pids", "Processes", String], ["disk", "Disk", bytes]];

function bounds(box, used) {
  return BOUNDS.map(([key, name, show]) => {
    const { limit = null, enforced = true, enforcedBy = "" } = box.effective?.[key] ?? {};
    // Processors are a rate: what is used "now" says nothing.
    const note = limit === null ? "" : enforced ? `kept by ${visible(enforcedBy)}` : "not kept by anything here";
    return { name, used: key === "cpu" ? null : (used?.[key] ?? null), most: limit, show, note };
  });
}

export const sandbox = {
  section: one, title: "Sandbox",
  enter(place) {
    // Nothing of the one before may stand, or act, under the name of this one.
    shownBox = null;
    text(by("sandbox-title"), visible(place.id));
    state(by("sandbox-state"), { kind: "plain", glyph: "", text: "" });
    deeds.root.hidden = true;
    meters(by("sandbox-usage"), []);
    facts(by("sandbox-facts"), []);
    runs.clear();
  },
  async refresh(place, { signal, now }) {
    const [box, used, list] = await Promise.all([
      call(path(place.id), { signal }),
      call(`${path(place.id)}/metrics`, { signal }).catch((failure) => {
        if (failure.status === 401 || failure.name === "AbortError") throw failure;
        return null;
      }),
      call(query("v1/execs", { sandbox: place.id, order: "desc", limit: 20 }), { signal }),
    ]);
    shownBox = box;
    const clock = Date.now();
    text(by("sandbox-title"), visible(box.id));
    state(by("sandbox-state"), sandboxState(box));
    deeds.root.hidden = false;
    deeds.fill(box);
    meters(by("sandbox-usage"), bounds(box, used));
    time(times.created, box.createdAt, ago(box.createdAt, clock));
    time(times.expires, box.expiresAt, until(box.expiresAt, clock));
    time(times.used, box.lastUsedAt, ago(box.lastUsedAt, clock));
    facts(by("sandbox-facts"), [
      ["Agent", visible(box.owner)], ["Reason", visible(box.reason)], ["Created", times.created], ["Expires", times.expires], ["Last used", times.used],
      ["Backend", visible(box.backend)], ["Template", visible(box.template)], ["Image", visible(box.image)], ["Digest", visible(box.digest)], ["Runtime", visible(box.runtime)],
      ["Network", network(box.network ?? { mode: "off" })], ["Metadata", labels(box).map(visible).join("  ")], ["Variables", (box.envNames ?? []).map(visible).join(" ")],
    ]);
    runs.update(list.items, { now });
    one.querySelector("section .empty").hidden = list.items.length > 0;
    const more = one.querySelector(".more");
    if (list.next && !more.firstChild) more.append(node("a", { href: link("executions", "", { sandbox: box.id }) }, "All executions of this sandbox"));
    else if (!list.next) more.replaceChildren();
  },
};

