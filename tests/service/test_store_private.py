"""The data directory is for its owner alone; what another user may have prepared is not used."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import IS_ROOT, As, must_work

from agent_sandbox.errors import HostError
from agent_sandbox.service import store_private
from agent_sandbox.service.audit import Audit
from agent_sandbox.service.store import Store


def modes(directory: Path) -> dict[str, str]:
    found = [directory, *directory.rglob("*")]
    return {
        str(path.relative_to(directory)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in found
    }


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(HostError) as caught:
        make()
    assert caught.value.code == "data-unsafe"
    return caught.value.message


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_everything_is_made_for_the_owner_alone(tmp_path: Path, umask: int) -> None:
    data = tmp_path / "above" / "data"
    before = os.umask(umask)
    try:
        store = Store(str(data))
        audit = Audit(f"{data}/audit", rotate_bytes=100)
        audit.write(None, "x")
        audit.write(None, "y")
        store.change("INSERT INTO keys VALUES ('o', 'k', 'h', 1, NULL, NULL)")
    finally:
        os.umask(before)
    assert modes(data) == {
        ".": "0o700", "lock": "0o600", "state.db": "0o600", "state.db-wal": "0o600",
        "state.db-shm": "0o600", "audit": "0o700", "audit/head": "0o600", "audit/lock": "0o600",
        "audit/audit-000001.jsonl": "0o600", "audit/audit-000002.jsonl": "0o600",
    }  # fmt: skip
    assert oct(stat.S_IMODE(data.parent.stat().st_mode)) == "0o700"
    audit.close()
    store.close()


def test_where_the_data_is() -> None:
    place = store_private.data_directory
    assert place({"SANDBOX_DATA": "/srv/x"}, 0) == "/srv/x"
    assert place({}, 0) == "/var/lib/agent-sandbox"
    assert place({"XDG_STATE_HOME": "/s", "HOME": "/h"}, 1000) == "/s/agent-sandbox/service"
    # A relative one counts as not set, says the specification.
    for state in ({}, {"XDG_STATE_HOME": "s"}):
        expected = "/h/.local/state/agent-sandbox/service"
        assert place({**state, "HOME": "/h"}, 1000) == expected


# --- directories


def test_cannot_use_a_linked_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "data").symlink_to(tmp_path / "real")
    assert "it is a link" in refused(lambda: Store(str(tmp_path / "data")))
    assert "it is a link" in refused(lambda: Audit(str(tmp_path / "data")))
    assert list((tmp_path / "real").iterdir()) == []
    # The control: the target itself is fine.
    Store(str(tmp_path / "real")).close()


def test_a_link_above_is_followed_to_its_checked_end(tmp_path: Path) -> None:
    """/var/lib is a link on some machines."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = Store(str(tmp_path / "link" / "data"))
    assert store.data == str(tmp_path / "real" / "data")
    store.close()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert "not a directory" in refused(lambda: Store(str(tmp_path / "data")))
    assert "not a directory" in refused(lambda: Store(str(tmp_path / "data" / "x")))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720])
def test_cannot_use_a_directory_that_others_can_write(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    assert "open to other users" in refused(lambda: Store(str(data)))
    assert modes(data) == {".": oct(mode)}


def test_a_readable_directory_is_closed_if_it_is_empty_and_refused_if_not(tmp_path: Path) -> None:
    """`mkdir d` by hand is fine; `--data /etc` by mistake must not close /etc."""
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    (data / "something").write_text("")
    assert "open to other users" in refused(lambda: Store(str(data)))
    assert oct(stat.S_IMODE(data.stat().st_mode)) == "0o755"
    (data / "something").unlink()
    Store(str(data)).close()
    assert oct(stat.S_IMODE(data.stat().st_mode)) == "0o700"


def test_cannot_use_a_place_that_others_could_swap(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    assert "written by others" in refused(lambda: Store(str(above / "data")))
    assert list(above.iterdir()) == []
    # Sticky, as /tmp is: only the owner of an entry can rename it.
    above.chmod(0o1777)
    Store(str(above / "data")).close()


def test_cannot_use_what_another_user_has_prepared(user: As, shared: Path, tmp_path: Path) -> None:
    """Directories of a user, where root runs the service."""
    must_work(IS_ROOT, "needs two users")
    theirs = user.directory(shared / "theirs")
    theirs.chmod(0o700)
    assert f"belongs to uid {user.uid}" in refused(lambda: Store(str(theirs)))
    # Root's own directory below: its parent can still put another one there.
    (theirs / "data").mkdir(mode=0o700)
    assert f"belongs to uid {user.uid}" in refused(lambda: Store(str(theirs / "data")))
    for name in ("state.db", "state.db-wal", "lock"):
        data = tmp_path / name
        data.mkdir(mode=0o700)
        (data / name).write_text("")
        (data / name).chmod(0o600)
        os.chown(data / name, user.uid, user.gid)
        assert f"belongs to uid {user.uid}" in refused(partial(Store, str(data)))


def test_root_cannot_be_led_to_write_as_another(user: As, shared: Path) -> None:
    """`sandboxctl token new` by root in a user's data would leave files of root there."""
    must_work(IS_ROOT, "needs two users")
    home = user.directory(shared / "their-home")
    data = home / "data"
    done = user.sandboxctl("token", "new", "worker", "--data", data)
    assert done.returncode == 0, done.stderr
    before = modes(data)
    message = refused(lambda: Store(str(data), own=False))
    assert str(user.uid) in message
    assert modes(data) == before


# --- files


@pytest.mark.parametrize("name", ["state.db", "state.db-wal", "state.db-shm", "lock"])
def test_cannot_use_a_planted_link(tmp_path: Path, name: str) -> None:
    """The control: SQLite by itself follows the link and writes to its target."""
    data, target = tmp_path / "data", tmp_path / "target"
    data.mkdir(mode=0o700)
    (data / name).symlink_to(target)
    assert "it is a link" in refused(lambda: Store(str(data)))
    assert not target.exists()
    if name == "state.db":
        db = sqlite3.connect(data / name)
        db.execute("CREATE TABLE t(x)")
        db.close()
        assert target.exists()


@pytest.mark.parametrize("name", ["head", "lock", "audit-000001.jsonl"])
def test_cannot_use_a_planted_link_in_the_audit_trail(tmp_path: Path, name: str) -> None:
    data, target = tmp_path / "audit", tmp_path / "target"
    data.mkdir(mode=0o700)
    (data / name).symlink_to(target)
    assert "it is a link" in refused(lambda: Audit(str(data)))
    assert not target.exists()


def test_cannot_use_a_file_with_a_second_name_or_open_to_others(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "state.db").write_bytes(b"")
    (data / "state.db").chmod(0o644)
    assert "open to other users" in refused(lambda: Store(str(data)))
    (data / "state.db").chmod(0o600)
    os.link(data / "state.db", tmp_path / "second")
    assert "second name" in refused(lambda: Store(str(data)))
    (tmp_path / "second").unlink()
    Store(str(data)).close()


@pytest.mark.parametrize("name", ["state.db", "lock"])
def test_a_planted_pipe_does_not_hang(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    os.mkfifo(data / name, 0o600)
    assert "not a regular file" in refused(lambda: Store(str(data)))
