"""The tables of patches, and how one changes the package: attributes, plans, bwrap's options.

A name that the package no longer has is an error: then the patch, and the attack, must follow the
code.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Patch = Callable[[], None]


class Table(dict[str, "Patch"]):
    """Patches by name."""

    def entry(self, name: str) -> Callable[[Patch], Patch]:
        """Put the decorated patch into the table."""

        def put_in(patch: Patch) -> Patch:
            self[name] = patch
            return patch

        return put_in


# Taken away by starting Python without -I and -S.
INTERPRETER = "isolated interpreter"
PROTECTIONS = Table({INTERPRETER: lambda: None})
CONDITIONS = Table()
protection, condition = PROTECTIONS.entry, CONDITIONS.entry


def module(name: str) -> Any:
    """A module of the package."""
    return import_module(f"agent_sandbox.{name}")


def put(place: str, name: str, value: object) -> None:
    """Replace an attribute of a module, also where others have imported it by name."""
    old = getattr(module(place), name)
    for loaded in [m for n, m in sys.modules.items() if n.startswith("agent_sandbox")]:
        if getattr(loaded, name, None) is old:
            setattr(loaded, name, value)


def around(place: str, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by one that gets the old one and its arguments."""
    old = getattr(module(place), name)
    put(place, name, lambda *args, **options: wrapper(old, *args, **options))


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def of_plan(change: Callable[[Any], Any]) -> None:
    """Change every plan after it was made."""
    around("policy.resolve", "resolve", lambda old, *args: change(old(*args)))


def drop_mounts(unwanted: Callable[[Any], bool]) -> None:
    """Leave mounts out."""
    of_plan(lambda plan: plan.replace(mounts=tuple(m for m in plan.mounts if not unwanted(m))))


def change_mounts(wanted: Callable[[Any], bool], **fields: object) -> None:
    """Make some mounts something else."""
    of_plan(
        lambda plan: plan.replace(
            mounts=tuple(m.replace(**fields) if wanted(m) else m for m in plan.mounts)
        )
    )


def of_command(change: Callable[[Any], Any]) -> None:
    """Change every bwrap command after it was built."""
    around("launch.bwrap", "command", lambda old, *a, **o: change(old(*a, **o)))


def of_options(change: Callable[[list[str]], Iterable[str]]) -> None:
    """Change bwrap's options."""
    of_command(lambda built: built.replace(options=tuple(change(list(built.options)))))


def drop_options(*words: str) -> None:
    """Leave out options, by name."""
    of_options(lambda options: [o for o in options if o not in words])


def tree(path: str) -> Any:
    """A mount of a tree of the host, as it is there."""
    return module("policy.model").Mount(kind="rw", dest=path, source=path, level="rw")


def one_by_one(options: list[str]) -> list[str]:
    """Options with each namespace by its own name."""
    if "--unshare-all" not in options:
        return options
    names = ["user", "ipc", "pid", "uts", "cgroup-try"]
    names += [] if "--share-net" in options else ["net"]
    kept = [o for o in options if o not in ("--unshare-all", "--share-net")]
    return [*(f"--unshare-{name}" for name in names), *kept]


class Proxy:
    """A module with some attributes changed, for one of its users."""

    def __init__(self, real: object) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
