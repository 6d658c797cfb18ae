"""Shares the time of `make fuzz` among the tests, and says the seed."""

from __future__ import annotations

import os

import pytest

from . import bound


def pytest_report_header() -> str:
    """The seed, for the next time."""
    return f"fuzz: seed {bound.SEED}, {bound.SECONDS:g} seconds"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers get through twice as many."""
    own = [item for item in items if hasattr(getattr(item, "function", None), "shares_time")]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or 1)
    bound.sharing["tests"] = max(1.0, len(own) / workers)
