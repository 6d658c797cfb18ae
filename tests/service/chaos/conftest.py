"""Says the seed; a ground for the service of each identity."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos import rounds
from conftest import As
from kernel.conftest import must_start, places
from service.chaos.ground import Ground

__all__ = ["places"]
_numbers = itertools.count(1)


def pytest_report_header() -> str:
    """The seed, for the next time."""
    return f"chaos: seed {rounds.SEED}, {rounds.RUNS} runs"


@pytest.fixture
def ground(runner: As, places: Path) -> Iterator[Ground]:
    """Where a service of this identity lives, dies and comes back."""
    must_start(runner)
    # Short: the path of a socket has 107 bytes at most.
    base = places / f"chaos-{next(_numbers)}"
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    ground = Ground(runner, base)
    yield ground
    ground.end()
    shutil.rmtree(base, ignore_errors=True)
