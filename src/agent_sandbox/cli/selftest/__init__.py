"""`sandboxctl selftest`: tries to break out of real sandboxes on this machine, and shows a table.

`attacks` is the table of attempts, `attempts` what runs inside, `world` what they aim at, `runs`
starts the sandboxes, `verdicts` judges. Exit code 0 when everything held, 1 when something escaped
or could not be tried, 125 when no sandbox starts.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from ...errors import EXIT_CANNOT_BUILD, EXIT_SIGNAL_BASE, HostError, UsageError
from ...host.tools import missing_bwrap
from ...policy.model import MARKER
from .. import output
from . import runs
from .attacks import ATTACKS
from .verdicts import judge, passed, render, render_json
from .world import World

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from .attacks import Attack
    from .verdicts import Ended, Outcome

PROGRAM = "sandboxctl"
CLEAR = "\r\x1b[K"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Somebody wants us to end; what we have made must go first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: list[str]) -> int:
    """Run the verb; `arguments` is what follows it."""
    unknown = [word for word in arguments if word != "--json"]
    if unknown:
        raise UsageError(
            f"unknown argument: {unknown[0]}", hint="selftest takes only --json", code="usage"
        )
    if os.path.exists(MARKER):
        raise HostError(
            "cannot start a sandbox inside a sandbox", hint="run selftest outside", code="nested"
        )
    started = time.monotonic()
    try:
        outcomes, ended = attempt_all(chosen(os.getuid()))
    except Interrupted as interrupted:
        return EXIT_SIGNAL_BASE + interrupted.number
    seconds = time.monotonic() - started
    if not any(run.evidence for run in ended.values()):
        return _explain(ended)
    if "--json" in arguments:
        sys.stdout.write(render_json(outcomes, seconds) + "\n")
    else:
        sys.stdout.write(render(outcomes, seconds, colour=_wants_colour()) + "\n")
    return 0 if passed(outcomes) else 1


def chosen(uid: int) -> list[Attack]:
    """The attacks that mean something to a user."""
    return [attack for attack in ATTACKS if uid == 0 or not attack.root_only]


def attempt_all(attacks: Sequence[Attack]) -> tuple[list[Outcome], Mapping[str, Ended]]:
    """Make a world, attack it, judge, and remove it, whatever happens."""
    for number in ENDING:
        signal.signal(number, _interrupt)
    world = World()
    try:
        if not world.bwrap:
            raise missing_bwrap()
        progress = Progress(len(attacks))
        try:
            ended = runs.make_all(world, attacks, progress.add)
        finally:
            progress.clear()
        outcomes = [judge(attack, world, ended.get(attack.run)) for attack in attacks]
        return sorted(outcomes, key=lambda outcome: outcome.attack.invariant), ended
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        world.close()


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)


class Progress:
    """One line on a terminal, while it takes."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._made = 0
        self._shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.add(0)

    def add(self, made: int) -> None:
        """Some more attempts were made."""
        self._made = min(self._made + made, self._total)
        if self._shown:
            sys.stderr.write(f"{CLEAR}{PROGRAM}: {self._made} of {self._total} attempts made")
            sys.stderr.flush()

    def clear(self) -> None:
        """Leave the line empty for the table."""
        if self._shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()


def _explain(ended: Mapping[str, Ended]) -> int:
    """No sandbox starts: say why, with what doctor finds."""
    from ...host.tools import find_bwrap
    from ..doctor import explain_failure

    said = " ".join(ended["main"].said.split()) if "main" in ended else ""
    problem = HostError(
        f"no sandbox starts here, so nothing was tried: {said}",
        hint="'sandboxctl doctor' looks at every layer",
        code="bwrap-failed",
    )
    output.error(PROGRAM, problem)
    sys.stderr.write(explain_failure(find_bwrap(os.environ, "/nonexistent"), said))
    return EXIT_CANNOT_BUILD


def _wants_colour() -> bool:
    # https://no-color.org: any value but the empty one.
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
