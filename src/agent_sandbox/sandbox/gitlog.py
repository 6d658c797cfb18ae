"""What a run had signed and handed in, as the process that answers for it tells at the end."""

from __future__ import annotations

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# How many different grants and refusals are named at the end of a run. The command chooses names.
SHOWN_DONE, SHOWN_REFUSED = 20, 5


class Event(Record):
    """One signature, one credential, or one refusal."""

    time: float
    # "signed", "handed-in" or "refused".
    what: str
    # What it was for, or why it was refused.
    purpose: str = ""
    why: str = ""
    # The key's fingerprint and comment.
    key: str = ""
    comment: str = ""


class GitLog(Record):
    """Everything of a run; a long list is cut off, the counts are not."""

    events: tuple[Event, ...] = ()
    counts: Mapping[str, int] = {}
    # Empty, or why the log outside is incomplete.
    log: str = ""


def parse(data: bytes) -> GitLog:
    """The report of the process. Nothing at all is a run without one."""
    if not data:
        return GitLog()
    import json

    try:
        table = json.loads(data)
        events = tuple(Event(**one) for one in table["events"])
        return GitLog(events=events, counts=table["counts"], log=table.get("log", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        # It was cut off: what is not whole is not worth guessing at.
        return GitLog()


def notes(found: GitLog) -> tuple[str, ...]:
    """Lines for the end of a run: what was signed and handed in, what was refused. Pure."""
    done: dict[str, int] = {}
    refused: dict[str, int] = {}
    for event in found.events:
        if event.what == "refused":
            refused[event.why] = refused.get(event.why, 0) + 1
        else:
            by = f" with '{event.comment}' ({event.key})" if event.key else ""
            text = f"git.auth: {event.what.replace('-', ' ')}: {event.purpose}{by}"
            done[text] = done.get(text, 0) + 1
    shown = [*done.items()][:SHOWN_DONE]
    shown += [(f"git.auth: refused: {text}", n) for text, n in [*refused.items()][:SHOWN_REFUSED]]
    said = [f"{text}{_times(count)}" for text, count in shown]
    more = sum(found.counts.values()) - sum(count for _, count in shown)
    if more > 0:
        said.append(f"git.auth: {more} more; 'audit/git.jsonl' in the state directory has them")
    return tuple(said)


def _times(count: int) -> str:
    return f", {count} times" if count > 1 else ""
