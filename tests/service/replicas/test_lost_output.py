"""Output that died with the replica that ran the command: nobody takes it for silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.core.journal import STDOUT, Journal
from agent_sandbox.service.replicas import outputs
from agent_sandbox.service.replicas.outputs import PART, SavedJournal
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.store_postgres import PgStore
from agent_sandbox.service.store_postgres_link import away
from agent_sandbox.service.values import EXITED, Execution

from .ground import Ground, Replica, ending, go, made


def _forget(replica: Replica, what: str) -> None:
    """As if it had died before all of the output was written."""
    where = {"all": "true", "the first part": "part = 0"}[what]
    replica.shared.store.change(f"DELETE FROM outputs WHERE {where}")


@pytest.mark.parametrize(
    ("command", "what"),
    [(["echo", "hello"], "all"), (["flood", str(3 * PART)], "all"),
     (["flood", str(3 * PART)], "the first part")],
)  # fmt: skip
def test_lost_output_is_told(ground: Ground, command: list[str], what: str) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            path = f"/v1/sandboxes/{box}/exec"
            done = (await first.client().post(path, json={"cmd": command})).json()
            silent = (await first.client().post(path, json={"cmd": ["true"]})).json()
            context = _context(first)
            await context.settle()
            _forget(first, what)
            await first.die()
            there = second.client()
            found = (await there.get(f"/v1/execs/{done['id']}")).json()
            assert (found["state"], found["exitCode"], found["stdout"]) == ("Exited", 0, "")
            assert found["truncated"] is True
            assert "output" in found["error"]
            logs = (await there.get(f"/v1/execs/{done['id']}/logs")).json()
            assert (logs["stdout"], logs["truncated"], logs["more"]) == ("", True, False)
            events = (await there.get(f"/v1/execs/{done['id']}/events")).text
            assert "event: exit" in events
            assert "event: stdout" not in events
            assert '"truncated":true' in events
            # The control: one that printed nothing has lost nothing.
            found = (await there.get(f"/v1/execs/{silent['id']}")).json()
            assert (found["truncated"], found["error"]) == (False, "")

    go(work())


def test_saved_output_is_whole_without_its_replica(ground: Ground) -> None:
    """The control: what was written in time is there."""

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            body = {"cmd": ["echo", "hello"]}
            done = (await first.client().post(f"/v1/sandboxes/{box}/exec", json=body)).json()
            await first.die()
            found = (await second.client().get(f"/v1/execs/{done['id']}")).json()
            assert (found["stdout"], found["truncated"], found["error"]) == ("hello\n", False, "")

    go(work())


def test_a_later_part_is_not_read_as_the_first(database: Database, tmp_path: Path) -> None:
    """It begins in the middle of a frame: as the beginning it would be noise."""
    store = PgStore(database, data=str(tmp_path / "pg"), home="me")
    try:
        store.put_execution(
            Execution(id="e", sandbox="s", owner="o", command=(), state=EXITED, ended=1.0)
        )
        journal = Journal(str(tmp_path / "journal"), limit=4 * PART)

        async def written() -> None:
            journal.append(STDOUT, b"x" * (2 * PART))
            journal.close()

        go(written())
        outputs.add(store, "e", 1, outputs.piece(journal, 1))
        saved = SavedJournal(store, "e")
        assert (saved.size, saved.read(0)) == (0, b"")
        outputs.add(store, "e", 0, outputs.piece(journal, 0))
        saved = SavedJournal(store, "e")
        assert saved.size == journal.size - len(outputs.piece(journal, 2))
        assert saved.read(0)
    finally:
        store.close()


def test_an_end_that_cannot_be_written_down_is_not_answered(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica would say that it was lost; and the audit has no line of it."""

    async def work() -> None:
        async with ending(ground):
            replica = await ground.replica()
            box = await made(replica.client())

            def gone(*_: object) -> None:
                raise away("test")

            path = f"/v1/sandboxes/{box}/exec"
            with monkeypatch.context() as patch:
                patch.setattr(replica.shared.store, "put_execution", gone)
                answer = await replica.client().post(path, json={"cmd": ["echo", "x"]})
            assert (answer.status_code, answer.json()["code"]) == (503, "STATE_UNAVAILABLE")
            answer = await replica.client().post(path, json={"cmd": ["echo", "x"]})
            assert answer.json()["stdout"] == "x\n"

    go(work())


def _context(replica: Replica) -> Any:
    assert replica.app._service is not None
    return replica.app._service._context
