"""What a killed program leaves of its sandboxes: it is ended by the process that outlives it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.launch import built, keeper_server

SRC = Path(keeper_server.__file__).parents[2]
# A program with a server of keepers, and a sandbox of its own that does not die with it.
PROGRAM = """
import os, sys, time
from agent_sandbox.launch.keeper_server import Server
server = Server(sys.argv[1])
own = os.posix_spawn("/bin/sleep", [f"bwrap-{sys.argv[2]}-1", "100"], {}, setsid=True)
print(own, flush=True)
if sys.stdin.readline() == "goodbye\\n":
    server.close()
    print("closed", flush=True)
time.sleep(100)
"""


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.fixture
def left() -> Iterator[list[int]]:
    """Processes to end with the test."""
    found: list[int] = []
    yield found
    for pid in found:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def killed(left: list[int], prefix: str, name: str, word: str = "") -> int:
    """Start a program, tell it a word, kill it; the process that it leaves."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, prefix, name], env={"PYTHONPATH": str(SRC)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdin is not None
        own = int(program.stdout.readline())
        left.append(own)
        if word:
            program.stdin.write(f"{word}\n")
            program.stdin.flush()
            assert program.stdout.readline() == "closed\n"
        program.kill()
    return own


def test_what_bears_the_program_s_name_is_ended(left: list[int]) -> None:
    mark = f"test-{secrets.token_hex(4)}"
    own = killed(left, f"{mark}-", mark)
    assert eventually(lambda: not is_alive(own))


def test_nobody_else_is_ended(left: list[int]) -> None:
    """The controls: another's name, no name, and a program that has said goodbye."""
    # Not that of another test: there it is looked for a moment longer.
    mark = f"test-{secrets.token_hex(4)}"
    others = [
        killed(left, f"{mark}-2-", mark), killed(left, "", mark),
        killed(left, f"{mark}-", mark, "goodbye"),
    ]  # fmt: skip
    # One that is ended, for as long as it takes.
    last = killed(left, f"{mark}-last-", f"{mark}-last")
    assert eventually(lambda: not is_alive(last))
    assert all(map(is_alive, others))


# --- a bwrap without its outer process


def test_a_root_that_nobody_will_finish_is_not_waited_for() -> None:
    """Its parent is no bwrap: whoever adopts orphans."""
    with subprocess.Popen(["/bin/sleep", "100"]) as orphan:
        begun = time.monotonic()
        assert not built.wait(orphan.pid, 20.0)
        assert time.monotonic() - begun < 10
        orphan.kill()


def test_a_root_whose_builder_ends_meanwhile_is_not_waited_for() -> None:
    script = "sh -c 'echo $$; sleep 100; :'; :"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        inner = int(outer.stdout.readline())
        # The control: as long as it is there it is waited for.
        with pytest.raises(TimeoutError):
            built.wait(inner, 0.2)
        outer.kill()
        assert not built.wait(inner, 20.0)
        os.kill(inner, signal.SIGKILL)
