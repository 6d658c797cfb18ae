"""`sandboxctl serve --backend kubernetes` for a cluster, and an agent that uses it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from conftest import As
from service.conftest import Served
from service.postgres import Sited

from .ground import Cluster
from .lab import INSTALLATION, PODS, SANDBOX, leave, settings
from .machine import wait

PATIENCE = 120.0
LIMITS = {
    "ALLOWED_IMAGES": "*",
    "MAX_EXECUTION_TIME": "900",
    "DEFAULT_MEMORY": "128M",
    "DEFAULT_CPUS": "0.5",
    "DEFAULT_DISK": "16M",
    "MAX_SANDBOXES": "1000",
    "MAX_SANDBOXES_PER_AGENT": "1000",
    "MAX_CONCURRENT_EXECS": "1000",
}
TEMPLATES = """\
[base]
image = "base"
warm = {warm}
"""


class Site:
    """A service with its data, which may be killed and started again."""

    def __init__(
        self, identity: As, cluster: Cluster, base: Path, *flags: str, warm: int = 0,
        database: str = "", token: str = "", **env: str,
    ) -> None:  # fmt: skip
        """With a database, others may be replicas of this one: the first of them makes a token."""
        self.cluster = cluster
        # With the packages that the backend needs; they are where the tests run.
        self.identity = Sited(
            identity.name, uid=identity.uid, gid=identity.gid, home=identity.home,
            shared=identity.shared,
        )  # fmt: skip
        self.data = identity.directory(base / "data")
        templates = base / "templates.toml"
        templates.write_text(TEMPLATES.format(warm=warm))
        self.state = ("--database", database) if database else ()
        self._flags = (
            "--backend", "kubernetes", "--templates", str(templates), *self.state, *flags,
        )  # fmt: skip
        self._env = {**LIMITS, **settings(cluster, base, **env)}
        before = self._installations()
        self.start()
        # Its own; the second replica of one has none.
        self._made = self._installations() - before
        self.token = token or self.served.token("agent-a", *self.state)

    def start(self) -> None:
        """Start the service, or start it again."""
        self.served = Served(self.identity, self.data, *self._flags, env=self._env)

    def client(self, token: str = "", timeout: float = PATIENCE) -> httpx.Client:
        """A client that is not ours."""
        return self.served.client(token or self.token, timeout=timeout)

    def pods(self) -> dict[str, dict[str, Any]]:
        """The pods of sandboxes of this installation, by sandbox."""
        found = self.cluster.api("GET", f"{PODS}?labelSelector={SANDBOX}")["items"]
        return {item["metadata"]["labels"][SANDBOX]: item for item in found}

    def _installations(self) -> set[str]:
        path = f"/api/v1/namespaces/default/configmaps?labelSelector={INSTALLATION}"
        found = self.cluster.api("GET", path)["items"]
        return {item["metadata"]["labels"][INSTALLATION] for item in found}

    def close(self) -> None:
        """Stop it, and remove what it has left; nobody else's."""
        with contextlib.suppress(AssertionError):
            self.served.stop()
        for installation in self._made:
            leave(self.cluster, installation)


def until(what: str, holds: Callable[[], object], seconds: float = PATIENCE) -> float:
    """Wait until something holds; how long that took."""
    begun = time.monotonic()
    wait(what, holds, seconds, 0.1)
    return time.monotonic() - begun


@contextlib.contextmanager
def site(
    identity: As, cluster: Cluster, base: Path, *flags: str, warm: int = 0, **env: str
) -> Iterator[Site]:
    """A service that is closed at the end."""
    made = Site(identity, cluster, base, *flags, warm=warm, **env)
    try:
        yield made
    finally:
        made.close()
