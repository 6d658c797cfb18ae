// Tokens, for admins: who may use the service.

import { call } from "./api.js";
import { confirm, newToken, showToken } from "./dialogs.js";
import { attribute, button, by, long, node, state, tags, text, time } from "./page.js";
import { filters } from "./route.js";
import { keyed, matching } from "./rows.js";
import { session } from "./session.js";
import { ago, until, visible } from "./words.js";

const path = (name) => `v1/tokens/${encodeURIComponent(name)}`;
const wake = () => dispatchEvent(new Event("refresh"));

const STATES = { live: ["good", "●"], expired: ["warn", "○"], revoked: ["plain", "○"] };

function status(token) {
  const [kind, glyph] = STATES[token.state] ?? ["plain", "○"];
  return { kind, glyph, text: visible(token.state) };
}

const bounds = (token) => [
  ...(token.images ?? []), ...(token.templates ?? []).map((name) => `template ${name}`),
  ...Object.entries(token.quotas ?? {}).map(([name, value]) => `${name}=${value}`),
];

function deeds(current) {
  const warn = () => (current().name === session.agent ? " It is the one that you are signed in with: you will be signed out." : "");
  const rotate = button("Rotate", () => {
    const token = current();
    confirm({
      title: "Give this agent a new token?", target: token.name, verb: "Rotate", done: "The token is replaced.",
      words: `The old token stops working at once.${warn()}`,
      work: async () => {
        const made = await call(`${path(token.name)}/rotate`, { method: "POST", body: {} });
        by("confirm").close();
        showToken(`New token of ${visible(token.name)}`, made.token);
        wake();
      },
    });
  });
  const revoke = button("Revoke", () => {
    const token = current();
    confirm({
      title: "Revoke this token?", target: `${token.name}  (${token.id})`, verb: "Revoke", done: "The token is revoked.",
      words: `The agent is locked out at once, for good. Its sandboxes stay until they expire.${warn()}`,
      work: () => call(path(token.id), { method: "DELETE" }).then(wake),
    });
  });
  return {
    root: node("span", { class: "actions" }, rotate, revoke),
    fill(token) {
      rotate.hidden = revoke.hidden = token.state !== "live";
      attribute(rotate, "aria-label", `Rotate ${visible(token.name)}`);
      attribute(revoke, "aria-label", `Revoke ${visible(token.name)}`);
    },
  };
}

function row() {
  let token = null;
  const name = node("th", { scope: "row", class: "cut" });
  const [valid, scopes, limits] = [node("span"), node("div"), node("div")];
  const id = node("td", { class: "wide mono" });
  const [created, ends] = [node("time"), node("time")];
  const acts = deeds(() => token);
  return {
    root: node("tr", {}, name, node("td", {}, valid), id, node("td", { class: "wide" }, scopes), node("td", { class: "wide" }, limits),
      node("td", { class: "wide" }, created), node("td", {}, ends), node("td", {}, acts.root)),
    fill(item) {
      token = item;
      const now = Date.now();
      long(name, visible(token.name));
      state(valid, status(token));
      text(id, visible(token.id));
      tags(scopes, token.scopes ?? []);
      tags(limits, bounds(token));
      time(created, token.createdAt, ago(token.createdAt, now));
      time(ends, token.expiresAt, token.state === "live" ? until(token.expiresAt, now) : "–");
      acts.fill(token);
    },
  };
}

const section = by("view-tokens");
const table = keyed(by("tokens").tBodies[0], { make: row, key: (token) => token.id });
const sync = filters(section.querySelector("form"), { now: ["q"] });
const empty = section.querySelector(".empty");
by("token-new").addEventListener("click", () => newToken(wake));

export const tokens = {
  section, title: "Tokens",
  enter: sync,
  async refresh(place, { signal, now }) {
    sync(place);
    const wanted = place.query.get("q") ?? "";
    const { items } = await call("v1/tokens", { signal });
    // Those that work come first.
    const sorted = [...items].sort((a, b) => (a.state !== "live") - (b.state !== "live") || a.name.localeCompare(b.name));
    const shown = matching(sorted, wanted, (token) => [token.name, token.id, token.state, ...(token.scopes ?? [])]);
    table.update(shown, { now });
    text(empty, wanted ? "No token matches. Clear the filter to see all." : "There is no token. Make one for each agent, so that each has its own limits and its own name in the audit.");
    empty.hidden = shown.length > 0;
  },
};
