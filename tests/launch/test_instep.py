"""The process that keeps an agent's files in step: hostile files, locks, crashes, other writers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import instep_files, instep_server
from agent_sandbox.launch.instep import InStep
from agent_sandbox.launch.instep_files import AgentLock, Refused, Staged, read, sweep
from agent_sandbox.launch.instep_server import File, Pair, Versions
from agent_sandbox.policy import instep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

P = "/home/u/p"
NAME = ".claude.json"


class Place:
    """Both sides of one file."""

    def __init__(
        self, base: Path, mode: str = "merge", keys: str = "claude", home: str = "home"
    ) -> None:
        for name in ("inside", home, "base"):
            (base / name).mkdir(exist_ok=True)
        self.inside, self.host = base / "inside" / NAME, base / home / NAME
        self.host_lock = self.host.with_name(f"{NAME}.lock")
        self.inner_lock = self.inside.with_name(f"{NAME}.lock")
        self.lock = str(base / "lock")
        self.row = {
            "mode": mode, "root": str(base / "inside"), "name": NAME, "outside": str(self.host),
            "keys": keys, "base": str(base / "base"),
        }  # fmt: skip

    def pair(self) -> Pair:
        return Pair(File(**self.row), P, self.lock)

    def left(self) -> list[str]:
        """Locks and versions that are not in place, on either side."""
        names = (*os.listdir(self.host.parent), *os.listdir(self.inside.parent))
        return sorted(n for n in names if n.endswith(".lock") or instep_files.MARK in n)


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
        file.truncate(instep_files.MAX_BYTES + 1)


def _larger(path: Path, _: Path) -> None:
    path.write_text(json.dumps({"numStartups": 2, "x": "x" * instep_files.MORE_BYTES}))


def _many(path: Path, _: Path) -> None:
    # As few bytes as possible: a step that copies them all for each takes minutes.
    entries = {f"{P}/{n}": {"a": 0} for n in range(40_000)}
    path.write_text(json.dumps({"numStartups": 2, "projects": entries}))


def _indented(path: Path, _: Path) -> None:
    zeros = ",".join("0" for _ in range(300_000))
    path.write_text('{"numStartups": 2, "z": ' + "[" * 900 + zeros + "]" * 900 + "}")


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


HOSTILE = (
    _link, _fifo, _directory, _large, _larger, _many, _indented, _deep, _number, _infinite, _torn,
    _other,
)  # fmt: skip


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
    began = time.monotonic()
    pair.step(first=when == "first", last=when == "last")
    # Well before whoever waits takes a lock for left over.
    assert time.monotonic() - began < instep_files.STALE / 2
    assert place.host.read_bytes() == before
    assert get(secret) == {"primaryApiKey": "theirs"}
    assert place.left() == []
    assert not place.inside.is_file() or place.inside.stat().st_size <= instep_files.MAX_BYTES + 1
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
    held = place.host_lock
    held.mkdir()
    tries = threading.Semaphore(0)
    looked = AgentLock.is_free

    def is_free(lock: AgentLock) -> bool:
        tries.release()
        return looked(lock)

    monkeypatch.setattr(instep_server, "STEP_SECONDS", 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(AgentLock, "is_free", is_free)
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
    held = place.host_lock
    held.mkdir()
    os.utime(held, (1, 1))
    place.pair().step(first=True)
    assert get(place.inside) == {"numStartups": 1}


def test_cannot_stop_the_last_step_with_a_lock_inside(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the sandbox is heeded while the command runs, not when it has ended."""
    monkeypatch.setattr(instep_server, "INNER_SECONDS", 0.05)
    monkeypatch.setattr(instep_server, "STEP_SECONDS", 0.05)
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=2)
    held = place.inner_lock
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
        done: list[Staged] = []

        def dying(
            version: Staged, done: list[Staged] = done, last: int = survives,
            put: Callable[[Staged], None] = Staged.put,
        ) -> None:  # fmt: skip
            if len(done) >= last:
                raise KeyboardInterrupt
            done.append(version)
            put(version)

        with monkeypatch.context() as patched:
            patched.setattr(Staged, "put", dying)
            try:
                place.pair().step()
            except KeyboardInterrupt:
                assert survives < 3
        place.pair().step(first=True)
        assert get(place.host) == get(place.inside) == {"numStartups": 2, "theme": "light"}


def take(lock: Path) -> None:
    """As agents take a lock: without our code."""
    while True:
        try:
            lock.mkdir()
        except FileExistsError:
            time.sleep(0.001)
        else:
            return


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
        lock = path.with_name(f"{NAME}.lock")
        for count in range(1, 31):
            take(lock)
            put(path, **{**get(path), key: count})
            lock.rmdir()

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
        file.truncate(instep_files.MAX_BYTES + 1)
    with pytest.raises(Refused):
        read(here, "x")
    os.close(here)


# --- other writers, and the time that a step takes


@pytest.mark.parametrize("looks_again", [True, False], ids=["attack", "control"])
def test_cannot_undo_what_the_host_writes_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, looks_again: bool
) -> None:
    """However long the sandbox makes a step, the host's agent has its lock and writes.

    The control does not look again before it renames, and the host's change is gone.
    """
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=2)
    merge, ours = instep.merge, {"mine": {"command": "x"}}

    def slow(*arguments: Any, **options: Any) -> instep.Merged:
        monkeypatch.setattr(instep, "merge", merge)
        place.host_lock.mkdir()
        put(place.host, **{**get(place.host), "mcpServers": ours})
        place.host_lock.rmdir()
        return merge(*arguments, **options)

    monkeypatch.setattr(instep, "merge", slow)
    if not looks_again:
        monkeypatch.setattr(Versions, "__eq__", lambda _, other: isinstance(other, Versions))
    pair.step()
    assert pair.problem == ""
    kept = {"mcpServers": ours} if looks_again else {}
    assert get(place.host) == {"numStartups": 2, **kept}
    assert place.left() == []


def test_what_is_written_right_after_a_step_is_a_change(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step knows its own versions, not those that are there when it looks next."""
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=2)
    release = AgentLock.release

    def late(lock: AgentLock) -> None:
        monkeypatch.setattr(AgentLock, "release", release)
        release(lock)
        put(place.inside, numStartups=3)

    monkeypatch.setattr(AgentLock, "release", late)
    pair.step()
    assert get(place.host) == {"numStartups": 2}
    assert pair.has_changed()
    pair.step()
    assert get(place.host) == {"numStartups": 3}


def test_a_lock_that_was_held_up_is_not_relied_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process or a machine asleep: others take the lock for left over."""
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=2)
    monkeypatch.setattr(instep_server, "STEP_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(instep_files, "HELD", -1.0)
        pair.step()
    assert "held up" in pair.problem
    assert get(place.host) == {"numStartups": 1}
    pair.step()
    assert get(place.host) == {"numStartups": 2}


def test_a_lock_that_somebody_else_has_by_now_is_not_given_back(place: Place) -> None:
    """Control: our own is."""
    directory = os.open(place.host.parent, instep_files.DIRECTORY)
    lock = AgentLock(directory, str(place.host.parent), place.host_lock.name)
    assert lock.take(time.time_ns())
    assert lock.is_held()
    place.host_lock.rmdir()
    place.host_lock.mkdir()
    assert not lock.is_held()
    lock.release()
    assert place.host_lock.exists()
    place.host_lock.rmdir()
    assert lock.take(time.time_ns())
    lock.release()
    assert not place.host_lock.exists()
    os.close(directory)


def test_cannot_hold_the_host_s_lock_by_the_one_inside(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the sandbox keeps its own lock fresh, the host's is not taken. Control: then it is."""
    monkeypatch.setattr(instep_server, "STEP_SECONDS", 0.1)
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=2)
    taken: list[str] = []
    mkdir = os.mkdir

    def making(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if dir_fd == pair.host:
            taken.append(name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", making)
        place.inner_lock.mkdir()
        pair.step()
        # Also where it appears in the moment between a look and the lock.
        patched.setattr(AgentLock, "is_free", lambda _: True)
        pair.step()
        assert "locked" in pair.problem
        assert taken == []
        place.inner_lock.rmdir()
        pair.step()
        assert taken == [place.host_lock.name]
    assert get(place.host) == {"numStartups": 2}


def test_what_the_host_does_not_get_leaves_its_lock_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that writes all the time what stays inside keeps nobody waiting."""
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    put(place.inside, numStartups=1, unheardOf=1)
    taken: list[str] = []
    really = AgentLock.take

    def take(lock: AgentLock, mark: int) -> bool:
        taken.append(lock.place)
        return really(lock, mark)

    monkeypatch.setattr(AgentLock, "take", take)
    pair.step()
    assert pair.problem == ""
    assert taken == []
    put(place.inside, numStartups=2)
    pair.step()
    assert taken == [str(place.inside.parent), str(place.host.parent)]


# --- what a killed process leaves


def killed(place: Place) -> None:
    """A process that is killed while it holds both locks and has its versions made."""

    def dying(_: Staged) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if not pid:
        try:
            pytest.MonkeyPatch().setattr(Staged, "put", dying)
            place.pair().step()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def ready_to_step(place: Place) -> None:
    put(place.host, numStartups=1)
    place.pair().step(first=True)
    put(place.inside, numStartups=2)


def test_what_a_killed_process_has_left_is_removed_at_the_next_start(place: Place) -> None:
    """Its locks and its versions, at once: nobody waits until the locks are old."""
    ready_to_step(place)
    killed(place)
    left = place.left()
    assert [n for n in left if n.endswith(".lock")] == [f"{NAME}.lock"] * 2
    assert len([n for n in left if instep_files.MARK in n]) == 1
    began = time.monotonic()
    place.pair().step(first=True)
    assert time.monotonic() - began < instep_files.STALE / 2
    assert place.left() == []
    assert get(place.host) == {"numStartups": 2}


def test_a_lock_of_somebody_else_is_not_removed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same name, right after a process of ours was killed. Control: the one above."""
    monkeypatch.setattr(instep_server, "EDGE_SECONDS", 0.2)
    ready_to_step(place)
    killed(place)
    place.host_lock.rmdir()
    place.host_lock.mkdir()
    pair = place.pair()
    pair.step(first=True)
    assert place.host_lock.exists()
    assert "locked" in pair.problem
    assert get(place.host) == {"numStartups": 1}


def test_versions_of_a_process_that_lives_are_not_swept(tmp_path: Path) -> None:
    """Nor what has another name, nor a link of that name."""
    here = os.open(tmp_path, instep_files.DIRECTORY)
    other = tmp_path / f"other{instep_files.MARK}1"
    other.write_text("x")
    link = tmp_path / f"{NAME}{instep_files.MARK}link"
    link.symlink_to(other)
    staged = Staged(here, NAME, b"{}")
    sweep(here, NAME)
    staged.put()
    staged.drop()
    assert (tmp_path / NAME).read_bytes() == b"{}"
    left = tmp_path / f"{NAME}{instep_files.MARK}left"
    left.write_text("x")
    sweep(here, NAME)
    assert not left.exists()
    assert other.exists()
    assert link.is_symlink()
    os.close(here)


# --- sizes and modes


def test_a_document_is_not_made_larger_than_it_could_be_read() -> None:
    """Indentation makes 20 KB to 18 MB; it is given up on the way."""
    value: Any = [0] * 10_000
    for _ in range(900):
        value = [value]
    assert len(json.dumps({"z": value}, indent=2)) > instep_files.MAX_BYTES
    with pytest.raises(Refused, match="too large"):
        instep_files.dump({"z": value})


def test_a_file_inside_may_be_larger_than_the_host_s_by_a_bound(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control has a larger bound."""
    put(place.host, numStartups=1)
    pair = place.pair()
    pair.step(first=True)
    _larger(place.inside, place.host)
    pair.step()
    assert "too large" in pair.problem
    monkeypatch.setattr(instep_files, "MORE_BYTES", 2 * instep_files.MORE_BYTES)
    pair.step()
    assert get(place.host) == {"numStartups": 2}


def test_cannot_choose_the_mode_of_a_file_with_a_login(place: Place) -> None:
    """Neither by a link, whose mode is open to all, nor by a file that is."""
    put(place.host, primaryApiKey="k")
    place.inside.symlink_to(place.host)
    assert place.inside.lstat().st_mode & 0o777 == 0o777
    pair = place.pair()
    pair.step(first=True)
    assert not place.inside.is_symlink()
    assert place.inside.stat().st_mode & 0o777 == 0o600
    place.inside.chmod(0o666)
    put(place.host, primaryApiKey="l")
    pair.step()
    assert get(place.inside) == {"primaryApiKey": "l"}
    assert place.inside.stat().st_mode & 0o777 == 0o600


def test_the_process_has_little_memory_and_names_what_it_could_not_do(place: Place) -> None:
    """Started as a run starts it; the bound is the kernel's."""
    put(place.host, numStartups=1)
    place.host.chmod(0o600)
    orders = {"files": [place.row], "project": P, "lock": place.lock}
    running = InStep(json.dumps(orders).encode())
    running.start()
    try:
        running.ready()
        assert running._process is not None
        with open(f"/proc/{running._process.pid}/limits") as file:
            bound = next(line.split() for line in file if line.startswith("Max address space"))
        assert int(bound[3]) == instep_server.MEMORY
        _many(place.inside, place.host)
        running.ask()
        running.finish()
    finally:
        running.abandon()
    assert [text for text in running.warnings if "too many entries" in text] != []
    assert get(place.host) == {"numStartups": 1}
    assert place.left() == []


# --- two accounts in one project


def run(place: Place) -> None:
    """A run of its own: a process, which ends."""
    pid = os.fork()
    if not pid:
        try:
            place.pair().step(first=True)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_cannot_take_a_login_from_one_account_to_another(tmp_path: Path) -> None:
    """What is inside belongs to one file of the host; for another it is put aside.

    Control: where the host's file is the same one, the same login goes out.
    """
    first, second = Place(tmp_path), Place(tmp_path, home="other")
    run(first)
    mine = {"primaryApiKey": "first", "mcpServers": {"m": {}}}
    put(first.inside, **mine)
    run(second)
    assert not second.host.exists()
    assert not second.inside.exists()
    put(second.inside, primaryApiKey="second")
    run(first)
    assert get(first.host) == {"primaryApiKey": "first"}
    assert get(first.inside) == mine
    assert not second.host.exists()
    run(second)
    assert get(second.host) == get(second.inside) == {"primaryApiKey": "second"}
    assert get(first.host) == {"primaryApiKey": "first"}


def test_two_accounts_at_once_in_a_project_are_refused(tmp_path: Path) -> None:
    """Their agents would write the same file. Control: two runs of one account are not."""
    first, second = Place(tmp_path), Place(tmp_path, home="other")
    put(first.host, numStartups=1)
    first.pair().step(first=True)
    first.pair().step(first=True)
    with pytest.raises(Refused, match="another account"):
        second.pair()
    assert get(first.inside) == {"numStartups": 1}
    orders = {"files": [second.row], "project": P, "lock": second.lock}
    running = InStep(json.dumps(orders).encode())
    running.start()
    with pytest.raises(HostError, match="another account"):
        running.ready()


def test_killed_between_two_accounts_the_file_inside_is_nobody_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither account gets what the other had; each gets its own back."""
    first, second = Place(tmp_path), Place(tmp_path, home="other")
    run(first)
    put(first.inside, primaryApiKey="first")
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(AssertionError):
            run(second)
    assert get(first.inside) == {"primaryApiKey": "first"}
    run(second)
    assert not second.host.exists()
    run(first)
    assert get(first.host) == {"primaryApiKey": "first"}
