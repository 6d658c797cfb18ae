"""Fuzz tests: seeded, so that a failure can be repeated, and bounded in number or in time.

As part of `make test` each runs a fixed number of examples from a fixed seed. `make fuzz` gives
them a time together, and a seed of its own that is printed and can be given again.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from random import randrange
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, seed, settings

from agent_sandbox.cli.output import printable
from agent_sandbox.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from hypothesis.strategies import SearchStrategy

    T = TypeVar("T")

SECONDS = float(os.environ.get("AGENT_SANDBOX_FUZZ_SECONDS") or 0)
# Always the same in `make test`, and another one each time in `make fuzz`.
SEED = int(os.environ.get("AGENT_SANDBOX_FUZZ_SEED") or (SECONDS and randrange(10**6)) or 1)
# For pytest's workers, which are started after this.
os.environ["AGENT_SANDBOX_FUZZ_SEED"] = str(SEED)
# How many fuzz tests share the time, per worker; the collection counts them.
sharing = {"tests": 1.0}


def attempt(call: Callable[[], T], kind: type[SandboxError] = SandboxError) -> T | SandboxError:
    """What a call returns, or the error of ours that it raises; any other error goes on."""
    try:
        return call()
    except kind as error:
        problem = error
    assert problem.code
    printable(problem.message + problem.hint).encode()
    return problem


def fuzz(examples: int, **drawn: SearchStrategy[Any]) -> Callable[..., Callable[..., None]]:
    """Run a test with values drawn for these arguments; its other arguments are fixtures."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            until = time.monotonic() + SECONDS / sharing["tests"]
            number = SEED
            while True:
                _round(body, examples, number, drawn, fixtures)
                number += 1
                if time.monotonic() >= until:
                    return

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        wanted = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter for parameter in wanted if parameter.name not in drawn]
        )
        test.shares_time = True  # type: ignore[attr-defined]
        return test

    return decorate


def _round(
    body: Callable[..., None],
    examples: int,
    number: int,
    drawn: dict[str, SearchStrategy[Any]],
    fixtures: dict[str, Any],
) -> None:
    def run(**values: Any) -> None:
        body(**fixtures, **values)

    limits = settings(
        max_examples=examples, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        seed(number)(limits(given(**drawn)(run)))()
    except BaseException:
        sys.stderr.write(f"again: make fuzz SEED={number} ARGS='-k {body.__name__}'\n")
        raise
