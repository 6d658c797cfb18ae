"""Processes as the kernel shows them: who descends from whom, who is what, who bears our mark."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
SUPERVISOR, OUTER, INIT, COMMAND, HELPER = "supervisor", "bwrap", "pid 1", "command", "helper"


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None when it is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1])


def is_alive(pid: int) -> bool:
    found = stat(pid)
    return found is not None and found[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    found = stat(pid)
    return found is not None and found[0] == "T"


def descendants(top: int) -> list[int]:
    """Everything below a process, found by its parents, whatever it is called."""
    parents = {pid: known[1] for pid in all_pids() if (known := stat(pid)) is not None}
    found: list[int] = []
    todo = [top]
    while todo:
        here = todo.pop()
        below = [pid for pid, parent in parents.items() if parent == here]
        found += below
        todo += below
    return [pid for pid in found if is_alive(pid)]


def inner_pids(pid: int) -> list[int]:
    """A process's pids in its namespaces, from ours inwards."""
    status = read(pid, "status").decode(errors="replace")
    line = next((line for line in status.splitlines() if line.startswith("NSpid:")), "NSpid:")
    return [int(word) for word in line.split()[1:]]


def role(pid: int, supervisor: int) -> str:
    """What a process of a run does, told by its place and not by its name."""
    if pid == supervisor:
        return SUPERVISOR
    inner = inner_pids(pid)
    if len(inner) > len(inner_pids(os.getpid())):
        return INIT if inner[-1] == 1 else COMMAND
    comm = read(pid, "comm").strip()
    return OUTER if comm == b"bwrap" else HELPER


def read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def link(pid: int, name: str) -> str:
    try:
        return str((PROC / str(pid) / name).readlink())
    except OSError:
        return ""


def bears(pid: int, marks: tuple[str, ...]) -> bool:
    """Whether a mark is in a process's arguments, variables, mounts or working directory."""
    texts = [read(pid, name) for name in ("cmdline", "environ", "mountinfo")]
    places = [link(pid, name).encode() for name in ("cwd", "root")]
    return any(mark.encode() in text for mark in marks for text in (*texts, *places))


def shown(pid: int) -> str:
    """A process for a report: its state, its parent, its place in its namespaces, its words."""
    words = read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").split("\n")[0]
    waits = read(pid, "wchan").decode(errors="replace")
    return f"{pid} {stat(pid)} {inner_pids(pid)} in {waits} {words[:80]!r}"


def marked(marks: tuple[str, ...]) -> list[str]:
    """Every living process with one of the marks, described, but for ourselves and our own."""
    ours = {os.getpid(), os.getppid()}
    return [
        shown(pid) for pid in all_pids() if pid not in ours and is_alive(pid) and bears(pid, marks)
    ]
