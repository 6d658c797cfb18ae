"""Claude Code's full-screen interface in a sandbox, in a real terminal (tmux) that is resized."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from conftest import must_work

from . import verdicts
from .conftest import Make
from .model import ANSWER
from .roster import PROMPT
from .stage import ALLOW, Done, Stage
from .table import FULL_SCREEN, Table

pytestmark = [pytest.mark.agent, pytest.mark.kernel, pytest.mark.network, pytest.mark.slow]

# A busy machine draws late.
SECONDS = 180.0
READY = "bypass permissions on"


def eventually(condition: Callable[[], object]) -> bool:
    """Wait until something holds; each look starts a program, so there are few of them."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


class Terminal:
    """A tmux window of the user, with the agent in it."""

    def __init__(self, stage: Stage, argv: list[str], env: dict[str, str]) -> None:
        self.stage = stage
        sockets = stage.world.mkdir(stage.world.base / "tmux")
        self._socket = sockets / "socket"
        self.ended = stage.world.base / "tmux" / "ended"
        # The exit status tells that the agent is gone; the window stays to be read.
        command = 'cd "$0" && "$@"; echo $? >"$ENDED"; exec sleep 9999'
        start = ["sh", "-c", command, str(stage.world.project), *argv]
        given = {**env, "TERM": "xterm-256color", "ENDED": str(self.ended), "LANG": "C.UTF-8"}
        words = ["tmux", "-f", "/dev/null", "-S", str(self._socket)]
        size = ["new-session", "-d", "-x", "100", "-y", "30"]
        done = stage.run([*words, *size, *start], given)
        assert done.returncode == 0, done.stderr

    def _tmux(self, *args: str) -> str:
        return self.stage.must("tmux", "-S", str(self._socket), *args)

    def keys(self, *keys: str) -> None:
        for key in keys:
            self._tmux("send-keys", key)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def expect(self, text: str) -> None:
        """Wait until a text is on the screen, or the agent has ended."""
        eventually(lambda: text in self.screen() or self.ended.exists())
        assert text in self.screen(), f"no {text!r}:\n{self.screen()}"

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def widths(self) -> set[int]:
        """How long the rules are that the interface draws from edge to edge."""
        lines = [line.rstrip() for line in self.screen().splitlines()]
        return {len(line) for line in lines if len(line) > 20 and set(line) == {"─"}}

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def here(stage: Make) -> Stage:
    must_work(shutil.which("tmux"), "needs tmux")
    return stage("claude", "full-screen")


@pytest.fixture
def terminal(here: Stage) -> Iterator[Terminal]:
    flags, env = here.prepare(ALLOW)
    # A user who has said before that this directory is trusted: a first start asks nothing.
    state = json.loads((here.world.home / ".claude.json").read_text())
    state["projects"] = {str(here.world.project): {"hasTrustDialogAccepted": True}}
    here.world.write("~/.claude.json", json.dumps(state))
    argv = here.world.argv(*flags, "claude", "--dangerously-skip-permissions")
    opened = Terminal(here, argv, env)
    yield opened
    opened.close()


def test_works_full_screen_and_follows_a_resize(
    here: Stage, terminal: Terminal, table: Table
) -> None:
    """Draws, takes a prompt, does the work, redraws for a new size, ends; and harms nobody."""
    was = verdicts.before(here)
    terminal.expect(READY)
    terminal.type(PROMPT)
    terminal.expect(PROMPT)
    terminal.keys("Enter")
    terminal.expect(ANSWER)
    for columns, rows in ((132, 40), (72, 24)):
        terminal.resize(columns, rows)
        assert eventually(lambda: terminal.widths() == {columns}), terminal.screen()  # noqa: B023
    terminal.type("/exit")
    terminal.expect("/exit")
    terminal.keys("Enter")
    assert eventually(terminal.ended.exists), terminal.screen()
    assert eventually(terminal.ended.read_text)
    done = Done([], int(terminal.ended.read_text()), terminal.screen(), "")
    table.judge(here, was, done, ALLOW)
    table.note("claude", FULL_SCREEN, good=True)
