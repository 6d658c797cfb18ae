"""Every request of the corpus through the filter to a recording engine."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from .corpus import REQUESTS, raw
from .fake import OWNER, FakeEngine
from .test_wire import statuses, talk

if TYPE_CHECKING:
    from .conftest import Filtered

pytestmark = pytest.mark.docker
MINE = "c" * 64
VICTIM = "d" * 64
# Fields of HostConfig that may not reach the engine at all.
NEVER = """
    Binds CapAdd Devices DeviceCgroupRules DeviceRequests PidMode UTSMode UsernsMode CgroupParent
    Cgroup MaskedPaths ReadonlyPaths Runtime Sysctls Annotations VolumeDriver VolumesFrom Links
    ExtraHosts GroupAdd OomScoreAdj Privileged PublishAllPorts
""".split()


def harm(method: str, path: str, body: bytes) -> list[str]:
    """What is dangerous in a request that arrived: a second opinion, without the policy's code."""
    bare = path.partition("?")[0]
    found = [] if re.fullmatch(r"/v1\.41/[a-z_]+(/[A-Za-z0-9:._@-]+)*", bare) else [f"path {bare}"]
    if "VICTIM" in path or VICTIM in path:
        found.append("a stranger's container")
    if method not in ("GET", "HEAD") and "evil" in path:
        found.append("an image from elsewhere")
    if "/build" in path:
        found += [word for word in ("networkmode=host", "remote=", "cgroupparent=") if word in path]
        found += [
            t for t in re.findall(r"[?&]t=([^&]*)", path) if not t.startswith("agent-sandbox-")
        ]
        return found
    document = json.loads(body) if body else {}
    host = document.get("HostConfig") or {}
    found += [key for key in NEVER if key in host or key in document]
    found += [m["Type"] for m in host.get("Mounts", ()) if m["Type"] not in ("volume", "tmpfs")]
    text = json.dumps(document)
    words = ("DriverConfig", "DriverOpts", "unconfined", "host-gateway", "traefik", "SubnetX")
    found += [word for word in words if f'"{word}' in text]
    if host.get("RestartPolicy", {}).get("Name", "no") != "no":
        found.append("restart")
    if host.get("NetworkMode") in ("host", "default", "bridge"):
        found.append("network")
    if bare.endswith("/containers/create") and document.get("Labels", {}).get(OWNER) is None:
        found.append("no owner")
    if bare.endswith("/containers/create") and not 0 < host.get("Memory", 0) <= 2 << 30:
        found.append("memory")
    return found


def test_the_second_opinion_finds_harm() -> None:
    """A control: what the corpus asks for would be found if it arrived."""
    creates = [e for e in REQUESTS if e["target"] == "/v1.41/containers/create" and "json" in e]
    refused = [e for e in creates if e["verdict"] == "refused"]
    assert len(refused) > 40
    for entry in refused:
        assert harm("POST", entry["target"], json.dumps(entry["json"]).encode()), entry["name"]


@pytest.fixture(autouse=True)
def objects(fake: FakeEngine, filtered: Filtered) -> None:
    """The run has one container, somebody else another, and a volume and a network."""

    def about(number: str, owner: str) -> tuple[int, Any]:
        return 200, {"Id": number, "Config": {"Labels": {OWNER: owner}}, "HostConfig": {}}

    for name, number, owner in (("MINE", MINE, filtered.owner), ("VICTIM", VICTIM, "somebody")):
        for word in (name, name.lower(), number):
            fake.answers["GET", f"/containers/{word}/json"] = about(number, owner)
    fake.objects["other-tenant"] = fake.objects["other-tenant-net"] = VICTIM, "somebody"


@pytest.mark.parametrize("entry", REQUESTS, ids=lambda entry: entry["name"])
def test_nothing_dangerous_arrives(
    entry: dict[str, Any], fake: FakeEngine, filtered: Filtered
) -> None:
    """Refused requests do not arrive at all; the others arrive harmless."""
    (status, *more) = statuses(talk(filtered.path, raw(entry)))
    assert more == []
    asked = [s for s in fake.asked() if not s.path.endswith("/networks/create")]
    for seen in asked:
        assert harm(seen.method, seen.path, seen.body) == [], seen
    if entry["verdict"] == "refused":
        assert status >= 400
        assert [s for s in asked if s.method not in ("GET", "HEAD")] == []
        assert filtered.audit()[-1]["verdict"] == "refuse"
    else:
        assert status < 400, fake.seen
        assert filtered.audit()[-1]["verdict"] == "allow"
