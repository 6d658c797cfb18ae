"""The view of the cluster: what is newer wins, and whoever waits is told."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_sandbox.service.backend.kube_api import Api
from agent_sandbox.service.backend.kube_cache import Cache
from agent_sandbox.service.backend.kube_objects import Node, Pod

from .fake import Answer, Fake, says, status, streams

PODS, NODES = "/api/v1/namespaces/default/pods", "/api/v1/nodes"
Change = tuple[Pod | None, Pod | None]


class Paths:
    """As much of an Api as is needed before it is started."""

    def path(self, plural: str) -> str:
        return plural


def cache() -> Cache:
    api: Any = Paths()
    return Cache(api, "i")


def pod(version: int, **changes: Any) -> Pod:
    return Pod(**{"name": "p", "uid": "u", "version": str(version), **changes})


def test_an_older_word_about_a_pod_changes_nothing() -> None:
    """The answer to a patch and the event about it come in any order."""
    view, seen = cache(), []
    view.on_pod(lambda now, before: seen.append((now, before)))
    claimed = pod(9, sandbox="s")
    view.put(claimed)
    view.put(pod(5))
    view.put(claimed)
    assert view.of_sandbox("s") == claimed
    assert seen == [(claimed, None)]


def test_a_sandbox_is_found_by_its_newest_pod_and_not_after_it_is_gone() -> None:
    view = cache()
    view.put(pod(1, uid="a", sandbox="s"))
    view.put(pod(2, uid="b", sandbox="s"))
    view.drop("a")
    found = view.of_sandbox("s")
    assert found is not None
    assert found.uid == "b"
    view.drop("b")
    assert view.of_sandbox("s") is None


def test_a_listener_that_fails_does_not_keep_others_from_hearing() -> None:
    view, heard = cache(), []

    def broken(_now: Pod | None, _before: Pod | None) -> None:
        raise RuntimeError

    view.on_pod(broken)
    view.on_pod(lambda now, _: heard.append(now))
    view.put(pod(1))
    assert heard == [pod(1)]


def test_whoever_waits_for_a_pod_misses_no_change() -> None:
    async def main() -> None:
        view = cache()
        made = view.change("u")
        view.put(pod(1))
        await asyncio.wait_for(made, 1)
        gone = view.change("u")
        view.drop("u")
        await asyncio.wait_for(gone, 1)
        assert view._waiting == {}

    asyncio.run(main())


def test_a_node_that_nobody_has_heard_of_is_well() -> None:
    """A pod may be placed on a node that is newer than our view of nodes."""
    view = cache()
    assert view.well("n9")
    view._node(Node(name="n9", ready=False, reason="x"))
    assert not view.well("n9")


# --- followed


def listed(version: str, *items: dict[str, Any]) -> Answer:
    return says(200, {"metadata": {"resourceVersion": version}, "items": list(items)})


def document(name: str, version: str = "1") -> dict[str, Any]:
    labels = {"agent-sandbox.dev/sandbox": f"sbx-{name}"}
    return {"metadata": {"name": name, "uid": name, "resourceVersion": version, "labels": labels}}


async def following(api: Api, until: int) -> tuple[Cache, list[Change]]:
    view, seen = Cache(api, "i"), []
    done = asyncio.Event()

    def tell(now: Pod | None, before: Pod | None) -> None:
        seen.append((now, before))
        if len(seen) >= until:
            done.set()

    view.on_pod(tell)
    await view.start()
    await asyncio.wait_for(done.wait(), 10)
    return view, seen


def follow(fake: Fake, until: int) -> tuple[Cache, list[Change]]:
    async def main() -> tuple[Cache, list[Change]]:
        async with fake.serving() as api:
            view, seen = await following(api, until)
            await view.stop()
            return view, seen

    return asyncio.run(main())


def test_what_went_while_nobody_looked_is_told_when_it_is_listed_again() -> None:
    fake = Fake()
    fake.on("GET", PODS, listed("1", document("a"), document("b")), listed("9", document("b")))
    fake.on("GET", f"{PODS}?watch", status(410, "Gone"), streams(then="stay"))
    fake.on("GET", NODES, listed("1"))
    fake.on("GET", f"{NODES}?watch", streams(then="stay"))
    view, seen = follow(fake, 3)
    assert set(view.pods) == {"b"}
    gone = [before.name for now, before in seen if now is None and before is not None]
    assert gone == ["a"]


def test_nodes_that_are_hidden_from_us_are_no_obstacle() -> None:
    fake = Fake()
    fake.on("GET", PODS, listed("1", document("a")))
    fake.on("GET", f"{PODS}?watch", streams(then="stay"))
    fake.on("GET", NODES, status(403, "Forbidden"))
    view, _ = follow(fake, 1)
    assert not view.sees_nodes
    # Only our own pods are asked for.
    assert {one.query["labelSelector"] for one in fake.seen if one.path == PODS} == {
        "agent-sandbox.dev/installation=i"
    }
