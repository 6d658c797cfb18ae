"""The files of a compose project on this machine."""

from __future__ import annotations

import os

from ...compose import read
from ...compose.model import Host
from ...compose.nodes import MAX_BYTES, library
from ...errors import PolicyError, UsageError, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...compose.model import Project
    from .arguments import Given


def content(path: str) -> str | None:
    """A file's text; None when there is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {reason(error)}", code="compose-missing") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PolicyError(f"{path}: not UTF-8", code="compose-broken") from None


def host(replaced: Mapping[str, str] | None = None) -> Host:
    """This machine, with some files' texts replaced."""
    texts = replaced or {}
    return Host(
        read=lambda path: texts.get(path) or content(path), real=os.path.realpath,
        env=dict(os.environ), home=os.path.expanduser("~"),
    )  # fmt: skip


def found(files: Sequence[str], *, override: bool) -> list[str]:
    """The files as absolute paths; without any, those that Compose would take here."""
    if not files:
        here = [name for name in read.DEFAULT_NAMES if os.path.exists(name)]
        if not here:
            raise UsageError(
                "no compose file here", hint="name one: compose check FILE…", code="usage"
            )
        files = here[:1]
    paths = [os.path.abspath(name) for name in files]
    if override and len(paths) == 1:
        directory, name = os.path.split(paths[0])
        others = [os.path.join(directory, o) for o in read.override_name(name)]
        paths += [path for path in others if os.path.exists(path)][:1]
    return paths


def shown(path: str) -> str:
    """A path as people write it here."""
    here = os.getcwd()
    return os.path.relpath(path, here) if path.startswith(here.rstrip("/") + "/") else path


def load(given: Given, files: Sequence[str], machine: Host) -> Project:
    """The project of these files."""
    library()
    env_files = [os.path.abspath(name) for name in given.every("--env-file")]
    return read.load(files, machine, env_files=env_files)
