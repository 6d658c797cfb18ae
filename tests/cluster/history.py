"""What happened to the pods of a cluster, event by event, as its API server tells it.

Whoever only looks from time to time cannot say what never was. A watch has every change of every
pod, in the order in which the API server has made them.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from agent_sandbox.service.backend.kube_objects import OWNER, SANDBOX, STATE, WARM

from .ground import Cluster
from .lab import PODS

Event = dict[str, Any]


class History:
    """Listens from now on, until it is closed."""

    def __init__(self, cluster: Cluster) -> None:
        self.events: list[Event] = []
        listed = cluster.api("GET", PODS)
        # What is there already is the beginning.
        self.events += [{"type": "ADDED", "object": item} for item in listed["items"]]
        version = listed["metadata"]["resourceVersion"]
        self._process = subprocess.Popen(
            [
                cluster.bin / "kubectl", "--kubeconfig", cluster.kubeconfig, "get", "--raw",
                f"{PODS}?watch=1&resourceVersion={version}&timeoutSeconds=3600",
            ],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    def close(self) -> None:
        """Hear no more. One that has ended by itself has missed something."""
        listening = self._process.poll() is None
        self.end()
        assert listening, "the watch has ended before the test"
        assert all(event["type"] != "ERROR" for event in self.events)

    def end(self) -> None:
        """In any case."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _labels(event: Event) -> dict[str, str]:
    return dict(event["object"]["metadata"].get("labels") or {})


def _uid(event: Event) -> str:
    return str(event["object"]["metadata"]["uid"])


def _lives(event: Event) -> bool:
    """Whether it is a sandbox that nobody has begun to remove."""
    found = event["object"]
    ended = found.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    going = "deletionTimestamp" in found["metadata"]
    return event["type"] != "DELETED" and SANDBOX in _labels(event) and not (going or ended)


def counts(events: list[Event]) -> Iterator[Counter[str]]:
    """After each event: how many pods live as sandboxes, by the hash of their owner."""
    living: dict[str, str] = {}
    for event in events:
        if _lives(event):
            living[_uid(event)] = _labels(event).get(OWNER, "")
        else:
            living.pop(_uid(event), None)
        yield Counter(living.values())


def most(events: list[Event]) -> Counter[str]:
    """The most pods that ever lived at once, by the hash of their owner."""
    found: Counter[str] = Counter()
    for now in counts(events):
        found |= now
    return found


def given(events: list[Event]) -> dict[str, list[str]]:
    """By the uid of a pod: the sandboxes that it was, one after another."""
    found: dict[str, list[str]] = {}
    for event in events:
        sandbox, been = _labels(event).get(SANDBOX, ""), found.setdefault(_uid(event), [])
        if sandbox and sandbox not in been[-1:]:
            been.append(sandbox)
    return found


def pods_of(events: list[Event]) -> dict[str, set[str]]:
    """By sandbox: the uids of all pods that were ever it."""
    found: dict[str, set[str]] = {}
    for uid, sandboxes in given(events).items():
        for sandbox in sandboxes:
            found.setdefault(sandbox, set()).add(uid)
    return found


def were_warm(events: list[Event]) -> set[str]:
    """Uids of pods that waited for a sandbox."""
    return {_uid(event) for event in events if _labels(event).get(STATE) == WARM}
