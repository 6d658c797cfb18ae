"""Answers: only what belongs to the run, and nothing about the host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_sandbox.policy.docker.decision import filter_answer
from agent_sandbox.policy.docker.mounts import root_volume
from agent_sandbox.policy.docker.values import IMAGE_LABEL, OWNER_LABEL

from .world import GRANTS, OWNER

MINE = {OWNER_LABEL: OWNER, IMAGE_LABEL: "alpine:3"}
THEIRS = {OWNER_LABEL: "run2"}
NETWORK = "a" * 64


def answer(name: str, document: object) -> Any:
    return filter_answer(name, GRANTS, document)


def container(labels: object, **more: object) -> dict[str, Any]:
    return {
        "Id": "c" * 64, "Image": "sha256:" + "b" * 64, "Labels": labels,
        "HostConfig": {"NetworkMode": NETWORK},
        "NetworkSettings": {"Networks": {"proj_default": {"NetworkID": NETWORK}}}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("labels", [THEIRS, {}, None, [OWNER], "x", {"OWNER": OWNER}])
def test_lists_hold_only_one_s_own(labels: object) -> None:
    own = container(MINE)
    assert [c["Id"] for c in answer("containers", [own, container(labels)])] == [own["Id"]]
    assert answer("networks", [{"Labels": labels}, {"Labels": MINE}]) == [{"Labels": MINE}]
    volumes = {"Volumes": [{"Name": "a", "Labels": labels}, {"Name": "b", "Labels": MINE}]}
    assert [v["Name"] for v in answer("volumes", volumes)["Volumes"]] == ["b"]
    assert answer("inspect", {"Config": {"Labels": labels}}) is None
    assert answer("network", {"Labels": labels}) is None
    assert answer("volume", {"Name": "a", "Labels": labels}) is None
    event = {"Type": "container", "Actor": {"Attributes": labels}}
    assert answer("events", event) is None


@pytest.mark.parametrize(
    "name",
    ["containers", "inspect", "images", "image", "history", "networks", "network", "volumes",
     "volume", "info", "events", "error", "removed"],
)  # fmt: skip
@pytest.mark.parametrize("document", [None, [], {}, "x", 1, [1], [None], {"a": 1}, {"Volumes": 1}])
def test_an_odd_answer_shows_nothing(name: str, document: object) -> None:
    shown = answer(name, document)
    if name not in ("info", "error", "removed", "history"):
        assert not shown or shown == {"Volumes": [], "Warnings": None}
    json.dumps(shown)


def test_names_are_those_that_the_client_gave() -> None:
    (shown,) = answer("containers", [container(MINE)])
    assert shown["Image"] == "alpine:3"
    assert shown["HostConfig"]["NetworkMode"] == "proj_default"
    inspected = {
        **container(None), "Config": {"Labels": MINE, "Image": "sha256:x"},
        "LogPath": "/var/lib/docker/x", "ResolvConfPath": "/var/lib/docker/y",
        "GraphDriver": {"Data": {"UpperDir": "/var/lib/docker/z"}},
        "Mounts": [
            {"Type": "volume", "Name": "v", "Source": "/var/lib/docker/volumes/v/_data"},
            {"Type": "volume", "Name": root_volume(GRANTS, "/ws"), "Source": "/var/lib/docker/q"},
            {"Type": "bind", "Source": "/ws"},
        ],
    }  # fmt: skip
    shown = answer("inspect", inspected)
    assert shown["Config"]["Image"] == "alpine:3"
    assert "/var/lib/docker" not in json.dumps(shown)
    assert [m["Source"] for m in shown["Mounts"]] == ["", "/ws", "/ws"]


def test_images_are_those_on_the_list_and_one_s_own() -> None:
    listed = [
        {"Id": "1", "RepoTags": ["alpine:3.19", "private/x:1"],
         "RepoDigests": ["private/x@sha256:" + "a" * 64]},
        {"Id": "2", "RepoTags": ["private/other:1"], "RepoDigests": None, "Labels": None},
        {"Id": "3", "RepoTags": ["agent-sandbox-run1/app:latest", "agent-sandbox-run2/app:1"]},
        {"Id": "4", "RepoTags": ["<none>:<none>"], "Labels": {OWNER_LABEL: OWNER}},
        {"Id": "5", "RepoTags": ["<none>:<none>"], "RepoDigests": ["<none>@<none>"]},
        {"Id": "6", "RepoTags": ["agent-sandbox-run2/app:latest"], "Labels": THEIRS},
    ]  # fmt: skip
    shown = answer("images", listed)
    assert [one["Id"] for one in shown] == ["1", "3", "4"]
    assert shown[0]["RepoTags"] == ["alpine:3.19"]
    assert shown[0]["RepoDigests"] == []
    assert shown[1]["RepoTags"] == ["app:latest"]
    assert answer("image", {"RepoTags": ["private:1"], "Config": {}}) is None
    assert answer("history", [{"Tags": ["private:1", "alpine:1"]}, {"Tags": None}]) == [
        {"Tags": ["alpine:1"]}, {"Tags": None},
    ]  # fmt: skip


def test_the_volumes_of_roots_are_not_listed() -> None:
    root = {"Name": root_volume(GRANTS, "/ws"), "Labels": MINE, "Mountpoint": "/x"}
    plain = {"Name": "v", "Labels": MINE, "Mountpoint": "/var/lib/docker/volumes/v"}
    assert answer("volumes", {"Volumes": [root, plain]}) == {
        "Volumes": [{**plain, "Mountpoint": ""}], "Warnings": None,
    }  # fmt: skip
    assert answer("volume", root) is None


def test_info_tells_nothing_about_the_host() -> None:
    told = {
        "Name": "secret-host", "ID": "x", "DockerRootDir": "/data", "Containers": 99, "NCPU": 64,
        "MemTotal": 1 << 40, "HttpProxy": "http://user:pw@proxy", "Labels": ["rack=3"],
        "ServerVersion": "20.10.24", "OSType": "linux", "Runtimes": {"kata": {}},
        "Swarm": {"NodeID": "n"}, "RegistryConfig": {"Mirrors": ["http://mirror"]},
        "SomethingNew": "leak",
    }  # fmt: skip
    shown = answer("info", told)
    text = json.dumps(shown)
    for secret in ("secret-host", "/data", "pw@", "rack", "kata", "mirror", "leak", "99"):
        assert secret not in text
    assert shown["ServerVersion"] == "20.10.24"
    assert shown["NCPU"] == 1
    assert shown["MemTotal"] == 1 << 30


def test_an_error_does_not_tell_who_has_the_name() -> None:
    text = f'Conflict. The container name "/x" is already in use by container "{"a" * 64}".'
    shown = answer("error", {"message": text, "other": "x"})
    assert set(shown) == {"message"}
    assert "a" * 64 not in shown["message"]
    assert "Conflict" in shown["message"]


def test_progress_speaks_of_tags_as_the_client_does() -> None:
    line = {"stream": "Successfully tagged agent-sandbox-run1/app:latest\n"}
    assert answer("progress", line) == {"stream": "Successfully tagged app:latest\n"}
    event = {"Type": "image", "Actor": {"ID": "agent-sandbox-run1/app", "Attributes": MINE}}
    assert answer("events", event)["Actor"]["ID"] == "app"


def test_what_has_no_filter_passes() -> None:
    assert answer("", {"a": 1}) == {"a": 1}
