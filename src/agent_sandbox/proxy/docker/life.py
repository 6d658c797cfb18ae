"""The life of the Docker filter's process: orders, serving, the end of the run, the clean-up.

`run` serves one run and ends with its supervisor. `foreground` serves whoever may connect and ends
with a signal (`sandboxctl docker serve`).
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket

from ...launch.egress import READY
from ...policy.docker.values import Bind, Grants
from ...record import Record
from . import cleanup
from .audit import Audit
from .desk import Desk
from .engine import Client
from .relaying import stop
from .server import Server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

# How long removing may take in all.
CLEANUP_SECONDS = 60.0


class Orders(Record):
    """What the supervisor wants."""

    # The real engine's socket.
    engine: str
    grants: Grants
    # Where the log of decisions ("-": standard output) and the records of runs are ("": there are
    # none, and nothing that another run has left is removed).
    audit: str
    records: str
    keep: bool
    # "enforce" or "warn".
    mode: str
    # What a refused client may read about it inside; "" where there is no such page.
    page: str = ""


def load(data: bytes) -> Orders:
    """Orders from the supervisor's JSON. Pure."""
    told = json.loads(data)
    return Orders(
        engine=told["engine"], audit=told["audit"], records=told["records"],
        keep=bool(told["keep"]), mode=told["mode"],
        grants=load_grants(told["grants"]), page=str(told.get("page", "")),
    )  # fmt: skip


def load_grants(table: Mapping[str, object]) -> Grants:
    """Grants from JSON: lists become tuples, and binds values. Pure."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    binds = table.get("binds")
    rows = binds if isinstance(binds, list) else []
    values["read_only"] = bool(values.get("read_only"))
    values["binds"] = tuple(
        Bind(
            host_path=path,
            writable=bool(writable),
            swappable=bool(swappable),
            hidden=bool(hidden),
            directory=bool(directory),
        )
        for path, writable, swappable, hidden, directory in rows
    )
    return Grants(**values)  # type: ignore[arg-type]


def run(told: int, listener: int, supervisor: int) -> None:
    """Serve until the supervisor says that the run is over, or is gone."""
    with open(told, "rb") as file:
        orders = load(file.read())
    _raise_limit()
    asyncio.run(_run(orders, socket.socket(fileno=listener), socket.socket(fileno=supervisor)))


def foreground(
    orders: Orders, listener: socket.socket, ready: Callable[[], None]
) -> dict[str, object]:
    """Serve until SIGTERM or SIGINT; the report."""
    _raise_limit()
    return asyncio.run(_foreground(orders, listener, ready))


def _raise_limit() -> None:
    """asyncio knows no limit for connections but this one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _foreground(
    orders: Orders, listener: socket.socket, ready: Callable[[], None]
) -> dict[str, object]:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return await _serve(orders, listener, ready, told.wait())


async def _run(orders: Orders, listener: socket.socket, supervisor: socket.socket) -> None:
    def ready() -> None:
        supervisor.sendall(READY)

    report = await _serve(orders, listener, ready, _ended(supervisor))
    _tell(supervisor, report)


async def _serve(
    orders: Orders, listener: socket.socket, ready: Callable[[], None], ended: Awaitable[object]
) -> dict[str, object]:
    """Serve until `ended`, and remove what was made; the report."""
    client = Client(orders.engine)
    owner = orders.grants.owner
    ledger = cleanup.Ledger(orders.records)
    if not orders.keep:
        # What is kept is nobody's leftover.
        ledger.open(owner, orders.engine)
    audit = Audit(orders.audit, owner)
    desk = Desk(orders.grants, client, audit, warns=orders.mode == "warn")
    server = Server(listener, desk, orders.page)
    serving = asyncio.ensure_future(server.serve())
    sweeping = asyncio.ensure_future(_sweep(desk, ledger))
    ready()
    await ended
    serving.cancel()
    await asyncio.wait({serving})
    clean = await server.close()
    # A short run must not keep the leftovers of others from being removed for ever.
    await asyncio.wait({sweeping}, timeout=CLEANUP_SECONDS)
    await stop(sweeping)
    report = {**audit.report(), **await _end(orders, desk, ledger, clean=clean)}
    audit.close()
    return report


async def _ended(supervisor: socket.socket) -> None:
    """Wait until the supervisor has nothing more to say."""
    supervisor.settimeout(0)
    loop = asyncio.get_running_loop()
    try:
        while await loop.sock_recv(supervisor, 64):
            pass
    except OSError:
        return


async def _sweep(desk: Desk, ledger: cleanup.Ledger) -> None:
    """Remove what dead runs have left, without keeping this one waiting."""
    if not ledger.directory:
        return
    try:
        await desk.grants()
        await cleanup.sweep(desk.client, ledger)
    except Exception:  # noqa: BLE001 - whatever it is, it is tried again at the next start
        return


async def _end(
    orders: Orders, desk: Desk, ledger: cleanup.Ledger, *, clean: bool
) -> dict[str, object]:
    """Remove what the run has made."""
    if orders.keep:
        ledger.close(done=True)
        return {"kept": True}
    removed: dict[str, int] = {}
    left = ["what the run has made: the engine does not answer"]
    try:
        async with asyncio.timeout(CLEANUP_SECONDS):
            await desk.grants()
            removed, left = await cleanup.remove(desk.client, orders.grants.owner)
    except Exception as error:  # noqa: BLE001 - the record stays, so a later start tries again
        # A timeout says nothing.
        left = [f"what the run has made: {str(error) or 'the engine takes too long'}"]
    # What was cut off may still be made by the engine: a later start looks again.
    ledger.close(done=not left and clean)
    return {"removed": {kind: count for kind, count in removed.items() if count}, "left": left}


def _tell(supervisor: socket.socket, report: dict[str, object]) -> None:
    supervisor.settimeout(None)
    try:
        supervisor.sendall(json.dumps(report).encode() + b"\n")
    except OSError:
        # Nobody listens any more.
        return
