"""Filters as a supervisor starts them, before a fake engine or a dockerd of our own."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.launch import dockerproxy
from agent_sandbox.launch.attendant import Attendant
from agent_sandbox.launch.egress import to_json
from engine import Engine, engine

from .fake import FakeEngine, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What can be run: nothing can be pulled.
IMAGE = "busybox:test"
_numbers = itertools.count(1)


class Filtered:
    """One filter: a socket, its process, and what it reports."""

    def __init__(self, base: Path, engine: Path, *, keep: bool = False, **grants: Any) -> None:
        self.owner = f"run{next(_numbers):04d}"
        self.base = base
        self.work = base / self.owner
        self.work.mkdir(parents=True)
        self.path = self.work / "docker.sock"
        self.audit_path = base / "audit" / "docker.jsonl"
        grants = {"images": ["busybox", "alpine"], "network": "on", **grants}
        grants |= {"owner": self.owner, "socket": str(self.path)}
        grants.setdefault("binds", [])
        orders = {
            "engine": str(engine), "keep": keep, "mode": grants.pop("mode", "enforce"),
            "audit": str(self.audit_path), "records": str(base / "records"), "grants": grants,
            "work": str(self.work),
        }  # fmt: skip
        self._filter = Attendant(dockerproxy.KIND, to_json(orders).encode(), str(self.work))
        self._filter.start()
        self._filter.ready()
        self.report: dict[str, Any] | None = None

    def stop(self) -> dict[str, Any]:
        """End the run."""
        if self.report is None:
            self._filter.ask()
            self.report = json.loads(self._filter.finish() or b"{}")
        return self.report

    @property
    def pid(self) -> int:
        """The process."""
        process = self._filter._process
        assert process is not None
        return process.pid

    def orphan(self) -> None:
        """Let go of it as a supervisor does that dies."""
        process = self._filter._process
        assert process is not None
        process._control.close()
        self.report = {}

    def kill(self) -> None:
        """End it as a crash would."""
        self._filter.abandon()
        self.report = {}

    def audit(self) -> list[dict[str, Any]]:
        """The lines of this run."""
        text = self.audit_path.read_text()
        return [e for e in map(json.loads, text.splitlines()) if e["run"] == self.owner]


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with short names."""
    path = place()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[FakeEngine, Filtered]]:
    """An engine that records, and a filter before it, for all tests of a module."""
    path = place()
    engine = FakeEngine(path / "engine.sock")
    engine.start()
    images = ["busybox", "alpine", "allowed/*"]
    filtered = Filtered(path, engine.path, registries=["docker.io"], images=images)
    yield engine, filtered
    filtered.stop()
    engine.stop()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def fake(recorded: tuple[FakeEngine, Filtered]) -> FakeEngine:
    """The engine, with nothing in it and nothing seen."""
    recorded[0].forget()
    return recorded[0]


@pytest.fixture
def filtered(fake: FakeEngine, recorded: tuple[FakeEngine, Filtered]) -> Filtered:
    """The filter before it."""
    return recorded[1]


@pytest.fixture
def start(base: Path) -> Iterator[Callable[..., Filtered]]:
    """Starts filters, and ends them after the test."""
    made: list[Filtered] = []

    def starter(engine: Path, **options: Any) -> Filtered:
        made.append(Filtered(base, engine, **options))
        return made[-1]

    yield starter
    for one in made:
        one.stop()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Engine]:
    """A real engine with one image, for all tests of a worker."""
    with engine("--storage-driver=overlay2") as made:
        made.image(IMAGE)
        made.run("tag", IMAGE, "alpine:latest")
        made.run("tag", IMAGE, "private/other:1")
        yield made


# Worlds of the kernel tests, for sandboxes with a filter.
from kernel.conftest import places, world  # noqa: E402, F401
