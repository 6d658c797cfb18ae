"""Two replicas of the service over one database and one cluster, with agents that use both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from conftest import As
from service import postgres as databases

from .ground import Cluster
from .serving import Site

AGENTS = ("alice", "bob")
KEPT_WARM = 3


class Team:
    """Two replicas, their agents, and their database."""

    def __init__(
        self, identity: As, cluster: Cluster, server: databases.Cluster, base: Path, **env: str
    ) -> None:
        self.cluster = cluster
        self.server = server
        self.url = server.new()
        self.name = self.url.partition("@/")[2].partition("?")[0]
        self.sites: list[Site] = []
        self._clients: list[httpx.Client] = []
        try:
            self._start(identity, base, env)
        except BaseException:
            self.close()
            raise

    def _start(self, identity: As, base: Path, env: dict[str, str]) -> None:
        for place in (identity.directory(base / name) for name in ("one", "two")):
            token = self.sites[0].token if self.sites else ""
            made = Site(
                identity, self.cluster, place, database=self.url, token=token, warm=KEPT_WARM, **env
            )
            self.sites.append(made)
        make = self.sites[0].served.token
        self.tokens = {name: make(name, *self.sites[0].state) for name in AGENTS}
        self.chief = make("chief", "--scope", "admin", *self.sites[0].state)

    def clients(self, agent: str) -> tuple[httpx.Client, httpx.Client]:
        """An agent's client of each replica."""
        one, two = (site.client(self.tokens[agent]) for site in self.sites)
        self._clients += [one, two]
        return one, two

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """The database itself."""
        return self.server.admin(sql, self.name)

    def records(self) -> set[str]:
        """Sandboxes that have a record."""
        return {str(row[0]) for row in self.ask("SELECT id FROM agent_sandbox.sandboxes")}

    def pods(self) -> set[str]:
        """Sandboxes that have a pod, and be it one that goes."""
        return set(self.sites[0].pods())

    def lines(self, action: str) -> list[dict[str, Any]]:
        """Lines of the audit, by a replica that lives."""
        alive = next(site for site in self.sites if site.served.process.poll() is None)
        found: list[dict[str, Any]] = []
        with alive.client(self.chief) as client:
            asked: dict[str, str] | None
            asked = {"action": action, "limit": "1000", "decision": "allow"}
            while asked is not None:
                page = client.get("/v1/audit", params=asked).json()
                found += page["items"]
                more = page.get("next")
                asked = {**asked, "after": str(more)} if more else None
        return found

    def verify(self) -> None:
        """The audit is one chain, as the tool says."""
        identity = self.sites[0].identity
        done = identity.run(identity.command("ctl", "audit", "verify", "--database", self.url))
        assert done.returncode == 0, done.stdout + done.stderr

    def close(self) -> None:
        for client in self._clients:
            client.close()
        # The first one has made what all pods belong to.
        for site in reversed(self.sites):
            site.close()
        self.server.give_back(self.name)
