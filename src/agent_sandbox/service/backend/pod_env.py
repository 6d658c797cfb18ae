"""What a pod needs so that the agent runs in it: paths, argument vectors, variables. Pure.

Nothing here is secret. A manifest that is made of it may be read by anybody.
"""

from __future__ import annotations

from ...pod import terms
from ...pod.inner import Bundle
from .interface import HOME, WORK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT, PLACE, PORT = terms.ROOT, terms.PLACE, terms.PORT
# The pod has ONE volume for a sandbox's files, mounted whole at PLACE and, by these sub-paths,
# where commands look for it (`volume_mounts`). The agent changes files below PLACE alone: there it
# can look a path up, and move a finished file to its place, without leaving one mount (EXDEV).
MOUNTS: Mapping[str, str] = {WORK: "workspace", HOME: "home/agent", "/tmp": "tmp"}


# The first program of each command, in the bundle.
ENTRY = "/bin/enter"


def _python(module: str, root: str = ROOT) -> tuple[str, ...]:
    # The loader by name, so that nothing of the image is needed: no libc, no shell. Before it what
    # drops the image's variables, since the loader would do what they say.
    python = Bundle(root=root).program("python3")
    words = f"from agent_sandbox.pod.{module} import run; run()"
    return (f"{root}{ENTRY}", *python, "-I", "-S", "-c", words)


# The container's command.
COMMAND = _python("main")
# Standard streams to and from the agent's port, for the engine's exec.
CONNECT = _python("connect")
# The init container's command but for its last word: the directory that the bundle is copied to.
INSTALL = _python("install")


def volume_mounts(volume: str) -> list[dict[str, str]]:
    """The mounts of the sandbox's one volume, as a manifest has them."""
    parts = [{"name": volume, "mountPath": path, "subPath": part} for path, part in MOUNTS.items()]
    return [{"name": volume, "mountPath": PLACE}, *parts]


def command(root: str) -> tuple[str, ...]:
    """The agent's command for a bundle that is elsewhere."""
    return _python("main", root)


def connect(root: str) -> tuple[str, ...]:
    """`CONNECT` for a bundle that is elsewhere."""
    return _python("connect", root)


def root_of(word: str) -> str:
    """Where the bundle is whose command begins with this word."""
    return word.removesuffix(ENTRY) if word.endswith(ENTRY) else ROOT


# The most that is read of a pod's log to find the agent's line.
LOG_BYTES = 256
_HEX = frozenset("0123456789abcdef")
# Variables by which an image (`ENV` in a Dockerfile) could have its own code loaded into the agent,
# before the agent can do anything about it: glibc's loader, its locales and their character sets
# (setlocale(3), iconv(3)). A pod's variables come before an image's. They do not get further than
# `enter`, which lets none through that it does not know; this is for an agent of another build.
NOTHING_OF_THE_IMAGE: Mapping[str, str] = {
    **dict.fromkeys((
        "LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_DEBUG", "LD_DEBUG_OUTPUT", "LD_PROFILE",
        "GLIBC_TUNABLES", "LOCPATH", "GCONV_PATH", "NLSPATH",
    ), ""),
    "LC_ALL": "C",
}  # fmt: skip


def env(ca_pem: str, unclaimed_seconds: int, *, port: int = PORT) -> dict[str, str]:
    """The agent's variables: who may speak to it, and how long it waits to be claimed."""
    own = {terms.CA: ca_pem, terms.UNCLAIMED: str(unclaimed_seconds), terms.AT: str(port)}
    return {**NOTHING_OF_THE_IMAGE, **own}


def fingerprint(log: str) -> str:
    """The certificate that an agent has printed, as hexadecimal SHA-256; "" when there is none yet.

    Only the first line counts. The agent prints it before any command can run.
    """
    line, newline, _ = log.partition("\n")
    digits = line.removeprefix(terms.LINE)
    if not newline or digits == line or len(digits) != 64 or not _HEX.issuperset(digits):
        return ""
    return digits
