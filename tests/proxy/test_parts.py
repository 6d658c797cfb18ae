"""Parts of the proxy on their own: a client's clock, the door, the relay, the control socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.policy import network
from agent_sandbox.proxy import control, gateway, inlet, listening, relay, upload
from agent_sandbox.proxy.inlet import Gone, Inlet
from agent_sandbox.proxy.ledger import Budget, Ledger
from agent_sandbox.proxy.refusals import Problem
from agent_sandbox.proxy.relay import Relay

from .lab import everything

if TYPE_CHECKING:
    from collections.abc import Iterator

YES = network.Verdict(allowed=True, rule="x", source="test", reason="")


def pair() -> tuple[socket.socket, socket.socket]:
    """A real TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.settimeout(10)
    return one, other


# --- clients that take their time


@pytest.mark.parametrize("first", [b"", b"GET / HT", b"\x16"])
def test_cannot_wait_for_ever(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """Slow-loris: the clock is for all bytes together, not for each."""
    monkeypatch.setattr(inlet, "HANDSHAKE_SECONDS", 0.2)

    async def run() -> None:
        one, other = socket.socketpair()
        other.setblocking(False)
        with one, other:
            one.sendall(first)
            slow = Inlet(other)

            async def drip() -> None:
                while True:
                    one.send(b"A")
                    await asyncio.sleep(0.05)

            task = asyncio.get_running_loop().create_task(drip())
            begun = asyncio.get_running_loop().time()

            async def all_of_it() -> None:
                while True:
                    await slow.more()

            with pytest.raises(Problem):
                await all_of_it()
            assert asyncio.get_running_loop().time() - begun < 2
            task.cancel()

    asyncio.run(run())


def test_cannot_fill_the_memory_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all clients have said together has a limit; who is through is not counted any more."""
    before = Inlet.waiting
    monkeypatch.setattr(inlet, "MAX_WAITING", before + 3000)

    async def run() -> None:
        ends = [socket.socketpair() for _ in range(4)]
        inlets = []
        for ours, theirs in ends:
            theirs.setblocking(False)
            ours.sendall(bytes(1000))
            inlets.append(Inlet(theirs))
        for one in inlets[:3]:
            await one.more()
        with pytest.raises(Problem) as caught:
            await inlets[3].more()
        assert caught.value.status == 503
        inlets[0].release()
        await inlets[3].more()
        for one in inlets:
            one.release()
            one.close()
        assert Inlet.waiting == before
        for ours, _ in ends:
            ours.close()

    asyncio.run(run())


def test_many_uploads_read_little_each() -> None:
    """Together they hold what a few may hold."""
    assert upload.share(0) == upload.share(100) == upload.MOST_READ
    assert all(upload.share(n) * n <= upload.HELD for n in range(512, 4097, 64))


def test_a_client_that_closes_is_gone() -> None:
    async def run() -> None:
        one, other = socket.socketpair()
        other.setblocking(False)
        one.close()
        with other, pytest.raises(Gone):
            await Inlet(other).kind()

    asyncio.run(run())


# --- the door


class Listener:
    """A listener whose accept(2) fails a few times."""

    def __init__(self, failures: list[int]) -> None:
        self.real = socket.create_server(("127.0.0.1", 0))
        self.failures = failures

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            raise OSError(self.failures.pop(0), "failed")
        return self.real.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


@pytest.mark.parametrize("failures", [[errno.EMFILE] * 2, [errno.ECONNABORTED] * 3, [errno.ENFILE]])
def test_accepting_goes_on_when_it_has_failed(
    monkeypatch: pytest.MonkeyPatch, failures: list[int]
) -> None:
    monkeypatch.setattr(listening, "PAUSE_SECONDS", 0.01)

    async def run() -> None:
        doors = listening.Listeners(10)
        listener = Listener(list(failures))
        served = asyncio.Event()

        async def handler(client: socket.socket) -> None:
            client.close()
            doors.left()
            served.set()

        doors.add(listener, handler)  # type: ignore[arg-type]
        with socket.create_connection(listener.real.getsockname()):
            async with asyncio.timeout(5):
                await served.wait()
        assert doors.active == 0
        asyncio.get_running_loop().remove_reader(listener.real.fileno())
        listener.real.close()

    asyncio.run(run())


def test_connections_fit_the_descriptors() -> None:
    assert listening.connections_for(1 << 20) == listening.MAX_CONNECTIONS
    assert listening.connections_for(1024) == (1024 - 128) // 4
    assert listening.connections_for(10) == 16


# --- the relay


@pytest.fixture
def running() -> Iterator[Relay]:
    found = Relay()
    found.start()
    yield found
    found.close()


def joined(
    running: Relay, ledger: Ledger | None = None, left: int | None = None
) -> tuple[socket.socket, socket.socket, threading.Event]:
    client, inner = pair()
    server, outer = pair()
    ended = threading.Event()
    account = ledger.note("a.test", 443, YES) if ledger else None
    running.join(inner, outer, account, left=left, closed=ended.set)
    return client, server, ended


def test_bytes_go_both_ways_and_are_counted(running: Relay) -> None:
    ledger = Ledger()
    client, server, ended = joined(running, ledger)
    with client, server:
        data = os.urandom(5_000_000)
        sender = threading.Thread(target=server.sendall, args=(data,))
        sender.start()
        heard = b""
        while len(heard) < len(data):
            heard += client.recv(1 << 20)
        sender.join()
        assert heard == data
        client.sendall(b"up")
        assert server.recv(10) == b"up"
        client.shutdown(socket.SHUT_WR)
        assert server.recv(10) == b""
        server.sendall(b"late")
        assert client.recv(10) == b"late"
        server.shutdown(socket.SHUT_WR)
        assert client.recv(10) == b""
    assert ended.wait(10)
    line = ledger.report()["hosts"][0]  # type: ignore[index]
    assert (line["sent"], line["received"]) == (2, 5_000_004)


def test_a_limit_holds_to_the_byte(running: Relay) -> None:
    client, server, ended = joined(running, left=5)
    with client, server:
        client.sendall(b"hello evil")
        assert server.recv(100) == b"hello"
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.recv(1)
        server.sendall(b"answer")
        server.shutdown(socket.SHUT_WR)
        # Although bytes were left unread, no reset destroys the answer.
        assert everything(client) == b"answer"
        assert ended.wait(10)


@pytest.mark.parametrize("over", [0, 1])
def test_a_budget_holds_to_the_byte(running: Relay, over: int) -> None:
    rule = network.parse("a.test", "test", deny=True)
    ledger = Ledger([Budget(rule=rule, total=100_000)])
    client, server, ended = joined(running, ledger)
    with client, server:
        with contextlib.suppress(OSError):
            server.sendall(bytes(100_000 + over))
            server.shutdown(socket.SHUT_WR)
        heard = 0
        broken = False
        try:
            while chunk := client.recv(1 << 20):
                heard += len(chunk)
        except ConnectionResetError:
            broken = True
        assert heard <= 100_000
        assert broken == bool(over)
        if not over:
            assert heard == 100_000
    assert ended.wait(10)


def test_a_review_ends_what_is_not_allowed_any_more(running: Relay) -> None:
    ledger = Ledger()
    one, other, ended = joined(running, ledger)
    free, peer, still = joined(running)
    with one, other, free, peer:
        running.review(lambda account: account.host != "a.test")
        assert ended.wait(10)
        with pytest.raises(ConnectionResetError):
            one.recv(1)
        free.sendall(b"x")
        assert peer.recv(1) == b"x"
    assert still.wait(10)


def test_a_pair_that_cannot_be_watched_ends_and_others_go_on(
    running: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """epoll(7): ENOSPC, when the user's processes have too many watches."""
    epoll = running._epoll
    ended = threading.Event()

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(epoll, name)

        def register(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client, door = pair()
    server, outlet = pair()
    with client, server:
        monkeypatch.setattr(running, "_epoll", Full())
        running.join(door, outlet, None, closed=ended.set)
        assert ended.wait(10)
        assert everything(client) == everything(server) == b""
    monkeypatch.undo()
    client, door = pair()
    server, outlet = pair()
    with client, server:
        running.join(door, outlet, None, closed=lambda: None)
        client.sendall(b"x")
        assert server.recv(1) == b"x"


def test_idle_pairs_hold_their_sockets_only(running: Relay) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = [joined(running) for _ in range(40)]
    for client, server, _ in held:
        client.sendall(b"x")
        assert server.recv(1) == b"x"
    # Four sockets each, and the pipes that are kept for all.
    assert len(os.listdir("/proc/self/fd")) <= before + 40 * 4 + 2 * relay.SPARE_PIPES
    for client, server, ended in held:
        client.close()
        server.close()
        assert ended.wait(10)


def test_pipes_are_few_and_small_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's pipes together have a limit in the kernel; ours must not use it up."""
    monkeypatch.setattr(relay, "LARGE_PIPES", 2)
    pipes = relay.Pipes()
    taken = [pipes.take() for _ in range(4)]
    assert [pipe.size > relay.DEFAULT_PIPE for pipe in taken] == [True, True, False, False]
    for pipe in taken:
        pipes.put(pipe, empty=True)
    assert pipes.take() in taken[:2]
    pipes.close()
    taken[0].close() if pipes.take() is not taken[0] else None


# --- gate and control


def test_the_gate_answers_in_any_order() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found: list[tuple[str, str, int]] = []

        def note(kind: str, address: str, port: int, fd: int) -> None:
            found.append((kind, address, port))
            os.close(fd)

        gate = gateway.Gate(ours, note)
        loop = asyncio.get_running_loop()
        null = os.open("/dev/null", os.O_RDONLY)
        socket.send_fds(theirs, [b"listener tcp * 80"], [null])
        theirs.send(b"ready")
        await gate.ready
        assert found == [("tcp", "*", 80)]
        first = loop.create_task(gate.bind("198.18.1.1", 7000))
        second = loop.create_task(gate.connect("127.0.0.1", 3000))
        await asyncio.sleep(0)
        theirs.settimeout(5)
        asked = {theirs.recv(100), await loop.run_in_executor(None, theirs.recv, 100)}
        assert asked == {b"1 bind 198.18.1.1 7000", b"2 connect 127.0.0.1 3000"}
        with socket.socket() as made:
            socket.send_fds(theirs, [b"2 ok"], [made.fileno()])
        (await second).close()
        theirs.send(b"1 error address in use")
        with pytest.raises(OSError, match="address in use"):
            await first
        # Nonsense does nothing, and leaves no descriptor behind.
        socket.send_fds(theirs, [b"99 ok"], [null])
        socket.send_fds(theirs, [b"x"], [null])
        third = loop.create_task(gate.bind("198.18.1.1", 7001))
        await asyncio.sleep(0)
        theirs.close()
        with pytest.raises(OSError, match="has ended"):
            await third
        with pytest.raises(gateway.GateGone):
            await gate.bind("198.18.1.1", 1)
        os.close(null)
        ours.close()

    asyncio.run(run())


def test_cannot_command_from_another_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    async def run() -> None:
        held = network.Egress(mode="allow")
        door = control.Control(f"{tmp_path}/c", lambda: held, lambda _: pytest.fail("changed"))
        for uid, heard in ((os.getuid(), True), (os.getuid() + 1 or 1, False)):
            monkeypatch.setattr(control, "peer", lambda _, uid=uid: uid)
            one, other = socket.socketpair()
            other.setblocking(False)
            with one, other:
                one.sendall(b'{"do": "list"}\n')
                one.shutdown(socket.SHUT_WR)
                await door.serve(other)
                other.close()
                assert bool(everything(one)) == heard
        door.listener.close()
        door.remove()

    asyncio.run(run())


def test_the_peer_is_the_kernels_word() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert control.peer(one) == os.getuid()


def test_orders_change_values_and_nothing_else() -> None:
    held = network.Egress(mode="allow")
    more = control.changed(held, {"do": "allow", "rules": ["a.test", "a.test"]})
    assert [rule.text for rule in more.allow] == ["a.test", "a.test"] or len(more.allow) == 1
    again = control.changed(more, {"do": "allow", "rules": ["a.test"]})
    assert again == more
    assert control.changed(held, {"do": "list"}) is held
