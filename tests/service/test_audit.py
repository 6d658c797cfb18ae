"""The audit trail as it is written and read."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.service.audit import Audit, lines, places, prune, read
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.values import Agent

from .audit_trails import AGENT, Clock, Desk, findings, logs, make, split, write

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def desk(either: Database | None, tmp_path: Path) -> Iterator[Desk]:
    """A trail of either kind."""
    made = Desk(tmp_path / "audit", either)
    yield made
    made.close()


def records(trail: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in logs(trail) for line in split(path)]


# --- one line


def test_a_line_says_who_did_what_and_how_it_was_decided(desk: Desk) -> None:
    audit = desk.open(clock=lambda: 1_700_000_000.25)
    seq = audit.write(
        AGENT, "exec.end", target="exc-aaaa", decision="deny", rule="limits.max_memory",
        reason="too much", request={"cmd": ["echo", "hi"], "cwd": "/workspace"},
        result={"status": 422, "exitCode": None, "durationMs": 1.5}, limits={"memory": 512 << 20},
        request_id="req_1",
    )  # fmt: skip
    assert seq == audit.seq == 1
    record = desk.records()[0]
    digest = record.pop("hash")
    assert record == {
        "v": 1, "ts": "2023-11-14T22:13:20.250Z", "seq": 1, "prev": "0" * 64, "requestId": "req_1",
        "actor": {"agent": "worker", "key": "sbx_ab12cd34", "uid": 1000, "addr": "127.0.0.1"},
        "action": "exec.end", "target": {"type": "execution", "id": "exc-aaaa"},
        "decision": "deny", "rule": "limits.max_memory", "reason": "too much",
        "request": {"cmd": ["echo", "hi"], "cwd": "/workspace"},
        "result": {"status": 422, "exitCode": None, "durationMs": 1.5},
        "limits": {"memory": 512 << 20},
    }  # fmt: skip
    # As anybody can check with other tools.
    plain = json.dumps(record, separators=(",", ":")).encode()
    assert digest == hashlib.sha256(plain).hexdigest()
    assert audit.head == f"1:{digest}"


def test_what_is_empty_is_left_out(desk: Desk) -> None:
    desk.open().write(None, "sandbox.expire", target={"type": "x", "id": "y"})
    record = desk.records()[0]
    assert set(record) == {"v", "ts", "seq", "prev", "action", "target", "decision", "hash"}
    assert record["target"] == {"type": "x", "id": "y"}


@pytest.mark.parametrize(
    "text", ["\n", "\r\n", "\u2028", "\0", "\x1b[2J", "\ud800", '","hash":"' + "0" * 64 + '"}\n']
)
def test_no_text_can_break_out_of_its_line(desk: Desk, text: str) -> None:
    audit = desk.open()
    agent = Agent(name=text, key=text, scopes=frozenset(), address=text)
    audit.write(agent, text, target=text, rule=text, reason=text, request={text: [text]},
                result={"x": text}, request_id=text)  # fmt: skip
    raw = b"".join(desk.raw())
    assert raw.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in raw[:-1])
    assert json.loads(raw)["actor"]["agent"] == text
    assert desk.findings() == []


def test_each_line_hangs_on_the_one_before(desk: Desk) -> None:
    desk.make()
    found = desk.records()
    assert [record["seq"] for record in found] == list(range(1, 13))
    for before, after in itertools.pairwise(found):
        assert after["prev"] == before["hash"]


def test_values_that_are_no_json_do_not_stop_a_line(desk: Desk) -> None:
    audit = desk.open()
    deep: object = "x"
    for _ in range(2000):
        deep = [deep]
    audit.write(None, "x", request={
        "a": float("inf"), "b": float("nan"), "c": object(), "d": b"bytes", "e": deep,
        "f": {1: 2}, "g": {"h": {"i": {"j": {"k": {"l": 1}}}}},
    })  # fmt: skip
    assert desk.findings() == []


def test_a_line_stays_small_whatever_an_agent_sends(desk: Desk) -> None:
    audit = desk.open()
    audit.write(
        AGENT, "exec.start", reason="r" * 10**6, target="t" * 10**6,
        request={"cmd": ["x" * 10**6] * 1000, "cwd": "c" * 10**6, "many": list(range(10**5)),
                 **{f"k{number}": "v" * 10**4 for number in range(1000)}},
    )  # fmt: skip
    assert len(desk.raw()[0]) < 400_000
    assert desk.findings() == []


def test_a_line_costs_less_than_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    """Of processor time, in the best of several rounds: other work may run beside."""
    audit = Audit(str(tmp_path / "audit"))
    rounds = []
    for _ in range(8):
        start = time.process_time()
        for number in range(300):
            write(audit, number)
        rounds.append((time.process_time() - start) / 300)
    assert min(rounds) < 0.0001


# --- several writers


def test_threads_may_write_at_once(desk: Desk) -> None:
    audit = desk.open(rotate_bytes=20_000)
    threads = [
        threading.Thread(target=lambda: [write(audit, number) for number in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(desk.records()) == 400
    assert desk.findings() == []


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from agent_sandbox.service.audit import Audit
audit = Audit(sys.argv[2], rotate_bytes=20_000)
for number in range(150):
    audit.write(None, "x", request={"process": sys.argv[3], "number": number})
"""


def test_processes_may_write_at_once(tmp_path: Path) -> None:
    """The service and `sandboxctl token`."""
    audit = Audit(str(tmp_path / "audit"), rotate_bytes=20_000)
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, SOURCE, audit.directory, str(number)])
        for number in range(3)
    ]
    while any(process.poll() is None for process in started):
        write(audit, 0)
    assert [process.returncode for process in started] == [0, 0, 0]
    assert findings(tmp_path / "audit") == []
    seen = [str(r["request"]) for r in records(tmp_path / "audit") if r["action"] == "x"]
    assert len(seen) == len(set(seen)) == 450


def test_a_writer_goes_on_behind_half_a_line_of_another(tmp_path: Path) -> None:
    """Of `sandboxctl`, killed in the middle, while the service runs."""
    audit = Audit(str(tmp_path / "audit"))
    write(audit, 1)
    with open(logs(tmp_path / "audit")[0], "ab") as file:
        file.write(b'{"v":1,"ts":"20')
    assert findings(tmp_path / "audit") == []
    write(audit, 2)
    assert [r["action"] for r in records(tmp_path / "audit")] == [
        "exec.start", "audit.recovered", "exec.start",
    ]  # fmt: skip
    assert findings(tmp_path / "audit") == []


def test_a_stuck_lock_is_a_problem_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    audit = Audit(str(tmp_path / "audit"))
    monkeypatch.setattr(places, "LOCK_SECONDS", 0.05)
    with open(tmp_path / "audit" / "lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Problem) as caught:
            write(audit, 1)
    assert (caught.value.code, caught.value.status) == ("AUDIT_UNAVAILABLE", 503)
    assert write(audit, 1) == 1


# --- rotation


def test_files_change_and_the_chain_goes_on(desk: Desk) -> None:
    desk.make(lines=50, rotate_bytes=1500)
    assert len(desk.files()) > 10
    assert all(len(b"".join(lines)) <= 1500 for lines in desk.files().values())
    assert desk.findings() == []
    # And over restarts.
    for number in range(5):
        audit = desk.open(rotate_bytes=1500)
        write(audit, number)
    assert [record["seq"] for record in desk.records()] == list(range(1, 56))
    assert desk.findings() == []


def test_a_line_that_is_larger_than_a_file_has_one_of_its_own(desk: Desk) -> None:
    desk.make(lines=3, rotate_bytes=10)
    assert [len(lines) for lines in desk.files().values()] == [1, 1, 1]
    assert desk.findings() == []


def test_old_files_are_removed_and_the_rest_verifies(desk: Desk) -> None:
    desk.make(lines=40, rotate_bytes=2000)
    before = list(desk.files())
    boundary = json.loads(desk.files()[before[3]][-1])["ts"]
    audit = desk.open(rotate_bytes=2000, clock=Clock(1_800_000_000.0))
    removed = prune.prune(audit, AGENT, read.moment(boundary, 0.0))
    assert removed == before[:3]
    assert desk.findings() == []
    write(audit, 1)
    # Again, with more.
    removed += prune.prune(audit, AGENT, 1_750_000_000.0)
    assert removed == before
    assert desk.findings() == []
    # The newest file stays, however old it is.
    prune.prune(audit, AGENT, 1e10)
    assert desk.files()
    assert desk.findings() == []
    desk.open()
    assert desk.findings() == []


@pytest.mark.parametrize("unlinked", [0, 1, 2, 3])
def test_a_pruning_that_was_killed_leaves_a_whole_trail(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, unlinked: int
) -> None:
    desk.make(lines=40, rotate_bytes=2000)
    audit = desk.open(rotate_bytes=2000)
    left = unlinked
    remove = audit.remove

    def killed(number: int) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        remove(number)

    monkeypatch.setattr(audit, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        prune.prune(audit, AGENT, 1_750_000_000.0)
    monkeypatch.undo()
    assert desk.findings() == []
    prune.prune(audit, AGENT, 1_750_000_000.0)
    assert desk.findings() == []


def test_cannot_pass_off_a_removed_file_as_pruned(tmp_path: Path) -> None:
    """One more than the pruning has written down."""
    trail = make(tmp_path / "audit", lines=40, rotate_bytes=2000)
    audit = Audit(str(trail), rotate_bytes=2000, clock=Clock(1_800_000_000.0))
    boundary = json.loads(split(logs(trail)[3])[-1])["ts"]
    prune.prune(audit, AGENT, read.moment(boundary, 0.0))
    assert findings(trail) == []
    logs(trail)[0].unlink()
    assert any("not the beginning" in finding for finding in findings(trail))


# --- reading


def test_the_newest_lines_come_first_and_are_filtered(desk: Desk) -> None:
    audit = desk.open(rotate_bytes=2000, clock=Clock())
    for number in range(30):
        agent = AGENT.replace(name=f"w{number % 3}")
        action = ("exec.start", "exec.end", "executive")[number % 3]
        decision = "deny" if number % 10 == 0 else "allow"
        audit.write(agent, action, decision=decision, target=f"exc-{number}")

    def seqs(limit: int = 100, **wanted: object) -> list[int]:
        wish = read.Filter().replace(**wanted)
        return [record["seq"] for record in read.newest(audit, wish, limit)]

    assert seqs() == list(range(30, 0, -1))
    assert seqs(limit=3) == [30, 29, 28]
    assert seqs(limit=2, before=10) == [9, 8]
    assert seqs(agent="w1") == list(range(29, 0, -3))
    assert seqs(agent="w1", action="exec.start") == []
    assert seqs(action="exec") == [n for n in range(30, 0, -1) if n % 3]
    assert seqs(decision="deny") == [21, 11, 1]
    assert seqs(target="exc-4") == [5]
    assert seqs(since=1_700_000_010.0, until=1_700_000_011.0) == [21, 20]
    assert seqs(after=28) == [30, 29]
    in_order = [r["seq"] for _, r in read.in_order(audit, read.Filter(agent="w0"))]
    assert in_order == list(range(1, 31, 3))


def test_lines_longer_than_a_block_are_read_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "BLOCK", 100)
    trail = make(tmp_path / "audit", lines=20)
    found = read.newest(str(trail), read.Filter(), 100)
    assert [record["seq"] for record in found] == list(range(20, 0, -1))


def test_new_lines_are_followed_over_files(desk: Desk) -> None:
    follower = read.Follower(desk.make())
    assert follower.new(read.Filter()) == []
    audit = desk.open(rotate_bytes=1500)
    for number in range(10):
        write(audit, number)
        assert [r["seq"] for r in follower.new(read.Filter())] == [13 + number]
    assert follower.new(read.Filter()) == []


@pytest.mark.parametrize(
    ("text", "moment"),
    [("2h", 1000.0 - 7200), ("1970-01-01T00:01:00Z", 60.0), ("1970-01-02", 86400.0),
     ("1970-01-01T01:00:00+01:00", 0.0)],
)  # fmt: skip
def test_moments(text: str, moment: float) -> None:
    assert read.moment(text, 1000.0) == moment


def test_no_moment_is_said_so() -> None:
    with pytest.raises(ValueError, match="it must be a date"):
        read.moment("yesterday", 0.0)


def test_stamps_sort_as_moments_do() -> None:
    moments = [0.0, 0.001, 0.999, 1.0, 59.9999, 60.0, 1e9, 1e9 + 0.5]
    assert sorted(map(lines.stamp, moments)) == list(map(lines.stamp, moments))
