"""Removes what a run has made in the engine: at its end, or at a later start if it could not.

The engine keeps the owner's label with each object, so what is left after a crash can be found. A
record in the state directory says which runs there were; a lock on it says that one still lives.
Only owners that are recorded here are removed: the engine may serve other people as well.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from urllib.parse import quote, urlencode

from ...policy.docker.values import OWNER_LABEL
from .engine import EngineError, owned_by

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engine import Client

# Containers hold networks and volumes, and are made of images.
ORDER = ("containers", "networks", "volumes", "images")
# A request that was under way at the end may add something behind our back.
ROUNDS = 3
LOCKED = fcntl.LOCK_EX | fcntl.LOCK_NB


def tag_space(owner: str) -> str:
    """Where the tags of a run's images live."""
    return f"agent-sandbox-{owner}"


async def remove(client: Client, owner: str) -> tuple[dict[str, int], list[str]]:
    """Remove all that an owner has. How many of each kind, and what could not be removed."""
    counts = dict.fromkeys(ORDER, 0)
    left: list[str] = []
    for _ in range(ROUNDS):
        found = [thing for kind in ORDER for thing in await _owned(client, owner, kind)]
        if not found:
            return counts, []
        left = []
        for kind, name, path in found:
            answer, document = await client.ask("DELETE", f"/v{client.api}{path}")
            if answer.status < 300:
                counts[kind] += 1
            elif answer.status != 404:
                said = document.get("message", "") if isinstance(document, dict) else ""
                left.append(f"{kind.removesuffix('s')} {name}: {said or answer.status}")
    return counts, left


async def _owned(client: Client, owner: str, kind: str) -> list[tuple[str, str, str]]:
    """(kind, name, path to delete) for each object of an owner."""
    everything = {"all": "1"} if kind in ("containers", "images") else {}
    place = {"containers": "/containers/json", "images": "/images/json"}.get(kind, f"/{kind}")
    query = owned_by(owner, **everything)
    answer, found = await client.ask("GET", f"/v{client.api}{place}", query)
    if answer.status != 200:
        raise EngineError(f"the container engine does not list {kind} ({answer.status})")
    if kind == "volumes":
        found = found.get("Volumes") if isinstance(found, dict) else None
    listed = found if isinstance(found, list) else []
    things = [thing for thing in listed if isinstance(thing, dict)]
    if kind == "images":
        things += await _tagged(client, owner)
        return list(dict.fromkeys(entry for thing in things for entry in _images(thing, owner)))
    # The filter is the engine's; the label is looked at all the same.
    own = [t for t in things if (t.get("Labels") or {}).get(OWNER_LABEL) == owner]
    names = [str(t["Name"] if kind == "volumes" else t["Id"]) for t in own]
    options = {"containers": "?force=1&v=1", "volumes": "?force=1"}.get(kind, "")
    return [(kind, name, f"/{kind}/{quote(name, safe='')}{options}") for name in names]


async def _tagged(client: Client, owner: str) -> list[dict[str, object]]:
    """Images with a tag of the run: one that was committed or tagged need not have the label."""
    query = urlencode({"filters": json.dumps({"reference": [f"{tag_space(owner)}/*"]})})
    answer, found = await client.ask("GET", f"/v{client.api}/images/json", query)
    if answer.status != 200 or not isinstance(found, list):
        raise EngineError(f"the container engine does not list images ({answer.status})")
    return [thing for thing in found if isinstance(thing, dict)]


def _is_own(tag: str, owner: str) -> bool:
    """Whether a tag lives where the run writes; Podman shows where it thinks a name leads."""
    bare = tag.removeprefix("docker.io/").removeprefix("localhost/")
    return bare.startswith(f"{tag_space(owner)}/")


def _images(thing: dict[str, object], owner: str) -> Iterator[tuple[str, str, str]]:
    """An image goes tag by tag: only the run's own tags, and the image if it is labelled."""
    tags = thing.get("RepoTags") or []
    tags = [str(tag) for tag in tags] if isinstance(tags, list) else []
    own = [tag for tag in tags if _is_own(tag, owner)]
    for tag in own:
        yield "images", tag, f"/images/{quote(tag, safe='/:')}"
    labels = thing.get("Labels")
    labelled = isinstance(labels, dict) and labels.get(OWNER_LABEL) == owner
    if labelled and not own and not [tag for tag in tags if tag != "<none>:<none>"]:
        yield "images", str(thing["Id"]), f"/images/{quote(str(thing['Id']), safe=':')}"


# --- records


class Ledger:
    """Which runs of this state directory have used an engine."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._lock = -1
        self._path = ""

    def open(self, owner: str, engine: str) -> None:
        """Write down a run that begins, before it can make anything."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._path = f"{self.directory}/{owner}"
        # An owner that was named (`docker serve --owner`) may come again after a crash: what it has
        # left is its own. The lock tells whether the one before is over.
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._lock, LOCKED)
            if not os.path.samestat(os.fstat(self._lock), os.stat(self._path)):
                # Whoever swept it removed it after we had opened it.
                raise BlockingIOError(errno.EAGAIN, "its record is being removed")
        except OSError:
            os.close(self._lock)
            self._lock = -1
            raise
        os.ftruncate(self._lock, 0)
        # Only now: a record that says something and is not locked is that of a dead run.
        os.write(self._lock, engine.encode("utf-8", "surrogateescape"))

    def close(self, *, done: bool) -> None:
        """The run is over. Not `done`: a later start has to look again."""
        if self._lock >= 0:
            if done:
                os.unlink(self._path)
            os.close(self._lock)
            self._lock = -1

    def dead(self, engine: str) -> Iterator[tuple[str, Ledger]]:
        """Runs with this engine that are over and left something; the record is ours meanwhile."""
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return
        for name in names:
            path = f"{self.directory}/{name}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            taken = Ledger(self.directory)
            taken._path, taken._lock = path, fd
            try:
                fcntl.flock(fd, LOCKED)
                mine = os.read(fd, 4096).decode("utf-8", "surrogateescape") == engine
            except OSError:
                mine = False
            if mine and os.path.exists(path):
                yield name, taken
            else:
                os.close(fd)


async def sweep(client: Client, ledger: Ledger) -> None:
    """Remove what dead runs have left. What cannot be removed is tried again another time."""
    for owner, record in ledger.dead(client.path):
        left = ["unknown"]
        try:
            _, left = await remove(client, owner)
        finally:
            record.close(done=not left)
