"""The made-up machine of the limits, and our package where every user can read it."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

import agent_sandbox

from .machine import Kernel

SOURCE = os.path.dirname(agent_sandbox.__path__[0])


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    return Kernel(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def public_source():
    """The package where every user can read it."""
    place = tempfile.mkdtemp(prefix="agent-sandbox-test-")
    os.chmod(place, 0o755)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(f"{SOURCE}/agent_sandbox", f"{place}/agent_sandbox", ignore=ignored)
    for top, folders, files in os.walk(place):
        for name in (*folders, *files):
            os.chmod(f"{top}/{name}", 0o755)
    yield place
    shutil.rmtree(place)
