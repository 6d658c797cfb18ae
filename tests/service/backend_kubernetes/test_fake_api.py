"""The client before an API server that fails in every way that a network and a server can."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from agent_sandbox.service.backend import kube_api, kube_http
from agent_sandbox.service.backend.kube_api import Api, Event, Follower
from agent_sandbox.service.backend.kube_http import Refusal
from agent_sandbox.service.backend.kube_objects import text
from agent_sandbox.service.problems import Problem

from .fake import Answer, Asked, Fake, says, status, streams

PODS = "/api/v1/namespaces/default/pods"
WATCH = f"{PODS}?watch"
SECONDS = 10


def play(fake: Fake, story: Callable[[Api], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(SECONDS), fake.serving() as api:
            return await story(api)

    return asyncio.run(main())


def listed(version: str, *names: str, more: str = "") -> Answer:
    metadata = {"resourceVersion": version, **({"continue": more} if more else {})}
    return says(200, {"metadata": metadata, "items": [thing(name) for name in names]})


def thing(name: str, version: str = "1") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": version}}


def event(kind: str, name: str, version: str) -> dict[str, Any]:
    return {"type": kind, "object": thing(name, version)}


GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited between tries is not what is tested."""
    monkeypatch.setattr(kube_api, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(kube_api, "LONGEST_PAUSE", 0.01)


# --- calls


def test_connections_are_used_again_and_carry_the_token() -> None:
    fake = Fake()
    fake.on("GET", PODS, listed("5", "a"))

    async def story(api: Api) -> None:
        for _ in range(3):
            await api.list(PODS)

    play(fake, story)
    assert fake.connections == 1
    assert {one.headers["authorization"] for one in fake.seen} == {"Bearer secret"}


def test_a_list_comes_in_pages() -> None:
    fake = Fake()
    fake.on("GET", PODS, listed("5", "a", more="next"), listed("5", "b"))
    found, version = play(fake, lambda api: api.list(PODS, (("labelSelector", "x=y"),)))
    assert ([text(one, "metadata", "name") for one in found], version) == (["a", "b"], "5")
    assert [one.query.get("continue") for one in fake.seen] == [None, "next"]
    assert {one.query["labelSelector"] for one in fake.seen} == {"x=y"}


def test_a_refusal_has_the_servers_words() -> None:
    fake = Fake()
    fake.on("POST", PODS, status(403, "Forbidden", "pods is forbidden"))
    with pytest.raises(Refusal, match="pods is forbidden") as caught:
        play(fake, lambda api: api.create(PODS, {}))
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")


def test_a_refusal_of_something_in_between_is_told_too() -> None:
    fake = Fake()
    fake.on("GET", PODS, says(502, b"<html>bad gateway</html>"))
    with pytest.raises(Refusal, match="bad gateway"):
        play(fake, lambda api: api.get(PODS))


async def drop(_asked: Asked, _writer: asyncio.StreamWriter) -> bool:
    """Close without a word."""
    return False


def test_what_only_reads_is_asked_again_on_a_fresh_connection() -> None:
    """An idle connection may be closed by the other side just when we use it."""
    fake = Fake()
    fake.on("GET", PODS, listed("5", "a"), drop, listed("6", "a"))

    async def story(api: Api) -> str:
        await api.list(PODS)
        return (await api.list(PODS))[1]

    assert play(fake, story) == "6"
    assert fake.connections == 2


def test_a_connection_that_was_forgotten_without_a_word_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load balancer that has moved answers nothing, and refuses nothing."""
    monkeypatch.setattr(kube_http, "FIRST_SECONDS", 0.1)
    fake = Fake()
    fake.on("GET", PODS, listed("5", "a"), silence, listed("6", "a"))

    async def story(api: Api) -> str:
        await api.list(PODS)
        return (await api.list(PODS))[1]

    assert play(fake, story) == "6"
    assert fake.connections == 2


async def silence(_asked: Asked, _writer: asyncio.StreamWriter) -> bool:
    await asyncio.Event().wait()
    return False


def test_the_kernel_looks_after_a_connection_to_the_api_server() -> None:
    fake = Fake()

    async def story(api: Api) -> int:
        line = await api.http.connect()
        sock = line.writer.get_extra_info("socket")
        found: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        line.close()
        return found if sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) else 0

    assert play(fake, story) == 25_000


def test_cannot_happen_that_a_change_is_sent_twice() -> None:
    """Nobody knows whether the first one has arrived."""
    fake = Fake()
    fake.on("GET", PODS, listed("5"))
    fake.on("POST", PODS, drop, says(201, {}))

    async def story(api: Api) -> None:
        await api.list(PODS)
        with pytest.raises(Problem, match="ended before an answer"):
            await api.create(PODS, {"a": 1})

    play(fake, story)
    assert len(fake.of("POST")) == 1


BROKEN: dict[str, bytes] = {
    "not HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length and chunks": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    ),
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "cut off in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{",
    "not JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
    "a head without end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_cannot_be_read_is_a_problem(name: str) -> None:
    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(BROKEN[name])
        await writer.drain()
        return False

    fake = Fake()
    fake.on("GET", PODS, answer)
    with pytest.raises(Problem) as caught:
        play(fake, lambda api: api.get(PODS))
    assert caught.value.code == "BACKEND_UNAVAILABLE"


def test_an_answer_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_http, "MOST_BODY", 1000)
    fake = Fake()
    fake.on("GET", PODS, says(200, {"x": "y" * 2000}))
    with pytest.raises(Problem, match="too large"):
        play(fake, lambda api: api.get(PODS))


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_http, "CALL_SECONDS", 0.1)

    async def never(_asked: Asked, _writer: asyncio.StreamWriter) -> bool:
        await asyncio.Event().wait()
        return False

    fake = Fake()
    fake.on("GET", PODS, never)
    with pytest.raises(Problem, match="in time"):
        play(fake, lambda api: api.get(PODS))


def test_a_log_is_cut_where_it_is_long_enough() -> None:
    fake = Fake()
    fake.on("GET", f"{PODS}/p/log", streams(b"first line\n", b"x" * 100))
    assert play(fake, lambda api: api.log("p", "agent", 20)) == "first line\nxxxxxxxxx"
    assert fake.seen[0].query == {"container": "agent", "limitBytes": "20"}


@pytest.mark.parametrize("code", [404, 409])
def test_what_is_gone_already_is_removed(code: int) -> None:
    fake = Fake()
    fake.on("DELETE", f"{PODS}/p", status(code))
    assert play(fake, lambda api: api.delete(f"{PODS}/p", uid="u", grace=1)) is False
    (asked,) = fake.seen
    assert asked.document["preconditions"] == {"uid": "u"}
    assert asked.document["gracePeriodSeconds"] == 1


# --- watching


class View:
    """What a follower has told."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.events: list[tuple[str, str]] = []
        self.errors: list[Exception] = []
        self._told = asyncio.Event()

    def follower(self, api: Api) -> Follower:
        return Follower(
            api, PODS, (), replace=self._replace, change=self._change, failed=self.errors.append
        )

    def _replace(self, found: list[object]) -> None:
        self.lists.append([text(one, "metadata", "name") for one in found])
        self._told.set()

    def _change(self, event: Event) -> None:
        self.events.append((event.kind, text(event.object, "metadata", "name")))
        self._told.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._told.clear()
            await self._told.wait()


def follow(fake: Fake, holds: Callable[[View], bool]) -> View:
    async def story(api: Api) -> View:
        view = View()
        follower = view.follower(api)
        await follower.start()
        try:
            await view.until(lambda: holds(view))
        finally:
            await follower.stop()
        return view

    found: View = play(fake, story)
    return found


def test_a_watch_goes_on_where_the_list_ended_and_where_the_last_one_did() -> None:
    fake = Fake()
    fake.on("GET", PODS, listed("5", "a"))
    fake.on(
        "GET", WATCH, streams(event("ADDED", "b", "6")),
        streams({"type": "BOOKMARK", "object": thing("", "9")}),
        streams(event("DELETED", "a", "10"), then="stay"),
    )  # fmt: skip
    view = follow(fake, lambda v: len(v.events) == 2)
    assert view.events == [("ADDED", "b"), ("DELETED", "a")]
    assert [one.query["resourceVersion"] for one in fake.of("GET", watch=True)] == ["5", "6", "9"]
    assert len(view.lists) == 1


EXPIRED: dict[str, Answer] = {
    "as an event": streams(GONE),
    "as a status": status(410, "Gone"),
    "after some events": streams(event("MODIFIED", "a", "6"), GONE),
}


@pytest.mark.parametrize("name", EXPIRED)
def test_a_version_that_is_too_old_is_listed_again(name: str) -> None:
    fake = Fake()
    fake.on("GET", PODS, listed("5", "a"), listed("50", "a", "c"))
    fake.on("GET", WATCH, EXPIRED[name], streams(event("ADDED", "d", "51"), then="stay"))
    view = follow(fake, lambda v: ("ADDED", "d") in v.events)
    assert view.lists == [["a"], ["a", "c"]]
    assert fake.of("GET", watch=True)[-1].query["resourceVersion"] == "50"
    assert view.errors == []


TRUNCATED: dict[str, Answer] = {
    "in a line": streams(b'{"type": "ADDED", "obj', then="cut"),
    "between lines": streams(event("ADDED", "b", "6"), then="cut"),
    "in a line, with a proper end": streams(b'{"type": "ADDED", "obj'),
    "not JSON": streams(b"nonsense\n", then="stay"),
    "not an event": streams({"type": "WONDERED", "object": {}}, then="stay"),
    "no object": streams({"type": "ADDED", "object": 3}, then="stay"),
    "an error": streams({"type": "ERROR", "object": {"code": 500, "message": "etcd"}}),
    "refused": status(503, "ServiceUnavailable"),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_stream_that_breaks_is_followed_again_and_nothing_is_missed(name: str) -> None:
    fake = Fake()
    fake.on("GET", PODS, listed("5", "a"), listed("50", "a", "b"))
    fake.on("GET", WATCH, TRUNCATED[name], streams(event("ADDED", "d", "51"), then="stay"))
    view = follow(fake, lambda v: ("ADDED", "d") in v.events)
    seen = {name for names in view.lists for name in names} | {name for _, name in view.events}
    # Either it was listed again, or the rest was asked for from the version before the cut.
    resumed = fake.of("GET", watch=True)[-1].query["resourceVersion"]
    assert "b" in seen or resumed == "5"


def test_a_line_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_api, "MOST_LINE", 1000)
    fake = Fake()
    fake.on("GET", PODS, listed("5"))
    fake.on(
        "GET",
        WATCH,
        streams(b"x" * 2000, then="stay"),
        streams(event("ADDED", "d", "6"), then="stay"),
    )
    view = follow(fake, lambda v: ("ADDED", "d") in v.events)
    assert "too long" in str(view.errors[0])


def test_a_silent_stream_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose other end has vanished would look alive for ever."""
    monkeypatch.setattr(kube_api, "WATCH_QUIET", 0.1)
    fake = Fake()
    fake.on("GET", PODS, listed("5"))
    fake.on("GET", WATCH, streams(then="stay"), streams(event("ADDED", "d", "6"), then="stay"))
    view = follow(fake, lambda v: ("ADDED", "d") in v.events)
    assert "in time" in str(view.errors[0])


def test_a_first_list_that_is_refused_is_the_callers_problem() -> None:
    fake = Fake()
    fake.on("GET", PODS, status(403, "Forbidden"))
    with pytest.raises(Refusal):
        follow(fake, lambda _: True)


# --- a token that is refused


def test_a_refused_token_is_read_again_and_the_call_made_once_more(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("old")

    async def check(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        fine = asked.headers["authorization"] == "Bearer new"
        answer: Awaitable[bool] = (listed("5") if fine else status(401))(asked, writer)
        path.write_text("new")
        return await answer

    fake = Fake()
    fake.on("GET", PODS, check)

    async def story(api: Api) -> None:
        from agent_sandbox.service.backend.kube_config import Access
        from agent_sandbox.service.backend.kube_credentials import Credentials
        from agent_sandbox.service.backend.kube_http import Http

        access = Access(host="127.0.0.1", port=fake.port, tls=False, token_file=str(path))
        other = Api(Http(access, Credentials(access, {})), "default")
        await other.list(PODS)
        await other.http.close()

    play(fake, story)
    assert len(fake.seen) == 2
