"""One connection to a host that has a secret, and what the streams lend for it."""

from __future__ import annotations

from .relay import close

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .ledger import Account
    from .refusals import Problem
    from .streams import Outlet

    Dial = Callable[[str, int], Awaitable[Outlet]]
    CheckHost = Callable[[str, str, int], None]
    Refuse = Callable[[str, int, str], Problem]


class Ways:
    """What the streams lend: how to dial, how to judge a Host, how to refuse."""

    def __init__(self, dial: Dial, check_host: CheckHost, refuse: Refuse) -> None:
        self.dial = dial
        self.check_host = check_host
        self.refuse = refuse


class Errand:
    """One connection to a host: dialled when it is needed."""

    def __init__(self, host: str, port: int, outlet: Outlet | None, ways: Ways) -> None:
        self.host = host
        self.port = port
        self.ways = ways
        self._outlet = outlet

    async def dial(self) -> Outlet:
        """The connection outside."""
        if self._outlet is None:
            self._outlet = await self.ways.dial(self.host, self.port)
        return self._outlet

    @property
    def account(self) -> Account:
        """Where the bytes are counted. Only after `dial`."""
        assert self._outlet is not None  # noqa: S101
        return self._outlet.account

    def close(self) -> None:
        """The end."""
        if self._outlet is not None:
            close(self._outlet.sock)
