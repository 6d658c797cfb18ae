"""From an accepted connection to a relayed one: who is asked for, whether it may be, and is it so.

The order is the protection. The name is judged before any lookup, the address before it is dialled,
and what the stream itself says (TLS server name, HTTP Host) before one byte of it goes out.
"""

from __future__ import annotations

import asyncio
import socket

from ..policy import network
from ..policy.addresses import METADATA_ADDRESSES
from ..policy.endpoints import LOCAL_ADDRESSES, LOCALHOST
from . import clienthello, http1, names, refusals, sniff, socks
from .errand import Ways
from .inlet import READ, Gone, Inlet
from .refusals import FORBIDDEN, MALFORMED, UNREACHABLE, Problem
from .relay import close
from .upload import Upload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from .dial import Dialler
    from .injected import Injected
    from .ledger import Account, Ledger
    from .relay import Relay

UPGRADE_SECONDS = 120.0
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
LOCAL_HOSTS = (LOCALHOST, *LOCAL_ADDRESSES)


class Outlet:
    """A connection outside that was checked, and where its bytes are counted."""

    def __init__(self, sock: socket.socket, account: Account) -> None:
        self.sock = sock
        self.account = account

    async def send(self, data: bytes) -> None:
        """Send a few bytes ourselves."""
        if self.account.take(len(data), up=True) < len(data):
            raise Problem(
                FORBIDDEN, self.account.cut(), host=self.account.host, port=self.account.port,
                denied=True,
            )  # fmt: skip
        await asyncio.get_running_loop().sock_sendall(self.sock, data)


class Streams:
    """What happens to connections. `egress` is replaced as a whole when the policy changes."""

    def __init__(
        self, egress: network.Egress, *, ledger: Ledger, stand_ins: names.Names, dialler: Dialler,
        relay: Relay, left: Callable[[], None], injected: Injected | None = None,
    ) -> None:  # fmt: skip
        self.egress = egress
        self._injected = injected
        self._ways = Ways(self._dial, self._check_host, self._refusal)
        self.ledger = ledger
        self._names = stand_ins
        self._dialler = dialler
        self._relay = relay
        self._left = left
        self._loop = asyncio.get_running_loop()

    def change(self, egress: network.Egress) -> None:
        """Put another policy in force; ends what goes to hosts that have a secret and no rule."""
        self.egress = egress
        if self._injected is not None:
            self._injected.review(lambda host, port: network.decide(egress, host, port).allowed)

    def bases(self) -> dict[int, tuple[str, int]]:
        """Ports inside that stand for a host."""
        return self._injected.bases if self._injected is not None else {}

    # --- the doors

    async def captured(self, client: socket.socket) -> None:
        """A connection to any address: getsockname(2) tells which one was meant."""
        await self._serve(client, self._captured)

    async def mux(self, client: socket.socket) -> None:
        """The proxy port: HTTP and SOCKS."""
        await self._serve(client, self._mux)

    async def based(self, client: socket.socket) -> None:
        """A listener that stands for a host that has a secret."""
        await self._serve(client, self._based)

    async def _serve(
        self, client: socket.socket, how: Callable[[Inlet], Coroutine[None, None, None]]
    ) -> None:
        inlet = Inlet(client)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await how(inlet)
        except Problem as problem:
            await inlet.farewell(problem)
        except (Gone, OSError):
            pass
        finally:
            inlet.release()
            if not inlet.handed_over:
                inlet.close()
                self._left()

    async def _captured(self, inlet: Inlet) -> None:
        address, port = inlet.sock.getsockname()[:2]
        try:
            host = self._meant(address, port)
            self._check(host, port)
        except Problem:
            await inlet.glance(port)
            raise
        await self._stream(inlet, host, port, None)

    async def _based(self, inlet: Inlet) -> None:
        if self._injected is not None:
            host, port = self._injected.bases[inlet.sock.getsockname()[1]]
            inlet.voice = refusals.HTTP
            self._check(host, port)
            await self._injected.based(inlet, host, port, self._ways)

    async def _mux(self, inlet: Inlet) -> None:
        await inlet.more()
        if inlet.data[0] in (socks.VERSION_4, socks.VERSION_5):
            await self._socks(inlet)
        else:
            await self._http_proxy(inlet)

    async def _socks(self, inlet: Inlet) -> None:
        handshake = socks.Handshake()
        while True:
            try:
                step = handshake.read(inlet.data) if inlet.data else None
            except socks.BadSocks as error:
                await self._loop.sock_sendall(inlet.sock, error.answer)
                return
            if isinstance(step, socks.Target):
                break
            if step is None:
                await inlet.more()
                continue
            inlet.data = inlet.data[step.used :]
            await self._loop.sock_sendall(inlet.sock, step.answer)
        inlet.data = inlet.data[step.used :]
        five = step.version == socks.VERSION_5
        inlet.voice = refusals.SOCKS5 if five else refusals.SOCKS4
        host = step.host
        if isinstance(host, bytes):
            family = socket.AF_INET if len(host) == 4 else socket.AF_INET6
            host = socket.inet_ntop(family, host)
        await self._tunnel(inlet, host, step.port, socks.reply(step.version, socks.GRANTED))

    async def _http_proxy(self, inlet: Inlet) -> None:
        inlet.voice = refusals.HTTP
        request = await self._request(inlet)
        target = _target(request)
        if request.method == "CONNECT":
            inlet.voice = refusals.CONNECT
            await self._tunnel(inlet, target.host, target.port, ESTABLISHED)
            return
        if not target.host:
            raise Problem(MALFORMED, "this is a proxy; ask it for http://HOST/ or CONNECT")
        host = self._meant(target.host, target.port)
        self._check(host, target.port)
        await self._exchange(inlet, host, target.port, None, request)

    async def _tunnel(self, inlet: Inlet, said: str, port: int, granted: bytes) -> None:
        """The client waits for our word before it speaks, so the host is dialled first."""
        host = self._meant(said, port)
        self._check(host, port)
        outlet = await self._dial(host, port)
        try:
            await self._loop.sock_sendall(inlet.sock, granted)
            inlet.voice = refusals.OPAQUE
            inlet.restart_clock()
            await self._stream(inlet, host, port, outlet)
        finally:
            if not inlet.handed_over:
                close(outlet.sock)

    # --- whether

    def _meant(self, said: str, port: int = 0) -> str:
        """The canonical host that a client means by a name or an address."""
        try:
            host = network.canonical(said)
        except network.BadName as error:
            raise self._refusal(refusals.plain(said)[:255], port, f"not a host: {error}") from None
        if not network.is_address(host):
            return host
        packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        if not names.is_stand_in(packed):
            return host
        name = self._names.name(packed)
        if name is None:
            raise self._refusal(host, port, "the address stands for no name that was asked for")
        return name

    def _check(self, host: str, port: int) -> None:
        """Rules and budgets; raises, and notes it, when they say no."""
        verdict = network.decide(self.egress, host, port)
        if verdict.allowed:
            over = self.ledger.exhausted(host, port)
            if over is None:
                return
            verdict = over
        # Nobody is led to open the address from which a machine in a cloud gets its credentials.
        final = bool(verdict.rule) or host in METADATA_ADDRESSES
        self.ledger.note(host, port, verdict, final=final)
        raise Problem(
            FORBIDDEN, verdict.reason, host=host, port=port, rule=verdict.rule, denied=final
        )

    def _refusal(self, host: str, port: int, why: str, status: int = 0) -> Problem:
        """A refusal by no rule, noted. No rule would help either."""
        verdict = network.Verdict(allowed=False, rule="", source="", reason=why)
        self.ledger.note(host, port, verdict, final=True)
        return Problem(FORBIDDEN, why, host=host, port=port, denied=True, status=status)

    async def _dial(self, host: str, port: int) -> Outlet:
        verdict = network.decide(self.egress, host, port)
        try:
            sock = await self._dialler.dial(self.egress, host, port)
        except Problem as problem:
            if problem.kind != UNREACHABLE:
                verdict = verdict.replace(allowed=False, rule=problem.rule, reason=problem.why)
            self.ledger.note(host, port, verdict, final=problem.denied)
            raise
        try:
            # Again, in one step with the count: others were dialling, too, and rules may be new.
            self._check(host, port)
        except Problem:
            close(sock)
            raise
        account = self.ledger.note(host, port, verdict)
        account.opened(self._named(host, port, sock))
        return Outlet(sock, account)

    def _named(self, host: str, port: int, sock: socket.socket) -> str:
        """The address that a name led to, if only a rule with the address has opened it."""
        address = str(sock.getpeername()[0])
        if network.is_address(host) or host == LOCALHOST:
            return ""
        own = self._dialler.own(address)
        judged = network.admit(network.Egress(mode=network.PUBLIC), host, port, address, own)
        return "" if judged.allowed else address

    def _agrees(self, said: str, host: str, port: int) -> bool:
        """Whether a name inside the stream is the one that was judged, or may be had as well."""
        try:
            found = network.canonical(said)
        except network.BadName:
            return False
        if found == host or (found in LOCAL_HOSTS and host in LOCAL_HOSTS):
            return True
        # Asked for by address: the name is the first that we hear.
        return network.is_address(host) and network.decide(self.egress, found, port).allowed

    # --- the stream itself

    async def _stream(self, inlet: Inlet, host: str, port: int, outlet: Outlet | None) -> None:
        made = outlet
        try:
            if host in LOCAL_HOSTS:
                # One service on this machine, whatever it calls itself.
                kind = sniff.OPAQUE
            elif port in sniff.ONLY:
                kind = await inlet.kind()
            else:
                made = made or await self._dial(host, port)
                kind = await self._greet(inlet, made)
            if host not in LOCAL_HOSTS and kind not in sniff.ONLY.get(port, (kind,)):
                spoken = " or ".join(sniff.ONLY[port]).upper()
                raise self._refusal(host, port, f"port {port} is for {spoken} only", 400)
            if kind == sniff.HTTP:
                await self._exchange(inlet, host, port, made, await self._request(inlet))
                return
            if kind == sniff.TLS:
                await self._hello(inlet, host, port)
                if self._injected is not None and self._injected.opens(host, port):
                    inlet.release()
                    await self._injected.opened(inlet, host, port, made, self._ways)
                    return
            if kind == sniff.HTTP2 and not network.is_address(host):
                inlet.voice = refusals.HTTP
                raise self._refusal(host, port, "HTTP/2 without TLS names hosts unseen", 505)
            made = made or await self._dial(host, port)
            await made.send(inlet.data)
            self._hand_over(inlet, made, None)
        finally:
            if made is not None and not inlet.handed_over:
                close(made.sock)

    async def _greet(self, inlet: Inlet, outlet: Outlet) -> str:
        """Wait for the first bytes of either side."""
        if not inlet.data:
            ready = await self._either(inlet.sock, outlet.sock)
            if inlet.sock not in ready:
                # Neither in TLS nor in HTTP does the server speak first: here no name is spoken of.
                return sniff.OPAQUE
            inlet.restart_clock()
        try:
            return await inlet.kind()
        except Gone:
            # It only listens, or has said all that it will ever say.
            return sniff.OPAQUE

    async def _either(self, *sockets: socket.socket) -> set[socket.socket]:
        """Those that have something to read, as soon as one has."""
        ready: set[socket.socket] = set()
        woken = asyncio.Event()

        def note(one: socket.socket) -> None:
            ready.add(one)
            self._loop.remove_reader(one.fileno())
            woken.set()

        try:
            for one in sockets:
                self._loop.add_reader(one.fileno(), note, one)
            await woken.wait()
        finally:
            for one in sockets:
                self._loop.remove_reader(one.fileno())
        return ready

    async def _hello(self, inlet: Inlet, host: str, port: int) -> None:
        """The server's name in TLS must be the one that was asked for."""
        while True:
            try:
                hello = clienthello.read(inlet.data)
            except clienthello.BadHello as error:
                raise Problem(MALFORMED, f"TLS: {error}", host=host, port=port) from None
            if hello is not None:
                break
            await inlet.more()
        if not hello.name:
            # Without a name the server chooses. Clients of databases do that, those of the web not.
            if port == 443 and not network.is_address(host):
                raise self._refusal(host, port, "the client names no server in TLS (SNI)")
        elif not self._agrees(hello.name, host, port):
            why = f"the name in TLS is {refusals.plain(hello.name)}, not {host}"
            raise self._refusal(host, port, why)

    def _hand_over(self, inlet: Inlet, outlet: Outlet, left: int | None) -> None:
        self._still(outlet)
        inlet.handed_over = True
        self._relay.join(inlet.sock, outlet.sock, outlet.account, left=left, closed=self._closed)

    def _still(self, outlet: Outlet) -> None:
        """Rules may have changed while the client spoke. From here on the relay looks after it."""
        verdict = network.decide(self.egress, outlet.account.host, outlet.account.port)
        if not verdict.allowed:
            raise Problem(
                FORBIDDEN, verdict.reason, host=outlet.account.host, port=outlet.account.port,
                rule=verdict.rule, denied=True,
            )  # fmt: skip

    def _closed(self) -> None:
        """In the relay's thread."""
        try:
            self._loop.call_soon_threadsafe(self._left)
        except RuntimeError:
            # The loop has ended, and with it everything.
            return

    # --- HTTP

    async def _request(self, inlet: Inlet) -> http1.Request:
        """The next head; what follows it stays in `inlet.data`."""
        try:
            while not (length := http1.head_length(inlet.data)):
                await inlet.more()
            request = http1.parse(inlet.data[:length])
        except http1.BadRequest as error:
            raise Problem(MALFORMED, str(error), status=error.status) from None
        inlet.data = inlet.data[length:]
        return request

    async def _exchange(
        self, inlet: Inlet, host: str, port: int, outlet: Outlet | None, request: http1.Request
    ) -> None:
        """One request goes out, built anew; the answer comes back as it is."""
        target = _target(request)
        if request.method == "CONNECT":
            raise Problem(MALFORMED, "CONNECT goes to the proxy port", host=host, port=port)
        self._check_host(request.host, host, port)
        if target.host:
            self._check_host(f"{_bracketed(target.host)}:{target.port}", host, port)
        made = outlet or await self._dial(host, port)
        try:
            head = http1.rebuild(request, http1.host_field(host, port), target.path)
            if request.upgrade:
                await self._upgrade(inlet, made, head)
            elif request.chunked:
                await self._chunked(inlet, made, head)
            else:
                body = inlet.data[: request.length]
                await made.send(head + body)
                self._hand_over(inlet, made, request.length - len(body))
        finally:
            if not inlet.handed_over:
                close(made.sock)

    def _check_host(self, said: str, host: str, port: int) -> None:
        if not said:
            # HTTP/1.0; the request that goes out names the host that was judged.
            return
        try:
            name, said_port = http1.authority(said)
        except http1.BadRequest as error:
            raise Problem(MALFORMED, f"Host: {error}", host=host, port=port) from None
        if said_port not in (0, port) or not self._agrees(name, host, port):
            raise self._refusal(host, port, f"the Host is {refusals.plain(said)}, not {host}")

    async def _upgrade(self, inlet: Inlet, outlet: Outlet, head: bytes) -> None:
        """The client may go on only after the server has said 101."""
        await outlet.send(head)
        data = b""
        async with asyncio.timeout(UPGRADE_SECONDS):
            while True:
                answer = http1.answer(data)
                if answer is None or (100 <= answer.status < 200 and answer.status != 101):
                    if answer is not None:
                        await self._loop.sock_sendall(inlet.sock, data[: answer.length])
                        data = data[answer.length :]
                        continue
                    chunk = await self._loop.sock_recv(outlet.sock, READ)
                    if not chunk:
                        break
                    outlet.account.take(len(chunk), up=False)
                    data += chunk
                    continue
                if answer.status != 101:
                    data = http1.closing(data)
                break
        await self._loop.sock_sendall(inlet.sock, data)
        switched = answer is not None and answer.status == 101
        self._hand_over(inlet, outlet, None if switched else 0)

    async def _chunked(self, inlet: Inlet, outlet: Outlet, head: bytes) -> None:
        """Chunks are read one by one; the relay carries the answer meanwhile."""
        await outlet.send(head)
        self._still(outlet)
        upload = Upload(inlet.sock, outlet.sock, outlet.account)
        first, inlet.data = inlet.data, b""
        inlet.release()
        inlet.handed_over = True

        def closed() -> None:
            upload.stop()
            self._closed()

        self._relay.join(inlet.sock, outlet.sock, outlet.account, left=0, closed=closed)
        await upload.run(first)


def _target(request: http1.Request) -> http1.Target:
    try:
        return http1.target(request)
    except http1.BadRequest as error:
        raise Problem(MALFORMED, str(error), status=error.status) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
