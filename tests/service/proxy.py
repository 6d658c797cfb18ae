"""A way to the database that falls silent when a test says so: nothing is lost, nothing comes."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.service import store_address
from agent_sandbox.service.store_address import Database

SOCKET = ".s.PGSQL.5432"


class Proxy:
    """A unix socket before the server's. It answers on the socket itself, as a frozen server."""

    def __init__(self, target: str) -> None:
        self._target = f"{target}/{SOCKET}"
        # Short: the path of a unix socket has 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="px-", dir="/tmp"))
        self._passes = threading.Event()
        self._passes.set()
        # How many bytes have come from those who ask, also while it is silent.
        self.asked = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / SOCKET))
        self._listener.listen(50)
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        self._passes.clear()

    def speak(self) -> None:
        self._passes.set()

    def close(self) -> None:
        self.speak()
        self._listener.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(self._target)
            answers = threading.Thread(target=self._pump, args=(server, client, False))
            answers.start()
            self._pump(client, server, asks=True)
            answers.join()

    def _pump(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.asked += len(data) if asks else 0
                self._passes.wait()
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxied(database: Database) -> Iterator[tuple[Proxy, Database]]:
    """The same database, through a proxy."""
    proxy = Proxy(database.parameters["host"])
    name, user = database.parameters["dbname"], database.parameters["user"]
    yield proxy, store_address.read(f"postgresql://{user}@/{name}?host={proxy.directory}", "test")
    proxy.close()
