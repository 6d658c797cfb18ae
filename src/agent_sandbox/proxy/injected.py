"""Requests to hosts that have a secret: read, filled with the value, and sent on with TLS.

The client comes with TLS, which is opened here with a certificate of the run's own, or without, to
a listener that stands for the host. Outside it is always TLS, and the host has to prove its name
before it gets a value.
"""

from __future__ import annotations

import asyncio
import ssl

from . import http1, refusals
from .errand import Errand
from .refusals import FORBIDDEN, MALFORMED, UNREACHABLE, Problem
from .relay import close
from .secure import Broken, Plain, Secure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from .authority import Authority
    from .errand import Ways
    from .injecting import Values
    from .inlet import Inlet
    from .ledger import Account
    from .streams import Outlet

HTTPS_PORT = 443
HEAD_SECONDS = 30.0
# A server repeats the request, values and all, to whoever asks with these.
ECHOING = ("TRACE", "TRACK")
LOCAL = ("127.0.0.1", "localhost")
METHOD_NOT_ALLOWED = 405


class Injected:
    """The hosts that have a secret, and the connections to them."""

    def __init__(
        self, values: Values, authority: Authority | None, trusted: Callable[[], ssl.SSLContext]
    ) -> None:
        self._values = values
        self._authority = authority
        self._trusted = trusted
        self._outward: ssl.SSLContext | None = None
        self._live: dict[asyncio.Task[object], tuple[str, int]] = {}

    def opens(self, host: str, port: int) -> bool:
        """Whether TLS to this host is opened."""
        return self._authority is not None and (host, port) in self._values.opened

    @property
    def bases(self) -> dict[int, tuple[str, int]]:
        """Ports inside that stand for a host, and which."""
        return self._values.bases

    def review(self, allowed: Callable[[str, int], bool]) -> None:
        """End every connection that is not allowed any more."""
        for task, where in list(self._live.items()):
            if not allowed(*where):
                task.cancel()

    # --- the two doors

    async def opened(
        self, inlet: Inlet, host: str, port: int, outlet: Outlet | None, ways: Ways
    ) -> None:
        """A client that speaks TLS to the host."""
        assert self._authority is not None  # noqa: S101 - `opens` was asked
        context = self._authority.context(host)
        client = Secure(inlet.sock, context, server=True, data=inlet.data)
        # From here on it understands words in TLS only.
        inlet.voice = refusals.OPAQUE
        try:
            await client.handshake()
        except ssl.SSLError as error:
            why = f"the client does not take the proxy's certificate ({error.reason})"
            raise ways.refuse(host, port, why) from None
        except TimeoutError:
            return
        await self._serve(client, (host,), Errand(host, port, outlet, ways))

    async def based(self, inlet: Inlet, host: str, port: int, ways: Ways) -> None:
        """A client that speaks plain HTTP to the listener that stands for the host."""
        inlet.voice = refusals.OPAQUE
        client = Plain(inlet.sock)
        await self._serve(client, (*LOCAL, host), Errand(host, port, None, ways))

    async def _serve(self, client: Plain, names: tuple[str, ...], errand: Errand) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._live[task] = (errand.host, errand.port)
        try:
            await self._exchange(client, names, errand)
        except Problem as problem:
            await client.send(refusals.say(refusals.HTTP, problem))
            await client.finish()
        except (TimeoutError, http1.BadRequest):
            close(client.sock, broken=True)
        finally:
            if task is not None:
                del self._live[task]
            errand.close()

    # --- one request

    async def _exchange(self, client: Plain, names: tuple[str, ...], errand: Errand) -> None:
        request, rest = await _read_head(client)
        host, port = errand.host, errand.port
        target = _target(request, names)
        if request.method in (*ECHOING, "CONNECT"):
            why = f"{request.method} would show what only the host may see"
            raise Problem(
                FORBIDDEN, why, host=host, port=port, denied=True, status=METHOD_NOT_ALLOWED
            )
        if isinstance(client, Secure):
            errand.ways.check_host(request.host, host, port)
        elif _name_of(request.host) not in names:
            raise errand.ways.refuse(host, port, f"the Host is {refusals.plain(request.host)}")
        server = await self._connect(errand)
        head = http1.rebuild(
            self._values.fill(request, host, port), _host_field(host, port), target
        )
        await _spend(server, head, errand.account)
        if request.upgrade:
            await _upgrade(client, rest, server, errand.account)
        else:
            await _both(client, _body(client, rest, request), server, errand.account)

    async def _connect(self, errand: Errand) -> Secure:
        host, port = errand.host, errand.port
        outlet = await errand.dial()
        if self._outward is None:
            self._outward = self._trusted()
        server = Secure(outlet.sock, self._outward, name=host)
        try:
            await server.handshake()
        except ssl.SSLCertVerificationError as error:
            why = f"its certificate does not hold: {error.verify_message}"
        except (ssl.SSLError, Broken, TimeoutError) as error:
            why = f"TLS failed: {getattr(error, 'reason', None) or str(error) or 'no answer'}"
        else:
            return server
        raise Problem(UNREACHABLE, why, host=host, port=port)


async def _read_head(client: Plain) -> tuple[http1.Request, bytes]:
    data = b""
    try:
        async with asyncio.timeout(HEAD_SECONDS):
            while not (length := http1.head_length(data)):
                chunk = await client.recv()
                if not chunk:
                    raise Broken("the client has closed")
                data += chunk
        return http1.parse(data[:length]), data[length:]
    except http1.BadRequest as error:
        raise Problem(MALFORMED, str(error), status=error.status) from None


def _target(request: http1.Request, names: tuple[str, ...]) -> str:
    try:
        found = http1.target(request)
    except http1.BadRequest as error:
        raise Problem(MALFORMED, str(error), status=error.status) from None
    if found.host and (found.host not in names or request.method == "CONNECT"):
        raise Problem(MALFORMED, "a target of another host")
    return found.path


def _name_of(host: str) -> str:
    try:
        return http1.authority(host)[0].lower()
    except http1.BadRequest:
        return ""


def _host_field(host: str, port: int) -> str:
    return host if port == HTTPS_PORT else f"{host}:{port}"


async def _spend(server: Plain, data: bytes, account: Account) -> None:
    """Send, if the budget has room for all of it."""
    if account.take(len(data), up=True) < len(data):
        raise Problem(FORBIDDEN, account.cut(), host=account.host, port=account.port, denied=True)
    await server.send(data)


async def _body(client: Plain, rest: bytes, request: http1.Request) -> AsyncIterator[bytes]:
    """The body as it goes out: exactly as long as the head says."""
    chunks = http1.Chunks() if request.chunked else None
    left = request.length
    while left > 0 or (chunks is not None and not chunks.done):
        data = rest or await client.recv()
        rest = b""
        if not data:
            raise Broken("the client has closed")
        if chunks is not None:
            yield chunks.feed(data)
        else:
            yield data[:left]
            left -= len(data)


async def _stream(client: Plain, rest: bytes) -> AsyncIterator[bytes]:
    """Whatever comes, after a switch of protocols."""
    while data := rest or await client.recv():
        rest = b""
        yield data


async def _upgrade(client: Plain, rest: bytes, server: Secure, account: Account) -> None:
    """The client may go on only after the server has said 101."""
    data = b""
    async with asyncio.timeout(HEAD_SECONDS):
        while (answer := http1.answer(data)) is None or _is_interim(answer.status):
            if answer is not None:
                await client.send(data[: answer.length])
                data = data[answer.length :]
                continue
            chunk = await server.recv()
            if not chunk or account.take(len(chunk), up=False) < len(chunk):
                break
            data += chunk
    switched = answer is not None and answer.status == 101
    await client.send(data if switched else http1.closing(data))
    await _both(client, _stream(client, rest if switched else b""), server, account, up=switched)


def _is_interim(status: int) -> bool:
    return 100 <= status < 200 and status != 101


async def _both(
    client: Plain, body: AsyncIterator[bytes], server: Secure, account: Account, *, up: bool = True
) -> None:
    """The body goes up while the answer comes down. The answer's end is the end."""
    above = asyncio.create_task(_upload(client, body, server, account)) if up else None
    below = asyncio.create_task(_download(client, server, account))
    tasks = {task for task in (above, below) if task is not None}
    try:
        while not below.done():
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if above in done and above is not None:
                tasks.discard(above)
                # A body that is none, or too much: what was sent must not look whole.
                above.result()
        below.result()
    except (OSError, http1.BadRequest):
        close(client.sock, broken=True)
        close(server.sock, broken=True)
        return
    finally:
        for task in (above, below):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in (above, below) if t is not None), return_exceptions=True)
    if not server.ragged or not isinstance(client, Secure):
        await client.finish()


async def _upload(
    client: Plain, body: AsyncIterator[bytes], server: Secure, account: Account
) -> None:
    async for data in body:
        if account.take(len(data), up=True) < len(data):
            raise Broken(account.cut())
        await server.send(data)
    # What comes after the request goes nowhere; that a client has gone is worth knowing.
    while await client.recv():
        pass
    if isinstance(client, Secure):
        raise Broken("the client has closed")


async def _download(client: Plain, server: Secure, account: Account) -> None:
    while data := await server.recv():
        if account.take(len(data), up=False) < len(data):
            raise Broken(account.cut())
        await client.send(data)
