"""The processes of a sandbox from outside: found, stopped, let go on."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.launch import kin

if TYPE_CHECKING:
    from collections.abc import Iterator

# Forks while it is being stopped: a chain of children, each of which ends its parent's part.
TREE = "sh -c 'sleep 60 & sleep 60 & wait' & sh -c 'sleep 60' & echo up; wait"


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        ["sh", "-c", TREE], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        for pid in [*kin.descendants(process.pid), process.pid]:
            os.kill(pid, 9)


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]


def until(count: int, process: subprocess.Popen[str]) -> list[int]:
    deadline = time.monotonic() + 30
    while len(found := kin.descendants(process.pid)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_all_are_found_stopped_and_let_go_on(family: subprocess.Popen[str]) -> None:
    found = until(4, family)
    assert len(found) >= 4
    kin.stop(family.pid)
    assert {state(pid) for pid in found} <= {"T", "D"}
    assert "T" in {state(pid) for pid in found}
    # The first one belongs to bwrap, and is left alone.
    assert state(family.pid) == "S"
    kin.go_on(family.pid)
    assert {state(pid) for pid in found} <= {"S", "R", "D"}


def test_a_process_of_another_namespace_is_left_alone(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = until(4, family)
    # As if the number had been given to somebody else meanwhile.
    monkeypatch.setattr(
        kin, "_namespace", lambda pid: "pid:[1]" if pid == family.pid else "pid:[2]"
    )
    kin._send_all(family.pid, 19)
    assert "T" not in {state(pid) for pid in found}


def test_what_is_gone_has_no_processes() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert kin.descendants(process.pid) == []
    kin.stop(process.pid)
    kin.go_on(process.pid)
