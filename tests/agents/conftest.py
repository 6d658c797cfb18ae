"""The stage of each agent, made once; and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import As, must_work
from kernel.conftest import World, must_start, places

from . import install
from .roster import AGENTS
from .stage import Engine, Ground, Models, Stage
from .table import Table, asked_to_write, of_page, write

__all__ = ["Table", "places"]

_table = Table()


@pytest.fixture(scope="session")
def table() -> Table:
    """What is known of each agent, for the page."""
    return _table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and renew it in the documentation when asked to."""
    if not _table.rows:
        return
    terminalreporter.section("agents")
    terminalreporter.write_line(_table.text(of_page()))
    if asked_to_write():
        write(_table)


@pytest.fixture(scope="session")
def prefix() -> Path:
    """Where the agents are installed."""
    found = install.found()
    must_work(found, "needs the agents: make test-agents")
    assert found is not None
    return found


@pytest.fixture(scope="session")
def ground(places: Path, prefix: Path) -> Iterator[Ground]:
    """Namespaces, as root."""
    base = places / "ground"
    base.mkdir()
    base.chmod(0o755)
    made = Ground(base, prefix)
    yield made
    made.end()


@pytest.fixture(scope="session")
def models(ground: Ground) -> Models:
    """The model, and a bystander."""
    return Models(ground)


@pytest.fixture(scope="session")
def engine(user: As) -> Iterator[Engine]:
    """What must not be reached, either."""
    made = Engine(user)
    yield made
    made.end()


Make = Callable[[str, str], Stage]


@pytest.fixture(scope="session")
def stage(user: As, places: Path, ground: Ground, models: Models, engine: Engine) -> Make:
    """Makes the stage of an agent; the second word keeps several of them apart."""
    must_start(user)
    made: dict[tuple[str, str], Stage] = {}

    def make(agent: str, purpose: str) -> Stage:
        there = ground.prefix / "bin" / agent
        must_work(there.exists(), f"needs {agent}: make test-agents AGENTS=all")
        if (agent, purpose) not in made:
            base = places / f"{agent}-{purpose}"
            base.mkdir()
            base.chmod(0o755)
            world = World(user, base)
            made[agent, purpose] = Stage(AGENTS[agent], world, ground, models, engine)
        return made[agent, purpose]

    return make
