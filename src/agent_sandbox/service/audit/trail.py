"""What every audit trail can do, wherever its lines are: in files, or in a database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from . import redact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..values import Agent
    from .lines import Head

    Target = str | Mapping[str, object]

ALLOW, DENY = "allow", "deny"
ROTATE_BYTES = 64 << 20
# What a target's id begins with.
KINDS = {"sbx-": "sandbox", "exc-": "execution", "sbx_": "token"}
MOST_ID = 32
# The trail's own actions. `GAP` is always a finding of `verify`.
RECOVERED, GAP, PRUNE = "audit.recovered", "audit.gap", "audit.prune"


class Trail(Protocol):
    """The trail at one moment, between two lines: files with numbers, also in a database."""

    head: Head | None
    # The files that are there, in order, by number.
    sizes: dict[int, int]

    def lines(self, number: int, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Each line of a file with where it ends; the last may lack its newline."""

    def backwards(self, number: int) -> Iterator[bytes]:
        """The lines of a file from its end to its beginning, without their newlines."""


class AuditTrail(ABC):
    """Writes lines, each on the end of the chain. Several processes may write at once."""

    @property
    @abstractmethod
    def seq(self) -> int:
        """The number of the last line that this process knows."""

    @property
    @abstractmethod
    def head(self) -> str:
        """The end of the chain as `SEQ:HASH`, to be kept elsewhere for `verify --head`."""

    @abstractmethod
    def _write(self, record: Mapping[str, object]) -> int:
        """Seal a line and write it; its number. AUDIT_UNAVAILABLE."""

    @abstractmethod
    def snapshot(self) -> Trail:
        """What there is now, for readers."""

    def check_removal(self) -> None:
        """Raise if `remove` would: a line says what is removed before it is."""
        return

    @abstractmethod
    def remove(self, number: int) -> None:
        """Remove a file, which must be the oldest."""

    @abstractmethod
    def sync(self) -> None:
        """Bring what was written to the disk. It waits: call it from a thread."""

    @abstractmethod
    def close(self) -> None:
        """No more lines from here."""

    def write(
        self, actor: Agent | None, action: str, *, target: Target | None = None,
        decision: str = ALLOW, rule: str = "", reason: str = "",
        request: Mapping[str, object] | None = None, result: Mapping[str, object] | None = None,
        limits: Mapping[str, object] | None = None, request_id: str = "",
    ) -> int:  # fmt: skip
        """Write one line; its number. Raises AUDIT_UNAVAILABLE, and then nothing was written."""
        members: dict[str, object] = {
            "requestId": request_id, "actor": actor_of(actor), "action": action,
            "target": target_of(target), "decision": decision, "rule": rule,
            "reason": redact.text(reason), "request": request and redact.request(request),
            "result": result and redact.request(result),
            "limits": limits and dict(limits),
        }  # fmt: skip
        return self._write({name: value for name, value in members.items() if value})

    def note(self, actor: Agent | None, action: str, request: Mapping[str, object]) -> int:
        """A line about the trail itself, as it is: nothing in it comes from outside."""
        record = {"action": action, "decision": ALLOW, "request": request}
        return self._write({"actor": actor_of(actor), **record} if actor else record)


if TYPE_CHECKING:
    # A directory with files, or a writer.
    Where = str | AuditTrail

# --- pure


def actor_of(agent: Agent | None) -> dict[str, object] | None:
    """Who, without any secret; None: the service itself, or nobody that it knows."""
    if agent is None:
        return None
    members = {"agent": agent.name, "key": agent.key, "uid": agent.uid, "addr": agent.address}
    return {name: value for name, value in members.items() if value not in ("", None)}


def target_of(target: Target | None) -> dict[str, object] | None:
    """What; an id alone tells its kind by its beginning."""
    if target is None or target == "":
        return None
    if isinstance(target, str):
        kind = KINDS.get(target[:4], "")
        # Our own ids are random letters, and hide nothing.
        shown = target if kind and len(target) <= MOST_ID else redact.text(target)
        return {"type": kind, "id": shown} if kind else {"id": shown}
    return redact.request(target)
