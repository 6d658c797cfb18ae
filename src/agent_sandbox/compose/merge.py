"""How Compose lays one definition over another: override files, `extends`, `include`."""

from __future__ import annotations

from .nodes import OVERRIDE, RESET, Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Lists that are mappings in disguise: `NAME=value`, or names alone.
NAMED: tuple[tuple[str, ...], ...] = (
    ("environment",), ("labels",), ("annotations",), ("sysctls",), ("extra_hosts",),
    ("networks",), ("depends_on",), ("build", "args"), ("build", "labels"),
    ("build", "extra_hosts"), ("deploy", "labels"),
)  # fmt: skip
# Lists whose later version takes the place of the earlier one.
REPLACED: tuple[tuple[str, ...], ...] = (("command",), ("entrypoint",), ("healthcheck", "test"))


def names(node: Node) -> Node:
    """The mapping form of a list of `NAME=value` or of names."""
    if node.items is None:
        return node
    fields: dict[str, Node] = {}
    for item in node.items:
        text = item.text or ""
        # extra_hosts may be written host:address.
        cut = min((i for i in (text.find("="), text.find(":")) if i >= 0), default=-1)
        if "=" in text:
            cut = text.find("=")
        name = text[:cut] if cut >= 0 else text
        value = item.replace(text=text[cut + 1 :]) if cut >= 0 else item.replace(text=None)
        fields[name] = value
    return node.replace(items=None, fields=fields)


def _target(item: Node) -> str:
    """Where a mount, a device, a secret or a config goes: one per target."""
    if item.fields is not None:
        return item.string("target") or item.string("source")
    parts = (item.text or "").split(":")
    return (parts[1] if len(parts) > 1 else parts[0]).rstrip("/") or "/"


KEYED: dict[tuple[str, ...], Callable[[Node], str]] = {
    ("volumes",): _target, ("devices",): _target, ("secrets",): _target, ("configs",): _target,
}  # fmt: skip


def service(lower: Node, upper: Node) -> Node:
    """One service's definition over another."""
    return _laid(lower, upper, ())


def project(lower: Node, upper: Node) -> Node:
    """One file over another: services as above, the rest by name."""
    fields = dict(lower.fields or {})
    for key, node in (upper.fields or {}).items():
        under = fields.get(key)
        if key == "services" and under is not None and under.fields is not None:
            fields[key] = _services(under, node)
        elif under is None or key == "include":
            fields[key] = node
        else:
            fields[key] = _laid(under, node, ("*", key))
    return upper.replace(fields=fields)


def _services(lower: Node, upper: Node) -> Node:
    fields = dict(lower.fields or {})
    for name, node in (upper.fields or {}).items():
        if node.tag == RESET:
            fields.pop(name, None)
        elif name in fields and node.tag != OVERRIDE:
            fields[name] = service(fields[name], node)
        else:
            fields[name] = node
    return lower.replace(fields=fields)


def _laid(lower: Node, upper: Node, path: tuple[str, ...]) -> Node:
    if upper.tag == RESET:
        return Node(place=upper.place)
    if upper.tag == OVERRIDE or lower.is_null or path in REPLACED:
        return upper
    if upper.is_null:
        return lower
    if path in NAMED:
        lower, upper = names(lower), names(upper)
    if lower.fields is not None and upper.fields is not None:
        fields = dict(lower.fields)
        for key, node in upper.fields.items():
            fields[key] = _laid(fields[key], node, (*path, key)) if key in fields else node
        # The base's own line: what stays unsaid above was said there.
        return upper.replace(fields=fields)
    if lower.items is not None and upper.items is not None:
        return upper.replace(items=_joined(lower.items, upper.items, KEYED.get(path)))
    return upper


def _joined(
    lower: tuple[Node, ...], upper: tuple[Node, ...], key: Callable[[Node], str] | None
) -> tuple[Node, ...]:
    if key is None:
        return (*lower, *upper)
    above = {key(item) for item in upper}
    return (*(item for item in lower if key(item) not in above), *upper)
