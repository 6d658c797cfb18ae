"""Each attack becomes a trial for each identity that it concerns."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import IS_ROOT, As
from escape.attack import ROOT, Trial
from kernel.conftest import must_start

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def places() -> Iterator[Path]:
    """A directory outside of /tmp that every identity can pass through."""
    parent = Path("/srv") if IS_ROOT else Path.home()
    path = Path(tempfile.mkdtemp(prefix="agsbx-", dir=parent))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def trial(request: pytest.FixtureRequest, places: Path) -> Trial:
    """One attack and one identity."""
    attack, who = request.param
    runner: As = request.getfixturevalue("superuser" if who == ROOT else "user")
    must_start(runner)
    return Trial(attack=attack, runner=runner, places=places)
