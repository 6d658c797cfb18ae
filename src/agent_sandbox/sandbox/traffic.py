"""Whom a command talked to, or was kept from talking to, as its proxy tells at the end."""

from __future__ import annotations

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# How many hosts the line at the end of a run names, and how many flags it suggests.
SHOWN_HOSTS = 5
SHOWN_FLAGS = 3
# What may stand in a command line that is there to be pasted: names come from inside.
SAFE = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_:*[]/")


class Contact(Record):
    """One host and port: what was decided, by which rule, and how much went there."""

    host: str
    port: int
    allowed: bool
    # The text of the rule that decided and where it stands; both empty if none did.
    rule: str = ""
    source: str = ""
    reason: str = ""
    # Connections or requests.
    count: int = 0
    # Bytes to the host and from it.
    sent: int = 0
    received: int = 0
    # A refusal that no rule for this host would change.
    final: bool = False

    @property
    def name(self) -> str:
        """Host and port as a rule spells them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Traffic(Record):
    """Everything that a proxy has seen in a run."""

    contacts: tuple[Contact, ...] = ()
    # Rules that would have sufficed, in the mode learn.
    learned: tuple[str, ...] = ()
    # What the proxy could not do: publish a port that is taken, and the like.
    problems: tuple[str, ...] = ()


def parse(data: bytes) -> Traffic:
    """The report of a proxy. Nothing at all is a run without traffic."""
    if not data:
        return Traffic()
    import json

    try:
        table = json.loads(data)
        contacts = [
            Contact(**{name: one[name] for name in Contact.__fields__}) for one in table["hosts"]
        ]
        return Traffic(
            contacts=tuple(contacts),
            learned=tuple(table["learned"]),
            problems=tuple(table.get("problems", ())),
        )
    except (ValueError, KeyError, TypeError):
        # It was cut off: what is not whole is not worth guessing at.
        return Traffic()


def refusals(traffic: Traffic) -> str:
    """One line about what was refused, or nothing. Pure."""
    found = [one for one in traffic.contacts if not one.allowed]
    if not found:
        return ""
    found.sort(key=lambda one: (-one.count, one.name))
    names = list(dict.fromkeys(one.name for one in found))
    more = ", …" if len(names) > SHOWN_HOSTS else ""
    line = f"{len(names)} {'host' if len(names) == 1 else 'hosts'} refused: "
    line += ", ".join(names[:SHOWN_HOSTS]) + more
    # What a rule denies, no other rule allows.
    wanted = _flags(dict.fromkeys(one.name for one in found if not (one.rule or one.final)))
    if wanted:
        rest = " …" if len(wanted) > SHOWN_FLAGS else ""
        line += f" (allow with {' '.join(wanted[:SHOWN_FLAGS])}{rest})"
    return line


def learned(traffic: Traffic) -> str:
    """The allow-list that would have sufficed, as flags to paste. Pure."""
    return " ".join(("--network=allow", *_flags(traffic.learned)))


def learned_policy(traffic: Traffic) -> str:
    """The same for a policy file. Pure."""
    rules = [f'"{rule}"' for rule in traffic.learned if SAFE.issuperset(rule)]
    return f'network = "allow"\nallow = [{", ".join(rules)}]\n'


def _flags(rules: Iterable[str]) -> list[str]:
    """Flags for a shell, to which brackets and stars mean something."""
    return [
        f"--allow '{rule}'" if any(c in rule for c in "[]*") else f"--allow {rule}"
        for rule in rules
        if SAFE.issuperset(rule)
    ]
