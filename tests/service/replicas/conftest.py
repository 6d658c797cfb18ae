"""Fixtures of the tests with several replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.service.store_address import Database

from ..postgres import Cluster, database, own_postgres, postgres, sited
from .ground import Ground, use

__all__ = ("database", "ground", "own_postgres", "postgres", "sited")


@pytest.fixture
def ground(
    postgres: Cluster, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Ground:
    """A database and a backend that every replica reaches. No replica yet."""
    made = Ground(postgres, database, tmp_path)
    use(monkeypatch, made.backend)
    return made
