"""Says the seed; the worlds are those of the kernel tests."""

from __future__ import annotations

from kernel.conftest import places, world

from . import rounds

__all__ = ["places", "world"]


def pytest_report_header() -> str:
    """The seed, for the next time."""
    return f"chaos: seed {rounds.SEED}, {rounds.RUNS} runs"
