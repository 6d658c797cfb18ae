"""What the core and the API need to know of other replicas; and the answer where there are none.

With SQLite there is one process, and it has everything: nothing here costs it more than a call.
"""

from __future__ import annotations

from contextlib import contextmanager

from ..core.queue import Places
from ..quotas import Buckets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from typing import Protocol

    from ..core.context import Context, Live
    from ..core.journal import Journal
    from ..core.queue import Share
    from ..quotas import Rate, Verdict
    from ..state import State
    from ..values import Agent, Execution, Sandbox
    from .upstream import Address

    class AnyPlaces(Protocol):
        """Places for executions: of this process, or of all."""

        def running(self, agent: str | None = None) -> int:
            """How many are taken."""
            ...

        def queued(self, agent: str | None = None) -> int:
            """How many wait."""
            ...

        async def take(self, agent: str, share: Share) -> None:
            """Wait for one. BUSY when the queue is full, or for too long."""
            ...

        def give(self, agent: str) -> None:
            """Give one back."""
            ...

        def close(self) -> None:
            """Send everybody away who waits, and who comes."""
            ...

    class AnyBuckets(Protocol):
        """Rates: as this process counts them, or as all do together."""

        def check(self, key: object, rate: Rate, now: float) -> Verdict:
            """Take one, or raise RATE_LIMITED."""
            ...

    class Replicas(Protocol):
        """Other processes of the service over the same state."""

        # Of this one; "": there are no others.
        id: str
        shared: bool

        def bind(self, context: Context) -> None:
            """What takes over what others leave."""
            ...

        def check(self) -> None:
            """Refuse to act without the lease."""
            ...

        def fenced(self) -> bool:
            """Whether the lease is lost."""
            ...

        def places(self, total: int) -> AnyPlaces:
            """Places for executions."""
            ...

        def buckets(self, name: str) -> AnyBuckets:
            """Rates, by what they are for."""
            ...

        def counting(self) -> AbstractContextManager[None]:
            """What is counted and entered meanwhile is so for all."""
            ...

        def entered(self, sandbox: Sandbox) -> None:
            """Write down what was counted."""
            ...

        def used(self, owner: str | None) -> int | None:
            """How many sandboxes count; None: the caller knows."""
            ...

        def begin(self, execution: Execution) -> None:
            """Write down that a command starts."""
            ...

        def claim(self, owner: str, key: str, body: str, now: float, id: str) -> bool:
            """Take an idempotency key; False: another was faster."""
            ...

        def claimed(self, owner: str, key: str) -> Peer | None:
            """Who else has a key under way."""
            ...

        def whereabouts(self, agent: Agent | None, sandbox: str, execution: str) -> Peer | None:
            """Who else has a sandbox or an execution, for this agent; None: any."""
            ...

        def stored(self) -> Iterable[Sandbox] | None:
            """Sandboxes of an earlier life; None: all in the store."""
            ...

        def under_way(self) -> list[Execution] | None:
            """Executions of an earlier life; None: all in the store."""
            ...

        def returned(self, sandbox: Sandbox) -> Sandbox:
            """A sandbox that comes back with us, as it was before."""
            ...

        def known(self, backend: str, own: Mapping[str, Sandbox]) -> Mapping[str, Sandbox]:
            """What a backend has to know."""
            ...

        def saved(self, execution: Execution, path: str) -> tuple[Execution, Journal | None]:
            """An execution as it is now, and its output; None: in its file."""
            ...

        def save(self, execution: Execution, journal: Journal) -> None:
            """Keep output for when we are gone."""
            ...

        def drop(self, sandbox_id: str) -> None:
            """Forget a sandbox whose replica is away."""
            ...

        def let_go(self, live: Live) -> bool:
            """Leave an idle sandbox to another replica; False: it stays ours."""
            ...

        async def sweep(self) -> None:
            """Every second."""
            ...

        def tidy(self) -> None:
            """Every ten seconds."""
            ...


class Peer:
    """Another replica that lives."""

    __slots__ = ("address", "id")

    def __init__(self, id: str, address: Address) -> None:
        self.id = id
        self.address = address


class Elsewhere(Exception):
    """What was asked for is at another replica. `body`: what was read of the request already."""

    def __init__(self, peer: Peer, body: bytes | None = None) -> None:
        super().__init__(peer.id)
        self.peer = peer
        self.body = body


class Alone:
    """The one process of a data directory."""

    id = ""
    shared = False

    def __init__(self, store: State) -> None:
        self._store = store

    def bind(self, context: Context) -> None:
        """Nothing to tell."""

    def check(self) -> None:
        """The lock of the data directory is for good."""

    def fenced(self) -> bool:
        """Never."""
        return False

    def places(self, total: int) -> AnyPlaces:
        """In memory."""
        return Places(total)

    def buckets(self, name: str) -> AnyBuckets:
        """In memory, for each use their own."""
        del name
        return Buckets()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Nobody else counts."""
        yield

    def entered(self, sandbox: Sandbox) -> None:
        """The caller writes it down."""

    def used(self, owner: str | None) -> int | None:
        """The caller has counted."""
        del owner
        return None

    def begin(self, execution: Execution) -> None:
        """Write down that it starts."""
        self._store.put_execution(execution)

    def claim(self, owner: str, key: str, body: str, now: float, id: str) -> bool:
        """Take an idempotency key, with the id of what will be made."""
        taken = self._store.claim(owner, key, body, now)
        self._store.answer(owner, key, 0, id)
        return taken

    def claimed(self, owner: str, key: str) -> Peer | None:
        """By us."""
        del owner, key
        return None

    def whereabouts(self, agent: Agent | None, sandbox: str, execution: str) -> Peer | None:
        """Here, if anywhere."""
        del agent, sandbox, execution
        return None

    def stored(self) -> Iterable[Sandbox] | None:
        """All that the store has."""
        return None

    def under_way(self) -> list[Execution] | None:
        """All that the store has."""
        return None

    def returned(self, sandbox: Sandbox) -> Sandbox:
        """As it was."""
        return sandbox

    def known(self, backend: str, own: Mapping[str, Sandbox]) -> Mapping[str, Sandbox]:
        """Our own are all."""
        del backend
        return own

    def saved(self, execution: Execution, path: str) -> tuple[Execution, Journal | None]:
        """In its file."""
        del path
        return execution, None

    def save(self, execution: Execution, journal: Journal) -> None:
        """It is in its file."""

    def drop(self, sandbox_id: str) -> None:
        """There are none whose replica is gone."""

    def let_go(self, live: Live) -> bool:
        """Nobody is there to take it."""
        del live
        return False

    async def sweep(self) -> None:
        """Nobody to watch."""

    def tidy(self) -> None:
        """Nothing of ours in the store."""
