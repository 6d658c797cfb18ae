"""What the service keeps of commands and sandboxes that are over: no memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.limits import Limits

from .lab import ALICE, cmd, go, lab
from .test_journal import resident


def test_a_hundred_megabytes_of_output_do_not_grow_the_service(tmp_path: Path) -> None:
    async def check() -> None:
        limits = Limits(max_output_bytes=100 << 20)
        async with lab(tmp_path / "d", limits=limits) as world:
            box = (await world.service.create(ALICE, Wish())).id
            before = resident()
            job = await world.service.execute(ALICE, box, cmd("flood", str(100 << 20)))
            peak, read = before, 0
            async for frame in job.journal.follow():
                read += len(frame.data)
                if read % (1 << 20) == 0:
                    peak = max(peak, resident())
                    await asyncio.sleep(0)
            assert read == 100 << 20
            assert (await job.wait()).stdout_bytes == read
            assert peak - before < 16 << 20

    go(check())


def test_a_thousand_sandboxes_made_and_deleted_leave_memory_flat(tmp_path: Path) -> None:
    async def check() -> None:
        limits = Limits(rate_create_per_min=10_000)
        async with lab(tmp_path / "d", limits=limits) as world:

            async def one() -> None:
                made = await world.service.create(ALICE, Wish())
                await world.service.delete(ALICE, made.id)

            for _ in range(100):
                await one()
            before = resident()
            for _ in range(1000):
                await one()
            assert resident() - before < 4 << 20
            assert world.service._context.live == {}

    go(check())
