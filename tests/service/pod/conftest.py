"""Agents that say what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend import pod_identity

from .liar import Answer, Liar

Scene = Callable[[Any], Awaitable[object]]


@pytest.fixture(scope="module")
def pem() -> bytes:
    return pod_identity.make()


@pytest.fixture
def lie(tmp_path: Path, pem: bytes) -> Callable[..., Any]:
    """Play a scene with an agent that answers so."""

    def play(scene: Scene, answers: dict[str, Answer], **options: Any) -> tuple[Any, Liar]:
        liar = Liar(tmp_path, pem, answers)

        async def body() -> object:
            async with liar.open(**options) as link:
                return await asyncio.wait_for(scene(link), 50)

        return asyncio.run(body()), liar

    return play
