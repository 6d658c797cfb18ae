"""Asks the user's own git for a credential, outside: `git credential fill`.

Never in the project, and with a list of variables: neither its configuration nor what it has put
on PATH chooses what runs.
"""

from __future__ import annotations

import asyncio
import os
import signal

from ...policy.gitauth import HTTPS_PORT
from . import lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# A helper may have to be unlocked by the user.
FILL_SECONDS = 120.0
MAX_ANSWER = 64 << 10
# How many may run at a time, and in all: each is work outside, and may be a question to the user.
AT_A_TIME = 4
IN_ALL = 1000


class Filler:
    """Runs git, a few at a time."""

    def __init__(self, env: Mapping[str, str], hosts: frozenset[tuple[str, int]]) -> None:
        self._env = dict(env)
        self._hosts = hosts
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._left = IN_ALL

    def check(self, asked: lines.Question) -> None:
        """Refuse a host that nobody has named."""
        port = 0 if asked.port == HTTPS_PORT else asked.port
        if not {(asked.host, port), (asked.host, asked.port)} & self._hosts:
            raise lines.Refused("it is none of git.hosts")

    async def fill(self, asked: lines.Question) -> bytes:
        """The answer for git inside."""
        self.check(asked)
        if not self._left:
            raise lines.Refused("it was asked too often")
        self._left -= 1
        async with self._turns:
            said = await self._run(lines.outside(asked))
        return lines.answer(said, asked)

    async def _run(self, told: bytes) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                "git", "credential", "fill", cwd="/", env=self._env, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise lines.Refused(f"git cannot be started outside: {error.strerror}") from None
        try:
            async with asyncio.timeout(FILL_SECONDS):
                said, _ = await process.communicate(told)
        except TimeoutError:
            raise lines.Refused("the helper outside takes too long") from None
        finally:
            await _end(process)
        if process.returncode or len(said) > MAX_ANSWER:
            raise lines.Refused("git outside has no password for it")
        return said


async def _end(process: asyncio.subprocess.Process) -> None:
    """End git and what it has started, if it still runs."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()
