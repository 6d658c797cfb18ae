// The address after "#": /view/id?filters. Filters are part of it, so that a view can be linked.

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function read() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [view = "", id = ""] = path.split("/").map(decoded);
  return { view: view || "overview", id, query: new URLSearchParams(search) };
}

export function link(view, id = "", query = {}) {
  const set = Object.entries(query).filter(([, value]) => value);
  const search = set.length ? `?${new URLSearchParams(set)}` : "";
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${search}`;
}

// The same view with other filters. `quiet`: typing is no step of the history.
export function go(place, changes, { quiet = false } = {}) {
  const query = { ...Object.fromEntries(place.query), ...changes };
  const target = link(place.view, place.id, query);
  if (target === location.hash) return;
  if (!quiet) {
    location.hash = target;
    return;
  }
  history.replaceState(null, "", target);
  dispatchEvent(new Event("hashchange"));
}

// A form of filters and the address, each after the other.
export function filters(form, { now = [] } = {}) {
  let place = read();
  let timer = null;
  const apply = () => {
    clearTimeout(timer);
    timer = null;
    // Somebody has gone elsewhere in the meantime.
    if (read().view !== place.view || read().id !== place.id) return;
    const values = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
    go(place, { ...values, after: "" }, { quiet: true });
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); apply(); });
  form.addEventListener("change", apply);
  form.addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(apply, now.includes(event.target.name) ? 0 : 350);
  });
  form.addEventListener("reset", () => setTimeout(apply));
  return (current) => {
    place = current;
    // Not while it is typed into: the address follows the form then.
    if (timer !== null) return;
    for (const field of form.elements) {
      const wanted = place.query.get(field.name) ?? "";
      if (field.name && field.value.trim() !== wanted) field.value = wanted;
    }
  };
}
