"""Locks of the database are the process's: whatever is closed in it must not drop them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.service import store as stores
from agent_sandbox.service.store import Store

SRC = Path(stores.__file__).parents[2]
# Another process that comes, changes something and goes, as `sandboxctl token` does.
OTHER = """
import sys
from agent_sandbox.service.store import Store
store = Store(sys.argv[1], own=False)
store.claim("other", sys.argv[2], "hash")
print(store.idempotent("us", sys.argv[2]) is not None)
store.close()
"""


def other(data: Path, key: str) -> bool:
    """Whether another process sees what was written here under a key."""
    line = [sys.executable, "-c", OTHER, str(data), key]
    done = subprocess.run(line, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True,
                          check=True)  # fmt: skip
    return done.stdout == "True\n"


@pytest.mark.parametrize("tidied", [False, True])
def test_the_log_stays_when_others_come_and_go(tmp_path: Path, tidied: bool) -> None:
    store = Store(str(tmp_path / "data"))
    try:
        for number in range(3):
            if tidied:
                store.tidy()
            key = f"k{number}"
            store.claim("us", key, "hash")
            assert other(tmp_path / "data", key)
            assert store.idempotent("other", key) is not None
            assert os.stat(f"{store.path}-wal").st_nlink == 1
    finally:
        store.close()


def test_a_file_that_is_closed_beside_it_loses_the_log(tmp_path: Path) -> None:
    """The control: this is what one close of the same file does."""
    store = Store(str(tmp_path / "data"))
    try:
        store.claim("us", "k1", "hash")
        os.close(os.open(store.path, os.O_RDONLY))
        other(tmp_path / "data", "k1")
        store.claim("us", "k2", "hash")
        assert not other(tmp_path / "data", "k2")
    finally:
        store.close()
