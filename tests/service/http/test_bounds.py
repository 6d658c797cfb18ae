"""Every bound of the HTTP layer, gone over: what is too big, too slow or too many."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.service.http import listening
from agent_sandbox.service.http.messages import Request, Response, json_response
from agent_sandbox.service.http.server import Limits
from agent_sandbox.service.problems import Problem

from .lab import Lab, echo, get, run, serving, until

POST = b"POST /p HTTP/1.1\r\nHost: x\r\n"
SOON = 0.15


def test_every_bound_is_gone_over_somewhere() -> None:
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    used = set(re.findall(r"(\w+)=", " ".join(re.findall(r"Limits\(([^)]*)\)", sources))))
    assert set(Limits.__fields__) - used == set()


# --- heads


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (get("/" + "a" * 200), 414, "URI_TOO_LONG"),
        (b"GET /" + b"a" * 300, 414, "URI_TOO_LONG"),
        (get("/", b"X-A: " + b"a" * 2000 + b"\r\n"), 431, "HEADERS_TOO_LARGE"),
        (b"GET / HTTP/1.1\r\nX-A: " + b"a" * 2000, 431, "HEADERS_TOO_LARGE"),
        (get("/", b"X-A: a\r\n" * 11), 431, "HEADERS_TOO_LARGE"),
    ],
    ids=["target", "endless target", "head", "endless head", "fields"],
)
def test_a_head_that_is_too_large(data: bytes, status: int, code: str) -> None:
    async def main() -> None:
        async with serving(echo, Limits(head_bytes=1000, target_bytes=100, fields=10)) as lab:
            client = await lab.client()
            answer = await client.ask(data)
            assert (answer.status, answer.code) == (status, code)
            assert await client.rest() == b""
            assert [problem.status for _, problem in lab.bad] == [status]

    run(main)


def test_a_head_within_the_bounds_is_taken() -> None:
    """The control."""

    async def main() -> None:
        async with serving(echo, Limits(head_bytes=1000, target_bytes=100, fields=10)) as lab:
            target = "/" + "a" * 99
            fields = b"".join(b"X-%d: %b\r\n" % (n, b"a" * 60) for n in range(9))
            assert (await lab.ask(get(target, fields))).status == 200

    run(main)


def test_a_head_that_comes_too_slowly() -> None:
    async def main() -> None:
        async with serving(echo, Limits(head_seconds=SOON)) as lab:
            client = await lab.client()
            client.send(b"GET / HTTP/1.1\r\n")
            began = time.monotonic()
            # A byte now and then does not help.
            task = asyncio.create_task(client.answer())
            while not task.done():
                client.send(b"a")
                await asyncio.sleep(0.02)
            answer = task.result()
            assert (answer.status, answer.code) == (408, "REQUEST_TIMEOUT")
            assert time.monotonic() - began < 5

    run(main)


def test_the_second_head_has_its_own_time() -> None:
    async def main() -> None:
        async with serving(echo, Limits(head_seconds=SOON, idle_seconds=30)) as lab:
            client = await lab.client()
            await client.ask(get("/"))
            await asyncio.sleep(2 * SOON)
            assert (await client.ask(get("/"))).status == 200
            client.send(b"G")
            assert (await client.answer()).status == 408

    run(main)


def test_a_connection_without_a_word_is_closed_without_one() -> None:
    async def main() -> None:
        async with serving(echo, Limits(head_seconds=SOON)) as lab:
            client = await lab.client()
            assert await client.rest() == b""
            assert lab.bad == []

    run(main)


def test_an_idle_connection_is_closed() -> None:
    async def main() -> None:
        async with serving(echo, Limits(idle_seconds=SOON)) as lab:
            client = await lab.client()
            await client.ask(get("/"))
            assert await client.rest() == b""
            await until(lambda: lab.server.connections == 0)

    run(main)


# --- bodies


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 11\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nb\r\n"]
)
def test_a_body_that_is_too_large(framing: bytes) -> None:
    async def main() -> None:
        async def handler(request: Request) -> Response:
            return json_response(200, len(await request.body(10)))

        async with serving(handler) as lab:
            answer = await lab.ask(POST + framing + b"x" * 11)
            assert (answer.status, answer.code) == (413, "TOO_LARGE")
            ten = POST + b"Content-Length: 10\r\n\r\n" + b"x" * 10
            assert (await lab.ask(ten)).body == b"10"

    run(main)


def test_a_client_in_full_flow_still_reads_the_refusal() -> None:
    """It sends megabytes that nobody wants. A reset would destroy the answer on its way."""

    async def main() -> None:
        async def handler(request: Request) -> Response:
            return json_response(200, len(await request.body(10)))

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(POST + b"Content-Length: 8000000\r\n\r\n")
            for _ in range(80):
                client.send(bytes(100_000))
                await client.writer.drain()
            assert (await client.answer()).status == 413

    run(main)


@pytest.mark.parametrize(
    "limits", [Limits(linger_bytes=100_000, linger_seconds=60), Limits(linger_seconds=SOON)]
)
def test_what_comes_after_a_refusal_is_not_read_for_ever(limits: Limits) -> None:
    async def main() -> None:
        async with serving(echo, limits) as lab:
            client = await lab.client()
            answer = await client.ask(b"nonsense\r\n\r\n")
            assert answer.status == 400

            async def pour() -> None:
                while True:
                    client.send(bytes(10_000))
                    await client.writer.drain()
                    await asyncio.sleep(0.005)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(pour(), 10)

    run(main)


def test_a_body_that_stops_coming() -> None:
    async def main() -> None:
        async with serving(echo, Limits(body_seconds=SOON)) as lab:
            client = await lab.client()
            answer = await client.ask(POST + b"Content-Length: 10\r\n\r\nabc")
            assert (answer.status, answer.code) == (408, "REQUEST_TIMEOUT")
            assert await client.rest() == b""

    run(main)


@pytest.mark.parametrize(("rate", "status"), [(10_000, 408), (10, 200)])
def test_a_body_must_come_at_some_rate(rate: int, status: int) -> None:
    """About 500 bytes a second, for longer than a client may be silent."""

    async def main() -> None:
        async with serving(echo, Limits(body_seconds=0.3, body_bytes_per_second=rate)) as lab:
            client = await lab.client()
            client.send(POST + b"Content-Length: 500\r\n\r\n")
            for _ in range(100):
                client.send(b"12345")
                await asyncio.sleep(0.01)
            assert (await client.answer()).status == status

    run(main)


def test_a_slow_handler_is_not_the_clients_fault() -> None:
    async def main() -> None:
        async def handler(request: Request) -> Response:
            await asyncio.sleep(3 * SOON)
            return json_response(200, len(await request.body(100)))

        async with serving(handler, Limits(body_seconds=SOON)) as lab:
            client = await lab.client()
            client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await asyncio.sleep(2 * SOON)
            client.send(b"0\r\n\r\n")
            assert (await client.answer()).body == b"3"

    run(main)


@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 100000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5f5e100\r\n"],
)
def test_what_a_handler_does_not_read_does_not_fill_the_memory(framing: bytes) -> None:
    async def main() -> None:
        go = asyncio.Event()
        held: list[int] = []

        async def handler(request: Request) -> Response:
            await go.wait()
            held.append(request._body.held)
            return json_response(200, None)

        async with serving(handler, Limits(body_held_bytes=100_000)) as lab:
            client = await lab.client()
            client.send(POST + framing)

            async def pour() -> None:
                for _ in range(1000):
                    client.send(bytes(100_000))
                    await client.writer.drain()

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pour(), 1)
            go.set()
            await client.answer()
            # One read of the loop on top: 256 KiB.
            assert 100_000 <= held[0] < 500_000

    run(main)


@pytest.mark.parametrize(("missing", "kept"), [(100, True), (101, False)])
def test_how_much_of_an_unread_body_is_waited_for(missing: int, kept: bool) -> None:
    async def main() -> None:
        async def handler(_: Request) -> Response:
            return json_response(200, None)

        async with serving(handler, Limits(body_skip_bytes=100)) as lab:
            answer = await lab.ask(POST + b"Content-Length: %d\r\n\r\n" % missing)
            assert ("connection" not in answer.headers) == kept

    run(main)


def test_an_unread_body_is_not_waited_for_for_ever() -> None:
    async def main() -> None:
        async def handler(_: Request) -> Response:
            return json_response(200, None)

        async with serving(handler, Limits(body_seconds=SOON)) as lab:
            client = await lab.client()
            await client.ask(POST + b"Content-Length: 10\r\n\r\n")
            assert await client.rest() == b""
            await until(lambda: lab.server.connections == 0)

    run(main)


# --- answers


async def stuck(lab: Lab) -> socket.socket:
    """A client that asks and never reads, with small buffers in the kernel."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", lab.port))
    return sock


def test_a_client_that_never_reads_holds_up_its_own_stream_alone() -> None:
    """Bounded memory: the stream waits, is cut off in the end, and is closed."""

    async def main() -> None:
        made = 0
        closed = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal made
            try:
                # 30 MB, not for ever: if it fails, this test must not take the machine with it.
                for _ in range(3000):
                    made += 1
                    yield bytes(10_000)
            finally:
                closed.set()

        async def handler(request: Request) -> Response:
            if request.path == "/quick":
                return json_response(200, None)
            return Response(status=200, body=pieces())

        limits = Limits(send_held_bytes=50_000, send_seconds=0.5)
        async with serving(handler, limits) as lab:
            sock = await stuck(lab)
            await asyncio.get_running_loop().sock_sendall(sock, get("/"))
            await until(lambda: made > 0)
            await asyncio.sleep(0.2)
            before = made
            assert (await lab.ask(get("/quick"))).status == 200
            assert made == before
            # What the kernel's buffers took, and what is held.
            assert made * 10_000 < 8_000_000
            assert not closed.is_set()
            async with asyncio.timeout(5):
                await closed.wait()
            await until(lambda: lab.server.connections == 0)
            sock.close()

    run(main)


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    """The control: every byte that it takes renews its time."""

    async def main() -> None:
        total = 400_000
        made = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal made
            for _ in range(total // 10_000):
                made += 1
                yield bytes(10_000)

        async def handler(_: Request) -> Response:
            return Response(status=200, headers=(("content-length", str(total)),), body=pieces())

        async with serving(handler, Limits(send_held_bytes=50_000, send_seconds=0.5)) as lab:
            lab.server._listeners[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sock = await stuck(lab)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, get("/"))
            await asyncio.sleep(0.1)
            assert made < 40
            began, size = time.monotonic(), 0
            while data := await loop.sock_recv(sock, 100_000):
                size += len(data)
                await asyncio.sleep(0.02)
                if size > total:
                    break
            assert size > total
            assert time.monotonic() - began > 0.6
            sock.close()

    run(main)


def test_a_client_that_never_reads_cannot_pile_up_answers_by_pipelining() -> None:
    async def main() -> None:
        handled = 0

        async def handler(_: Request) -> Response:
            nonlocal handled
            handled += 1
            return Response(status=200, body=bytes(10_000))

        async with serving(handler, Limits(send_held_bytes=50_000, head_bytes=2000)) as lab:
            sock = await stuck(lab)
            loop = asyncio.get_running_loop()

            async def pour() -> None:
                while True:
                    await loop.sock_sendall(sock, get("/") * 100)

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pour(), 1)
            assert handled * 10_000 < 8_000_000
            (connection,) = lab.server._connections
            # What one read of the loop brings (256 KiB), and no more with every request.
            assert len(connection._input) < 300_000
            sock.close()
            await until(lambda: lab.server.connections == 0)

    run(main)


def test_an_answer_after_the_client_has_closed_its_side_may_not_take_for_ever() -> None:
    async def main() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"x"
            await asyncio.sleep(60)

        async def handler(_: Request) -> Response:
            return Response(status=200, body=pieces())

        async with serving(handler, Limits(half_closed_seconds=SOON)) as lab:
            client = await lab.client()
            client.send(get("/"))
            await client.head()
            client.writer.write_eof()
            assert not (await client.rest()).endswith(b"0\r\n\r\n")
            await until(lambda: lab.server.connections == 0)

    run(main)


def test_nor_does_a_handler_that_goes_on_without_the_rest_of_the_body() -> None:
    async def main() -> None:
        async def handler(request: Request) -> Response:
            with pytest.raises(Problem):
                await request.body(100)
            await asyncio.sleep(60)
            raise AssertionError

        async with serving(handler, Limits(half_closed_seconds=SOON)) as lab:
            client = await lab.client()
            client.send(POST + b"Content-Length: 10\r\n\r\nabc")
            await until(lambda: bool(lab.server.running))
            client.writer.write_eof()
            assert await client.rest() == b""
            await until(lambda: lab.server.connections == 0)

    run(main)


# --- connections


def test_slow_clients_do_not_keep_a_quick_one_out() -> None:
    """Slowloris: far more connections than there is room for, each with half a head."""

    async def main() -> None:
        async with serving(echo, Limits(connections=50, connections_per_peer=50)) as lab:
            slow = [await lab.client() for _ in range(200)]
            for client in slow:
                client.send(b"GET / HTTP/1.1\r\nX-A: ")
            await until(lambda: lab.server.connections == 50)
            for _ in range(20):
                began = time.monotonic()
                assert (await lab.ask(get("/"))).status == 200
                assert time.monotonic() - began < 1
            assert lab.server.connections <= 50
            assert lab.bad == []

    run(main)


def test_slow_bodies_do_not_keep_a_quick_client_out_either() -> None:
    """A request that runs has its place; beyond that, the newcomer is told to come back."""

    async def main() -> None:
        async with serving(echo, Limits(connections=10, body_seconds=0.5)) as lab:
            slow = [await lab.client() for _ in range(10)]
            for client in slow:
                client.send(POST + b"Content-Length: 9\r\n\r\n")
            await until(lambda: len(lab.server.running) == 10)
            answer = await lab.ask(get("/"))
            assert (answer.status, answer.code) == (429, "BUSY")
            assert answer.headers["retry-after"] == "1"
            assert [problem.code for _, problem in lab.bad] == ["BUSY"]
            # Their time runs out, and then there is room.
            await until(lambda: not lab.server.running)
            assert (await lab.ask(get("/"))).status == 200

    run(main)


def test_one_peer_cannot_take_every_connection() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def handler(_: Request) -> Response:
            await go.wait()
            return json_response(200, None)

        async with serving(handler, Limits(connections=100, connections_per_peer=5)) as lab:
            busy = [await lab.client() for _ in range(5)]
            for client in busy:
                client.send(get("/"))
            await until(lambda: len(lab.server.running) == 5)
            assert (await lab.ask(get("/"))).status == 429
            # Another address of the same machine is another peer.
            _, writer = await asyncio.open_connection(
                "127.0.0.1", lab.port, local_addr=("127.0.0.2", 0)
            )
            writer.write(get("/"))
            await until(lambda: len(lab.server.running) == 6)
            go.set()
            writer.close()

    run(main)


def test_an_idle_connection_gives_way_to_a_new_one() -> None:
    async def main() -> None:
        async with serving(echo, Limits(connections=3)) as lab:
            first, second, third = [await lab.client() for _ in range(3)]
            for client in (first, second, third, first):
                await client.ask(get("/"))
            # The second has waited longest.
            assert (await lab.ask(get("/"))).status == 200
            assert await second.rest() == b""
            assert (await first.ask(get("/"))).status == 200

    run(main)


@pytest.mark.parametrize(
    ("family", "one", "other", "same"),
    [
        (socket.AF_INET, "10.0.0.1", "10.0.0.2", False),
        (socket.AF_INET6, "2001:db8::1", "2001:db8::ffff:2", True),
        (socket.AF_INET6, "2001:db8::1", "2001:db8:0:1::1", False),
        (socket.AF_INET6, "fe80::1%eth0", "fe80::1", True),
    ],
)
def test_who_counts_as_one_peer(family: int, one: str, other: str, same: bool) -> None:
    assert (listening.counted(family, one) == listening.counted(family, other)) == same


def test_the_kernel_keeps_as_many_callers_as_it_was_told() -> None:
    async def main() -> None:
        async with serving(echo, Limits(backlog=7)) as lab:
            listener = lab.server._listeners[0].sock
            # tcp_info of a listener: eight bytes, five numbers, and then the longest backlog.
            told = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
            assert int.from_bytes(told[28:32], "little") == 7

    run(main)
