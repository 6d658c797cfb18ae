"""Refusals in the audit: each has its line, but a flood of them has a sum.

Whoever is not let in could otherwise fill the disk with lines about not being let in.
"""

from __future__ import annotations

from ..quotas import Buckets, Rate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..audit import AuditTrail
    from ..http.messages import Peer, Request
    from ..problems import Problem
    from ..values import Agent

# Lines about those whom nobody knows, per address; and about those who ask too much, each.
STRANGERS = Rate(count=20, seconds=4.0)
EAGER = Rate(count=2, seconds=10.0)
MOST_KEYS = 1000


class Denials:
    """Writes refusals."""

    def __init__(self, audit: AuditTrail, clock: Callable[[], float]) -> None:
        self._audit = audit
        self._clock = clock
        self._buckets = Buckets(MOST_KEYS)
        self._untold: dict[str, int] = {}

    def note(
        self, request: Request, agent: Agent | None, action: str, target: str, problem: Problem
    ) -> None:
        """A request that was refused."""
        if problem.code == "UNAUTHENTICATED":
            action = "auth.fail"
        elif problem.code == "RATE_LIMITED":
            action = "limit.refuse"
        peer = request.peer.address if agent is None else ""
        self._write(
            agent, action, problem, peer=peer, target=target, request_id=request.id,
            about={"method": request.method[:32], "path": request.path[:1024]},
        )  # fmt: skip

    def malformed(self, peer: Peer, problem: Problem) -> None:
        """Bytes that were no request."""
        self._write(None, "http.malformed", problem, peer=peer.address, target="", request_id="",
                    about={})  # fmt: skip

    def _write(
        self, agent: Agent | None, action: str, problem: Problem, *, peer: str, target: str,
        request_id: str, about: dict[str, object],
    ) -> None:  # fmt: skip
        reason = problem.message
        if agent is None or problem.code == "RATE_LIMITED":
            key = f"{agent.name if agent else peer} {action}"
            rate = STRANGERS if agent is None else EAGER
            if not self._buckets.take(key, rate, self._clock()).allowed:
                if key in self._untold or len(self._untold) < MOST_KEYS:
                    self._untold[key] = self._untold.get(key, 0) + 1
                return
            if untold := self._untold.pop(key, 0):
                reason = f"{reason} (and {untold} more before)"
        kind = "execution" if target.startswith("exc-") else "sandbox"
        self._audit.write(
            agent, action, target={"type": kind, "id": target[:64]} if target else None,
            decision="deny", rule=problem.rule or problem.code, reason=reason[:500],
            request={**about, **({"addr": peer} if peer else {})},
            result={"status": problem.status, "problem": problem.code}, request_id=request_id,
        )  # fmt: skip
