// The page: sign-in, the view of the address, and its refresh while somebody looks.

import { call, Failure, useSession } from "./api.js";
import { audit } from "./audit.js";
import { closeAll } from "./dialogs.js";
import { execution, executions } from "./executions.js";
import { overview } from "./overview.js";
import { attribute, by, problem, text } from "./page.js";
import { read } from "./route.js";
import { sandbox, sandboxes } from "./sandboxes.js";
import { session } from "./session.js";
import { tokens } from "./tokens.js";
import { visible } from "./words.js";

const EVERY = 2000;
const LONGEST = 30000;
const VIEWS = { overview, sandboxes, executions, audit, tokens };
const SINGLE = { sandboxes: sandbox, executions: execution };
const NEEDS = { audit: "audit:read", tokens: "admin" };
const missing = { section: by("view-missing"), title: "Not here", refresh: async () => {} };

// --- the view

let place = null;
let view = null;
let loading = null;
let timer = null;
let failures = 0;
let signedIn = false;

function choose(wanted) {
  const found = wanted.id ? SINGLE[wanted.view] : VIEWS[wanted.view];
  if (!found) return [missing, new Failure({ code: "NOT_FOUND", message: "There is no such view." })];
  if (NEEDS[wanted.view] && !session.has(NEEDS[wanted.view])) {
    return [missing, new Failure({ code: "SCOPE_MISSING", message: `This view needs a token with the scope ${NEEDS[wanted.view]}.`, hint: "Sign in with another token, or ask the administrator for the scope." })];
  }
  return [found, null];
}

function show(next) {
  for (const each of document.querySelectorAll("main > section")) each.hidden = each !== next.section;
  for (const each of document.querySelectorAll("header nav a")) {
    attribute(each, "aria-current", each.dataset.view === place?.view && next !== missing ? "page" : null);
  }
  document.title = `${place?.id ? `${place.id.slice(0, 12)} · ` : ""}${next.title} · agent-sandbox`;
}

function navigate() {
  if (!signedIn) return;
  const before = place;
  place = read();
  const [next, failure] = choose(place);
  const same = next === view && before?.id === place.id;
  if (!same) {
    view?.leave?.();
    view = next;
    closeAll();
    view.enter?.(place);
    show(view);
    problem(missing.section.querySelector(".problem"), failure);
    // A new view is announced by its heading; the first one of a visit is read anyway.
    if (before) view.section.querySelector("h1").focus();
    scrollTo(0, 0);
    pulse("", "Loading");
  }
  refresh({ now: true, told: true });
}

// --- its refresh

// now: rows may change places; told: what is found is announced.
async function refresh({ now = false, told = false } = {}) {
  clearTimeout(timer);
  loading?.abort();
  if (!signedIn || document.hidden) return;
  const control = new AbortController();
  loading = control;
  try {
    await view.refresh(place, { signal: control.signal, now, told });
    if (control.signal.aborted) return;
    failures = 0;
    pulse("live", "Live");
    trouble(null);
    timer = setTimeout(refresh, EVERY);
  } catch (failure) {
    if (control.signal.aborted) return;
    failed(failure);
  }
}

function failed(failure) {
  if (failure.status === 401) {
    signOut(OVER);
    return;
  }
  if (!(failure instanceof Failure)) console.error(failure);
  const known = failure instanceof Failure ? failure : new Failure({ code: "PAGE", message: "This page has made a mistake.", hint: String(failure) });
  if (known.status === 404 && place.id) {
    view.leave?.();
    view = missing;
    show(missing);
    problem(missing.section.querySelector(".problem"), known);
    return;
  }
  failures += 1;
  const wait = Math.max(known.retry * 1000, Math.min(EVERY * 2 ** failures, LONGEST));
  pulse("broken", `Retry in ${Math.round(wait / 1000)} s`);
  trouble(known);
  timer = setTimeout(refresh, wait);
}

function pulse(kind, words) {
  attribute(by("pulse"), "data-state", kind);
  text(by("pulse"), words);
}

function trouble(failure) {
  problem(by("trouble").querySelector(".problem"), failure);
  by("trouble").hidden = !failure;
}

// --- sign-in

const OVER = "Your session has ended. Sign in again to go on where you were.";

function askForToken(words) {
  show({ section: by("login"), title: "Sign in" });
  text(by("login-note"), words);
  by("login-note").hidden = !words;
  by("login-token").focus();
}

// By a new load of the page: whoever signs in next finds nothing of what was shown before.
function signOut(words) {
  signedIn = false;
  clearTimeout(timer);
  loading?.abort();
  keep("session", "");
  keep("note", words);
  location.reload();
}

async function signIn(found) {
  useSession(found);
  session.start(found, await call("v1/policy"));
  signedIn = true;
  keep("session", found.csrfToken);
  document.documentElement.classList.toggle("admin", session.has("admin"));
  document.documentElement.classList.toggle("audit", session.has("audit:read"));
  text(by("me"), visible(found.agent));
  by("top").hidden = false;
  navigate();
}

by("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  const place = form.querySelector(".problem");
  const go = form.querySelector("button");
  problem(place, null);
  go.disabled = true;
  try {
    const token = new FormData(form).get("token").trim();
    useSession(await call("v1/session", { method: "POST", body: { token } }));
    form.reset();
    await signIn(await call("v1/session"));
    view.section.querySelector("h1").focus();
  } catch (failure) {
    problem(place, failure);
    by("login-token").focus();
  } finally {
    go.disabled = false;
  }
});

by("sign-out").addEventListener("click", async () => {
  try {
    await call("v1/session", { method: "DELETE" });
    signOut("You are signed out.");
  } catch (failure) {
    if (failure.status === 401) signOut("You are signed out.");
    else trouble(failure);
  }
});

// --- the rest of the page

by("retry").addEventListener("click", () => refresh({ now: true }));
addEventListener("hashchange", navigate);
addEventListener("refresh", () => refresh({ now: true }));
addEventListener("trouble", (event) => failed(event.detail));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else refresh();
});
addEventListener("online", () => refresh());

by("skip").addEventListener("click", (event) => {
  event.preventDefault();
  by("main").focus();
});

function kept(name, fallback) {
  try {
    return localStorage.getItem(name) ?? fallback;
  } catch {
    return fallback;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // No storage: it holds until the page is left.
  }
}

const theme = by("theme");
theme.value = kept("theme", "");
theme.addEventListener("change", () => {
  attribute(document.documentElement, "data-theme", theme.value || null);
  keep("theme", theme.value);
});

const keys = by("keys");
keys.checked = kept("keys", "on") === "on";
keys.addEventListener("change", () => keep("keys", keys.checked ? "on" : "off"));
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea, dialog");
  if (event.key !== "/" || !keys.checked || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const field = view?.section.querySelector("[data-filter]");
  if (!field) return;
  event.preventDefault();
  field.focus();
  field.select();
});

// --- the start

// The cookie is not for scripts to see, and useless without this: storage is one origin's alone, port
// included, a cookie is not. Without it nobody asks: each visit of a stranger would be a denial.
if (kept("session", "")) {
  try {
    useSession({ csrfToken: kept("session", "") });
    await signIn(await call("v1/session"));
  } catch (failure) {
    askForToken(failure.status === 401 ? OVER : "");
    if (failure.status === 401) keep("session", "");
    else problem(by("login-form").querySelector(".problem"), failure);
  }
} else {
  askForToken(kept("note", ""));
  keep("note", "");
}
