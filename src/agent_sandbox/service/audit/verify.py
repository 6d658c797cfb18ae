"""Whether the audit trail is whole: every line there, unchanged, in order, up to its head.

Who can write the directory can also write a new chain and a new head. Against that only a head that
was kept elsewhere helps: `expected`.
"""

from __future__ import annotations

from ...record import Record
from . import places
from .lines import GENESIS, BadLine, Head, parse
from .trail import GAP, PRUNE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .lines import Line
    from .trail import Trail, Where

# A trail of garbage must not fill the memory with findings.
MOST_FINDINGS = 100
# A kill between a line and its head leaves one line beyond it.
MOST_BEYOND = 1


class Finding(Record):
    """Something that is not as it was written. `line` counts from 1; 0: the whole file."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.what}" if where else self.what


class Report(Record):
    """What `verify` saw."""

    findings: tuple[Finding, ...]
    files: int
    lines: int
    # Of the last line that is there.
    seq: int
    hash: str
    # Whether half a line stands at the end: of one who was killed, never acknowledged.
    torn: bool


def verify(where: Where, expected: tuple[int, str] | None = None) -> tuple[Finding, ...]:
    """All that is wrong; nothing if the trail is whole."""
    return report(where, expected).findings


def report(where: Where, expected: tuple[int, str] | None = None) -> Report:
    """Read the whole trail."""
    walk = Walk(places.look(where), expected)
    walk.run()
    return Report(
        findings=tuple(walk.findings), files=len(walk.trail.sizes), lines=walk.count,
        seq=walk.seq, hash=walk.hash, torn=walk.torn,
    )  # fmt: skip


class Walk:
    """One pass over the trail."""

    def __init__(self, trail: Trail, expected: tuple[int, str] | None) -> None:
        self.trail = trail
        self.findings: list[Finding] = []
        self.count = 0
        self.seq, self.hash = 0, GENESIS
        self.torn = False
        self._expected = expected
        # Where the trail may begin after files were pruned: (file, seq, hash) of what was before.
        self._anchors: set[tuple[int, int, str]] = {(0, 0, GENESIS)}
        self._begin: tuple[int, int, str] | None = None
        # Whether the head fits what is where it points. A new trail has no file yet.
        self._met = not trail.sizes and trail.head == Head()
        # Numbers of lines that must be there with a hash, until they are met.
        self._wanted: dict[int, str] = {}

    def run(self) -> None:
        """File by file, then what holds for all of them."""
        head = self.trail.head
        if head is None:
            self._find("head", 0, "is missing or was changed")
        if self._expected:
            self._wanted[self._expected[0]] = self._expected[1]
        numbers = list(self.trail.sizes)
        for before, number in zip([None, *numbers], numbers, strict=False):
            if before is not None and number != before + 1:
                self._find(places.name_of(before + 1), 0, "is missing")
            self._file(number, head, last=number == numbers[-1])
        self._check_begin()
        if head is not None:
            self._check_end(head)
        self._check_expected()

    def _file(self, number: int, head: Head | None, *, last: bool) -> None:
        name = places.name_of(number)
        # A file that was made for a line that did not come.
        self._meet(number, 0)
        for at, (end, raw) in enumerate(self.trail.lines(number), 1):
            beyond = head is None or (number, end) > (head.file, head.end)
            if not raw.endswith(b"\n"):
                # Whatever the head has acknowledged ends with a newline.
                self.torn = last and beyond and head is not None
                if not self.torn:
                    self._find(name, at, "is cut")
                continue
            try:
                line = parse(raw[:-1])
            except BadLine as error:
                self._find(name, at, str(error))
                continue
            self._line(name, at, line, number)
            self._meet(number, end)

    def _meet(self, number: int, end: int) -> None:
        """Compare with the head, where it says that the trail ends."""
        head = self.trail.head
        if head is not None and (number, end) == (head.file, head.end):
            self._met = (self.seq, self.hash) == (head.seq, head.hash)

    def _line(self, name: str, at: int, line: Line, number: int) -> None:
        self.count += 1
        if self._begin is None:
            self._begin = (number - 1, line.seq - 1, line.prev)
            self.seq, self.hash = line.seq - 1, line.prev
        if line.prev != self.hash or line.seq != self.seq + 1:
            self._find(name, at, _order(line.seq, self.seq))
        self.seq, self.hash = line.seq, line.hash
        if line.seq in self._wanted and self._wanted.pop(line.seq) != line.hash:
            self._find(name, at, f"is not the line {line.seq} that was expected")
        action = line.record.get("action")
        if action == GAP:
            self._find(name, at, f"damage was met: {line.record.get('reason', '')}")
        elif action == PRUNE:
            self._anchors |= _anchors(line)

    def _check_begin(self) -> None:
        """The first line that is there must be the first of all, or stand behind pruned files."""
        if self._begin is not None and self._begin not in self._anchors:
            first = places.name_of(self._begin[0] + 1)
            self._find(first, 1, f"is not the beginning: {self._begin[1]} lines before are missing")

    def _check_end(self, head: Head) -> None:
        if head.seq > self.seq:
            first, last = self.seq + 1, head.seq
            which = f"line {last} is" if first == last else f"lines {first} to {last} are"
            self._find("", 0, f"{which} missing at the end")
        elif self.seq - head.seq > MOST_BEYOND:
            self._find("head", 0, f"is behind: it names line {head.seq} of {self.seq}")
        elif not self._met:
            self._find("head", 0, "does not fit the line that it points to")

    def _check_expected(self) -> None:
        for seq, digest in self._wanted.items():
            if (seq, digest) not in {(anchor[1], anchor[2]) for anchor in self._anchors}:
                self._find("", 0, f"line {seq}, which was expected, is missing or pruned")

    def _find(self, file: str, line: int, what: str) -> None:
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(file=file, line=line, what=what))


def _order(seq: int, before: int) -> str:
    if seq <= before:
        return f"is out of order: line {seq} after line {before}"
    if seq == before + 2:
        return f"line {before + 1} is missing before it"
    if seq > before + 1:
        return f"lines {before + 1} to {seq - 1} are missing before it"
    return "does not follow the line before it"


def _anchors(line: Line) -> set[tuple[int, int, str]]:
    """The ends of the files that a pruning has removed."""
    try:
        return {
            (int(one["file"]), int(one["seq"]), str(one["hash"]))
            for one in line.record["request"]["removed"]
        }
    except (KeyError, TypeError, ValueError):
        return set()
