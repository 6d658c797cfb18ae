// Paging by cursor. The cursor is in the address, so that a page can be linked and gone back to.

import { button, node, text } from "./page.js";
import { go } from "./route.js";
import { count } from "./words.js";

export const SIZE = 50;

// Cursors that led here, by view; lost with a reload, then "First" is still there.
const trails = new Map();

export function pages(nav, name) {
  const words = node("span", { class: "count" });
  const to = (cursor) => go(here, { after: cursor ?? "" });
  const first = button("First", () => to(""), "quiet");
  const previous = button("Previous", () => to(trail().at(-2)), "quiet");
  const next = button("Next", () => {
    trails.set(name, [...trail(), upcoming]);
    to(upcoming);
  }, "quiet");
  let upcoming = null;
  let here = null;
  nav.append(words, first, previous, next);

  function trail() {
    const known = trails.get(name) ?? [];
    const after = here.query.get("after");
    if (!after) return [];
    const at = known.indexOf(after);
    return at >= 0 ? known.slice(0, at + 1) : ["", after];
  }

  return {
    show(place, { shown, loaded, more }) {
      here = place;
      upcoming = more;
      const steps = trail();
      const known = steps[0] !== "";
      const many = shown === loaded ? count(loaded, "row", "rows") : `${shown} of ${count(loaded, "row", "rows")} on this page`;
      text(words, `${many}${steps.length || more ? `, page ${known ? steps.length + 1 : "?"}` : ""}`);
      first.disabled = !steps.length;
      previous.disabled = !steps.length || !known;
      next.disabled = !more;
      for (const each of [first, previous, next]) each.hidden = !steps.length && !more;
    },
  };
}
