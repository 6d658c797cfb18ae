"""Names in a request that stand for objects of the engine, and what becomes of them.

Between decision and request the shell looks each one up. A name is always replaced by the full id:
names can be bound anew between the look and the use.
"""

from __future__ import annotations

import re

from ...record import Record
from . import images, watching
from .values import OWNER_LABEL, Found, Grants, Reference, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Lookup = Mapping[Reference, Found | None]

# Must exist and be the run's own.
OWN = "own"
# May exist only as the run's own.
FREE = "free"
# An image that may be used.
IMAGE = "image"
# An image's tag or id that is the run's own.
OWN_IMAGE = "own-image"
# One container more.
COUNT = "count"
# Ports to publish: those asked for, and those of the image.
PORTS = "ports"
# Mounts: those asked for, and the volumes of the image.
MOUNTS = "mounts"
# A path that the shell holds open.
PATH = "path"

FULL_ID = re.compile(r"[0-9a-f]{64}")
# A volume that stands for a directory that the shell holds open.
PINNED = re.compile(r"agent-sandbox-[a-z0-9-]{1,100}")


class Slot(Record):
    """A value that is known when its references are."""

    mode: str
    references: tuple[Reference, ...]
    # {} is replaced by the id.
    form: str = "{}"
    value: object = None


def own(kind: str, name: str, form: str = "{}") -> Slot:
    """An object of the run."""
    return Slot(mode=OWN, references=(Reference(kind=kind, name=name),), form=form)


def free(kind: str, name: str) -> Slot:
    """A name that nobody else has."""
    return Slot(mode=FREE, references=(Reference(kind=kind, name=name),))


def image(name: str, grants: Grants, mode: str = IMAGE) -> Slot:
    """An image, first among the run's own tags."""
    return Slot(mode=mode, references=images.candidates(name, grants), value=name)


def fill(value: object, grants: Grants, found: Lookup) -> object:
    """A copy of a document with every slot resolved."""
    if isinstance(value, Slot):
        return resolve(value, grants, found)
    if isinstance(value, dict):
        return {fill(k, grants, found): fill(v, grants, found) for k, v in value.items()}
    if isinstance(value, list):
        return [fill(item, grants, found) for item in value]
    return value


def resolve(slot: Slot, grants: Grants, found: Lookup) -> object:
    """What a slot stands for, or a refusal."""
    return RESOLVERS[slot.mode](slot, grants, found)


def missing(reference: Reference) -> Refused:
    """The engine's words, so that a foreign object looks like none."""
    return Refused(f"owner.{reference.kind}", f"No such {reference.kind}: {reference.name}", 404)


def _own(slot: Slot, grants: Grants, found: Lookup) -> object:
    (reference,) = slot.references
    seen = found.get(reference)
    if seen is None or not watching.may_use(grants, seen):
        raise missing(reference)
    if reference.kind == "volume":
        # Volumes have no id: the name is all there is.
        if seen.id != reference.name:
            raise missing(reference)
    elif not FULL_ID.fullmatch(seen.id):
        raise missing(reference)
    return slot.form.replace("{}", seen.id)


def _free(slot: Slot, grants: Grants, found: Lookup) -> object:
    (reference,) = slot.references
    seen = found.get(reference)
    if seen is not None and seen.owner != grants.owner:
        raise Refused(
            f"owner.{reference.kind}-name",
            f"the {reference.kind} name {reference.name} is in use",
            409,
        )
    return reference.name


def _image(slot: Slot, grants: Grants, found: Lookup) -> object:
    return images.choose(str(slot.value), slot.references, grants, found)


def _own_image(slot: Slot, grants: Grants, found: Lookup) -> object:
    return images.removable(str(slot.value), slot.references, grants, found)


def _count(slot: Slot, grants: Grants, found: Lookup) -> object:
    seen = found.get(slot.references[0])
    count = seen.extra.get("count") if seen is not None else None
    if not isinstance(count, int) or count >= grants.containers:
        raise Refused("limit.containers", f"docker.containers allows {grants.containers} at a time")
    return count


def _ports(slot: Slot, _grants: Grants, found: Lookup) -> object:
    asked = dict(slot.value) if isinstance(slot.value, dict) else {}
    for reference in slot.references:
        seen = found.get(reference)
        listed = seen.extra.get("ports", ()) if seen is not None else ()
        if isinstance(listed, (list, tuple, dict)):
            for port in listed:
                asked.setdefault(str(port), [{"HostIp": "127.0.0.1", "HostPort": ""}])
    return asked


def _mounts(slot: Slot, grants: Grants, found: Lookup) -> object:
    wanted, tmpfs = slot.value if isinstance(slot.value, tuple) else ([], [])
    mounts = [fill(one, grants, found) for one in wanted]
    taken = {str(one["Target"]) for one in mounts if isinstance(one, dict)} | set(tmpfs)
    seen = next((found[r] for r in slot.references if found.get(r) is not None), None)
    listed = seen.extra.get("volumes", ()) if seen is not None else ()
    for path in sorted(listed) if isinstance(listed, (list, tuple, dict)) else ():
        place = str(path).rstrip("/")
        if place.startswith("/") and place not in taken:
            options = {"Labels": {OWNER_LABEL: grants.owner}}
            mounts.append({"Type": "volume", "Target": place, "VolumeOptions": options})
            taken.add(place)
    return sorted(mounts, key=lambda one: str(one["Target"]) if isinstance(one, dict) else "")


def _path(slot: Slot, grants: Grants, found: Lookup) -> object:
    (reference,) = slot.references
    seen = found.get(reference)
    if seen is None or seen.owner != grants.owner or not PINNED.fullmatch(seen.id):
        raise Refused("mount.path", f"{reference.name} cannot be opened without following a link")
    return seen.id


RESOLVERS: dict[str, Callable[[Slot, Grants, Lookup], object]] = {
    OWN: _own,
    FREE: _free,
    IMAGE: _image,
    OWN_IMAGE: _own_image,
    COUNT: _count,
    PORTS: _ports,
    MOUNTS: _mounts,
    PATH: _path,
}
