"""The service assembled: store, audit, core, API and listeners, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

from ..errors import HostError, UsageError, reason
from ..policy import engines
from ..record import Record
from . import limits, tokens_files
from .api.call import Parts
from .api.denials import Denials
from .api.dispatch import Dispatcher
from .api.entrance import Entrance
from .api.operations import Readiness
from .api.origins import LOOPBACK_NAMES, Names
from .api.sessions import Sessions
from .audit import Audit
from .core import templates
from .core.service import Service
from .http.server import Limits as HttpLimits
from .http.server import Server
from .metrics import Metrics
from .problems import Problem
from .store import Store
from .store_private import AUDIT
from .tokens import Tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from ssl import SSLContext

    from .backend.interface import Backend
    from .limits import Limits
    from .logs import Log
    from .mcp import Endpoint

SOCKET = "service.sock"
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - to know them
# After the last command has ended, so long for its answer to be sent.
LAST_WORDS = 5.0
SYNC_SECONDS = 1.0
MOST_CONNECTIONS = 4096


class Settings(Record):
    """What `sandboxctl serve` was told."""

    data: str
    listen: tuple[tuple[str, int], ...] = ()
    # The path of the unix socket; "": none.
    socket: str = ""
    # The first is the default.
    backends: tuple[str, ...] = ("bwrap",)
    certificate: str = ""
    key: str = ""
    # Told by whoever starts it: TLS ends in front of us, or the network is private.
    plain_http: bool = False
    templates: str | None = None
    drain: float = 30.0
    public_hosts: tuple[str, ...] = ()
    metrics_public: bool = False
    environ: Mapping[str, str] = {}


class App:
    """One running service."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings = settings
        self.log = log
        # What can be wrong in words is found before anything is made.
        self.limits = limits.load(settings.environ)
        self._tls = _tls(settings)
        self._undo = contextlib.ExitStack()
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._syncing: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._service: Service | None = None
        self.addresses: list[str] = []

    async def start(self) -> None:
        """Everything, up to the listeners; nothing is left of a start that fails."""
        try:
            await self._start()
        except BaseException:
            await self.stop(0)
            raise

    async def _start(self) -> None:
        settings = self.settings
        store = Store(settings.data)
        self._undo.callback(store.close)
        audit = Audit(os.path.join(store.data, AUDIT))
        self._undo.callback(audit.close)
        tokens = Tokens(store)
        _adopt(tokens, audit, settings.environ)
        refuse_open_doors(settings, has_tokens=tokens.any())
        metrics = Metrics()
        presets = templates.load(store.data, settings.templates)
        backends = {
            name: _backend(name, settings, store.data, self.limits) for name in settings.backends
        }
        service = self._service = Service(
            store=store, tokens=tokens, audit=audit, limits=self.limits, backends=backends,
            default_backend=settings.backends[0], data=store.data, templates=presets,
            observe=metrics.observe,
        )  # fmt: skip
        logins = Sessions(time.time)
        denials = Denials(audit, time.monotonic)
        # TLS may end in front of us, so a browser gets a cookie that it sends by https alone. On
        # a private network without TLS there is thus no login, only tokens.
        secure = settings.plain_http
        mcp = _mcp(service, denials)
        parts = Parts(
            service=service, tokens=tokens, audit=audit, limits=self.limits, sessions=logins,
            metrics=metrics, backends=backends, default_backend=settings.backends[0],
            templates=tuple(presets), ready=Readiness(service), secure=secure,
            metrics_public=settings.metrics_public,
            mcp=mcp,
            connections=lambda: self._server.connections if self._server else 0,
        )  # fmt: skip
        self._closing.append(mcp.close)
        entrance = Entrance(tokens, logins, owner=os.geteuid(), secure=secure)
        dispatcher = Dispatcher(parts, names_of(settings), entrance, denials, self.log)
        await service.start()
        self._syncing = asyncio.ensure_future(_sync(audit, self.log))
        server = self._server = Server(
            dispatcher.handle, connections(), on_bad=dispatcher.malformed,
            on_error=dispatcher.failed,
        )  # fmt: skip
        await self._listen(server)

    async def _listen(self, server: Server) -> None:
        for host, port in self.settings.listen:
            with _hinted("another --listen, or port 0 for any"):
                bound, number = await server.listen_tcp(host, port, self._tls)
            scheme = "https" if self._tls else "http"
            shown = f"[{bound}]" if ":" in bound else bound
            self.addresses.append(f"{scheme}://{shown}:{number}")
        if self.settings.socket:
            # In the data directory only its owner gets to it. Elsewhere others may connect:
            # the kernel says who they are, and tokens with a --uid say who that is.
            own = self.settings.socket == f"{self.settings.data}/{SOCKET}"
            with _hinted("another --socket, or --socket none"):
                await server.listen_unix(self.settings.socket, 0o600 if own else 0o666)
            self.addresses.append(f"unix://{self.settings.socket}")

    async def stop(self, drain: float, hurry: asyncio.Event | None = None) -> None:
        """Take nothing new, let what runs end within `drain` seconds or until `hurry`, end it."""
        try:
            flushed: asyncio.Future[bool] | None = None
            if self._server is not None:
                flushed = asyncio.ensure_future(self._server.drain(drain + LAST_WORDS))
                # It stops listening before anything else happens.
                await asyncio.sleep(0)
            if self._service is not None:
                await _stop(self._service, drain, hurry or asyncio.Event(), flushed)
            if flushed is not None and self._server is not None:
                await asyncio.wait((flushed,), timeout=LAST_WORDS)
                await self._server.close()
                await flushed
            for close in self._closing:
                await close()
            if self._syncing is not None:
                self._syncing.cancel()
        finally:
            self._undo.close()


async def _stop(
    service: Service, drain: float, hurry: asyncio.Event, flushed: asyncio.Future[bool] | None
) -> None:
    others = asyncio.shield(flushed) if flushed is not None else None
    stopping = asyncio.ensure_future(service.stop(drain, others))
    told = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((stopping, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if not stopping.done():
        stopping.cancel()
        await asyncio.wait((stopping,))
        await service.stop(0)
    else:
        await stopping


@contextlib.contextmanager
def _hinted(hint: str) -> Iterator[None]:
    """Say which flag helps, where nothing better is said."""
    try:
        yield
    except HostError as error:
        raise HostError(error.message, hint=error.hint or hint, code=error.code) from error


# --- parts


def _adopt(tokens: Tokens, audit: Audit, environ: Mapping[str, str]) -> None:
    """TOKENS_DIR: agents whose tokens somebody else has made."""
    directory = environ.get(tokens_files.VARIABLE, "")
    # Without it, too: tokens of files that are gone are dead.
    given = tokens_files.read(directory) if directory else {}
    for what, info in tokens.adopt(given):
        audit.write(None, f"token.{'new' if what == 'new' else 'revoke'}",
                    target={"type": "token", "id": info.key, "name": info.name},
                    reason=tokens_files.VARIABLE)  # fmt: skip


def _bwrap(data: str, _environ: Mapping[str, str], _limits: Limits) -> Backend:
    from .backend.bwrap import BwrapBackend

    return BwrapBackend(data)


def _docker(data: str, environ: Mapping[str, str], bounds: Limits) -> Backend:
    from .backend.docker import DockerBackend, instance_id

    address = environ.get("DOCKER_HOST", "") or engines.STANDARD
    path = engines.unix_path(address)
    if not path:
        raise UsageError(
            f"cannot use the container engine at '{address}': not a unix socket",
            hint="DOCKER_HOST=unix:///run/docker.sock", code="docker-not-unix",
        )  # fmt: skip
    return DockerBackend(path, instance=instance_id(data), required=bounds.required_runtime)


BACKENDS: dict[str, Callable[[str, Mapping[str, str], Limits], Backend]] = {
    "bwrap": _bwrap, "docker": _docker,
}  # fmt: skip


def _backend(name: str, settings: Settings, data: str, bounds: Limits) -> Backend:
    if name not in BACKENDS:
        raise UsageError(
            f"there is no backend '{name}'", hint=f"one of: {', '.join(BACKENDS)}", code="usage"
        )
    return BACKENDS[name](data, settings.environ, bounds)


def _mcp(service: Service, denials: Denials) -> Endpoint:
    """The endpoint of MCP; without the SDK it tells what is missing."""
    from .mcp import endpoint

    return endpoint(service, denials.note)


async def _sync(audit: Audit, log: Log) -> None:
    """Bring the audit to the disk every second, off the loop."""
    while True:
        await asyncio.sleep(SYNC_SECONDS)
        try:
            await asyncio.to_thread(audit.sync)
        except OSError as error:
            log.write("error", "audit-sync", error=str(error))
        except Problem as problem:
            log.write("error", "audit-sync", error=problem.message)


# --- doors


def connections() -> HttpLimits:
    """As many as there are descriptors for, with half of those left for commands and files.

    Far more than one agent may have open: behind a proxy all of them have one address.
    """
    import resource

    every = min(MOST_CONNECTIONS, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
    return HttpLimits(connections=every, connections_per_peer=every - every // 8)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_doors(settings: Settings, *, has_tokens: bool) -> None:
    """A port that others can reach needs TLS, so that tokens stay secret, and tokens."""
    for host, port in settings.listen:
        if is_loopback(host):
            continue
        if not settings.certificate and not settings.plain_http:
            raise UsageError(
                f"refusing to listen on {host}:{port} without TLS",
                hint="give --tls-cert and --tls-key; or, where a proxy in front of it ends TLS or "
                "the network is private, --plain-http", code="serve-no-tls",
            )  # fmt: skip
        if not has_tokens:
            raise UsageError(
                f"refusing to listen on {host}:{port} before there is a token",
                hint=f"make one: sandboxctl token new NAME --data {settings.data}",
                code="serve-no-token",
            )


def names_of(settings: Settings) -> Names:
    """The names that clients may call us by."""
    hosts = {host.lower() for host, _ in settings.listen} - WILDCARDS
    wild = any(host in WILDCARDS for host, _ in settings.listen)
    if wild:
        hosts.add(socket.gethostname().lower())
    return Names(
        hosts=frozenset(LOOPBACK_NAMES | hosts | {h.lower() for h in settings.public_hosts}),
        any_address=wild, proxied=settings.plain_http,
    )  # fmt: skip


def _tls(settings: Settings) -> SSLContext | None:
    if not settings.certificate:
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.certificate, settings.key or None)
    except (OSError, ssl.SSLError) as error:
        words = (
            reason(error) if not isinstance(error, ssl.SSLError) else error.reason or "not a pair"
        )
        raise UsageError(
            f"cannot use the certificate '{settings.certificate}': {words}",
            hint="--tls-cert takes a PEM chain, --tls-key its key", code="serve-tls",
        ) from error  # fmt: skip
    return context
