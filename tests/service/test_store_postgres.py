"""The store in PostgreSQL: exact among many processes, and clear when the database is away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import HostError, PolicyError
from agent_sandbox.service import store_address, store_postgres_link, store_postgres_schema
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.store_postgres import PgStore, label
from agent_sandbox.service.tokens import Tokens
from agent_sandbox.service.values import RUNNING, Execution, Sandbox

from .postgres import Cluster
from .test_audit_postgres import url_of

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def store(database: Database) -> Iterator[PgStore]:
    made = PgStore(database)
    yield made
    made.close()


def sandbox(number: int, **changes: object) -> Sandbox:
    made = Sandbox(id=f"sbx-{number}", owner="worker", backend="bwrap", state=RUNNING)
    return made.replace(**changes)


def eventually(act: Callable[[], object], seconds: float = 20.0) -> object:
    """Until it is no problem any more."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except Problem:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def processes(database: Database, script: str, count: int) -> list[str]:
    """What so many processes print, each after all have connected."""
    head = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from agent_sandbox.service import store_address\n"
        "from agent_sandbox.service.store_postgres import PgStore\n"
        "store = PgStore(store_address.read(sys.argv[2], 'test'))\n"
        "number = int(sys.argv[3])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", head + script, SOURCE, url_of(database), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(count)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [process.communicate()[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * count
    return found


# --- exact among many


def test_a_value_is_made_once_among_many(database: Database, store: PgStore) -> None:
    found = processes(
        database, "print(store.keep('installation', lambda: str(number).encode()).decode())", 6
    )
    assert len(set(found)) == 1
    assert store.keep("installation", lambda: b"late").decode() == found[0]


def test_a_key_has_one_winner_among_many(database: Database, store: PgStore) -> None:
    script = "print(sum(store.claim('a', f'k{n}', f'{number}') for n in range(100)))"
    assert sum(map(int, processes(database, script, 4))) == 100


TAKE = """
taken = 0
for n in range(40):
    with store.transaction("sandboxes"):
        if store.count_sandboxes() < 50:
            store.change("INSERT INTO sandboxes VALUES (?, 'o', 's', 1, '{}', '{}', '')",
                         (f"{number}-{n}",))
            taken += 1
print(taken)
"""


def test_a_quota_is_exact_when_it_is_counted_in_the_transaction(
    database: Database, store: PgStore
) -> None:
    assert sum(map(int, processes(database, TAKE, 4))) == 50
    assert store.count_sandboxes() == 50


def test_a_quota_that_is_counted_without_the_lock_is_not(
    database: Database, store: PgStore
) -> None:
    """The control, step by step: each has a lock of its own, so both see room for the last one."""

    def add(one: PgStore, name: str) -> None:
        one.change("INSERT INTO sandboxes VALUES (?, 'o', 's', 1, '{}', '{}', '')", (name,))

    with contextlib.closing(PgStore(database)) as other:
        with store.transaction("own 1"), other.transaction("own 2"):
            assert store.count_sandboxes() == other.count_sandboxes() == 0
            add(store, "a")
            add(other, "b")
        assert store.count_sandboxes() == 2
        # With one lock for both the second does not get as far as to count.
        with (
            store.transaction("sandboxes"),
            pytest.raises(Problem, match="database"),
            other.transaction("sandboxes"),
        ):
            pytest.fail("both are in")


def test_a_token_of_a_name_is_made_once_among_many(database: Database, store: PgStore) -> None:
    script = (
        "from agent_sandbox.service.tokens import Tokens\n"
        "from agent_sandbox.errors import PolicyError\n"
        "made = 0\n"
        "for n in range(10):\n"
        "    try:\n"
        "        Tokens(store).new(f'agent-{n}'); made += 1\n"
        "    except PolicyError: pass\n"
        "print(made)"
    )
    assert sum(map(int, processes(database, script, 4))) == 10
    assert len(Tokens(store).list()) == 10


def test_a_kill_loses_nothing_that_was_acknowledged(database: Database, store: PgStore) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from agent_sandbox.service import store_address\n"
        "from agent_sandbox.service.store_postgres import PgStore\n"
        "from agent_sandbox.service.values import Sandbox\n"
        "store = PgStore(store_address.read(sys.argv[2], 'test'))\n"
        "for n in range(10**9):\n"
        "    name = f'sbx-{sys.argv[3]}-{n}'\n"
        "    store.put_sandbox(Sandbox(id=name, owner='o', backend='b', state='s'))\n"
        "    print(name, flush=True)\n"
    )
    for turn in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", script, SOURCE, url_of(database), str(turn)],
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            seen = [process.stdout.readline() for _ in range(5 + 37 * turn)]
            process.send_signal(signal.SIGKILL)
            seen += [line for line in process.stdout if line.endswith("\n")]
        assert [name for name in seen if store.get_sandbox(name.strip()) is None] == []


# --- homes


def test_a_row_of_another_replica_is_left_alone(database: Database, store: PgStore) -> None:
    other = PgStore(database, home="other")
    store.home = "one"
    store.put_sandbox(sandbox(1))
    store.put_execution(Execution(id="exc-1", sandbox="sbx-1", owner="w", command=("true",)))
    with pytest.raises(Problem) as caught:
        other.put_sandbox(sandbox(1, state="Failed"))
    assert caught.value.code == "CONFLICT"
    with pytest.raises(Problem):
        other.put_execution(
            Execution(id="exc-1", sandbox="sbx-1", owner="w", command=("true",), ended=5.0)
        )
    other.delete_sandbox("sbx-1")
    assert store.get_sandbox("sbx-1") == sandbox(1)
    # The control: the one who has it may.
    store.put_sandbox(sandbox(1, state="Paused"))
    store.delete_sandbox("sbx-1")
    assert store.get_sandbox("sbx-1") is None
    other.close()


def test_a_start_frees_only_its_own_keys(database: Database, store: PgStore) -> None:
    other = PgStore(database, home="other")
    store.claim("a", "mine", "h")
    other.claim("a", "theirs", "h")
    assert store.release_unanswered() == 1
    assert store.idempotent("a", "theirs") == ("h", None)
    other.close()


# --- what clients choose

EVIL = (
    "'", "''", "\\", "\\'", "' OR 1=1 --", "'; DROP SCHEMA agent_sandbox CASCADE; --", "$1", "%s",
    "%(x)s", "%", "?", "?1", "{}", '{"a"}', "$$", "E'\\x27'", "\x1b[2J", "🦀", "x'; COMMIT; --",
)  # fmt: skip


@pytest.mark.parametrize("text", EVIL)
def test_cannot_inject_sql_through_any_text(store: PgStore, text: str) -> None:
    """Every value is data: it comes back as it was, finds only itself, and changes nothing else."""
    store.put_sandbox(sandbox(0, owner="victim"))
    odd = sandbox(
        1, id=text, owner=text, state=text, template=text, image=text, digest=text, runtime=text,
        env={text: text}, metadata={text: text}, enforced={text: text}, reason=text,
    )  # fmt: skip
    store.put_sandbox(odd)
    assert store.get_sandbox(text) == odd
    assert store.sandboxes(owner=text) == store.sandboxes(state=text) == [odd]
    assert store.sandboxes(metadata={text: text}) == [odd]
    assert store.count_sandboxes(text) == 1
    run = Execution(
        id=text, sandbox=text, owner=text, command=(text,), cwd=text, state=text, signal=text,
        exceeded=text, error=text, ended=1.0,
    )  # fmt: skip
    store.put_execution(run)
    assert store.get_execution(text) == store.get_execution(text, text) == run
    assert store.get_execution(text, "victim") is None
    assert store.executions(sandbox=text) == store.executions(owner=text, state=text) == [run]
    assert store.kept(10)[text][0] == 1
    assert store.claim(text, text, text)
    store.answer(text, text, 201, text)
    assert store.idempotent(text, text) == (text, (201, text))
    store.release(text, text)
    assert store.keep(text, text.encode) == text.encode()
    tokens = Tokens(store)
    assert tokens.check(text) is None
    assert tokens.get(text) is None
    with store.transaction(text):
        store.delete_execution(text)
        store.delete_sandbox(text)
    assert [one.owner for one in store.sandboxes()] == ["victim"]


def test_sql_can_be_injected_into_a_text_that_is_put_together(
    store: PgStore, database: Database
) -> None:
    """The control: this is what the same value does without a placeholder."""
    store.put_sandbox(sandbox(1, owner="victim"))
    text = "' OR 1=1 --"
    found = store._link.run(f"SELECT id FROM sandboxes WHERE owner = '{text}'").fetchall()
    assert found == [("sbx-1",)]


def test_labels_of_two_pairs_are_never_the_same() -> None:
    assert len({label("a", "bc"), label("ab", "c"), label("", "abc"), label("abc", "")}) == 4
    assert label("1:a", "") != label("1", ":a")


def test_order_does_not_depend_on_the_servers_language(store: PgStore, postgres: Cluster) -> None:
    """The control: the server's own order is another one, which pages would then be cut by."""
    names = ["sbx-B", "sbx-a", "sbx-_", "sbx-é", "sbx-Z"]
    for name in names:
        store.put_sandbox(sandbox(1, id=name))
    assert [one.id for one in store.sandboxes()] == sorted(names, key=str.encode)
    values = ", ".join(f"('{name}')" for name in names)
    other = postgres.admin(f"SELECT v FROM (VALUES {values}) t(v) ORDER BY v")
    assert [row[0] for row in other] != sorted(names, key=str.encode)


# --- the database goes away


@pytest.fixture
def away(own_postgres: Cluster) -> Iterator[tuple[Cluster, PgStore]]:
    store = PgStore(store_address.read(own_postgres.new(), "test"))
    yield own_postgres, store
    store.close()


def unavailable(act: Callable[[], object]) -> float:
    """How long it took to be told."""
    begun = time.monotonic()
    with pytest.raises(Problem) as caught:
        act()
    assert (caught.value.code, caught.value.status) == ("STATE_UNAVAILABLE", 503)
    assert caught.value.retry_after
    # Where the database is, and as whom we are there, is nobody's business.
    told = f"{caught.value.message} {caught.value.hint}"
    assert not any(word in told for word in ("socket", "server at", "/tmp/", "postgres"))
    return time.monotonic() - begun


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_database_that_goes_is_said_and_one_that_comes_back_is_used(
    away: tuple[Cluster, PgStore], how: signal.Signals
) -> None:
    cluster, store = away
    store.put_sandbox(sandbox(1))
    cluster.stop(how)
    unavailable(lambda: store.put_sandbox(sandbox(2)))
    # The loop is not held up: not even by the attempt to connect.
    assert max(unavailable(store.count_sandboxes) for _ in range(20)) < 1.0
    cluster.start()
    eventually(store.count_sandboxes)
    store.put_sandbox(sandbox(3))
    assert [one.id for one in store.sandboxes()] == ["sbx-1", "sbx-3"]


def test_a_restart_between_two_calls_is_not_even_noticed(away: tuple[Cluster, PgStore]) -> None:
    """Nothing was under way, so nothing is in doubt: also a change is made on a new connection."""
    cluster, store = away
    for number in range(2):
        store.put_sandbox(sandbox(number))
        cluster.stop()
        cluster.start()
    assert store.claim("a", "k", "h")
    assert store.count_sandboxes() == 2


def test_a_frozen_server_is_given_up(
    away: tuple[Cluster, PgStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, store = away
    monkeypatch.setattr(store_postgres_link, "ANSWER_SECONDS", 0.5)
    store.put_sandbox(sandbox(1))
    cluster.signal(signal.SIGSTOP)
    assert unavailable(lambda: store.put_sandbox(sandbox(2))) < 3
    # And then at once: the attempt to connect hangs in a thread.
    unavailable(store.count_sandboxes)
    assert unavailable(store.count_sandboxes) < 0.2
    cluster.signal(signal.SIGCONT)
    assert eventually(store.count_sandboxes, 30) in (1, 2)


def test_a_transaction_is_all_or_nothing_when_the_server_dies_in_it(
    away: tuple[Cluster, PgStore],
) -> None:
    cluster, store = away

    def act() -> None:
        with store.transaction("x"):
            store.put_sandbox(sandbox(1))
            cluster.stop(signal.SIGQUIT)
            cluster.start()
            # Not on a new connection: that one would know nothing of the first half.
            store.put_sandbox(sandbox(2))

    unavailable(act)
    assert eventually(store.count_sandboxes) == 0
    with store.transaction("x"):
        store.put_sandbox(sandbox(3))
    assert store.count_sandboxes() == 1


def test_a_change_whose_answer_was_lost_is_not_made_twice(store: PgStore) -> None:
    """Nobody knows whether the server has done it: so a claim is in doubt, not made again."""
    store.change("CREATE TABLE counted (n INTEGER)")
    cut = threading.Timer(0.3, lambda: _terminate(store))
    cut.start()
    with pytest.raises(Problem):
        store.change("INSERT INTO counted SELECT 1 FROM pg_sleep(1)")
    cut.join()
    assert store.one("SELECT count(*) FROM counted") == (0,)


def test_a_question_whose_answer_was_lost_is_asked_again(store: PgStore) -> None:
    cut = threading.Timer(0.3, lambda: _terminate(store))
    cut.start()
    assert store.one("SELECT 7, pg_sleep(0.7)") == (7, "")
    cut.join()


def _terminate(store: PgStore) -> None:
    import psycopg

    with psycopg.connect(url_of(store.database), autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_a_lock_that_is_held_too_long_is_said(store: PgStore, database: Database) -> None:
    other = PgStore(database)
    other.change("SET lock_timeout TO 200")
    with store.transaction("x"):
        unavailable(lambda: other.transaction("x").__enter__())
    with other.transaction("x"):
        pass
    other.close()


def test_a_frozen_holder_of_a_lock_is_cut_off_by_the_server(
    store: PgStore, database: Database
) -> None:
    """A replica that is stopped in a transaction must not stop the others for ever."""
    other = PgStore(database)
    other.change("SET idle_in_transaction_session_timeout TO 300")

    def act() -> None:
        with other.transaction("x"):
            other.put_sandbox(sandbox(1))
            # It "sleeps"; meanwhile somebody else wants the lock, and gets it.
            with store.transaction("x"):
                store.put_sandbox(sandbox(2))
            other.put_sandbox(sandbox(3))

    unavailable(act)
    assert [one.id for one in store.sandboxes()] == ["sbx-2"]
    other.close()


def test_a_server_that_has_become_read_only_is_left(store: PgStore) -> None:
    """As after a failover, where the old primary still answers."""
    store.change("SET default_transaction_read_only TO on")
    unavailable(lambda: store.put_sandbox(sandbox(1)))
    store.put_sandbox(sandbox(2))
    assert store.count_sandboxes() == 1


def test_a_full_disk_is_a_problem_with_words() -> None:
    import psycopg

    class Full(psycopg.errors.DiskFull):
        sqlstate = "53100"

    problem = store_postgres_link.problem_of(Full())
    assert isinstance(problem, Problem)
    assert problem.code == "DISK_FULL"


def test_children_do_not_have_the_connection(store: PgStore) -> None:
    connection = store._link._connection
    assert connection is not None
    assert not os.get_inheritable(connection.fileno())


# --- versions


def test_a_later_database_is_refused_and_not_touched(store: PgStore, database: Database) -> None:
    store.change("UPDATE version SET number = 999")
    with pytest.raises(HostError) as caught:
        PgStore(database)
    assert caught.value.code == "data-newer"


def test_a_migration_is_all_or_nothing(
    database: Database, postgres: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (*store_postgres_schema.MIGRATIONS, "CREATE TABLE more (x INT); SELECT 1/0")
    monkeypatch.setattr(store_postgres_schema, "MIGRATIONS", steps)
    with pytest.raises(HostError) as caught:
        PgStore(database)
    assert caught.value.code == "data-broken"
    found = postgres.admin(
        "SELECT to_regnamespace('agent_sandbox')::text", database.parameters["dbname"]
    )
    assert found == [(None,)]
    monkeypatch.undo()
    PgStore(database).close()


def test_an_old_database_is_brought_up_to_date(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    PgStore(database).close()
    steps = (*store_postgres_schema.MIGRATIONS, "CREATE TABLE more (x INT)")
    monkeypatch.setattr(store_postgres_schema, "MIGRATIONS", steps)
    store = PgStore(database)
    assert store.one("SELECT number FROM version") == (len(steps),)
    assert store.rows("SELECT * FROM more") == []
    store.close()


def test_a_user_that_may_not_make_tables_is_told(database: Database, postgres: Cluster) -> None:
    name = database.parameters["dbname"]
    postgres.admin("CREATE ROLE poor LOGIN", name)
    try:
        with pytest.raises(HostError, match="permission denied") as caught:
            PgStore(database.replace(parameters={**database.parameters, "user": "poor"}))
        assert "create a schema" in caught.value.hint
    finally:
        postgres.admin("DROP ROLE poor", name)


def test_names_of_others_are_not_found(
    store: PgStore, database: Database, postgres: Cluster
) -> None:
    """Whoever may create in `public` could put a table or function in the way."""
    name = database.parameters["dbname"]
    postgres.admin("CREATE TABLE public.trap (x INT)", name)
    import psycopg

    with pytest.raises(psycopg.errors.UndefinedTable):
        store.one("SELECT * FROM trap")
    assert store.one("SHOW search_path") == ("agent_sandbox, pg_temp",)
    postgres.admin("DROP TABLE public.trap", name)


def test_two_services_need_two_data_directories(database: Database, tmp_path: Path) -> None:
    """The state is shared; what a replica keeps on its machine is its own."""
    one = PgStore(database, data=str(tmp_path / "one"))
    with pytest.raises(HostError) as caught:
        PgStore(database, data=str(tmp_path / "one"))
    assert caught.value.code == "data-busy"
    other = PgStore(database, data=str(tmp_path / "other"))
    one.put_sandbox(sandbox(1))
    assert other.get_sandbox("sbx-1") == sandbox(1)
    one.close()
    PgStore(database, data=str(tmp_path / "one")).close()
    other.close()


def test_a_taken_name_is_refused_beside(store: PgStore, database: Database) -> None:
    Tokens(store).new("worker")
    other = PgStore(database)
    with pytest.raises(PolicyError):
        Tokens(other).new("worker")
    other.close()
