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
from . import limits, store_address, tokens_files, tokens_recent
from .api.call import Parts
from .api.denials import Denials
from .api.dispatch import Dispatcher
from .api.entrance import Entrance
from .api.operations import Readiness
from .api.origins import LOOPBACK_NAMES, Names
from .api.sessions import Sessions
from .core import templates
from .core.service import Service
from .http.server import Limits as HttpLimits
from .http.server import Server
from .metrics import Metrics
from .problems import Problem
from .replicas import identity
from .replicas.gateway import Gateway
from .tokens import Tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from ssl import SSLContext

    from .audit import AuditTrail
    from .backend.interface import Backend
    from .limits import Limits
    from .logs import Log
    from .mcp import Endpoint
    from .replicas.shared import Shared
    from .state import State
    from .store_address import Database

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
    # None: SQLite in the data directory.
    database: Database | None = None
    # Where other replicas reach this one; None: the first of `listen`.
    advertise: tuple[str, int] | None = None
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
        # Host and port of each listener, as they came out.
        self.bound: list[tuple[str, int]] = []
        self._replicas: Shared | None = None
        # Set when this replica must not act any more: stop it, and start another App.
        self.fenced = asyncio.Event()

    async def start(self) -> None:
        """Everything, up to the listeners; nothing is left of a start that fails."""
        try:
            await self._start()
        except BaseException:
            await self.stop(0)
            raise

    async def _start(self) -> None:
        settings = self.settings
        store = store_address.open_state(settings.data, settings.database)
        self._undo.callback(store.close)
        audit = store_address.open_audit(store.data, settings.database)
        self._undo.callback(audit.close)
        tokens = Tokens(store)
        _adopt(tokens, audit, settings.environ)
        refuse_open_doors(settings, has_tokens=tokens.any())
        replicas = self._replicas = self._join(store)
        metrics = Metrics()
        presets = templates.load(store.data, settings.templates)
        backends = {
            name: _backend(name, settings, store, self.limits) for name in settings.backends
        }
        service = self._service = Service(
            store=store, tokens=tokens, audit=audit, limits=self.limits, backends=backends,
            default_backend=settings.backends[0], data=store.data, templates=presets,
            observe=metrics.observe, replicas=replicas,
        )  # fmt: skip
        logins = Sessions(time.time, replicas.id if replicas is not None else "")
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
        entrance = Entrance(
            tokens, logins, owner=os.geteuid(), secure=secure,
            recent=None if replicas is None else tokens_recent.Recent(
                tokens, seconds=tokens_recent.SECONDS, held=replicas.lease.held
            ),
        )  # fmt: skip
        dispatcher = Dispatcher(
            parts, names_of(settings), entrance, denials, self.log,
            gateway=Gateway(replicas) if replicas is not None else None,
            buckets=replicas.buckets("requests") if replicas is not None else None,
        )  # fmt: skip
        await service.start()
        self._syncing = asyncio.ensure_future(_sync(audit, self.log))
        server = self._server = Server(
            dispatcher.handle, connections(), on_bad=dispatcher.malformed,
            on_error=dispatcher.failed,
        )  # fmt: skip
        await self._listen(server)
        if replicas is not None:
            where = identity.advertised(settings.advertise, self.bound)
            replicas.lease.announce(where, identity.certificate(settings.certificate))

    def _join(self, store: State) -> Shared | None:
        """Become one of several, where the state is such."""
        if not store.shared:
            return None
        from .replicas.shared import Shared

        # Before anything lives: the address itself is known when we listen.
        identity.advertised(self.settings.advertise, self.settings.listen)
        replicas = Shared(store, identity.of(store.data))  # type: ignore[arg-type]
        replicas.lease.join()
        # At once: what follows may take longer than the lease.
        replicas.lease.start(replicas.beat, self._fence)
        return replicas

    def _fence(self) -> None:
        """Too late to act: others may have taken over. Commands are ended, nothing is written."""
        if self._service is not None:
            self._service.fence("the replica that ran it has lost its lease")
        self.fenced.set()

    async def _listen(self, server: Server) -> None:
        for host, port in self.settings.listen:
            with _hinted("another --listen, or port 0 for any"):
                bound, number = await server.listen_tcp(host, port, self._tls)
            scheme = "https" if self._tls else "http"
            self.bound.append((bound, number))
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
            if self._replicas is not None:
                await self._replicas.close()
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


def _adopt(tokens: Tokens, audit: AuditTrail, environ: Mapping[str, str]) -> None:
    """TOKENS_DIR: agents whose tokens somebody else has made."""
    directory = environ.get(tokens_files.VARIABLE, "")
    # Without it, too: tokens of files that are gone are dead.
    given = tokens_files.read(directory) if directory else {}
    for what, info in tokens.adopt(given):
        audit.write(None, f"token.{'new' if what == 'new' else 'revoke'}",
                    target={"type": "token", "id": info.key, "name": info.name},
                    reason=tokens_files.VARIABLE)  # fmt: skip


def _bwrap(store: State, _environ: Mapping[str, str], _limits: Limits) -> Backend:
    from .backend.bwrap import BwrapBackend

    return BwrapBackend(store.data)


def _docker(store: State, environ: Mapping[str, str], bounds: Limits) -> Backend:
    from .backend.docker import DockerBackend, instance_id

    address = environ.get("DOCKER_HOST", "") or engines.STANDARD
    path = engines.unix_path(address)
    if not path:
        raise UsageError(
            f"cannot use the container engine at '{address}': not a unix socket",
            hint="DOCKER_HOST=unix:///run/docker.sock", code="docker-not-unix",
        )  # fmt: skip
    return DockerBackend(path, instance=instance_id(store.data), required=bounds.required_runtime)


def _kubernetes(store: State, environ: Mapping[str, str], bounds: Limits) -> Backend:
    from .backend import kube_settings
    from .backend.kubernetes import KubernetesBackend

    settings = kube_settings.load(environ)
    return KubernetesBackend(
        settings, environ, store=store, required_runtime=bounds.required_runtime
    )


BACKENDS: dict[str, Callable[[State, Mapping[str, str], Limits], Backend]] = {
    "bwrap": _bwrap, "docker": _docker, "kubernetes": _kubernetes,
}  # fmt: skip


def _backend(name: str, settings: Settings, store: State, bounds: Limits) -> Backend:
    if name not in BACKENDS:
        raise UsageError(
            f"there is no backend '{name}'", hint=f"one of: {', '.join(BACKENDS)}", code="usage"
        )
    return BACKENDS[name](store, settings.environ, bounds)


def _mcp(service: Service, denials: Denials) -> Endpoint:
    """The endpoint of MCP; without the SDK it tells what is missing."""
    from .mcp import endpoint

    return endpoint(service, denials.note)


async def _sync(audit: AuditTrail, log: Log) -> None:
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
                hint="make one: sandboxctl token new NAME "
                + ("--database URL" if settings.database else f"--data {settings.data}"),
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
