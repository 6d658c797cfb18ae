"""One proxy for all attacks that leave it as it was."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from conftest import must_work

from .lab import LISTENERS, Lab, Server, Space

if TYPE_CHECKING:
    from collections.abc import Iterator

# Servers and clients of the tests are in this process, both ends of up to thousands of connections.
_most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_most, _most))

WEB = "127.0.0.2"
HOSTS = {
    "good.test": [WEB], "also.test": [WEB], "evil.test": ["127.0.0.3"], "dev.test": [WEB],
    "rebound.test": ["127.0.0.1"], "meta.test": ["169.254.169.254"], "lan.test": ["10.0.0.5"],
    "mapped.test": ["::ffff:127.0.0.1"], "gone.test": ["127.0.0.4"],
}  # fmt: skip
# Names and, since everything here is a loopback address, the one address that they may have.
ALLOW = (
    "good.test", "also.test", "dev.test:7000", "rebound.test", "meta.test", "lan.test",
    "mapped.test", "gone.test", "nowhere.test", WEB, f"{WEB}:7000", "127.0.0.4",
    "localhost:5000", "*.wild.test",
)  # fmt: skip
DENY = ("bad.wild.test",)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """All of this needs network namespaces, but no rights."""
    try:
        Space().close()
    except (AssertionError, OSError) as error:
        must_work(None, f"network namespaces for unprivileged users: {error}")


class World:
    """A lab and its servers."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.web = Server(lab.outside.listen(WEB, 80), ANSWER, until=b"\r\n\r\n")
        self.tls = Server(lab.outside.listen(WEB, 443))
        self.dev = Server(lab.outside.listen(WEB, 7000))
        self.local = Server(lab.outside.listen("127.0.0.1", 5000))
        # What must never be reached.
        self.own = [Server(lab.outside.listen("127.0.0.1", port), ANSWER) for port in (80, 443)]

    def close(self) -> None:
        """Close the listeners."""
        for one in (self.web, self.tls, self.dev, self.local, *self.own):
            one.close()

    def reached(self) -> int:
        """Connections to any server."""
        return sum(one.count for one in (self.web, self.tls, self.dev, self.local, *self.own))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The servers run in this process, in the namespace outside."""
    listeners = (*LISTENERS, ("tcp", "127.0.0.1", 5000), ("tcp", "::1", 5000))
    with Lab(HOSTS, ALLOW, DENY, listeners=listeners) as lab:
        found = World(lab)
        yield found
        found.close()
