// Questions. <dialog> keeps the focus inside, closes by Esc and gives the focus back.

import { call } from "./api.js";
import { announce, by, node, problem, text } from "./page.js";
import { visible } from "./words.js";

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector("[data-close]")?.addEventListener("click", () => dialog.close());
}

// While an answer is on its way, a second click sends nothing.
async function once(dialog, work) {
  const go = dialog.querySelector('[type="submit"]');
  const place = dialog.querySelector(".problem");
  if (go.disabled) return;
  go.disabled = true;
  problem(place, null);
  try {
    await work();
    dialog.close();
  } catch (failure) {
    problem(place, failure);
  } finally {
    go.disabled = false;
  }
}

function ask(dialog, work) {
  const form = dialog.querySelector("form");
  problem(dialog.querySelector(".problem"), null);
  form.onsubmit = (event) => {
    event.preventDefault();
    once(dialog, work);
  };
  dialog.showModal();
}

// A deed that cannot be undone, with the name of what it hits. Cancel has the focus.
export function confirm({ title, words, target, verb, work, done }) {
  const dialog = by("confirm");
  text(by("confirm-title"), title);
  text(by("confirm-text"), words);
  text(by("confirm-target"), visible(target));
  text(by("confirm-go"), verb);
  ask(dialog, async () => {
    await work();
    announce(done);
  });
  dialog.querySelector("[data-close]").focus();
}

export function closeAll() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
}

// --- tokens

const MAY = [
  ["sandbox:create", "make sandboxes", true],
  ["exec", "run commands", true],
  ["files", "read and write files in its sandboxes", true],
  ["audit:read", "read the audit of all agents", false],
  ["admin", "everything: all sandboxes, all tokens", false],
];

by("token-scopes").append(
  ...MAY.map(([scope, words, usual]) => {
    const box = node("input", { type: "checkbox", name: "scopes", value: scope });
    box.defaultChecked = usual;
    return node("label", {}, box, `${words} `, node("code", {}, scope));
  }),
);

const list = (words) => words.split(/[\s,]+/).filter(Boolean);

function quotas(words) {
  return Object.fromEntries(
    list(words).map((pair) => {
      const [name, ...value] = pair.split("=");
      const said = value.join("=");
      return [name, /^\d+(\.\d+)?$/.test(said) ? Number(said) : said];
    }),
  );
}

const SECONDS = { d: 86400 };

function wanted(form) {
  const data = new FormData(form);
  const lists = ["images", "templates"].map((name) => [name, list(data.get(name))]);
  const ends = data.get("expires");
  return {
    name: data.get("name").trim(),
    scopes: data.getAll("scopes"),
    ...Object.fromEntries(lists.filter(([, values]) => values.length)),
    ...(data.get("quotas").trim() ? { quotas: quotas(data.get("quotas")) } : {}),
    ...(ends ? { expiresIn: parseInt(ends, 10) * SECONDS[ends.slice(-1)] } : {}),
  };
}

// The only place where a token is ever shown; it leaves the document with the dialog.
export function showToken(title, token) {
  const dialog = by("token-shown");
  const field = by("token-value");
  const copy = by("token-copy");
  text(by("token-shown-title"), title);
  text(copy, "Copy");
  field.value = token;
  copy.onclick = async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(field.value);
      text(copy, "Copied");
      announce("The token is copied.");
    } catch {
      // No clipboard without TLS: it is selected, so that the usual keys copy it.
      text(copy, "Selected");
      announce("The token is selected. Copy it with the keyboard.");
    }
  };
  dialog.addEventListener("close", () => { field.value = ""; copy.onclick = null; }, { once: true });
  dialog.showModal();
  copy.focus();
}

export function newToken(refresh) {
  const dialog = by("token-form");
  const form = dialog.querySelector("form");
  form.reset();
  ask(dialog, async () => {
    const made = await call("v1/tokens", { method: "POST", body: wanted(form) });
    dialog.close();
    showToken(`Token of ${visible(made.name)}`, made.token);
    refresh();
  });
  by("token-name").focus();
}
