"""The store: what goes in comes out, in order, once, and survives a kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import HostError
from agent_sandbox.service import store_address, store_rows
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.state import State
from agent_sandbox.service.store import MIGRATIONS, Store
from agent_sandbox.service.values import EXITED, RUNNING, Execution, Network, Resources, Sandbox

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def store(state_store: State) -> State:
    """Of either kind."""
    return state_store


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Store]:
    """SQLite, where the file is what matters."""
    found = Store(str(tmp_path / "data"))
    yield found
    found.close()


def sandbox(number: int, **changes: object) -> Sandbox:
    values = Sandbox(
        id=f"sbx-{number:03d}", owner="worker", backend="bwrap", state=RUNNING, created=100.0
    )
    return values.replace(**changes)


def execution(number: int, **changes: object) -> Execution:
    values = Execution(
        id=f"exc-{number:03d}", sandbox="sbx-001", owner="worker", command=("true",), started=5.0
    )
    return values.replace(**changes)


# --- what goes in comes out

TEXT = st.text(max_size=20)
MAPPING = st.dictionaries(TEXT, TEXT, max_size=3)
SANDBOXES = st.builds(
    Sandbox,
    id=st.from_regex(r"sbx-[a-z2-7]{26}", fullmatch=True),
    owner=st.just("worker"), backend=st.just("bwrap"), state=st.just(RUNNING),
    image=TEXT, env=MAPPING, metadata=MAPPING, enforced=MAPPING, reason=TEXT,
    resources=st.builds(Resources, memory=st.none() | st.integers(1, 1 << 62),
                        cpus=st.none() | st.floats(0.1, 64)),
    network=st.builds(Network, mode=TEXT, allow=st.lists(TEXT, max_size=3).map(tuple)),
    created=st.floats(0, 1e11), one_shot=st.booleans(),
)  # fmt: skip


@given(SANDBOXES)
def test_a_sandbox_is_read_as_it_was_written(value: Sandbox) -> None:
    assert store_rows.sandbox_of(store_rows.sandbox_text(value)) == value


@given(st.lists(st.text(), min_size=1, max_size=4), st.none() | st.integers(0, 255), TEXT)
def test_an_execution_is_read_as_it_was_written(
    command: list[str], code: int | None, error: str
) -> None:
    value = execution(1, command=tuple(command), exit_code=code, error=error)
    assert store_rows.execution_of(store_rows.execution_text(value)) == value


def test_fields_of_a_later_version_are_left_out() -> None:
    text = store_rows.sandbox_text(sandbox(1))
    assert store_rows.sandbox_of(text[:-1] + ',"later":1}') == sandbox(1)


def test_a_row_is_replaced_and_removed(store: State) -> None:
    store.put_sandbox(sandbox(1))
    store.put_sandbox(sandbox(1, state="Paused"))
    found = store.get_sandbox("sbx-001")
    assert found is not None
    assert found.state == "Paused"
    assert store.count_sandboxes() == store.count_sandboxes("worker") == 1
    assert store.count_sandboxes("other") == 0
    store.delete_sandbox("sbx-001")
    assert store.get_sandbox("sbx-001") is None
    assert store.count_sandboxes() == 0


def test_half_a_character_is_not_found_and_no_crash(store: State) -> None:
    """A lone surrogate or a NUL can come in by JSON; no database takes the first."""
    for text in ("\ud800", "x\0", "\0"):
        assert store.get_sandbox(text) is None
        assert store.get_execution(text) is None
        assert store.idempotent("worker", text) is None
        assert store.sandboxes(metadata={text: "x"}) == []
        assert store.sandboxes(owner=text) == []
    store.put_sandbox(sandbox(1, metadata={"j": "x\0"}, env={"A": "\0"}, reason="\ud800"))
    assert store.get_sandbox("sbx-001") == sandbox(
        1, metadata={"j": "x\0"}, env={"A": "\0"}, reason="\ud800"
    )
    # What one agent has put in does not spoil the list of another.
    store.put_sandbox(sandbox(2, metadata={"k": "x"}))
    assert [one.id for one in store.sandboxes(metadata={"k": "x"})] == ["sbx-002"]


# --- lists


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def pages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[State]:
    """One store for many examples."""
    given = None
    if request.param == "postgres":
        given = store_address.read(request.getfixturevalue("postgres").new(), "test")
    made = store_address.open_state(str(tmp_path_factory.mktemp("pages") / "data"), given)
    yield made
    made.close()


@settings(max_examples=30, deadline=None)
@given(
    moments=st.lists(st.sampled_from([1.0, 1.5, 2.0, 1e9 + 1 / 3]), max_size=25),
    limit=st.integers(1, 7),
    newest=st.booleans(),
)
def test_pages_are_the_whole_list_in_order(
    pages: State, moments: list[float], limit: int, newest: bool
) -> None:
    """Also where many were made in the same moment, and from either end."""
    with pages.transaction():
        for table in ("sandboxes", "executions"):
            pages.change(f"DELETE FROM {table}")
    made = [sandbox(number, created=at) for number, at in enumerate(moments)]
    for one in made[::2] + made[1::2]:
        pages.put_sandbox(one)
    found: list[Sandbox] = []
    after = None
    while page := pages.sandboxes(after=after, limit=limit, newest=newest):
        found += page
        after = store_rows.cursor(page[-1].created, page[-1].id)
    assert found == sorted(made, key=lambda one: (one.created, one.id), reverse=newest)


@pytest.mark.parametrize("text", ["", "x", "AAAA", "%%%", "bmFuIHg", "aW5mIHg", "é", "1" * 3000])
def test_a_cursor_that_is_not_ours_is_the_clients_mistake(store: State, text: str) -> None:
    with pytest.raises(Problem) as caught:
        store.sandboxes(after=text)
    assert (caught.value.code, caught.value.field) == ("INVALID", "cursor")


def test_lists_are_filtered(store: State) -> None:
    store.put_sandbox(sandbox(1, metadata={"team": "a", 'q"': "$.x"}))
    store.put_sandbox(sandbox(2, owner="other", metadata={"team": "a"}))
    store.put_sandbox(sandbox(3, state="Paused"))

    def ids(**wanted: object) -> list[str]:
        return [one.id for one in store.sandboxes(**wanted)]  # type: ignore[arg-type]

    assert ids() == ["sbx-001", "sbx-002", "sbx-003"]
    assert ids(owner="worker") == ["sbx-001", "sbx-003"]
    assert ids(owner="worker", state="Paused") == ["sbx-003"]
    assert ids(metadata={"team": "a"}) == ["sbx-001", "sbx-002"]
    assert ids(metadata={"team": "a"}, owner="other") == ["sbx-002"]
    assert ids(metadata={"team": "a", 'q"': "$.x"}) == ["sbx-001"]
    assert ids(metadata={"team": "b"}) == []
    assert ids(limit=1) == ["sbx-001"]
    assert ids(limit=-1) == []


@pytest.mark.parametrize("value", ["' OR 1=1 --", "x'; DROP TABLE sandboxes; --", "%", "*"])
def test_cannot_inject_sql_through_a_filter(store: State, value: str) -> None:
    store.put_sandbox(sandbox(1))
    assert store.sandboxes(owner=value) == []
    assert store.sandboxes(metadata={value: value}) == []
    assert store.get_sandbox(value) is None
    assert store.count_sandboxes() == 1


def test_executions_are_listed_and_forgotten(store: State) -> None:
    store.put_execution(execution(1, state=EXITED, ended=10.0))
    store.put_execution(execution(2, state=EXITED, ended=20.0, owner="other"))
    store.put_execution(execution(3, sandbox="sbx-002"))
    assert [one.id for one in store.executions(sandbox="sbx-001")] == ["exc-001", "exc-002"]
    assert [one.id for one in store.executions(owner="other")] == ["exc-002"]
    assert [one.id for one in store.executions(state=RUNNING)] == ["exc-003"]
    after = store_rows.cursor(5.0, "exc-001")
    assert [one.id for one in store.executions(after=after)] == ["exc-002", "exc-003"]
    # One that runs has no end yet, and stays.
    assert store.forget_executions(15.0) == ["exc-001"]
    assert store.forget_executions(1e9) == ["exc-002"]
    assert [one.id for one in store.executions()] == ["exc-003"]


# --- idempotency keys


def test_a_key_is_claimed_once_per_owner(store: State) -> None:
    assert store.idempotent("a", "k") is None
    assert store.claim("a", "k", "hash")
    assert not store.claim("a", "k", "other")
    assert store.claim("b", "k", "other")
    assert store.idempotent("a", "k") == ("hash", None)
    store.answer("a", "k", 201, "{}")
    assert store.idempotent("a", "k") == ("hash", (201, "{}"))
    assert store.idempotent("b", "k") == ("other", None)


def test_a_key_of_a_failed_or_killed_request_is_free_again(store: State) -> None:
    store.claim("a", "failed", "h", now=10.0)
    store.release("a", "failed")
    assert store.claim("a", "failed", "h", now=10.0)
    store.claim("a", "done", "h", now=20.0)
    store.answer("a", "done", 200, "x")
    assert store.release_unanswered() == 1
    assert store.idempotent("a", "failed") is None
    assert store.forget_keys(15.0) == 0
    assert store.forget_keys(25.0) == 1


# --- what is made once


def test_a_value_is_made_once_and_kept(store: State) -> None:
    made = iter([b"first\0\xff", b"second"])
    assert store.keep("key", lambda: next(made)) == b"first\0\xff"
    assert store.keep("key", lambda: next(made)) == b"first\0\xff"
    assert store.keep("other", lambda: next(made)) == b"second"


def test_who_makes_a_value_too_late_gets_that_of_the_first(store: State) -> None:
    def late() -> bytes:
        store.keep("key", lambda: b"first")
        return b"late"

    assert store.keep("key", late) == b"first"


def test_what_is_kept_is_summed_by_owner(store: State) -> None:
    store.put_execution(execution(1, ended=9.0, stdout_bytes=100, stderr_bytes=50))
    store.put_execution(execution(2, ended=9.0, stdout_bytes=10**6))
    store.put_execution(execution(3, ended=9.0, owner="other"))
    store.put_execution(execution(4, stdout_bytes=10**6))
    bodies = [len(store_rows.execution_text(one)) for one in store.executions()]
    found = store.kept(1000)
    assert found == {"worker": (2, 150 + 1000 + bodies[0] + bodies[1]), "other": (1, bodies[2])}


# --- the file


def test_what_is_deleted_is_wiped(tmp_path: Path) -> None:
    """Variables of a sandbox must not stay in free pages; the control is a plain database."""
    secret = "hunter2-hunter2-hunter2"
    store = Store(str(tmp_path / "data"))
    store.put_sandbox(sandbox(1, env={"PASSWORD": secret}))
    store.delete_sandbox("sbx-001")
    store.close()
    assert secret.encode() not in (tmp_path / "data" / "state.db").read_bytes()
    plain = sqlite3.connect(tmp_path / "plain.db")
    plain.executescript(
        f"PRAGMA secure_delete=OFF; CREATE TABLE t(x); INSERT INTO t VALUES('{secret}');"
        "DELETE FROM t;"
    )
    plain.close()
    assert secret.encode() in (tmp_path / "plain.db").read_bytes()


def test_a_full_disk_is_a_problem_with_words(plain: Store) -> None:
    store = plain
    pages = store.db.execute("PRAGMA page_count").fetchone()[0]
    store.db.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for number in range(1000):
            store.put_sandbox(sandbox(number))

    with pytest.raises(Problem) as caught:
        fill()
    assert caught.value.code == "DISK_FULL"
    assert store.count_sandboxes() < 1000


def test_a_transaction_is_all_or_nothing(store: State) -> None:
    def both() -> None:
        with store.transaction():
            store.put_sandbox(sandbox(1))
            raise KeyError

    with pytest.raises(KeyError):
        both()
    assert store.count_sandboxes() == 0
    with store.transaction():
        store.put_sandbox(sandbox(1))
    assert store.count_sandboxes() == 1


def test_an_old_database_is_brought_up_to_date(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    os.close(os.open(data / "state.db", os.O_CREAT, 0o600))
    store = Store(str(data))
    assert store.db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    store.close()
    store = Store(str(data))
    assert store.count_sandboxes() == 0
    store.close()


def test_a_later_database_is_refused_and_not_touched(tmp_path: Path) -> None:
    Store(str(tmp_path / "data")).close()
    other = sqlite3.connect(tmp_path / "data" / "state.db")
    other.execute("PRAGMA user_version = 999")
    other.close()
    with pytest.raises(HostError) as caught:
        Store(str(tmp_path / "data"))
    assert caught.value.code == "data-newer"


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "state.db").write_bytes(b"no database at all" * 100)
    (data / "state.db").chmod(0o600)
    with pytest.raises(HostError) as caught:
        Store(str(data))
    assert caught.value.code == "data-broken"
    # The lock is free again.
    (data / "state.db").unlink()
    Store(str(data)).close()


def test_tidying_empties_the_log_while_the_store_is_used(plain: Store) -> None:
    store = plain
    for number in range(50):
        store.put_sandbox(sandbox(number))
    store.tidy()
    busy, log, moved = store.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert (busy, log) == (0, moved)
    assert store.count_sandboxes() == 50


# --- processes

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from agent_sandbox.service.store import Store
from agent_sandbox.service.values import Sandbox
store = Store(sys.argv[2])
for number in range(10**9):
    store.put_sandbox(Sandbox(id=f"sbx-{number}", owner="o", backend="b", state="s"))
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for turn in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, SOURCE, data], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            seen = [int(process.stdout.readline()) for _ in range(5 + 37 * turn)]
            process.send_signal(signal.SIGKILL)
            seen += [int(line) for line in process.stdout if line.endswith("\n")]
        store = Store(str(data))
        missing = [number for number in seen if store.get_sandbox(f"sbx-{number}") is None]
        assert missing == []
        store.close()


def test_a_second_service_on_the_same_data_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "data"))
    # In this process, twice: the first refusal must not take the lock away.
    for _ in range(2):
        with pytest.raises(HostError, match=rf"another service \(pid {os.getpid()}\)"):
            Store(str(tmp_path / "data"))
        done = subprocess.run(
            [sys.executable, "-c", WRITER, SOURCE, tmp_path / "data"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "another service" in done.stderr
        assert done.stdout == ""
    # `sandboxctl token` works beside it.
    Store(str(tmp_path / "data"), own=False).close()
    with pytest.raises(HostError):
        Store(str(tmp_path / "data"))
    store.close()
    Store(str(tmp_path / "data")).close()


HOLDER = """
import fcntl, os, sys, time
sys.path.insert(0, sys.argv[1])
from agent_sandbox.service.store import Store
store = Store(sys.argv[2])
plain = os.open(sys.argv[2] + "/plain", os.O_CREAT | os.O_RDWR, 0o600)
fcntl.flock(plain, fcntl.LOCK_EX)
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_a_forked_child_does_not_keep_the_data_of_a_killed_service(tmp_path: Path) -> None:
    """The control is flock, which the child keeps."""
    import fcntl

    data = tmp_path / "data"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, SOURCE, data], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(HostError):
            Store(str(data))
        process.kill()
        process.wait()
        Store(str(data)).close()
        with open(data / "plain", "rb") as plain, pytest.raises(BlockingIOError):
            fcntl.flock(plain, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_many_may_make_the_database_at_once(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from agent_sandbox.service.store import Store\n"
        "Store(sys.argv[2], own=False).close()"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, SOURCE, tmp_path / "data"])
        for _ in range(8)
    ]
    assert [process.wait() for process in started] == [0] * 8
