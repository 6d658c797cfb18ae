"""The parts by themselves: the header, answers, the lease's clock, buckets, output, identity."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from agent_sandbox.errors import SandboxError
from agent_sandbox.service.core.journal import STDERR, STDOUT, Journal
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.quotas import Buckets, Rate
from agent_sandbox.service.replicas import claims, identity, outputs, upstream
from agent_sandbox.service.replicas.claims import Claim
from agent_sandbox.service.replicas.lease import LEASE, MARGIN, Lease, peer_of
from agent_sandbox.service.replicas.outputs import PART, SavedJournal
from agent_sandbox.service.replicas.rates import SharedBuckets
from agent_sandbox.service.replicas.upstream import Broken
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.store_postgres import PgStore
from agent_sandbox.service.values import Execution

from .ground import go

KEY = bytes(range(32))
CLAIM = Claim(
    sender="a", receiver="b", at=100.0, request_id="r", method="GET", target="/x", address="1.2.3.4"
)


@pytest.fixture
def pg(database: Database, tmp_path: Path) -> Iterator[PgStore]:
    made = PgStore(database, data=str(tmp_path / "pg"), home="me")
    yield made
    made.close()


# --- the header


@given(some.text(max_size=300))
def test_no_text_is_a_claim_without_the_key(text: str) -> None:
    with pytest.raises(Problem, match="between replicas"):
        claims.read(text, KEY, receiver="b", method="GET", target="/x", headers={}, now=100.0)


@given(some.integers(min_value=0, max_value=2000), some.integers(min_value=0, max_value=127))
def test_no_changed_character_passes(place: int, value: int) -> None:
    good = claims.write(CLAIM.replace(digest=claims.digest({})), KEY)
    asked = {"receiver": "b", "method": "GET", "target": "/x", "headers": {}, "now": 100.0}
    assert claims.read(good, KEY, **asked).address == "1.2.3.4"  # type: ignore[arg-type]
    place %= len(good)
    bad = good[:place] + chr(value) + good[place + 1 :]
    if bad != good:
        with pytest.raises(Problem):
            claims.read(bad, KEY, **asked)  # type: ignore[arg-type]


ASKED: dict[str, Any] = {
    "receiver": "b", "method": "GET", "target": "/x", "headers": {}, "now": 100.0,
}  # fmt: skip


def _sealed(values: dict[str, object]) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(values).encode()).decode()
    return f"{payload}.{claims._mac(payload, KEY)}"


def test_replicas_of_two_versions_understand_each_other() -> None:
    """A later one may have a field more, which is left out where it says nothing."""
    good = CLAIM.replace(digest=claims.digest({}))

    class Later(Claim):
        region: str = ""

    later = Later(**vars(good))
    assert claims.read(claims.write(later, KEY), KEY, **ASKED) == good
    # An earlier one has fewer: what it does not say is as it was before there was the field.
    said = {k: v for k, v in vars(good).items() if k not in ("session", "owner", "nonce")}
    assert claims.read(_sealed(said), KEY, **ASKED) == good


@pytest.mark.parametrize("change", [{"region": "x"}, {"sender": None}])
def test_what_is_not_understood_may_be_asked_again(change: dict[str, object]) -> None:
    """Not a final refusal, as for one who has no key: the update will be over soon."""
    said = {**vars(CLAIM), "digest": claims.digest({}), **change}
    if change.get("sender", "") is None:
        del said["sender"]
    with pytest.raises(Problem) as caught:
        claims.read(_sealed(said), KEY, **ASKED)
    assert (caught.value.code, caught.value.status) == ("REPLICA_UNAVAILABLE", 503)


# --- answers of another replica


def _head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


def test_an_answer_is_read_by_its_length() -> None:
    head = upstream.parse(_head("HTTP/1.1 200 OK", "Content-Length: 5", "X-A: b"))
    assert (head.status, head.length, head.chunked, head.keep) == (200, 5, False, True)
    assert head.field("x-a") == "b"
    head = upstream.parse(_head("HTTP/1.1 200 ", "transfer-encoding: chunked", "connection: close"))
    assert (head.length, head.chunked, head.keep) == (None, True, False)


@pytest.mark.parametrize("lines", [
    ["HTTP/1.0 200 OK"], ["HTTP/1.1 20 OK"], ["nonsense"], ["HTTP/1.1 abc"],
    ["HTTP/1.1 200 OK", "content-length: 1", "content-length: 1"],
    ["HTTP/1.1 200 OK", "content-length: 1", "transfer-encoding: chunked"],
    ["HTTP/1.1 200 OK", "transfer-encoding: gzip"], ["HTTP/1.1 200 OK", "content-length: -1"],
    ["HTTP/1.1 200 OK", "content-length: 1x"], ["HTTP/1.1 200 OK", "no colon"],
    ["HTTP/1.1 200 OK", "bad name: x"], ["HTTP/1.1 200 OK", " folded: x"],
    ["HTTP/1.1 200 OK", "a: \x01"], ["HTTP/1.1 200 OK", *(f"x{n}: y" for n in range(200))],
])  # fmt: skip
def test_an_answer_that_two_could_read_differently_is_none(lines: list[str]) -> None:
    with pytest.raises(Broken):
        upstream.parse(_head(*lines))


# --- the lease


def test_a_lease_ends_for_us_before_it_ends_for_others(pg: PgStore) -> None:
    now = [1000.0]
    lease = Lease(pg, "me", clock=lambda: now[0])
    assert not lease.held()
    lease.join()
    assert lease.held()
    now[0] += LEASE - MARGIN - 0.01
    lease.check()
    now[0] += 0.02
    with pytest.raises(Problem, match="lease"):
        lease.check()
    # The database's own clock says that it is not over yet: it may be renewed.
    assert lease.renew()
    assert lease.held()
    lease.close()


def test_a_second_process_with_the_same_name_ends_the_first(pg: PgStore) -> None:
    first, second = Lease(pg, "me"), Lease(pg, "me")
    first.join()
    second.join()
    assert not first.renew()
    assert second.renew()
    first.leave()
    assert second.renew()
    second.leave()
    assert not second.renew()
    first.close()
    second.close()


def test_cannot_live_twice_from_a_copied_directory(pg: PgStore, tmp_path: Path) -> None:
    """A golden image, or a disk that was cloned: each would end the other for ever."""
    first = Lease(pg, "me", place="here")
    first.join()
    with pytest.raises(SandboxError) as caught:
        Lease(pg, "me", place="there").join()
    assert caught.value.code == "replica-twin"
    assert first.renew()
    # Another life of the same directory takes over at once; any other when the first is over.
    Lease(pg, "me", place="here").join()
    pg.change("UPDATE replicas SET ends = 0")
    Lease(pg, "me", place="there").join()
    first.close()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    places = [identity.place(str(tmp_path / name)) for name in ("a", "b", "a")]
    assert places[0] == places[2] != places[1]


def test_a_lease_that_is_over_is_not_renewed(pg: PgStore) -> None:
    lease = Lease(pg, "me")
    lease.join()
    pg.change("UPDATE replicas SET ends = 0")
    assert not lease.renew()
    lease.close()


def test_the_address_of_a_peer_may_have_colons() -> None:
    peer = peer_of("id", "[::1]:80", "ff")
    assert (peer.address.host, peer.address.port, peer.address.authority) == ("::1", 80, "[::1]:80")
    assert peer_of("id", "", "").address.port == 0


# --- rates


def test_a_shared_bucket_gives_what_one_in_memory_gives(pg: PgStore) -> None:
    rate = Rate(count=3, seconds=60.0, rule="r")
    shared, memory = SharedBuckets(pg, "x"), Buckets()
    for _ in range(5):
        ours = shared.take(("a", "b"), rate, 0.0)
        theirs = memory.take(("a", "b"), rate, 0.0)
        assert (ours.allowed, ours.limit, ours.remaining) == (
            theirs.allowed, theirs.limit, theirs.remaining,
        )  # fmt: skip
        assert ours.retry_after == pytest.approx(theirs.retry_after, abs=1.0)
        assert ours.reset == pytest.approx(theirs.reset, abs=1.0)
    # Another name, and another key, are other buckets.
    assert SharedBuckets(pg, "y").take(("a", "b"), rate, 0.0).remaining == 2
    assert shared.take("a", rate, 0.0).remaining == 2


def test_a_shared_bucket_fills_with_the_databases_time(pg: PgStore) -> None:
    rate, bucket = Rate(count=20, seconds=1.0), SharedBuckets(pg, "x")
    while bucket.take("a", rate, 0.0).allowed:
        pass
    pg.change("UPDATE rates SET at = at - 0.5")
    taken = 0
    while bucket.take("a", rate, 0.0).allowed:
        taken += 1
    assert 10 <= taken <= 14
    # A clock that goes back fills nothing, and nothing beyond the brim.
    pg.change("UPDATE rates SET at = at + 100")
    assert not bucket.take("a", rate, 0.0).allowed
    pg.change("UPDATE rates SET at = at - 1000, level = 0")
    assert bucket.take("a", rate, 0.0).remaining == 19


# --- output


def test_output_in_the_database_is_the_output_of_the_file(pg: PgStore, tmp_path: Path) -> None:
    async def work() -> None:
        pg.put_execution(Execution(id="e", sandbox="s", owner="o", command=("x",)))
        journal = Journal(str(tmp_path / "journal"), limit=10 << 20)
        for number in range(300):
            journal.append(STDOUT if number % 3 else STDERR, os.urandom(number * 37))
        journal.close()
        assert journal.end > 3 * PART
        await outputs.save(pg, "e", journal)
        saved = SavedJournal(pg, "e")
        assert saved.end == journal.end
        whole = await journal.collect(10 << 20)
        assert await saved.collect(10 << 20) == whole
        frames = [frame async for frame in journal.follow()]
        assert [frame async for frame in saved.follow()] == frames
        middle = frames[len(frames) // 2].offset
        rest = [frame async for frame in saved.follow(middle)]
        assert rest == [frame for frame in frames if frame.offset > middle]
        with pytest.raises(Problem):
            await saved.check(middle + 1)
        # It goes with its execution; one that is forgotten gets none.
        pg.delete_execution("e")
        assert pg.rows("SELECT 1 FROM outputs") == []
        await outputs.save(pg, "e", journal)
        assert pg.rows("SELECT 1 FROM outputs") == []

    go(work())


def test_output_of_a_second_start_is_all_that_is_saved(pg: PgStore, tmp_path: Path) -> None:
    async def work() -> None:
        pg.put_execution(Execution(id="e", sandbox="s", owner="o", command=("x",)))
        journal = Journal(str(tmp_path / "journal"), limit=10 << 20)
        journal.append(STDOUT, bytes(PART + 1))
        journal.restart()
        journal.append(STDOUT, b"x" * (PART + 2))
        journal.close()
        await outputs.save(pg, "e", journal)
        row = pg.one("SELECT sum(length(data)) FROM outputs")
        assert row is not None
        assert row[0] == journal.size < PART + 100
        saved = SavedJournal(pg, "e", journal.begins)
        assert (saved.end, saved.size) == (journal.end, journal.size)
        frames = [frame async for frame in journal.follow()]
        for offset in (0, journal.begins):
            assert [frame async for frame in saved.follow(offset)] == frames
            assert (await saved.collect(10 << 20, offset)).stdout == b"x" * (PART + 2)
        with pytest.raises(Problem):
            await saved.check(journal.begins + 1)

    go(work())


def test_saving_output_leaves_the_loop_to_others(pg: PgStore, tmp_path: Path) -> None:
    import asyncio

    async def work() -> None:
        pg.put_execution(Execution(id="e", sandbox="s", owner="o", command=("x",)))
        journal = Journal(str(tmp_path / "journal"), limit=10 << 20)
        journal.append(STDOUT, bytes(10 << 20))
        journal.close()
        turns, longest, last = 0, 0.0, time.monotonic()
        saving = asyncio.ensure_future(outputs.save(pg, "e", journal))
        while not saving.done():
            await asyncio.sleep(0)
            now = time.monotonic()
            turns, longest, last = turns + 1, max(longest, now - last), now
        assert turns >= 10 * (1 << 20) // PART
        # Far less than the whole takes.
        assert longest < 0.5

    go(work())


# --- who we are


def test_a_replica_has_one_name_for_the_life_of_its_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first = identity.of(str(tmp_path))
    assert identity.of(str(tmp_path)) == first
    (tmp_path / identity.FILE).write_text("../../etc\n")
    with pytest.raises(SandboxError, match="no id"):
        identity.of(str(tmp_path))
    (tmp_path / identity.FILE).unlink()
    (tmp_path / identity.FILE).symlink_to("/etc/hostname")
    with pytest.raises(SandboxError, match="link"):
        identity.of(str(tmp_path))


def test_others_are_told_an_address_that_leads_here() -> None:
    assert identity.advertised(None, [("127.0.0.1", 80)]) == "127.0.0.1:80"
    assert identity.advertised(("10.0.0.1", 0), [("0.0.0.0", 80)]) == "10.0.0.1:80"
    assert identity.advertised(("fd00::1", 81), [("::", 80)]) == "[fd00::1]:81"
    for given_one, bound in ((None, [("0.0.0.0", 80)]), (None, []), (("::", 80), [("::1", 80)])):
        with pytest.raises(SandboxError) as caught:
            identity.advertised(given_one, bound)
        assert caught.value.code == "serve-advertise"
