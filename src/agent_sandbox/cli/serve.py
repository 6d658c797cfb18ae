"""`sandboxctl serve`: the sandbox service in the foreground."""

from __future__ import annotations

import gc
import os
import sys

from ..errors import UsageError
from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio

    from ..service.app import App, Settings
    from ..service.logs import Log

USAGE = (
    "sandboxctl serve [--listen ADDR:PORT]… [--socket PATH|none] [--data DIR] [--database URL] "
    "[--advertise ADDR:PORT] "
    "[--backend bwrap|docker|kubernetes]… [--kubeconfig FILE] "
    "[--kube-context NAME] [--kube-namespace NAME] [--tls-cert FILE --tls-key FILE] [--plain-http] "
    "[--public-host NAME]… [--templates FILE] [--drain-seconds N] [--metrics-public] "
    "[--log json|text|off]"
)
SWITCHES = ("--plain-http", "--metrics-public")
VALUES = (
    "--listen", "--advertise", "--socket", "--data", "--database", "--backend", "--tls-cert",
    "--tls-key", "--public-host", "--templates", "--drain-seconds", "--log", "--kubeconfig",
    "--kube-context", "--kube-namespace",
)  # fmt: skip
# Flags that stand for a variable of the kubernetes backend.
KUBERNETES = {
    "--kubeconfig": "KUBECONFIG", "--kube-context": "KUBE_CONTEXT",
    "--kube-namespace": "KUBE_NAMESPACE",
}  # fmt: skip
LISTEN = "127.0.0.1:8650"
DRAIN, MOST_DRAIN = 30.0, 3600.0
# Between two attempts to begin anew while the database is away.
AGAIN_SECONDS = 2.0
NONE = "none"


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; 0."""
    given = split(arguments)
    import logging

    from ..service.logs import Log, Relay

    settings = settings_of(given, dict(os.environ))
    log = Log(log_format(given))
    logging.getLogger().addHandler(Relay(log))
    # The checkout's command has switched it off, for commands that end soon.
    gc.enable()
    # Whatever we make is ours alone, also what a library makes.
    os.umask(0o077)
    more_descriptors()
    from ..service.app import App

    app = App(settings, log)
    import asyncio

    asyncio.run(live(app, log))
    return 0


async def live(app: App, log: Log) -> None:
    """From the start to the end of the service."""
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    again = asyncio.Event()

    def stop() -> None:
        # The second signal means: now.
        (again if told.is_set() else told).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await app.start()
    # What lives until the end need not be looked at by every collection.
    gc.collect()
    gc.freeze()
    say(f"serving on {' '.join(app.addresses)}")
    log.write("info", "ready", addresses=app.addresses, data=app.settings.data)
    notify("READY=1")
    while await _fenced(app, told):
        log.write("error", "fenced", hint="it starts again by itself")
        await app.stop(0)
        app = await _anew(app, log, told)
    notify("STOPPING=1")
    log.write("info", "draining", seconds=app.settings.drain)
    await app.stop(app.settings.drain, again)
    log.write("info", "stopped")


async def _fenced(app: App, told: asyncio.Event) -> bool:
    """Wait for the end; True: it is not the end, but this replica must begin anew."""
    import asyncio

    waits = [asyncio.ensure_future(event.wait()) for event in (told, app.fenced)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    return not told.is_set()


async def _anew(old: App, log: Log, told: asyncio.Event) -> App:
    """Another service in the place of one that has lost its lease, as soon as that can be."""
    import asyncio

    from ..errors import SandboxError
    from ..service.app import App

    # Clients know the port; a 0 would give another one.
    settings = old.settings.replace(listen=tuple(old.bound))
    while True:
        app = App(settings, log)
        try:
            await app.start()
        except (SandboxError, OSError) as error:
            log.write("warning", "start", error=str(error))
        else:
            log.write("info", "ready", addresses=app.addresses, data=settings.data)
            return app
        try:
            await asyncio.wait_for(told.wait(), AGAIN_SECONDS)
        except TimeoutError:
            continue
        return app


def say(text: str) -> None:
    """The one line for people."""
    sys.stderr.write(f"sandboxctl: {output.printable(text)}\n")
    sys.stderr.flush()


def notify(state: str) -> None:
    """Tell systemd, if it asked; sd_notify(3)."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    import socket

    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), address)
    except OSError:
        # It will be missed by systemd, which then says so.
        return


def more_descriptors() -> None:
    """Each connection and each command needs some; the soft limit is for programs with select."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- the command line


def _usage(message: str) -> UsageError:
    return UsageError(message, hint=USAGE, code="usage")


def split(arguments: list[str]) -> dict[str, list[str]]:
    """Flags with their values."""
    given: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in SWITCHES and not equals:
            given[name] = [""]
        elif name in VALUES:
            found = value if equals else next(words, "")
            if not found:
                raise _usage(f"flag {name} needs a value")
            given.setdefault(name, []).append(found)
        else:
            raise _usage(f"serve does not know '{word}'")
    return given


def log_format(given: dict[str, list[str]]) -> str:
    """As asked for; otherwise text on a terminal and JSON elsewhere."""
    from ..service.logs import FORMATS, JSON, TEXT

    named = given.get("--log", [TEXT if sys.stderr.isatty() else JSON])[-1]
    if named not in FORMATS:
        raise _usage(f"--log takes {', '.join(FORMATS)}")
    return named


def settings_of(given: dict[str, list[str]], environ: dict[str, str]) -> Settings:
    """What the words and the environment say."""
    from ..service import store_address
    from ..service.app import SOCKET, Settings
    from ..service.store_private import data_directory

    last = {name: values[-1] for name, values in given.items()}
    environ = {**environ, **{KUBERNETES[flag]: last[flag] for flag in KUBERNETES if flag in last}}
    if ("--tls-cert" in given) != ("--tls-key" in given):
        raise _usage("--tls-cert and --tls-key belong together")
    data = os.path.abspath(last["--data"]) if "--data" in last else data_directory(environ)
    listen = given.get("--listen", [environ.get("SANDBOX_LISTEN") or LISTEN])
    sock = last.get("--socket", os.path.join(data, SOCKET))
    told = last.get("--advertise", environ.get("SANDBOX_ADVERTISE", ""))
    hosts = [*given.get("--public-host", ()), *environ.get("SANDBOX_PUBLIC_HOSTS", "").split()]
    settings = Settings(
        data=data, listen=tuple(address(text) for text in listen if text != NONE),
        socket="" if sock == NONE else os.path.abspath(sock),
        backends=tuple(dict.fromkeys(given.get("--backend", ["bwrap"]))),
        certificate=last.get("--tls-cert", ""), key=last.get("--tls-key", ""),
        plain_http="--plain-http" in given, templates=last.get("--templates"),
        drain=seconds(last.get("--drain-seconds")), public_hosts=tuple(map(public_host, hosts)),
        metrics_public="--metrics-public" in given, environ=environ,
        database=store_address.of(last.get("--database", ""), environ),
        advertise=address(told, "--advertise") if told else None,
    )  # fmt: skip
    if not settings.listen and not settings.socket:
        raise _usage("without --listen and --socket nobody could reach it")
    return settings


def address(text: str, flag: str = "--listen") -> tuple[str, int]:
    """ADDR:PORT; an IPv6 address in brackets."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _usage(f"{flag} {text}: write an IPv6 address in brackets")
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise _usage(f"{flag} takes ADDR:PORT, not '{text}'")
    return host, int(port)


def public_host(text: str) -> str:
    """A name without a port."""
    from ..service.api.origins import authority

    found = authority(text)
    if found is None or found[1] is not None:
        raise _usage(f"--public-host takes a name without a port, not '{text}'")
    return found[0]


def seconds(text: str | None) -> float:
    """--drain-seconds."""
    if text is None:
        return DRAIN
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= MOST_DRAIN:
        raise _usage(f"--drain-seconds takes 0 to {MOST_DRAIN:g}, not '{text}'")
    return found
