"""What a run does to control files: looked at before, judged after, put right. Shared steps.

On the launch path. Judging and putting away are loaded only when something has changed.
"""

from __future__ import annotations

from ..errors import reason
from ..host.triggers import Watch
from ..policy.triggers import NOTABLE, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .prepare import Prepared


def _not_compared(error: Exception) -> Finding:
    said = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    what = (
        f"control files could not be compared or put away: {said}; look at the project's '.git' "
        "directories before you use git there. The next run will try again"
    )
    return Finding(path="", severity=NOTABLE, who="", what=what)


class Changes:
    """The control files of one run. `begin` before it, `settle` when nothing of it lives."""

    def __init__(self, prepared: Prepared, run: str) -> None:
        self._watch = Watch(prepared.plan, prepared.facts.state_dir, run)
        self._state_dir = prepared.facts.state_dir
        # Whoever switches git's protection off wants git's files left alone.
        self._act = any(preset.value == "@git" for preset in prepared.policy.presets)

    def begin(self) -> None:
        """Remember what is there; stops the start when that is not possible."""
        self._watch.before()

    def settle(self) -> tuple[Finding, ...]:
        """Compare, and put away what is forbidden. Never raises: the command has already run."""
        try:
            found = self._watch.after()
            if found:
                from ..launch.quarantine import FAILED, settle

                found = settle(found, state_dir=self._state_dir, run=self._watch.run, act=self._act)
                failed = any(change.action.startswith(FAILED) for change in found)
                if failed or self._watch.overrun:
                    # Forgotten now, what is left would be the user's own to the next run.
                    self._watch.abandon()
        except Exception as error:  # noqa: BLE001 - the command's own exit code must stand
            # What an attacker can make fail must not be forgotten: the next run compares with the
            # same record, as after a crash.
            self._watch.abandon()
            return (_not_compared(error),)
        self.forget()
        return found

    def forget(self) -> None:
        """Nothing is left to be compared, because no sandbox was started or all is settled."""
        try:
            self._watch.close()
        except OSError:
            # The record stays; a later run finds it dead and makes up for it.
            return
