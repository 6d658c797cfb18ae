// Small hands for the document. Text of others goes in as text nodes only; nothing here parses
// markup, and the page's Trusted Types policy refuses whatever would.

import { exact, visible } from "./words.js";

export const by = (id) => document.getElementById(id);

export function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Written only when it differs: an unchanged page keeps its selection and stays silent.
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
  return element;
}

export function attribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  return element;
}

export function button(label, act, kind = "") {
  const made = node("button", { type: "button", class: kind || null }, label);
  made.addEventListener("click", act);
  return made;
}

export function state(element, { kind, glyph, text: words }) {
  element.classList.add("state");
  attribute(element, "data-kind", kind);
  attribute(element, "data-glyph", glyph);
  return text(element, words);
}

export function time(element, iso, words) {
  attribute(element, "datetime", iso ?? null);
  attribute(element, "title", exact(iso) || null);
  return text(element, words);
}

// Cut by the stylesheet where it is long; the whole of it is in the title.
export function long(element, words) {
  attribute(element, "title", words.length > 24 ? words : null);
  return text(element, words);
}

export function tags(element, pairs) {
  const words = pairs.map(visible);
  if (element.dataset.words === JSON.stringify(words)) return;
  element.dataset.words = JSON.stringify(words);
  element.classList.add("tags");
  element.replaceChildren(...words.map((word) => node("span", { class: "tag", title: word.length > 24 ? word : null }, word)));
}

// A list of facts, updated in place: [[name, value | element], …]; an empty value is left out.
export function facts(list, pairs) {
  const wanted = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const have = new Map([...list.children].map((child) => [child.dataset.name, child]));
  for (const [name, value] of wanted) {
    let item = have.get(name);
    if (!item) item = node("div", { "data-name": name }, node("dt", {}, name), node("dd"));
    have.delete(name);
    list.append(...(item.isConnected ? [] : [item]));
    const place = item.lastChild;
    if (value instanceof Element) {
      if (place.firstChild !== value) place.replaceChildren(value);
    } else text(place, value);
  }
  for (const left of have.values()) left.remove();
}

// Bars with the numbers beside them: [{name, used, most, show(number)}]; most null: no bound.
export function meters(list, items) {
  const have = new Map([...list.children].map((child) => [child.dataset.name, child]));
  for (const { name, used, most, show, note } of items) {
    let item = have.get(name);
    if (!item) {
      const bar = node("div", { class: "bar", role: "meter", "aria-label": name, "aria-valuemin": "0" }, node("i"));
      const label = node("p", { class: "label" }, node("span", {}, name), node("span", {}, node("b"), ""));
      item = node("li", { "data-name": name }, label, bar, node("p", { class: "help" }));
      list.append(item);
    }
    have.delete(name);
    const part = most ? Math.min(1, (used ?? 0) / most) : 0;
    const [label, bar, help] = item.children;
    const words = most === null ? "no bound" : show(most);
    text(label.lastChild.firstChild, used === null ? "" : show(used));
    label.lastChild.lastChild.data = used === null ? `up to ${words}` : ` of ${words}`;
    text(help, note ?? "");
    help.hidden = !note;
    bar.hidden = most === null || used === null;
    attribute(bar, "aria-valuemax", String(most ?? 0));
    attribute(bar, "aria-valuenow", String(Math.min(used ?? 0, most ?? 0)));
    attribute(bar, "aria-valuetext", `${show(used ?? 0)} of ${words}`);
    attribute(bar, "data-kind", part >= 1 ? "bad" : part >= 0.8 ? "warn" : "plain");
    bar.firstChild.style.setProperty("--part", part.toFixed(3));
  }
  for (const left of have.values()) left.remove();
}

// A failure with everything that helps: message, hint, code, and the request for the logs.
export function problem(place, failure) {
  const parts = failure
    ? [
        node("p", {}, node("b", {}, visible(failure.message)), " ", node("span", { class: "code" }, visible(failure.code))),
        failure.hint ? node("p", { class: "hint" }, visible(failure.hint)) : null,
        failure.rule || failure.request
          ? node("p", { class: "request" }, [failure.rule && `rule ${visible(failure.rule)}`, failure.request && `request ${visible(failure.request)}`].filter(Boolean).join(" · "))
          : null,
      ].filter(Boolean)
    : [];
  const words = parts.map((part) => part.textContent).join("\n");
  if ((place.dataset.words ?? "") === words) return;
  place.dataset.words = words;
  place.replaceChildren(...parts);
}

// A deed that failed where no dialog stands open.
export function toast(failure) {
  problem(by("toast").querySelector(".problem"), failure);
  by("toast").hidden = !failure;
}
by("toast").querySelector("button").addEventListener("click", () => toast(null));

// Polite, one thing at a time, and the same words not twice within a few seconds.
let last = ["", 0];
export function announce(words) {
  if (words === last[0] && Date.now() - last[1] < 5000) return;
  last = [words, Date.now()];
  by("announce").textContent = words;
}
