"""`sandboxctl shim`: launchers, first on PATH, by which typing `claude` means the sandboxed one."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile

from ..errors import CommandError, HostError, SandboxError, UsageError, reason
from ..record import Record
from . import ourselves, output
from . import shim_text as words
from .compose.arguments import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .compose.arguments import Given

VERSION = 1
HINT = "see 'sandboxctl shim --help'"
SHELLS = ("bash", "zsh", "fish")
# States of a shim.
OK, MISSING, HIDDEN, STALE, LOOP = "ok", "no program", "not first on PATH", "stale", "loop"
CLOSED = "cannot start"
VERSION_SECONDS = 20.0
MOST_VERSION = 60


class Shim(Record):
    """One shim, as it is found."""

    name: str
    path: str
    state: str
    # The program that it would run, and what that says about itself.
    real: str = ""
    version: str = ""
    detail: str = ""


class Place(Record):
    """Where shims are, and what the environment says about it."""

    directory: str
    home: str
    path: tuple[str, ...]
    env: Mapping[str, str]


def main(arguments: list[str]) -> int:
    """Install, show or remove."""
    if not arguments or arguments[0] not in ACTIONS:
        raise UsageError(f"shim takes one of: {', '.join(ACTIONS)}", hint=HINT, code="usage")
    action, switches = ACTIONS[arguments[0]]
    try:
        given = parse(arguments[1:], switches=switches, values=())
    except UsageError as error:
        raise UsageError(error.message, hint=HINT, code=error.code) from error
    return action(given, place_of(os.environ))


def place_of(env: Mapping[str, str]) -> Place:
    """From the environment."""
    home = env.get("HOME", "")
    data = env.get("XDG_DATA_HOME", "")
    base = data if data.startswith("/") else f"{home}/.local/share"
    if not base.startswith("/") or any(c in base for c in ":\n\r\0"):
        raise HostError(
            f"cannot keep shims below '{base}': PATH cannot name it",
            hint="set HOME or XDG_DATA_HOME to a plain absolute path",
            code="bad-data-directory",
        )
    path = tuple(part for part in env.get("PATH", "").split(":") if part.startswith("/"))
    return Place(directory=f"{base}/agent-sandbox/shims", home=home, path=path, env=env)


# --- actions


def install(given: Given, place: Place) -> int:
    """Make shims, or make them anew."""
    if not given.rest:
        raise UsageError("shim install needs a command's name", hint=HINT, code="usage")
    for name in given.rest:
        if not words.is_name(name):
            raise UsageError(f"cannot make a shim for '{name}'", hint=HINT, code="usage")
    sandbox = ourselves.find("agent-sandbox")
    try:
        os.makedirs(place.directory, mode=0o755, exist_ok=True)
        write(f"{place.directory}/{words.SIGN}", "", 0o644)
        for name in given.rest:
            _keep_others(f"{place.directory}/{name}")
            write(f"{place.directory}/{name}", words.launcher(name, sandbox), 0o755)
    except OSError as error:
        raise _cannot(place.directory, error) from error
    for name in given.rest:
        if _real(name, place) is None:
            output.notice("sandboxctl", f"there is no {name} on PATH yet; its shim will find it")
    if "--rc" in given.switches:
        _write_rc(place)
    elif _first(place) is not True:
        _say_line(place)
    return 0


def remove(given: Given, place: Place) -> int:
    """Remove shims; with the last one go the lines in start-up files."""
    every = "--all" in given.switches
    if every == bool(given.rest):
        raise UsageError("shim remove takes names, or --all", hint=HINT, code="usage")
    names = installed(place) if every else list(given.rest)
    for name in names:
        path = f"{place.directory}/{name}"
        if not words.is_name(name) or not _is_shim(path):
            raise UsageError(f"there is no shim for '{name}'", hint=HINT, code="usage")
    try:
        for name in names:
            os.unlink(f"{place.directory}/{name}")
        if not installed(place):
            _remove_rc(place)
            for path, gone in ((f"{place.directory}/{words.SIGN}", os.unlink),
                               (place.directory, os.rmdir)):  # fmt: skip
                if os.path.lexists(path):
                    gone(path)
    except OSError as error:
        raise _cannot(place.directory, error) from error
    return 0


def status(given: Given, place: Place) -> int:
    """What each shim leads to. Ends with 1 when one does not do its work."""
    if given.rest:
        raise UsageError("shim status takes no name", hint=HINT, code="usage")
    found = [look(name, place) for name in installed(place)]
    if found:
        found = _with_versions(found)
    first = _first(place)
    if "--json" in given.switches:
        rows = [{name: getattr(one, name) for name in Shim.__fields__} for one in found]
        shown = {
            "version": VERSION, "directory": place.directory, "onPath": first is not None,
            "first": first is True, "shims": rows,
        }  # fmt: skip
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        sys.stdout.write(table(found))
        if found and first is not True:
            _say_line(place)
    return 0 if all(one.state == OK for one in found) else 1


ACTIONS: dict[str, tuple[Callable[[Given, Place], int], tuple[str, ...]]] = {
    "install": (install, ("--rc",)),
    "status": (status, ("--json",)),
    "remove": (remove, ("--all",)),
}


# --- looking


def installed(place: Place) -> list[str]:
    """The names of our shims, and of nothing else that lies there."""
    try:
        names = sorted(os.listdir(place.directory))
    except FileNotFoundError:
        return []
    return [name for name in names if _is_shim(f"{place.directory}/{name}")]


def look(name: str, place: Place) -> Shim:
    """What one shim would do now."""
    path = f"{place.directory}/{name}"
    real = _real(name, place)
    shim = Shim(name=name, path=path, state=OK, real=real or "")
    if real is None:
        return shim.replace(state=MISSING, detail=f"no other {name} on PATH")
    if _is_shim(real):
        return shim.replace(state=LOOP, detail=f"{real} is a copy of a shim")
    text = _read(path, 1 << 16).decode("utf-8", "surrogateescape")
    if text != words.launcher(name, ourselves.find("agent-sandbox")):
        detail = f"made by another version; run: sandboxctl shim install {name}"
        return shim.replace(state=STALE, detail=detail)
    typed = next((p for p in (f"{d}/{name}" for d in place.path) if _runs(p)), "")
    if not typed or not os.path.samefile(typed, path):
        detail = f"typing {name} runs {typed}" if typed else "its directory is not on PATH"
        return shim.replace(state=HIDDEN, detail=detail)
    return shim


def _real(name: str, place: Place) -> str | None:
    """The program that a shim finds: the first one in a directory that has no shims."""
    own = f"{place.directory}/{name}"
    for directory in place.path:
        path = f"{directory}/{name}"
        if not _runs(path) or os.path.exists(f"{directory}/{words.SIGN}"):
            continue
        if not (os.path.exists(own) and os.path.samefile(path, own)):
            return path
    return None


def _runs(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _first(place: Place) -> bool | None:
    """Whether the shims come first on PATH; None when they are not on it."""
    real = os.path.realpath(place.directory)
    found = [at for at, part in enumerate(place.path) if os.path.realpath(part) == real]
    return found[0] == 0 if found else None


def _is_shim(path: str) -> bool:
    return words.is_shim(_read(path, 256))


def _read(path: str, most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _with_versions(found: list[Shim]) -> list[Shim]:
    """Ask each program for its version: in a sandbox, since PATH may lead into a project."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(lambda one: _with_version(one) if one.real else one, found))


def _with_version(shim: Shim) -> Shim:
    try:
        return shim.replace(version=_version(shim.real))
    except CommandError as error:
        # Somewhere that no sandbox shows, or without its interpreter.
        closed = shim.replace(state=CLOSED, detail=f"{error.message}; {error.hint}")
        return closed if shim.state == OK else shim
    except (SandboxError, OSError):
        return shim


def _version(real: str) -> str:
    from ..sandbox.library import Policy, Sandbox

    with tempfile.TemporaryDirectory(prefix="agent-sandbox-shim-") as empty:
        policy = Policy(
            project=empty, network="off", home="ephemeral", profile="none",
            timeout=VERSION_SECONDS, config=True,
        )  # fmt: skip
        done = Sandbox(policy).run([real, "--version"], capture=True)
    lines = done.stdout.strip().splitlines() if done.ok else []
    return output.printable(lines[0][:MOST_VERSION]) if lines else ""


def table(found: list[Shim]) -> str:
    """For people. Pure."""
    if not found:
        return "no shims; make one: sandboxctl shim install claude\n"
    rows = [("NAME", "STATE", "VERSION", "RUNS")]
    rows += [(one.name, one.state, one.version or "-", one.real or "-") for one in found]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    lines += [f"{one.name}: {one.detail}" for one in found if one.detail]
    return "".join(f"{output.printable(line)}\n" for line in lines)


# --- start-up files


def rc_files(place: Place) -> dict[str, str]:
    """Where each shell reads our line."""
    config = place.env.get("XDG_CONFIG_HOME") or f"{place.home}/.config"
    return {
        "bash": f"{place.home}/.bashrc",
        "zsh": f"{place.env.get('ZDOTDIR') or place.home}/.zshrc",
        "fish": f"{config}/fish/conf.d/agent-sandbox.fish",
    }


def _shell(place: Place) -> str:
    name = os.path.basename(place.env.get("SHELL", ""))
    return name if name in SHELLS else "bash"


def _wanted(place: Place) -> list[tuple[str, str]]:
    """The user's own shell, and others that are in use."""
    own = _shell(place)
    in_use = {
        shell: os.path.exists(file if shell != "fish" else os.path.dirname(os.path.dirname(file)))
        for shell, file in rc_files(place).items()
    }
    return [(s, file) for s, file in rc_files(place).items() if s == own or in_use[s]]


def _write_rc(place: Place) -> None:
    for shell, file in _wanted(place):
        try:
            text = _text(file)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            change(file, text, words.with_block(text, words.block(shell, place.directory)))
        except OSError as error:
            raise _cannot(file, error) from error
        output.notice("sandboxctl", f"{file} puts the shims first; open a new {shell}")


def _remove_rc(place: Place) -> None:
    for file in rc_files(place).values():
        text = _text(file)
        bare = words.without_block(text)
        if bare != text:
            if not bare and file.endswith("/agent-sandbox.fish"):
                os.unlink(file)
            else:
                change(file, text, bare)
            output.notice("sandboxctl", f"the lines for shims are gone from {file}")


def _say_line(place: Place) -> None:
    shell = _shell(place)
    output.notice("sandboxctl", f"put this at the end of {rc_files(place)[shell]}, or use --rc:")
    sys.stderr.write(f"{words.line(shell, place.directory)}\n")


def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="surrogateescape", newline="") as opened:
            return opened.read()
    except FileNotFoundError:
        return ""


def change(file: str, was: str, now: str) -> None:
    """Replace a file of the user at once, behind its links and with its mode."""
    if was == now:
        return
    real = os.path.realpath(file)
    mode = stat.S_IMODE(os.stat(real).st_mode) if os.path.exists(real) else 0o644
    write(real, now, mode)


def write(path: str, text: str, mode: int) -> None:
    """A whole file or none."""
    fd, new = tempfile.mkstemp(prefix=".agent-sandbox-", dir=os.path.dirname(path))
    try:
        with open(fd, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def _keep_others(path: str) -> None:
    if os.path.lexists(path) and not _is_shim(path):
        raise HostError(
            f"cannot make a shim: '{path}' is something else",
            hint="move it away",
            code="not-a-shim",
        )


def _cannot(path: str, error: OSError) -> HostError:
    return HostError(
        f"cannot change '{error.filename or path}': {reason(error)}",
        hint="shims are made outside of sandboxes, by the user whose home it is",
        code="cannot-write",
    )
