"""What was asked for and what went through: the report, the list that would have done, budgets.

Two threads count here, the one that decides and the one that relays. The lock is held for a few
instructions only.
"""

from __future__ import annotations

import threading

from ..policy import network
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # host, port, rule, source, allowed, reason
    Key = tuple[str, int, str, str, bool, str]

# A command can ask for any number of hosts; the report stays readable.
MAX_ENTRIES = 4096
MAX_REASON = 300


class Budget(Record):
    """Caps for all hosts together that a rule covers; 0 means none."""

    rule: network.Rule
    requests: int = 0
    # Bytes to the host, and in both directions.
    upload: int = 0
    total: int = 0


class Spending:
    """What has been used of one budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.requests = 0
        self.sent = 0
        self.received = 0

    def room(self, *, up: bool) -> int | None:
        """Bytes that may still go this way; None for any number."""
        rooms = []
        if self.budget.total:
            rooms.append(self.budget.total - self.sent - self.received)
        if self.budget.upload and up:
            rooms.append(self.budget.upload - self.sent)
        return max(0, min(rooms)) if rooms else None

    def spent(self) -> str:
        """Which cap is reached; empty if none."""
        budget = self.budget
        caps = (
            ("requests", budget.requests, self.requests),
            ("bytes sent", budget.upload, self.sent),
            ("bytes", budget.total, self.sent + self.received),
        )
        for what, cap, used in caps:
            if cap and used >= cap:
                return f"the budget of {cap} {what} for {budget.rule.text} is used up"
        return ""


class Entry:
    """One line of the report."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.final = False
        self.count = 0
        # Connections that were made.
        self.opened = 0
        self.sent = 0
        self.received = 0
        # Addresses that are not public: the name alone would not have done.
        self.addresses: set[str] = set()


class Account:
    """Where one connection's bytes are counted and capped."""

    def __init__(
        self, lock: threading.Lock, entry: Entry, spending: tuple[Spending, ...], ledger: Ledger
    ) -> None:
        self._lock = lock
        self._entry = entry
        self._spending = spending
        self._ledger = ledger
        self.turns = ledger.turns
        self.capped = bool(spending)
        self.host, self.port = entry.key[0], entry.key[1]

    def opened(self, address: str = "") -> None:
        """The connection was made; to an address that a rule had to name, if one is given."""
        with self._lock:
            self._entry.opened += 1
            if address:
                self._entry.addresses.add(address)

    def take(self, count: int, *, up: bool) -> int:
        """Count bytes before they go; what comes back is how many may. 0: over budget."""
        with self.turns, self._lock:
            for spending in self._spending:
                room = spending.room(up=up)
                count = count if room is None else min(count, room)
            self._add(count, up=up)
        return count

    def cut(self) -> str:
        """Note that a budget ends the connection here, and say which."""
        verdict = self._ledger.exhausted(self.host, self.port)
        if verdict is None:
            # What was given back meanwhile makes room again, but not for this connection.
            return "over budget"
        self._ledger.note(self.host, self.port, verdict)
        return verdict.reason

    def give_back(self, count: int, *, up: bool) -> None:
        """Bytes that were taken and did not go."""
        with self._lock:
            self._add(-count, up=up)

    def _add(self, count: int, *, up: bool) -> None:
        counters: tuple[Entry | Spending, ...] = (self._entry, *self._spending)
        for counter in counters:
            if up:
                counter.sent += count
            else:
                counter.received += count


class Ledger:
    """Every host that was asked for."""

    def __init__(self, budgets: Iterable[Budget] = ()) -> None:
        self._lock = threading.Lock()
        # For who takes more than may be needed, and gives it back.
        self.turns = threading.RLock()
        self._entries: dict[Key, Entry] = {}
        self._spending = tuple(Spending(budget) for budget in budgets)
        self._more = 0

    def exhausted(self, host: str, port: int) -> network.Verdict | None:
        """The refusal by a budget that is used up; None if there is room."""
        with self.turns, self._lock:
            for spending in self._matching(host, port):
                why, rule = spending.spent(), spending.budget.rule
                if why:
                    text = f"budget {rule.text}"
                    return network.Verdict(allowed=False, rule=text, source=rule.source, reason=why)
        return None

    def note(
        self, host: str, port: int, verdict: network.Verdict, *, final: bool = False
    ) -> Account:
        """Count a request, whatever came of it; `final`: no rule for the host would change it."""
        reason = verdict.reason[:MAX_REASON]
        key = (host, port, verdict.rule, verdict.source, verdict.allowed, reason)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = Entry(key)
                entry.final = final
                if len(self._entries) < MAX_ENTRIES:
                    self._entries[key] = entry
                else:
                    self._more += 1
            entry.count += 1
            matching = self._matching(host, port) if verdict.allowed else ()
            for spending in matching:
                spending.requests += 1
            return Account(self._lock, entry, matching, self)

    def _matching(self, host: str, port: int) -> tuple[Spending, ...]:
        return tuple(s for s in self._spending if covers(s.budget.rule, host, port))

    def report(self) -> dict[str, object]:
        """The report as it is written at the end."""
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda e: (e.key[4], *e.key[:2]))
            hosts = [_line(entry) for entry in entries]
            report: dict[str, object] = {"hosts": hosts, "learned": self._learned()}
            if self._more:
                report["more"] = self._more
        return report

    def _learned(self) -> list[str]:
        """The smallest list that would have done: what was reached, nothing around it."""
        reached: set[tuple[str, int]] = set()
        for entry in self._entries.values():
            if entry.key[4] and entry.opened:
                host, port = entry.key[:2]
                host = network.LOCALHOST if host in network.LOCAL_ADDRESSES else host
                reached |= {(host, port), *((one, port) for one in entry.addresses)}
        return [exact(host, port) for host, port in sorted(reached)]


def covers(rule: network.Rule, host: str, port: int) -> bool:
    """Whether a rule without a port, or with this one, means this host."""
    every = rule.replace(ports=rule.ports or (0,))
    return network.decide(network.Egress(mode="allow", allow=(every,)), host, port).allowed


def exact(host: str, port: int) -> str:
    """A rule for this port of this host alone."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _line(entry: Entry) -> dict[str, str | int | bool]:
    host, port, rule, source, allowed, reason = entry.key
    return {
        "host": host, "port": port, "rule": rule, "source": source, "allowed": allowed,
        "count": entry.count, "sent": entry.sent, "received": entry.received, "reason": reason,
        "final": entry.final,
    }  # fmt: skip
