"""The process that keeps an agent's files in step: hostile files, locks, crashes, other writers."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.launch import instep_server
from agent_sandbox.launch.instep_server import AgentLock, File, Pair, Refused, read, write

if TYPE_CHECKING:
    from pathlib import Path

P = "/home/u/p"
NAME = ".claude.json"


class Place:
    """Both sides of one file."""

    def __init__(self, base: Path, mode: str = "merge", keys: str = "claude") -> None:
        for name in ("inside", "home", "base"):
            (base / name).mkdir(exist_ok=True)
        self.inside, self.host = base / "inside" / NAME, base / "home" / NAME
        self._lock = str(base / "lock")
        self._file = File(
            mode=mode, root=str(base / "inside"), name=NAME, outside=str(self.host), keys=keys,
            base=str(base / "base"),
        )  # fmt: skip

    def pair(self) -> Pair:
        return Pair(self._file, P, self._lock)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A fresh pair of places."""
    return Place(tmp_path)


def put(path: Path, **values: Any) -> None:
    """Write a document as agents do: beside it, then over it."""
    fresh = path.with_name(f"{path.name}.{threading.get_ident()}")
    fresh.write_text(json.dumps(values))
    fresh.replace(path)


def get(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def test_a_file_is_copied_in_and_its_changes_come_out(place: Place) -> None:
    """The host's mode stays."""
    put(place.host, numStartups=1, mcpServers={"a": {}})
    place.host.chmod(0o640)
    pair = place.pair()
    pair.step(first=True)
    assert get(place.inside) == get(place.host)
    put(place.inside, numStartups=2, mcpServers={"a": {}, "evil": {}})
    assert pair.has_changed()
    pair.step()
    assert get(place.host) == {"numStartups": 2, "mcpServers": {"a": {}}}
    assert place.host.stat().st_mode & 0o777 == 0o640
    assert not pair.has_changed()
    assert pair.notes() == [f"'mcpServers' of '{place.host}' was changed inside, and stays inside"]


def test_a_file_that_neither_side_has_is_not_made(place: Place) -> None:
    """No trace on the host of an agent that was never used."""
    place.pair().step(first=True)
    assert not place.host.exists()
    assert not place.inside.exists()


def test_a_login_that_only_the_inside_has_is_made_on_the_host(place: Place) -> None:
    """Closed to others, since it holds a key."""
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, primaryApiKey="sk-1")
    pair.step(last=True)
    assert get(place.host) == {"primaryApiKey": "sk-1"}
    assert place.host.stat().st_mode & 0o777 == 0o600


def _link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path, _: Path) -> None:
    path.mkdir()


def _large(path: Path, _: Path) -> None:
    with path.open("wb") as file:
        file.truncate(instep_server.MAX_BYTES + 1)


def _deep(path: Path, _: Path) -> None:
    path.write_text('{"theme": ' + "[" * 100_000 + "]" * 100_000 + "}")


def _number(path: Path, _: Path) -> None:
    path.write_text('{"numStartups": ' + "9" * 100_000 + "}")


def _infinite(path: Path, _: Path) -> None:
    path.write_text('{"numStartups": 1e999, "theme": NaN}')


def _torn(path: Path, _: Path) -> None:
    path.write_text('{"numStartups": 2, "the')


def _other(path: Path, _: Path) -> None:
    path.write_text('["numStartups"]')


HOSTILE = (_link, _fifo, _directory, _large, _deep, _number, _infinite, _torn, _other)


@pytest.mark.parametrize("plant", HOSTILE, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("when", ["first", "later", "last"])
def test_cannot_harm_the_host_with_an_odd_file(place: Place, plant: Any, when: str) -> None:
    """Neither read through, nor waited for, nor taken for a document."""
    secret = place.host.with_name("secret")
    put(secret, primaryApiKey="theirs")
    put(place.host, numStartups=1)
    before = place.host.read_bytes()
    pair = place.pair()
    if when != "first":
        pair.step(first=True)
        place.inside.unlink()
    plant(place.inside, secret)
    pair.step(first=when == "first", last=when == "last")
    assert place.host.read_bytes() == before
    assert get(secret) == {"primaryApiKey": "theirs"}
    # It works again as soon as there is a plain file.
    if place.inside.is_dir():
        place.inside.rmdir()
    put(place.inside, numStartups=2)
    pair.step()
    assert get(place.host)["numStartups"] in (1, 2)
    put(place.inside, **{**get(place.inside), "numStartups": 3})
    pair.step()
    assert get(place.host)["numStartups"] == 3


def test_comments_at_the_beginning_stay_as_they_are(place: Place) -> None:
    """Copilot has them in its JSON; those inside do not go out."""
    place.host.write_text('// managed\n// here\n{"numStartups": 1}')
    pair = place.pair()
    pair.step(first=True)
    assert place.inside.read_text().startswith("// managed\n// here\n{")
    place.inside.write_text('// evil\n{"numStartups": 2}')
    pair.step()
    assert place.host.read_text() == '// managed\n// here\n{\n  "numStartups": 2\n}'
    place.inside.write_text("// no more")
    pair.step()
    assert place.host.read_text().startswith("// managed")


def test_a_damaged_file_of_the_host_is_left_alone(place: Place) -> None:
    """Its agent has a way to mend it; ours would lose what is in it."""
    place.host.write_text('{"oauthAccount": {')
    put(place.inside, numStartups=2)
    pair = place.pair()
    pair.step(first=True)
    assert place.host.read_text() == '{"oauthAccount": {'
    assert "not JSON" in pair.problem


def test_the_host_is_replaced_in_one_piece(place: Place) -> None:
    """Whoever reads it meanwhile never sees half of it."""
    put(place.host, numStartups=0)
    pair = place.pair()
    pair.step(first=True)
    stop, torn = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            try:
                get(place.host)
            except ValueError as error:
                torn.append(str(error))

    reader = threading.Thread(target=watch)
    reader.start()
    for count in range(1, 101):
        put(place.inside, numStartups=count, tipsHistory={f"tip-{n}": count for n in range(200)})
        pair.step()
    stop.set()
    reader.join()
    assert torn == []
    assert get(place.host)["numStartups"] == 100


def test_a_step_waits_for_the_agent_on_the_host(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claude Code holds a directory of this name from reading to writing."""
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=2)
    held = place.host.with_name(f"{NAME}.lock")
    held.mkdir()
    tries = threading.Semaphore(0)
    with monkeypatch.context() as patched:
        patched.setattr(AgentLock, "_drop_stale", lambda _: tries.release())
        stepping = threading.Thread(target=pair.step)
        stepping.start()
        assert tries.acquire(timeout=30)
        assert tries.acquire(timeout=30)
    assert get(place.host) == {"numStartups": 1}
    put(place.host, numStartups=1, theme="light")
    held.rmdir()
    stepping.join(30)
    assert get(place.host) == {"numStartups": 2, "theme": "light"}
    assert not held.exists()


def test_a_lock_that_was_left_over_does_not_stop_it(place: Place) -> None:
    """Agents do the same."""
    put(place.host, numStartups=1)
    held = place.host.with_name(f"{NAME}.lock")
    held.mkdir()
    os.utime(held, (1, 1))
    place.pair().step(first=True)
    assert get(place.inside) == {"numStartups": 1}


def test_cannot_stop_the_last_step_with_a_lock_inside(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the sandbox is heeded while the command runs, not when it has ended."""
    monkeypatch.setattr(instep_server, "INNER_SECONDS", 0.05)
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=2)
    held = place.inside.with_name(f"{NAME}.lock")
    held.mkdir()
    future = time.time() + 10_000
    os.utime(held, (future, future))
    pair.step()
    assert get(place.host) == {"numStartups": 1}
    assert "locked" in pair.problem
    pair.step(last=True)
    assert get(place.host) == {"numStartups": 2}


def test_killed_between_any_two_writes_the_next_step_comes_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's change and the inside's both survive, wherever it ends."""
    for index, survives in enumerate((0, 1, 2, 3)):
        base = tmp_path / str(index)
        base.mkdir()
        place = Place(base)
        put(place.host, numStartups=1, theme="dark")
        place.pair().step(first=True)
        put(place.host, numStartups=1, theme="light")
        put(place.inside, numStartups=2, theme="dark")
        done: list[str] = []

        def dying(
            directory: int, name: str, data: bytes, done: list[str] = done, last: int = survives
        ) -> None:
            if len(done) >= last:
                raise KeyboardInterrupt
            done.append(name)
            write(directory, name, data)

        with monkeypatch.context() as patched:
            patched.setattr(instep_server, "write", dying)
            try:
                place.pair().step()
            except KeyboardInterrupt:
                assert survives < 3
        place.pair().step(first=True)
        assert get(place.host) == get(place.inside) == {"numStartups": 2, "theme": "light"}


def test_many_processes_in_step_lose_nothing(tmp_path: Path) -> None:
    """Two sandboxes of one project and an agent on the host, each with a key of its own."""
    place = Place(tmp_path)
    put(place.host, numStartups=0)
    pairs = [place.pair(), place.pair()]
    for pair in pairs:
        pair.step(first=True)
    ended = threading.Event()

    def serve(pair: Pair) -> None:
        while not ended.is_set():
            if pair.has_changed():
                pair.step()

    def agent(path: Path, key: str) -> None:
        """Read, change and write under the agent's own lock."""
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        for count in range(1, 31):
            with AgentLock(directory, f"{NAME}.lock", 60.0):
                put(path, **{**get(path), key: count})
        os.close(directory)

    servers = [threading.Thread(target=serve, args=(pair,)) for pair in pairs]
    agents = [
        threading.Thread(target=agent, args=arguments)
        for arguments in (
            (place.inside, "numStartups"), (place.inside, "promptQueueUseCount"),
            (place.host, "subscriptionNoticeCount"),
        )
    ]  # fmt: skip
    for thread in (*servers, *agents):
        thread.start()
    for thread in agents:
        thread.join(120)
    ended.set()
    for thread in servers:
        thread.join(60)
    pairs[0].step(last=True)
    wanted = dict.fromkeys(("numStartups", "promptQueueUseCount", "subscriptionNoticeCount"), 30)
    assert get(place.host) == get(place.inside) == wanted


def test_a_copy_follows_the_host_and_keeps_what_was_changed_inside(tmp_path: Path) -> None:
    """Until the host's changes again. Nothing goes out."""
    place = Place(tmp_path, mode="copy", keys="")
    place.host.write_text("model = 1\n")
    place.pair().step(first=True)
    place.inside.write_text("model = 2\n")
    place.pair().step(first=True)
    assert place.inside.read_text() == "model = 2\n"
    place.pair().step(last=True)
    assert place.host.read_text() == "model = 1\n"
    place.host.write_text("model = 3\n")
    place.pair().step(first=True)
    assert place.inside.read_text() == "model = 3\n"


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """Before a byte of it is read."""
    path = tmp_path / "x"
    path.write_bytes(b"x" * 10)
    here = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    assert read(here, "x") == b"x" * 10
    with path.open("wb") as file:
        file.truncate(instep_server.MAX_BYTES + 1)
    with pytest.raises(Refused):
        read(here, "x")
    os.close(here)
