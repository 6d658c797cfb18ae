"""Bodies, upgrades, budgets, changes of the policy, ports out, crowds, and how a proxy ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from .conftest import ANSWER, WEB
from .lab import Lab, Server, everything, hello, until

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = {"good.test": [WEB], "also.test": [WEB]}
ALLOW = ("good.test", "good.test:7000", WEB, f"{WEB}:7000")
POST = b"POST /up HTTP/1.1\r\nHost: good.test\r\n"


@contextlib.contextmanager
def accepting(lab: Lab, port: int) -> Iterator[socket.socket]:
    with lab.outside.listen(WEB, port) as listener:
        yield listener


def accept(listener: socket.socket) -> socket.socket:
    client, _ = listener.accept()
    client.settimeout(10)
    return client


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(HOSTS, ALLOW) as found:
        yield found


# --- bodies and upgrades


def test_a_long_body_is_sent_to_its_last_byte_and_no_further(lab: Lab) -> None:
    body = os.urandom(3_000_000)
    with accepting(lab, 80) as listener, lab.to("good.test", 80) as client:
        head = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head)
        with accept(listener) as server:
            assert everything(server, b"\r\n\r\n").startswith(b"POST /up")
            server.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert everything(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            sender = threading.Thread(target=client.sendall, args=(body + b"evil",))
            sender.start()
            heard = b""
            while len(heard) < len(body):
                heard += server.recv(1 << 20)
            assert heard == body
            sender.join()
            server.settimeout(0.2)
            with pytest.raises(TimeoutError):
                server.recv(1)
            server.sendall(ANSWER)
        assert everything(client).endswith(b"hi")


def test_chunks_are_passed_on_and_nothing_behind_them(lab: Lab) -> None:
    with accepting(lab, 80) as listener, lab.to("good.test", 80) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel")
        with accept(listener) as server:
            assert b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" in everything(
                server, b"hel"
            )
            client.sendall(b"lo\r\n0\r\nX: y\r\n\r\nGET /evil HTTP/1.1\r\n\r\n")
            assert everything(server, b"0\r\n\r\n") == b"lo\r\n0\r\n\r\n"
            server.sendall(ANSWER)
        assert everything(client).endswith(b"hi")


def test_cannot_go_on_after_a_bad_chunk(lab: Lab) -> None:
    with accepting(lab, 80) as listener, lab.to("good.test", 80) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        with accept(listener) as server:
            everything(server, b"hello\r\n")
            client.sendall(b"5;x\r\nGET /evil")
            assert everything(server) == b""
        assert everything(client) == b""


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: x\r\n\r\n"
)
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"


def test_a_websocket_is_opened_by_the_server(lab: Lab) -> None:
    with accepting(lab, 80) as listener, lab.to("good.test", 80) as client:
        client.sendall(UPGRADE)
        with accept(listener) as server:
            assert b"Upgrade: websocket\r\n" in everything(server, b"\r\n\r\n")
            server.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n" + SWITCHING + b"\x81\2hi")
            assert everything(client, b"hi").endswith(SWITCHING + b"\x81\2hi")
            for _ in range(3):
                client.sendall(b"\x81\2yo")
                assert everything(server, b"yo") == b"\x81\2yo"
                server.sendall(b"\x81\2hi")
                assert everything(client, b"hi") == b"\x81\2hi"


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 101 x\r\n\r\n", b"x\r\n\r\n"]
)
def test_cannot_go_on_without_a_101(lab: Lab, answer: bytes) -> None:
    with accepting(lab, 80) as listener, lab.to("good.test", 80) as client:
        client.sendall(UPGRADE)
        with accept(listener) as server:
            everything(server, b"\r\n\r\n")
            server.sendall(answer)
            assert b"Connection: close\r\n" in everything(client, b"\r\n\r\n")
            client.sendall(b"GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n")
            server.settimeout(0.2)
            with pytest.raises(TimeoutError):
                server.recv(1)


def test_a_server_may_speak_first(lab: Lab) -> None:
    with accepting(lab, 7000) as listener, lab.to("good.test", 7000) as client:
        with accept(listener) as server:
            server.sendall(b"220 ready\r\n")
            assert everything(client, b"\r\n") == b"220 ready\r\n"
            client.sendall(b"EHLO x")
            assert everything(server, b"x") == b"EHLO x"
        assert everything(client) == b""


def test_a_stream_that_is_cut_off_does_not_look_complete(lab: Lab) -> None:
    """A reset on one side is a reset on the other."""
    with accepting(lab, 7000) as listener, lab.to("good.test", 7000) as client:
        client.sendall(b"\0")
        server = accept(listener)
        server.recv(1)
        server.sendall(b"half")
        assert everything(client, b"half") == b"half"
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_slow_receiver_holds_the_sender_back(lab: Lab) -> None:
    """What nobody takes is not read: memory does not grow."""
    with accepting(lab, 7000) as listener, lab.to("good.test", 7000) as client:
        client.sendall(b"\0")
        with accept(listener) as server:
            server.recv(1)
            server.setblocking(False)
            piece, sent = bytes(1 << 20), 0
            while select.select([], [server], [], 0.5)[1]:
                sent += server.send(piece)
            assert sent < 64 << 20
            server.settimeout(10)
            received = 0
            server.shutdown(socket.SHUT_WR)
            while chunk := client.recv(1 << 20):
                received += len(chunk)
            assert received == sent


# --- the policy changes


def test_the_policy_of_a_running_proxy_can_be_changed() -> None:
    with Lab(HOSTS, [WEB, f"{WEB}:7000"]) as lab, accepting(lab, 7000) as listener:
        with pytest.raises(ConnectionRefusedError):
            lab.to("good.test", 7000).close()
        assert lab.order(do="allow", rules=["good.test:7000"])["ok"]

        def connected() -> socket.socket | None:
            try:
                return lab.to("good.test", 7000)
            except ConnectionRefusedError:
                return None

        client = until(connected)
        with client:
            client.sendall(b"\0")
            with accept(listener) as server:
                assert server.recv(1) == b"\0"
                server.sendall(b"\1")
                assert client.recv(1) == b"\1"
                # Deny holds for what is connected already.
                assert lab.order(do="deny", rules=["good.test"])["ok"]
                assert everything(client) == b""
                assert everything(server) == b""
        with lab.to("good.test", 7000) as refused:
            refused.sendall(b"\0")
            assert everything(refused) == b""
        rules = lab.order(do="list")
        assert rules["allow"][-1] == ["good.test:7000", "sandboxctl net"]
        assert rules["deny"] == [["good.test", "sandboxctl net"]]


@pytest.mark.parametrize(
    "order",
    [{"do": "no"}, {"do": "allow", "rules": "x"}, {"do": "allow", "rules": [1]},
     {"do": "allow", "rules": ["http://x/"]}, {"do": "allow", "rules": ["localhost"]}, {}],
)  # fmt: skip
def test_a_wrong_order_changes_nothing(lab: Lab, order: dict[str, object]) -> None:
    before = lab.order(do="list")
    answer = lab.order(**order)
    assert answer["ok"] is False
    assert answer["error"]
    after = lab.order(do="list")
    assert (after["allow"], after["deny"]) == (before["allow"], before["deny"])


def test_the_control_socket_is_for_its_owner(lab: Lab) -> None:
    # A proxy makes it when it has loaded everything, a moment after the start.
    assert lab.order(do="list")["ok"]
    mode = os.stat(lab.control).st_mode
    assert stat.S_IMODE(mode) == 0o600
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(lab.control)
        sock.sendall(b"[" * 1000 + b"\nnonsense\n")
        assert json.loads(everything(sock, b"\n").splitlines()[0])["ok"] is False


# --- ports out


def test_a_server_inside_is_reachable_at_a_published_port() -> None:
    with Lab(HOSTS, publish=[["127.0.0.1", 8081, 3000], ["127.0.0.1", 8082, 3001]]) as lab:
        lab.resolve("good.test")
        server = Server(lab.inside.listen("127.0.0.1", 3000), b"from inside")
        other = Server(lab.inside.listen("::1", 3001), b"from ::1")
        try:
            for port, said in ((8081, b"from inside"), (8082, b"from ::1")):
                with lab.outside.connect("127.0.0.1", port) as client:
                    client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    client.shutdown(socket.SHUT_WR)
                    assert everything(client) == said
        finally:
            server.close()
            other.close()
        # Nobody listens inside any more: a reset, perhaps as soon as it is connected.
        with contextlib.suppress(ConnectionResetError), lab.outside.connect("127.0.0.1", 8081) as c:
            assert everything(c) == b""


def test_cannot_keep_orders_out_with_connections_to_a_published_port() -> None:
    with (
        Lab(HOSTS, publish=[["127.0.0.1", 8081, 3000]]) as lab,
        lab.inside.listen("127.0.0.1", 3000) as listener,
        contextlib.ExitStack() as stack,
    ):
        lab.resolve("good.test")

        def is_full() -> bool:
            """Whether a connection from outside has to wait."""
            client = stack.enter_context(lab.outside.connect("127.0.0.1", 8081))
            if not select.select([listener], [], [], 0.5)[0]:
                return True
            stack.enter_context(listener.accept()[0])
            return client.fileno() < 0

        until(is_full)
        assert lab.order(do="list")["ok"]


def test_a_port_that_is_taken_is_reported() -> None:
    with Lab(HOSTS, publish=[["127.0.0.1", 8081, 1], ["127.0.0.1", 8081, 2]]) as lab:
        lab.resolve("good.test")
        assert "8081" in lab.report()["problems"][0]


# --- budgets


def test_cannot_send_more_than_the_budget() -> None:
    budgets = [{"host": "good.test", "upload": 1000}]
    with Lab(HOSTS, ALLOW, budgets=budgets) as lab, accepting(lab, 7000) as listener:
        with lab.to("good.test", 7000) as client:
            client.sendall(bytes(500))
            with accept(listener) as server:
                assert len(server.recv(500)) == 500
                with contextlib.suppress(OSError):
                    client.sendall(bytes(5000))
                assert len(everything(server)) <= 500
            assert everything(client) == b""
        with lab.to("good.test", 80) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
            assert b"budget of 1000 bytes sent" in everything(client)
        lines = {line["port"]: line for line in lab.report()["hosts"] if not line["allowed"]}
        assert "budget" in lines[80]["reason"]


# --- the end


def test_the_report_says_what_was_asked_for() -> None:
    with Lab(HOSTS, ["good.test", WEB], mode="learn") as lab:
        web = Server(lab.outside.listen(WEB, 80), ANSWER, until=b"\r\n\r\n")
        for _ in range(2):
            with lab.to("good.test", 80) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
                assert everything(client).endswith(b"hi")
        with lab.inside.connect("10.0.0.1", 443) as client:
            client.sendall(hello("x.test"))
            everything(client)
        report = lab.report()
        web.close()
    # The address, too: it is not a public one, and without a rule the name would not do.
    assert report["learned"] == [f"{WEB}:80", "good.test:80"]
    refused, allowed = report["hosts"]
    assert (refused["host"], refused["port"], refused["allowed"]) == ("10.0.0.1", 443, False)
    assert (allowed["host"], allowed["count"], allowed["rule"]) == ("good.test", 2, "good.test")
    assert allowed["received"] == 2 * len(ANSWER)
    assert allowed["sent"] > 0


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_supervisor(*, busy: bool) -> None:
    with Lab(HOSTS, ALLOW) as lab, accepting(lab, 7000):
        lab.resolve("good.test")
        client = lab.to("good.test", 7000) if busy else None
        assert alive(lab.pid)
        lab.kill_supervisor()
        until(lambda: not alive(lab.pid))
        if client is not None:
            assert everything(client) == b""
            client.close()
        assert not os.path.exists(lab.control)


def test_when_it_dies_the_network_is_gone_and_nothing_else() -> None:
    with Lab(HOSTS, ALLOW) as lab:
        stand_in = lab.resolve("good.test")
        os.kill(lab.pid, signal.SIGKILL)
        until(lambda: not alive(lab.pid))

        def refused() -> bool:
            try:
                lab.inside.connect(stand_in, 80).close()
            except ConnectionRefusedError:
                return True
            return False

        until(refused)
        with pytest.raises(ConnectionRefusedError):
            lab.inside.connect("127.0.0.1", 3128).close()


# --- crowds


def test_five_hundred_connections_are_held_together(lab: Lab) -> None:
    with accepting(lab, 7000) as listener, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(lab.to("good.test", 7000)) for _ in range(500)]
        for number, client in enumerate(clients):
            client.sendall(b"\0%03d" % number)
        servers = [stack.enter_context(accept(listener)) for _ in clients]
        heard = {server.recv(4): server for server in servers}
        for number, client in enumerate(clients):
            heard[b"\0%03d" % number].sendall(b"%03d" % number)
            assert client.recv(3) == b"%03d" % number


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("address", "port", "data"),
    [("127.0.0.1", 3128, ""), ("1.2.3.4", 80, "GET / HT"), ("1.2.3.4", 443, "\x16\x03\x01")],
)
def test_cannot_end_it_with_ten_thousand_connections(
    lab: Lab, address: str, port: int, data: str
) -> None:
    """They wait; what is connected goes on, the policy can be changed, then they are served."""
    lab.resolve("good.test")
    with accepting(lab, 7000) as listener, lab.to("good.test", 7000) as client:
        client.sendall(b"\0")
        with accept(listener) as server:
            assert server.recv(1) == b"\0"
            assert lab.inside.flood(address, port, 10_000, data) == 10_000
            waiting: list[socket.socket] = []

            def is_full() -> bool:
                """Whether a new connection has to wait."""
                waiting.append(lab.to("good.test", 7000))
                if not select.select([listener], [], [], 0.3)[0]:
                    return True
                waiting.append(accept(listener))
                return False

            try:
                until(is_full)
                server.sendall(b"\1")
                assert client.recv(1) == b"\1"
                assert lab.order(do="list")["ok"]
                assert resident(lab.pid) < 256 << 20
                lab.inside.release()
                waiting[-1].sendall(b"\2")
                with accept(listener) as late:
                    assert late.recv(1) == b"\2"
            finally:
                lab.inside.release()
                for one in waiting:
                    one.close()


def test_it_does_nothing_while_nothing_happens() -> None:
    """Half-closed and idle connections cost no time."""
    with (
        Lab(HOSTS, ALLOW) as lab,
        accepting(lab, 7000) as listener,
        lab.to("good.test", 7000) as client,
    ):
        client.sendall(b"\0")
        with accept(listener) as server, lab.to("good.test", 80) as waiting:
            waiting.sendall(b"GET / HT")
            server.recv(1)
            server.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""

            def ticks() -> int:
                with open(f"/proc/{lab.pid}/stat", encoding="ascii") as file:
                    return sum(int(n) for n in file.read().rpartition(")")[2].split()[11:13])

            threading.Event().wait(0.3)
            before = ticks()
            threading.Event().wait(1.0)
            assert ticks() - before <= 2
