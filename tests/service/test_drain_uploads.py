"""A drain lets uploads and downloads end, too: they have no command that is waited for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from conftest import As
from kernel.conftest import eventually
from service.conftest import Serve

pytestmark = pytest.mark.kernel


def test_an_upload_ends_within_the_drain(user: As, serve: Serve) -> None:
    served = serve(user, "--drain-seconds", "20")
    begun, go = threading.Event(), threading.Event()
    answers: list[httpx.Response] = []

    def parts() -> Iterator[bytes]:
        yield b"one"
        begun.set()
        go.wait(30)
        yield b"two"

    with served.client(served.token("agent")) as client:
        box = client.post("/v1/sandboxes", json={}).json()["id"]
        path = f"/v1/sandboxes/{box}/files"
        upload = threading.Thread(
            target=lambda: answers.append(client.put(path, params={"path": "f"}, content=parts()))
        )
        upload.start()
        assert begun.wait(30)
        served.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: any(line["event"] == "draining" for line in served.log))
        go.set()
        upload.join(30)
    assert [answer.status_code for answer in answers] == [200], answers[0].text
    assert served.wait() == 0
    assert [line for line in served.log if line["level"] == "error"] == []
    assert (served.data / "sandboxes" / box / "workspace" / "f").read_bytes() == b"onetwo"


def test_one_that_does_not_is_told(user: As, serve: Serve) -> None:
    served = serve(user, "--drain-seconds", "0.3")
    begun, go = threading.Event(), threading.Event()
    answers: list[httpx.Response | httpx.TransportError] = []

    def parts() -> Iterator[bytes]:
        yield b"one"
        begun.set()
        go.wait(30)
        yield b"two"

    def put(client: httpx.Client, box: str) -> None:
        try:
            path = f"/v1/sandboxes/{box}/files"
            answers.append(client.put(path, params={"path": "f"}, content=parts()))
        except httpx.TransportError as error:
            answers.append(error)

    with served.client(served.token("agent")) as client:
        box = client.post("/v1/sandboxes", json={}).json()["id"]
        upload = threading.Thread(target=put, args=(client, box))
        upload.start()
        assert begun.wait(30)
        assert served.stop() == 0
        go.set()
        upload.join(30)
    found = answers[0]
    assert not isinstance(found, httpx.Response) or found.status_code == 503
    assert [line for line in served.log if line["level"] == "error"] == []
    assert not (served.data / "sandboxes" / box / "workspace" / "f").exists()
