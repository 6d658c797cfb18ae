"""Reads the values of secrets, outside, and hands them to the proxy alone.

The command gets placeholders. A value is never in an argument, a variable, a file or a message: it
goes from its source into our memory, and through a file in memory into the proxy's.
"""

from __future__ import annotations

import os

from ..errors import HostError, reason
from ..host import libraries
from ..host.trails import follow, search_path
from ..launch import asking
from ..policy import credentials, explain, paths
from ..policy.trails import mentioned, sound, weak_spot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..policy.credentials import Secret
    from ..policy.model import Plan

# Somebody may have to type a passphrase.
COMMAND_SECONDS = 120.0
MAX_BYTES = 64 << 10
MAX_CERTIFICATES = 4 << 20


def hand_out(
    made: Plan, env: Mapping[str, str], home: str, argv: Sequence[str]
) -> tuple[Plan, Mapping[str, object]]:
    """The plan with placeholders in its variables, and what the proxy is told besides."""
    shown = dict(made.env)
    rows = []
    values = []
    for one in made.secrets:
        value = _value(one, made, env, home)
        problem = credentials.problem_of(value)
        if problem:
            raise _unreadable(one, problem)
        stand_in = credentials.placeholder(value, _choose)
        if one.variable in shown:
            shown[one.variable] = stand_in
        rows.append(_row(one, stand_in, value))
        values.append((one, value))
    for one, value in values:
        seen = credentials.exposed(value, shown, argv)
        if seen:
            raise HostError(
                f"cannot keep secret '{one.name}' outside: {seen}",
                hint=f"take it out there; the command has ${one.variable}, which stands for it",
                code="secret-visible",
            )
    outside: dict[str, object] = {"secrets": rows, "ca": _certificates(made, home)}
    if credentials.intercepted(made.secrets):
        outside["library"] = _library(made)
    return made.replace(env=shown), outside


def _row(one: Secret, stand_in: str, value: str) -> dict[str, object]:
    same = {name: getattr(one, name) for name in ("host", "port", "header", "format", "base_port")}
    return {**same, "placeholder": stand_in, "value": value}


def _choose(alphabet: str) -> str:
    return alphabet[int.from_bytes(os.urandom(8)) % len(alphabet)]


def _value(one: Secret, made: Plan, env: Mapping[str, str], home: str) -> str:
    if one.kind == credentials.ENV:
        return env.get(one.origin[0], "").strip()
    try:
        if one.kind == credentials.FILE:
            raw = _read(_expanded(one.origin[0], home), MAX_BYTES)
        else:
            raw = _output(one, made, env)
    except OSError as error:
        raise _unreadable(one, f"{one.origin[0]}: {reason(error)}") from None
    return raw.decode("ascii", "replace").strip()


def _expanded(path: str, home: str) -> str:
    return home + path[1:] if path.startswith("~") else path


def _read(path: str, most: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(most)


def _unreadable(one: Secret, why: str) -> HostError:
    return HostError(
        f"cannot read secret '{one.name}': {why}",
        hint=f"look at [[secret]] in your policy file ({one.where}), or take its host out of the "
        "allow-list: then it is not read",
        code="no-secret",
    )


# --- a program that prints the value


def _output(one: Secret, made: Plan, env: Mapping[str, str]) -> bytes:
    """What a program prints. It runs in `/`: no file of the project may tell it what to do."""
    program = _program(one.origin[0], made, env)
    if not program:
        why = f"no program '{one.origin[0]}' is where the command cannot write"
        raise _unreadable(one, why)
    kept = _kept(made, env)
    for word in one.origin[1:]:
        if _leads_inside(word, made, kept):
            raise _unreadable(one, f"'{word}' names what the command can write")
    argv = ["sh", "-c", 'cd / && exec "$@"', "sh", program, *one.origin[1:]]
    failed, said = asking.answer(
        "/bin/sh", argv, kept, seconds=COMMAND_SECONDS, most=MAX_BYTES
    )  # fmt: skip
    if said is None:
        raise _unreadable(one, f"'{program}' did not end within {COMMAND_SECONDS:.0f} s")
    if failed:
        raise _unreadable(one, f"'{program}' ended with {failed}")
    return said


def _program(name: str, made: Plan, env: Mapping[str, str]) -> str:
    """Where a program is, unless a sandbox could have put it there, or could lead elsewhere.

    Not the end of its links: some programs go by the name that they are called by. No place on the
    way can be written, so it leads to the same when it is run.
    """
    places = [name] if "/" in name else [f"{place}/{name}" for place in _places(made, env)]
    for path in places:
        way = follow(path)
        found = path.startswith("/") and os.access(path, os.X_OK) and not os.path.isdir(way.real)
        if found and not weak_spot(way, lambda step: _is_writable(made, step)):
            return path
    return ""


def _places(made: Plan, env: Mapping[str, str]) -> tuple[str, ...]:
    """The directories of PATH that no sandbox decides about, behind every link."""
    return sound(search_path(env), lambda step: _is_writable(made, step))


def _kept(made: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """The caller's variables without those that lead where the command can write.

    The program may start others, and PYTHONPATH and its like name what these run.
    """
    kept = {k: v for k, v in env.items() if k == "PATH" or not _leads_inside(v, made, env)}
    # An empty one would be the working directory.
    return {**kept, "PATH": ":".join(_places(made, env)) or "/usr/bin:/bin"}


def _leads_inside(text: str, made: Plan, env: Mapping[str, str]) -> bool:
    """Whether a text names a path that the command can write."""
    named = mentioned(text, env.get("HOME", made.home), {})
    ways = (follow(path) for path in dict.fromkeys(named) if path.startswith("/"))
    return any(weak_spot(way, lambda step: _is_writable(made, step)) for way in ways)


def _is_writable(made: Plan, path: str) -> bool:
    """Whether the command could have written a path of the host."""
    return explain.look_up(made, path).level == "rw" or paths.within(path, made.project)


# --- certificates


def _certificates(made: Plan, home: str) -> str:
    """The text of `network.ca`."""
    if not made.network_ca:
        return ""
    path = _expanded(made.network_ca, home)
    way = follow(path)
    try:
        text = _read(way.real, MAX_CERTIFICATES).decode("ascii", "ignore")
        why = "" if "-----BEGIN CERTIFICATE-----" in text else "no certificate in PEM is in it"
    except OSError as error:
        text, why = "", reason(error)
    if not why and weak_spot(way, lambda step: _is_writable(made, step)):
        why = "the command can write it, and would decide who is trusted"
    if why:
        raise HostError(
            f"cannot use network.ca '{path}': {why}",
            hint="name a file with certificates in PEM, outside of the project",
            code="bad-ca",
        )
    return text


def _library(made: Plan) -> str:
    found = libraries.find(lambda path: not _is_writable(made, path))
    if not found:
        names = ", ".join(one.name for one in made.secrets if not one.base_url)
        raise HostError(
            f"cannot use secrets without base-url ({names}): the library 'cryptography', which "
            "makes certificates, is not installed",
            hint="pip install 'agent-sandbox[secrets]' (or your system's python3-cryptography), or "
            "give the secret a base-url",
            code="no-cryptography",
        )
    return found
