"""TOKENS_DIR: tokens that were made elsewhere, one per file, as compose mounts secrets."""

from __future__ import annotations

import os

from ..errors import HostError, reason
from .store_private import read_mounted
from .tokens import MOST_TOKEN, OUTSIDE, check_name

# The first that fits. `sandboxctl compose secure` names its secrets as in the first.
SUFFIXES = ("-sandbox-token", ".token", "_token")
VARIABLE = "TOKENS_DIR"
# In a container even root reads only what the mode allows, unless it has the capability.
CLOSED = "make the file readable (mode 644) in a directory that only you can enter (mode 700)"


def agent_name(file: str) -> str:
    """The agent of a file: its name without the suffix. Pure."""
    for suffix in SUFFIXES:
        if file.endswith(suffix) and file != suffix:
            return file.removesuffix(suffix)
    return file


def read(directory: str) -> dict[str, str]:
    """Each agent's token. A file that holds none is an error that names the file, not its content.

    Links are followed: that is how secrets are mounted. Whoever may write here makes the tokens.
    """
    found: dict[str, str] = {}
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise _bad(directory, reason(error)) from error
    for name in names:
        # Kubernetes keeps its own links and versions in names with two dots.
        if name.startswith("."):
            continue
        path = os.path.join(directory, name)
        agent = check_name(agent_name(name))
        if agent in found:
            raise _bad(path, f"another file is for the agent '{agent}' too")
        found[agent] = _token(path)
    return found


def _token(path: str) -> str:
    try:
        text = read_mounted(path, MOST_TOKEN * 2, _bad)
    except PermissionError as error:
        raise _bad(path, reason(error), hint=CLOSED) from error
    except OSError as error:
        raise _bad(path, reason(error)) from error
    token = text.decode("utf-8", "replace").strip()
    if not OUTSIDE.fullmatch(token):
        raise _bad(
            path, "it does not hold a token: 32 to 256 letters, digits, '_' and '-'",
            hint="make one with: openssl rand -hex 32",
        )  # fmt: skip
    return token


def _bad(path: str, what: str, hint: str = "") -> HostError:
    return HostError(f"cannot use '{path}' of {VARIABLE}: {what}", hint=hint, code="bad-token-file")
