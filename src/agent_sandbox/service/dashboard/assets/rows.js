// Rows of a table, kept by key. A refresh changes cells in place. Rows come, go and move only
// while nobody points at the table or has the focus in it: a click must hit what was under it.

import { count } from "./words.js";

// make() gives {root, fill(item)}; key(item) names it; held: the paragraph with "show changes".
export function keyed(body, { make, key, held = null }) {
  const rows = new Map();
  let waiting = null;

  const busy = () => body.matches(":hover") || body.contains(document.activeElement);
  const order = () => [...body.children].map((child) => child.dataset.key);

  function note(items) {
    if (!held) return;
    const fresh = items.filter((item) => !rows.has(key(item))).length;
    held.hidden = false;
    held.firstElementChild.textContent = fresh ? `Show ${count(fresh, "new row", "new rows")}` : "Show the new order";
  }

  function fill(items, keys) {
    for (const item of items) rows.get(key(item))?.fill(item);
    for (const [name, row] of rows) row.root.classList.toggle("gone", !keys.has(name));
  }

  function place(items) {
    waiting = null;
    if (held) held.hidden = true;
    const focused = body.contains(document.activeElement) ? document.activeElement : null;
    const keys = new Set(items.map(key));
    let lost = null;
    for (const [name, row] of rows) {
      if (keys.has(name)) continue;
      if (focused && row.root.contains(focused)) lost = row.root.nextElementSibling ?? row.root.previousElementSibling ?? body;
      row.root.remove();
      rows.delete(name);
    }
    let cursor = body.firstElementChild;
    for (const item of items) {
      let row = rows.get(key(item));
      if (!row) {
        row = make();
        row.root.dataset.key = key(item);
        rows.set(key(item), row);
      }
      row.fill(item);
      row.root.classList.remove("gone");
      if (row.root === cursor) cursor = cursor.nextElementSibling;
      else body.insertBefore(row.root, cursor);
    }
    if (focused?.isConnected) focused.focus({ preventScroll: true });
    else if (lost) (lost.querySelector("a, button") ?? body.closest("[tabindex]"))?.focus({ preventScroll: true });
  }

  function settle() {
    if (waiting && !busy()) place(waiting);
  }
  body.addEventListener("pointerleave", settle);
  body.addEventListener("focusout", () => setTimeout(settle));
  held?.firstElementChild.addEventListener("click", () => {
    if (!waiting) return;
    place(waiting);
    (body.querySelector("a, button") ?? body.closest("[tabindex]"))?.focus();
  });

  return {
    // now: the user asked for other rows, so that nothing waits.
    update(items, { now = false } = {}) {
      const wanted = items.map(key);
      const current = order();
      const same = current.every((name, index) => wanted[index] === name);
      if (now || same || !busy()) {
        place(items);
        return;
      }
      fill(items, new Set(wanted));
      waiting = items;
      note(items);
    },
    clear() {
      place([]);
    },
  };
}

// Text that must stand in one of an item's words.
export function matching(items, wanted, words) {
  const needle = wanted.trim().toLowerCase();
  if (!needle) return items;
  return items.filter((item) => words(item).some((word) => String(word ?? "").toLowerCase().includes(needle)));
}
