"""The chain in PostgreSQL: one, whoever writes and dies, and only ever added to."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from agent_sandbox.service.audit import lines, places, prune, verify
from agent_sandbox.service.audit.postgres import PgAudit
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.values import Sandbox

from .audit_trails import AGENT, Clock, Desk, write
from .postgres import Cluster

SOURCE = Path(__file__).resolve().parents[2] / "src"
WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from agent_sandbox.service.audit.postgres import PgAudit
from agent_sandbox.service import store_address
audit = PgAudit(store_address.read(sys.argv[2], "test"), rotate_bytes=100_000)
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[4])):
    seq = audit.note(None, "test", {"process": sys.argv[3], "number": number})
    sys.stdout.write(f"{seq} {sys.argv[3]}/{number}\\n")
    sys.stdout.flush()
"""


@pytest.fixture
def desk(database: Database, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "unused", database)
    yield made
    made.close()


def url_of(database: Database) -> str:
    given = database.parameters
    return f"postgresql://{given['user']}@/{given['dbname']}?host={given['host']}"


def writer(
    database: Database, name: str, lines: int, script: str = WRITER
) -> subprocess.Popen[str]:
    """A process that has connected, and waits for a word."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, SOURCE, url_of(database), name, str(lines)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def acknowledged(process: subprocess.Popen[str]) -> dict[int, str]:
    """What it said, up to its end."""
    assert process.stdout is not None
    said = process.stdout.read()
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    # The last may be half a line.
    whole = said[: said.rfind("\n") + 1].splitlines()
    return {int(line.split()[0]): line.split()[1] for line in whole}


def present(desk: Desk) -> dict[int, str]:
    return {
        record["seq"]: f"{record['request']['process']}/{record['request']['number']}"
        for record in desk.records()
        if record["action"] == "test"
    }


# --- many writers


def test_four_processes_write_one_chain(desk: Desk, database: Database) -> None:
    started = [writer(database, str(number), 500) for number in range(4)]
    for process in started:
        go(process)
    said: dict[int, str] = {}
    for process in started:
        said |= acknowledged(process)
    assert [process.returncode for process in started] == [0] * 4
    assert desk.findings() == []
    assert present(desk) == said
    assert sorted(said) == list(range(1, 2001))
    # Each process's own lines are in its order.
    for name in map(str, range(4)):
        own = [what for _, what in sorted(said.items()) if what.startswith(f"{name}/")]
        assert own == [f"{name}/{number}" for number in range(500)]


UNLOCKED = """
ALTER TABLE agent_sandbox.audit_lines DROP CONSTRAINT audit_lines_pkey;
"""


@pytest.mark.parametrize("locked", [True, False])
def test_cannot_fork_the_chain_by_writing_at_once(
    desk: Desk, database: Database, postgres: Cluster, locked: bool
) -> None:
    """The control has the same function without its lock: there two lines hang on one."""
    desk.open()
    name = database.parameters["dbname"]
    source = str(postgres.admin(
        "SELECT pg_get_functiondef('agent_sandbox.audit_append'::regproc)", name
    )[0][0])  # fmt: skip
    # A pause where another may come in, so that it does not depend on luck.
    slow = source.replace("seq := head.seq + 1;", "PERFORM pg_sleep(0.002); seq := head.seq + 1;")
    assert slow != source
    if not locked:
        unlocked = slow.replace("FROM audit_head FOR UPDATE;", "FROM audit_head;")
        assert unlocked != slow
        # The number is the key as well: it would refuse the second line, and lose it.
        slow = UNLOCKED + unlocked
    postgres.admin(slow, name)
    started = [writer(database, str(number), 25) for number in range(4)]
    for process in started:
        go(process)
    for process in started:
        acknowledged(process)
    assert (desk.findings() == []) == locked
    assert len(desk.raw()) == 100


# --- kills


def test_a_kill_at_any_moment_leaves_a_chain_and_loses_nothing(
    desk: Desk, database: Database
) -> None:
    chance = random.Random(20261116)
    said: dict[int, str] = {}
    for turn in range(8):
        started = [writer(database, f"{turn}-{number}", 10**6) for number in range(2)]
        for process in started:
            go(process)
        time.sleep(chance.random() * 0.05)
        for process in started:
            process.send_signal(signal.SIGKILL)
        for process in started:
            new = acknowledged(process)
            assert not new.keys() & said.keys(), "a number was given twice"
            said |= new
        assert desk.findings() == [], f"turn {turn}"
    there = present(desk)
    assert said
    assert {seq: there.get(seq) for seq in said} == said


# A writer that is killed with a line that is written but not committed, and the lock in its hand.
HALF = """
import sys
sys.path.insert(0, sys.argv[1])
from agent_sandbox.service import store_address, store_postgres_link
link = store_postgres_link.Link(store_address.read(sys.argv[2], "test"))
link.run("BEGIN")
link.run("SELECT audit_append(?, ?, ?)", ("2026-01-01T00:00:00.000Z", ',"action":"half"}', 10**6))
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_writer_that_dies_between_line_and_commit_leaves_nothing_and_no_lock(
    desk: Desk, database: Database
) -> None:
    audit = desk.open()
    write(audit, 1)
    process = writer(database, "half", 0, HALF)
    # The control: the lock is held, so nobody else gets a line in.
    with psycopg.connect(url_of(database)) as other:
        other.execute("SET lock_timeout TO 100")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("SELECT seq FROM agent_sandbox.audit_head FOR UPDATE")
    process.kill()
    acknowledged(process)
    assert write(audit, 2) == 2
    assert [record["action"] for record in desk.records()] == ["exec.start", "exec.start"]
    assert desk.findings() == []


def test_a_writer_that_is_frozen_holds_nobody_up(desk: Desk, database: Database) -> None:
    """The server seals: no client has the lock while it thinks. Frozen at many moments."""
    audit = desk.open()
    process = writer(database, "frozen", 10**6)
    go(process)
    try:
        for _ in range(20):
            time.sleep(0.003)
            process.send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            write(audit, 1)
            assert time.monotonic() - begun < 2
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        acknowledged(process)
    assert desk.findings() == []


def test_a_crash_of_the_server_loses_nothing_that_was_acknowledged(
    own_postgres: Cluster, tmp_path: Path
) -> None:
    from agent_sandbox.service import store_address

    # Syncs matter here.
    own_postgres.stop()
    own_postgres.settings["fsync"] = "on"
    own_postgres.start()
    database = store_address.read(own_postgres.new(), "test")
    desk = Desk(tmp_path / "unused", database)
    process = writer(database, "w", 10**6)
    go(process)
    assert process.stdout is not None
    first = process.stdout.readline()
    own_postgres.stop(signal.SIGQUIT)
    said = {int(first.split()[0]): first.split()[1]} | acknowledged(process)
    own_postgres.start()
    there = present(desk)
    assert {seq: there.get(seq) for seq in said} == said
    assert desk.findings() == []
    assert write(desk.open(), 1) == max(there) + 1
    assert desk.findings() == []
    desk.close()


def test_a_database_that_is_away_stops_the_act(own_postgres: Cluster) -> None:
    from agent_sandbox.service import store_address

    audit = PgAudit(store_address.read(own_postgres.new(), "test"))
    write(audit, 1)
    own_postgres.stop()
    with pytest.raises(Problem) as caught:
        write(audit, 2)
    assert (caught.value.code, caught.value.status) == ("AUDIT_UNAVAILABLE", 503)
    own_postgres.start()
    deadline = time.monotonic() + 20
    while True:
        try:
            assert write(audit, 3) == 2
            break
        except Problem:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert verify.verify(audit) == ()
    audit.close()


# --- only added to

HARM = {
    "changed": "UPDATE agent_sandbox.audit_lines SET line = replace(line, 'echo', 'true')",
    "changed one": "UPDATE agent_sandbox.audit_lines SET line = line || ' ' WHERE seq = 5",
    "removed": "DELETE FROM agent_sandbox.audit_lines WHERE seq = 5",
    "removed last": "DELETE FROM agent_sandbox.audit_lines WHERE seq = 12",
    "removed first": "DELETE FROM agent_sandbox.audit_lines WHERE seq = 1",
    "removed file": "DELETE FROM agent_sandbox.audit_lines WHERE file = 2",
    "emptied": "TRUNCATE agent_sandbox.audit_lines",
    "as if pruning": "SELECT set_config('agent_sandbox.prune', 'on', false);"
    " DELETE FROM agent_sandbox.audit_lines WHERE seq = 5",
    "moved": "UPDATE agent_sandbox.audit_lines SET ends = ends + 5000 WHERE seq = 2",
    "swapped": "UPDATE agent_sandbox.audit_lines a SET line = b.line FROM agent_sandbox.audit_lines"
    " b WHERE (a.seq, b.seq) IN ((4, 5), (5, 4))",
}


# As only the owner can.
SWITCHED_OFF = (
    "ALTER TABLE agent_sandbox.audit_lines DISABLE TRIGGER USER;"
    " ALTER TABLE agent_sandbox.audit_head DISABLE TRIGGER USER"
)


@pytest.mark.parametrize("kind", HARM)
def test_cannot_change_what_was_written(
    desk: Desk, database: Database, postgres: Cluster, kind: str
) -> None:
    """The control switches the trigger off, as only the owner can: and then `verify` sees it."""
    desk.make()
    name = database.parameters["dbname"]
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="only added to"):
        postgres.admin(HARM[kind], name)
    assert desk.findings() == []
    postgres.admin(SWITCHED_OFF, name)
    postgres.admin(HARM[kind], name)
    assert desk.findings() != []


@pytest.mark.parametrize(
    "head", ["seq = 3", "seq = 13", "hash = repeat('0', 64)", "file = 1", "ends = 5", None]
)
def test_cannot_move_the_end_unseen(
    desk: Desk, database: Database, postgres: Cluster, head: str | None
) -> None:
    desk.make()
    name = database.parameters["dbname"]
    sql = f"UPDATE agent_sandbox.audit_head SET {head}" if head else None
    sql = sql or "DELETE FROM agent_sandbox.audit_head"
    for text in (sql, "TRUNCATE agent_sandbox.audit_head"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="only added to"):
            postgres.admin(text, name)
    assert desk.findings() == []
    postgres.admin(SWITCHED_OFF, name)
    postgres.admin(sql, name)
    assert desk.findings() != []


@pytest.mark.parametrize(("stamp", "rest"), [
    ("2026-01-01T00:00:00.000Z", ',"action":"x"}\n{"forged":1}'),
    ("2026-01-01T00:00:00.000Z", ',"action":"x"'), ("2026-01-01T00:00:00.000Z", "}"),
    ('","seq":9,"x":"', ',"action":"x"}'),
])  # fmt: skip
def test_cannot_add_what_is_no_line(desk: Desk, database: Database, stamp: str, rest: str) -> None:
    """It would stay for good: nobody may remove it, and no `verify` would get past it."""
    desk.make()
    with (
        psycopg.connect(url_of(database), autocommit=True) as connection,
        pytest.raises(psycopg.errors.InvalidParameterValue),
    ):
        connection.execute("SELECT agent_sandbox.audit_append(%s, %s, 1000)", (stamp, rest))
    assert desk.findings() == []


def test_cannot_shorten_the_trail_with_its_end_against_a_head_that_was_kept(
    desk: Desk, database: Database, postgres: Cluster
) -> None:
    """Who owns the database can rewrite all of it. The control has no head from before."""
    audit = desk.make()
    seq, _, digest = audit.head.partition(":")
    records = desk.records()
    name = database.parameters["dbname"]
    postgres.admin(SWITCHED_OFF, name)
    postgres.admin("DELETE FROM agent_sandbox.audit_lines WHERE seq = 12", name)
    postgres.admin(
        f"UPDATE agent_sandbox.audit_head SET seq = 11, hash = '{records[10]['hash']}',"
        " (file, ends) = (SELECT file, ends FROM agent_sandbox.audit_lines WHERE seq = 11)", name,
    )  # fmt: skip
    assert desk.findings() == []
    assert any("12" in finding for finding in desk.findings((int(seq), digest)))


LESS = {
    "a line of one's own": "INSERT INTO agent_sandbox.audit_lines VALUES (100, 1, 1, 'x')",
    "the end": "UPDATE agent_sandbox.audit_head SET seq = 1",
    "no trigger": "ALTER TABLE agent_sandbox.audit_lines DISABLE TRIGGER USER",
    "another function": "CREATE OR REPLACE FUNCTION agent_sandbox.audit_refuse() RETURNS trigger"
    " LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END'",
    "prune": "SELECT agent_sandbox.audit_prune(1)",
    "as if pruning": "SELECT set_config('agent_sandbox.prune', 'on', false);"
    " DELETE FROM agent_sandbox.audit_lines",
}


def grants(role: str) -> str:
    """As the documentation says."""
    text = (SOURCE.parent / "docs" / "service.md").read_text()
    block = text.split("<!-- grants -->")[1].split("<!-- /grants -->")[0]
    return block.replace("```sql", "").replace("```", "").replace("sandbox;", f"{role};")


@pytest.fixture
def lesser(database: Database, postgres: Cluster) -> Iterator[Database]:
    """The same database for a service that does not own the tables."""
    PgAudit(database).close()
    name, role = database.parameters["dbname"], f"lesser_{database.parameters['dbname']}"
    postgres.admin(f"CREATE ROLE {role} LOGIN; {grants(role)}", name)
    yield database.replace(parameters={**database.parameters, "user": role})
    postgres.admin(f"DROP OWNED BY {role}; DROP ROLE {role}", name)


@pytest.mark.parametrize("kind", LESS)
def test_cannot_touch_the_trail_as_a_service_that_does_not_own_it(
    desk: Desk, lesser: Database, postgres: Cluster, kind: str
) -> None:
    audit = PgAudit(lesser)
    assert [write(audit, number) for number in range(3)] == [1, 2, 3]
    audit.close()
    with (
        psycopg.connect(url_of(lesser), autocommit=True) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(LESS[kind].encode())
    assert desk.findings() == []
    # The control: the owner may, who can switch the triggers off.
    postgres.admin(f"{SWITCHED_OFF}; {LESS[kind]}", lesser.parameters["dbname"])


def test_cannot_prune_as_a_service_that_does_not_own_it(desk: Desk, lesser: Database) -> None:
    """And no line says that it was done. The control is the owner."""
    from agent_sandbox.errors import HostError

    desk.make(lines=20)
    audit = PgAudit(lesser)
    with pytest.raises(HostError) as caught:
        prune.prune(audit, AGENT, 1e10)
    assert caught.value.code == "audit-owner"
    assert len(desk.raw()) == 20
    with pytest.raises(Problem):
        audit.remove(1)
    audit.close()
    assert prune.prune(desk.open(), AGENT, 1e10)
    assert desk.findings() == []


def test_a_service_that_does_not_own_the_tables_does_its_work(lesser: Database) -> None:
    from agent_sandbox.service.store_postgres import PgStore
    from agent_sandbox.service.tokens import Tokens

    store = PgStore(lesser)
    token, _ = Tokens(store).new("worker")
    assert Tokens(store).check(token) is not None
    assert store.keep("k", lambda: b"v") == b"v"
    store.put_sandbox(Sandbox(id="sbx-1", owner="worker", backend="b", state="s"))
    with store.transaction():
        assert store.rows("SELECT id FROM sandboxes FOR UPDATE") == [("sbx-1",)]
        store.delete_sandbox("sbx-1")
    store.close()


# --- pruning, copies


def test_only_the_oldest_files_can_be_pruned(desk: Desk) -> None:
    """So no hole can be made, whatever is asked for."""
    audit = desk.make(lines=20)
    names = list(desk.files())
    for number in (len(names), 3, 0, 99):
        audit.remove(number)
    assert list(desk.files()) == names
    assert desk.findings() == []
    assert prune.prune(audit, AGENT, 1e10) == names[:-1]
    assert desk.findings() == []


def test_a_copy_in_files_verifies_with_the_tool_for_files(desk: Desk, tmp_path: Path) -> None:
    audit = desk.make(lines=20)
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    for name, found in desk.files().items():
        (copy / name).write_bytes(b"".join(found))
        (copy / name).chmod(0o600)
    snapshot = audit.snapshot()
    assert snapshot.head is not None
    (copy / places.HEAD).write_bytes(snapshot.head.encode())
    (copy / places.HEAD).chmod(0o600)
    assert verify.verify(str(copy)) == ()
    # The control.
    path = copy / places.name_of(2)
    path.write_bytes(path.read_bytes().replace(b"echo", b"evil", 1))
    assert verify.verify(str(copy)) != ()


def test_the_server_seals_lines_as_we_do(desk: Desk) -> None:
    audit = desk.open(clock=Clock())
    awkward = {"text": "é\n\"\\ \u2028 \ud800 % ? $1 ' -- \0", "n": [1.5, None, True]}
    audit.write(AGENT, "exec.start", request=awkward, reason="r")
    raw = desk.raw()[0]
    record = json.loads(raw)
    del record["hash"]
    assert lines.seal(record)[0] == raw


def test_reading_does_not_stop_a_line(desk: Desk, database: Database) -> None:
    """A reader has a connection of its own."""
    audit = desk.make(lines=700, rotate_bytes=10**6)
    reader = audit.snapshot().lines(1)
    next(reader)
    assert write(audit, 1) == 701
    assert len(list(reader)) == 699


def test_many_may_open_a_new_trail_at_once(database: Database) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, SOURCE, url_of(database), str(number), "5"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        for number in range(6)
    ]  # fmt: skip
    assert [process.wait() for process in processes] == [0] * 6
    audit = PgAudit(database)
    assert audit.seq == 30
    assert verify.verify(audit) == ()
    audit.close()
