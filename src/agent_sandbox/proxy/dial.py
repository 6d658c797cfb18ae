"""Outside: one lookup, a check of every address that it gave, a connection to a checked one.

The address that was checked is the one that is dialled. There is no second lookup in which a name
server could say something else.
"""

from __future__ import annotations

import asyncio
import socket

from ..errors import reason
from ..policy import addresses, network
from ..policy.endpoints import LOCAL_ADDRESSES, LOCALHOST
from . import routes
from .refusals import FORBIDDEN, UNREACHABLE, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

# A lookup holds a thread until the C library gives up.
MAX_LOOKUPS = 16
LOOKUP_SECONDS = 15.0
CONNECT_SECONDS = 10.0
HOSTS = "/etc/hosts"
# A name with hundreds of addresses must not keep us busy.
MAX_ADDRESSES = 8


class Dialler:
    """Makes connections to hosts that the policy allows."""

    def __init__(
        self,
        lookup: Callable[[str], list[str]] | None = None,
        is_own: Callable[[str], bool] = routes.is_own,
    ) -> None:
        self._lookup = lookup or addresses_of
        self.is_own = is_own
        self._threads: Executor | None = None
        self._room = asyncio.Semaphore(MAX_LOOKUPS)

    async def dial(self, egress: network.Egress, host: str, port: int) -> socket.socket:
        """A connection, or a Problem. `decide` has allowed host and port."""
        found = await self.resolve(host, port)
        checked, refused = [], None
        for address in found[:MAX_ADDRESSES]:
            verdict = network.admit(egress, host, port, address, self.own(address))
            if verdict.allowed:
                checked.append(address)
            else:
                refused = refused or verdict
        if not checked and refused is not None:
            # A hint to allow the name would not help: the address is what is refused.
            raise Problem(
                FORBIDDEN, refused.reason, host=host, port=port, rule=refused.rule, denied=True
            )
        return await self._first(checked, host, port)

    def own(self, address: str) -> tuple[str, ...]:
        """Which of this machine's own addresses one leads to: itself, or a v4 address in it."""
        try:
            found = addresses.address(address)
        except ValueError:
            # `admit` refuses what is no address.
            return ()
        held = (str(one) for one in (found, *addresses.embedded(found)))
        return tuple(one for one in held if self.is_own(one))

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host; only a name is looked up."""
        if host in (LOCALHOST, *LOCAL_ADDRESSES):
            # A service on this machine listens on either.
            return sorted(LOCAL_ADDRESSES, key=lambda one: one != host)
        if network.is_address(host):
            return [host]
        try:
            async with asyncio.timeout(LOOKUP_SECONDS), self._room:
                return await asyncio.get_running_loop().run_in_executor(
                    self._pool(), self._lookup, host
                )
        except TimeoutError:
            why = "the lookup took too long"
        except OSError as error:
            why = f"the lookup failed: {reason(error)}"
        raise Problem(UNREACHABLE, why, host=host, port=port)

    def _pool(self) -> Executor:
        if self._threads is None:
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "lookup")
        return self._threads

    async def _first(self, checked: list[str], host: str, port: int) -> socket.socket:
        why = "it has no address"
        for address in checked:
            try:
                return await connect(address, port)
            except TimeoutError:
                why = f"{address} did not answer"
            except OSError as error:
                why = f"{address}: {reason(error)}"
        raise Problem(UNREACHABLE, why, host=host, port=port)


def addresses_of(host: str) -> list[str]:
    """Look a name up as it is, without this machine's search domains.

    With them, a name that nobody has would become another one, which no rule has seen.
    """
    try:
        with open(HOSTS, encoding="utf-8", errors="replace") as file:
            known = is_listed(host, file.read())
    except OSError:
        known = False
    # A last dot says that a name is complete. In the hosts file names have none.
    # As bytes: the name is ASCII already, and Python must not map it once more.
    name = (host if known else host + ".").encode("ascii")
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    listed = dict.fromkeys(str(address[0]) for *_, address in found)
    # A zone ("fe80::1%eth0") is on the link, and nothing that a rule could name.
    return [address for address in listed if "%" not in address]


def is_listed(host: str, text: str) -> bool:
    """Whether a hosts file has a name. Pure."""
    lines = (line.partition("#")[0].lower().split() for line in text.splitlines())
    return any(host in words[1:] for words in lines)


async def connect(address: str, port: int) -> socket.socket:
    """A connection to an address, never to a name."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made
