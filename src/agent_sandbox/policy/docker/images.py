"""Names of images: which may be used, which may be pulled, and where the sandbox's tags live.

A tag that the sandbox writes goes to `agent-sandbox-RUN/…`: a tag that others run is never moved.
"""

from __future__ import annotations

import re

from ...record import Record
from .values import Found, Grants, Reference, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Lookup = Mapping[Reference, Found | None]

HUB = "docker.io"
PREFIX = "agent-sandbox-"
MAX_NAME = 255
PATH = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
DOMAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SHORT_ID = re.compile(r"[0-9a-f]{4,64}")


class Name(Record):
    """A reference, taken apart."""

    domain: str
    path: str
    tag: str = ""
    digest: str = ""

    def repository(self) -> str:
        """As docker shows it: without what it adds itself."""
        if self.domain != HUB:
            return f"{self.domain}/{self.path}"
        return self.path.removeprefix("library/") if self.path.count("/") == 1 else self.path

    def __str__(self) -> str:
        if self.digest:
            return f"{self.repository()}@{self.digest}"
        return f"{self.repository()}:{self.tag}"


def parse(text: str) -> Name:
    """`[domain/]path[:tag][@digest]`; without both it is `latest`."""
    rest, _, digest = text.partition("@")
    head, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:
        head, tag = rest, ""
    domain, path = _split(head)
    wrong = (
        len(text) > MAX_NAME
        or not PATH.fullmatch(path)
        or not DOMAIN.fullmatch(domain)
        or (tag and not TAG.fullmatch(tag))
        or (digest and not DIGEST.fullmatch(digest))
        or text.endswith((":", "@"))
    )
    if wrong:
        raise Refused("image.name", f"{text[:80]!r} is not the name of an image", 400)
    # A digest says all; the engine ignores a tag beside it.
    return Name(domain=domain, path=path, digest=digest, tag="" if digest else tag or "latest")


def _split(text: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return (HUB if first == "index.docker.io" else first), _library(first, rest)
    return HUB, _library(HUB, text)


def _library(domain: str, path: str) -> str:
    return f"library/{path}" if domain in (HUB, "index.docker.io") and "/" not in path else path


def is_id(text: str) -> bool:
    """Whether a text names an image by its id alone."""
    return bool(DIGEST.fullmatch(text)) or (len(text) == 64 and bool(SHORT_ID.fullmatch(text)))


# --- the run's own tags


def namespace(grants: Grants) -> str:
    """Where the tags of a run live."""
    return f"{PREFIX}{grants.owner}/"


def own_tag(text: str, grants: Grants) -> str:
    """Where a tag that the sandbox names is kept."""
    name = parse(text)
    if name.digest:
        raise Refused("image.tag", "a tag cannot be a digest", 400)
    if name.repository().startswith(PREFIX):
        if not name.repository().startswith(namespace(grants)):
            raise Refused("image.tag", f"names that begin with {PREFIX} are reserved")
        return str(name)
    if ":" in name.domain:
        raise Refused("image.tag", "a tag for a registry with a port cannot be kept")
    return f"{namespace(grants)}{name}"


def shown(text: str, grants: Grants) -> str:
    """A tag as the sandbox has named it."""
    return text.removeprefix(namespace(grants))


# --- which image a name stands for


def candidates(text: str, grants: Grants) -> tuple[Reference, ...]:
    """What to look up for a name: the run's own tag first."""
    if is_id(text):
        return (_reference("sha256:" + text.removeprefix("sha256:")),)
    name = parse(text)
    names = [str(name)]
    if not name.digest and ":" not in name.domain and not name.repository().startswith(PREFIX):
        names.insert(0, own_tag(text, grants))
    if SHORT_ID.fullmatch(text):
        names.append(text)
    return tuple(_reference(one) for one in names)


def _reference(name: str) -> Reference:
    return Reference(kind="image", name=name)


def choose(text: str, references: tuple[Reference, ...], grants: Grants, found: Lookup) -> str:
    """The id of an image that may be used: an id is what was checked, whatever a tag says later."""
    for reference in references:
        seen = found.get(reference)
        if seen is not None and DIGEST.fullmatch(seen.id) and _usable(reference, seen, grants):
            return seen.id
    if is_id(text) or matches(parse(text), grants.images):
        raise Refused("image.missing", f"No such image: {text}", 404)
    raise Refused("image.allow-list", f"docker.images does not allow {text}")


def removable(text: str, references: tuple[Reference, ...], grants: Grants, found: Lookup) -> str:
    """The run's own tag, or the id of an image that only the run has named."""
    for reference in references:
        seen = found.get(reference)
        if seen is None or not DIGEST.fullmatch(seen.id):
            continue
        if reference.name.startswith(namespace(grants)):
            return reference.name
        tags = _texts(seen.extra.get("tags"))
        if seen.owner == grants.owner and all(t.startswith(namespace(grants)) for t in tags):
            return seen.id
    raise Refused("owner.image", f"No such image: {text}", 404)


def _usable(reference: Reference, seen: Found, grants: Grants) -> bool:
    if seen.owner == grants.owner or reference.name.startswith(namespace(grants)):
        return True
    if is_id(reference.name) or seen.id.startswith(f"sha256:{reference.name}"):
        named = [*_texts(seen.extra.get("tags")), *_texts(seen.extra.get("digests"))]
        return any(visible(tag, grants) for tag in named)
    return matches(parse(reference.name), grants.images)


def visible(tag: str, grants: Grants) -> bool:
    """Whether a tag or digest that the engine lists may be seen."""
    if tag.startswith(namespace(grants)):
        return True
    try:
        return matches(parse(tag), grants.images)
    except Refused:
        # `<none>:<none>`
        return False


def _texts(value: object) -> list[str]:
    return (
        [one for one in value if isinstance(one, str)] if isinstance(value, (list, tuple)) else []
    )


# --- allow-lists


def matches(name: Name, patterns: Iterable[str]) -> bool:
    """Whether a name is on a list. Names of other runs are on none."""
    if name.domain == HUB and name.path.startswith(PREFIX):
        return False
    return any(_match(name, pattern) for pattern in patterns)


def _match(name: Name, pattern: str) -> bool:
    if pattern == "*":
        return True
    rest, _, digest = pattern.partition("@")
    head, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:
        head, tag = rest, ""
    domain, path = _split(head)
    return (
        glob(domain, name.domain)
        and glob(path, name.path)
        and (not tag or bool(name.tag and glob(tag, name.tag)))
        and (not digest or digest == name.digest)
    )


def may_pull(name: Name, grants: Grants) -> bool:
    """Whether the registry, and where a path is given the repository, is named."""
    return any(
        glob(entry, f"{name.domain}/{name.path}" if "/" in entry else name.domain)
        for entry in grants.registries
    )


def glob(pattern: str, text: str) -> bool:
    """`*` and `?` within a component, `**` across."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    known = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return bool(re.fullmatch("".join(known.get(part) or re.escape(part) for part in parts), text))
