"""`--report FILE`: the run as JSON, for programs."""

from __future__ import annotations

import json
import os
import time

from ..errors import UsageError, reason
from ..policy import paths
from ..sandbox.traffic import Contact, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..launch.execute import Outcome
    from ..policy.triggers import Finding
    from ..sandbox.prepare import Prepared

VERSION = 1
CHANGE_FIELDS = ("path", "severity", "who", "what", "action", "id")


class Report:
    """Opened before the run, so that a path that cannot be written stops the start."""

    def __init__(self, path: str, prepared: Prepared) -> None:
        self._prepared = prepared
        self._begun = time.time()
        full = os.path.abspath(path)
        # A link in the project may have been planted to make us write elsewhere.
        planted = paths.within(full, prepared.plan.project) and (
            os.path.realpath(os.path.dirname(full)) != os.path.dirname(full)
        )
        if planted:
            raise UsageError(
                f"cannot write '{path}': the way there leads through a link in the project",
                code="bad-report",
            )
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(full, flags, 0o666)
        except OSError as error:
            raise UsageError(
                f"cannot write '{path}': {reason(error)}", code="bad-report"
            ) from error

    def write(self, outcome: Outcome, changes: tuple[Finding, ...] = ()) -> None:
        """Write the report of a run that has ended."""
        made, policy = self._prepared.plan, self._prepared.policy
        traffic = parse(outcome.network)
        data = {
            "version": VERSION,
            "project": made.project,
            "exit_code": outcome.code,
            "timed_out": outcome.timed_out,
            "exceeded": outcome.exceeded or None,
            "duration": round(time.time() - self._begun, 6),
            "policy": {
                name: {"value": s.value, "source": str(s.source)}
                for name in ("network", "docker", "home", "seccomp", "profile")
                for s in (getattr(policy, name),)
            },
            "mounts": [{"kind": m.kind, "path": m.dest, "rule": m.rule} for m in made.mounts],
            "notices": [*made.notices, *outcome.warnings],
            "changes": [
                {name: getattr(change, name) for name in CHANGE_FIELDS} for change in changes
            ],
            "network": [
                {name: getattr(contact, name) for name in Contact.__fields__}
                for contact in traffic.contacts
            ],
            "learned": list(traffic.learned),
            "docker": json.loads(outcome.docker) if outcome.docker else None,
            "git": json.loads(outcome.git_auth) if outcome.git_auth else None,
        }
        with os.fdopen(self._fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
