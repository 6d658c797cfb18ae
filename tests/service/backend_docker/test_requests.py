"""What is asked of the engine, as tables: nothing that a client says becomes more than it may."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_sandbox.service.backend import docker_requests as requests
from agent_sandbox.service.backend.docker_requests import Pair
from agent_sandbox.service.backend.interface import Start, Terminal
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import RUNNING, Network, Resources, Sandbox

PIN = "sha256:" + "a" * 64
PAIR = Pair(work="w", home="h")
INFO: dict[str, Any] = {
    "MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True, "DefaultRuntime": "runc",
    "Runtimes": {"runsc": {}, "runc": {}}, "SecurityOptions": ["name=seccomp,profile=default"],
}  # fmt: skip


def sandbox(**fields: Any) -> Sandbox:
    base = {"id": "sbx-1", "owner": "alice", "backend": "docker", "state": RUNNING, "digest": PIN}
    return Sandbox(**{**base, **fields})


def body(*declared: str, **fields: Any) -> Any:
    return requests.container(
        sandbox(**fields), instance="i", pair=PAIR, runtime="", declared=declared
    )


# --- containers


def test_a_container_is_made_from_the_pin_and_not_from_the_name() -> None:
    assert body(image="python:3")["Image"] == PIN


@pytest.mark.parametrize("digest", ["", "python:3", "sha256:abc", PIN.upper()])
def test_an_image_that_is_not_pinned_is_refused(digest: str) -> None:
    with pytest.raises(Problem, match="not pinned"):
        body(digest=digest)


def test_the_container_has_no_privilege() -> None:
    host = body()["HostConfig"]
    wanted = {
        "CapDrop": ["ALL"], "Privileged": False, "ReadonlyRootfs": True, "NetworkMode": "none",
        "SecurityOpt": ["no-new-privileges"], "IpcMode": "private", "PidMode": "",
        "CgroupnsMode": "private", "LogConfig": {"Type": "none", "Config": {}}, "Init": True,
    }  # fmt: skip
    assert {name: host[name] for name in wanted} == wanted
    assert not {"Binds", "CapAdd", "Devices", "VolumesFrom", "CgroupParent", "UsernsMode"} & {*host}
    assert body()["User"] == "65534:65534"


def test_only_volumes_of_the_engine_are_mounted() -> None:
    mounts = body()["HostConfig"]["Mounts"]
    assert [(m["Type"], m["Source"], m["Target"]) for m in mounts] == [
        ("volume", "w", "/workspace"),
        ("volume", "h", "/home/agent"),
    ]


def test_volumes_that_an_image_declares_cannot_be_written() -> None:
    host = body("/data", "/home")["HostConfig"]
    own = host["Mounts"][-1]
    assert (own["Source"], own["Target"]) == ("agent-sandbox-i-aaaaaaaaaaaaaaaa-0", "/data")
    assert own["ReadOnly"]
    assert len(host["Mounts"]) == 3
    # It goes when a service that was killed comes back.
    assert own["VolumeOptions"]["Labels"] == {requests.INSTANCE: "i"}
    # Our own mount is below this one.
    assert host["Tmpfs"]["/home"] == "rw,nosuid,nodev,mode=755,size=64k"


DECLARED = [
    (None, ()), ({}, ()), ({"/data": {}, "/cache/": {}}, ("/cache", "/data")),
    ({"//a/../b": {}, "/b": {}}, ("/b",)), ({"/workspace": {}, "/home/agent/": {}}, ()),
    ({"/tmp": {}, "/run": {}, "/tmp/x": {}}, ("/tmp/x",)), ({"/home": {}}, ("/home",)),
]  # fmt: skip


@pytest.mark.parametrize(("volumes", "wanted"), DECLARED)
def test_what_an_image_declares_is_read(volumes: object, wanted: tuple[str, ...]) -> None:
    assert requests.declared({"Config": {"Volumes": volumes}}, "x") == wanted


@pytest.mark.parametrize("path", ["", "data", "/", "//", "/..", "/a\0b", "."])
def test_an_image_with_a_volume_that_is_no_place_is_refused(path: str) -> None:
    with pytest.raises(Problem) as caught:
        requests.declared({"Config": {"Volumes": {path: {}}}}, "x")
    assert (caught.value.code, caught.value.rule) == ("UNSUPPORTED", "image.volume")


def test_nothing_that_a_client_says_becomes_a_label() -> None:
    forged = {requests.AGENT: "bob", requests.INSTANCE: "other", "traefik.enable": "true"}
    found = body(metadata=forged, env=forged, template="x", image="y")
    assert found["Labels"] == {
        requests.INSTANCE: "i", requests.SANDBOX: "sbx-1", requests.AGENT: "alice",
        "org.agent-sandbox.service.work": "w", "org.agent-sandbox.service.home": "h",
    }  # fmt: skip
    assert "traefik" not in json.dumps(found)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x?force=1", "a b", ".x"])
def test_an_id_that_could_be_another_path_is_refused(name: str) -> None:
    with pytest.raises(Problem):
        requests.container_name("i", name)


@pytest.mark.parametrize("mode", ["public", "allow", "on", "host"])
def test_a_network_that_cannot_be_kept_is_refused(mode: str) -> None:
    with pytest.raises(Problem) as caught:
        body(network=Network(mode=mode))
    assert caught.value.code == "UNSUPPORTED"


BOUNDS = [
    (Resources(), {"Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}]}),
    (Resources(memory=1 << 20), {"Memory": 1 << 20, "MemorySwap": 1 << 20}),
    (Resources(cpus=0.5), {"NanoCpus": 500_000_000}),
    (Resources(pids=7), {"PidsLimit": 7}),
    (Resources(disk=9), {"Ulimits": [
        {"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "fsize", "Soft": 9, "Hard": 9},
    ]}),
]  # fmt: skip


@pytest.mark.parametrize(("resources", "wanted"), BOUNDS)
def test_bounds_become_limits_of_the_kernel(resources: Resources, wanted: dict[str, Any]) -> None:
    found = requests.bounds(resources)
    assert {name: found[name] for name in wanted} == wanted


# --- executions


def test_a_command_runs_as_the_sandboxes_user_without_privilege() -> None:
    start = Start(execution="e", argv=("a", "b c"), env={"A": "2"}, cwd="/workspace/x")
    found = requests.execution(sandbox(env={"A": "1", "B": "1"}), start, "token")
    assert (found["User"], found["Privileged"], found["Tty"]) == ("1000:1000", False, False)
    assert found["Env"] == ["HOME=/home/agent", "A=2", "B=1"]
    command = found["Cmd"]
    assert isinstance(command, list)
    assert command[-4:] == ["token", "/workspace/x", "a", "b c"]


def test_a_terminal_has_input_and_a_kind() -> None:
    start = Start(execution="e", argv=("a",), terminal=Terminal())
    found = requests.execution(sandbox(), start, "token")
    assert (found["Tty"], found["AttachStdin"]) == (True, True)
    assert "TERM=xterm-256color" in str(found["Env"])


def test_without_input_there_is_no_input() -> None:
    assert (
        requests.execution(sandbox(), Start(execution="e", argv=("a",)), "t")["AttachStdin"]
        is False
    )


# --- images


REFERENCES = [
    ("python", "python:latest"),
    ("python:3", "python:3"),
    ("ghcr.io/a/b:1", "ghcr.io/a/b:1"),
    (f"python@{PIN}", f"python@{PIN}"),
    (PIN, PIN),
    ("a" * 64, PIN),
    # Without a tag the engine would take it for the start of an id.
    ("abcdef", "abcdef:latest"),
]


@pytest.mark.parametrize(("image", "wanted"), REFERENCES)
def test_an_image_is_asked_for_by_its_complete_name(image: str, wanted: str) -> None:
    assert requests.reference(image) == wanted


@pytest.mark.parametrize(
    "image", ["", "A", "a b", "a/../b", "a?x", "../../info", "a@sha256:1", "x" * 300]
)
def test_what_is_no_name_of_an_image_is_refused(image: str) -> None:
    with pytest.raises(Problem) as caught:
        requests.reference(image)
    assert caught.value.code == "INVALID"


@pytest.mark.parametrize("document", [None, [], {}, {"Id": "x"}, {"Id": 1}])
def test_an_answer_without_an_id_is_no_pin(document: object) -> None:
    with pytest.raises(Problem):
        requests.pin(document, "x")


# --- support


OBJECTIONS: list[tuple[dict[str, Any], tuple[int, int], bool, str, str]] = [
    ({}, (1, 41), False, "", ""),
    ({}, (1, 41), True, "", "podman"),
    ({}, (1, 40), False, "", "older"),
    ({}, (1, 47), False, "runsc", ""),
    ({}, (1, 47), False, "sysbox-runc", "required runtime 'sysbox-runc'"),
    ({"SecurityOptions": []}, (1, 47), False, "", "seccomp"),
    ({"SecurityOptions": None}, (1, 47), False, "", "seccomp"),
    ({"SecurityOptions": ["name=seccomp,profile=unconfined"]}, (1, 47), False, "", "seccomp"),
]


@pytest.mark.parametrize(("change", "api", "podman", "required", "reason"), OBJECTIONS)
def test_an_engine_is_used_only_if_it_protects(
    change: dict[str, Any], api: tuple[int, int], podman: bool, required: str, reason: str
) -> None:
    found = requests.support({**INFO, **change}, api, podman=podman, required=required)
    assert found.ok == (not reason)
    assert reason in found.reason


def test_bounds_that_the_engine_does_not_keep_are_not_promised() -> None:
    found = requests.support({**INFO, "MemoryLimit": False}, (1, 41), podman=False, required="")
    assert found.enforced == {"memory": "", "cpus": "cgroup", "pids": "cgroup", "disk": "server"}
    assert found.networks == ("off",)
    assert found.runtimes == ("runc", "runsc")


RUNTIMES = [
    ("", "", ""),
    ("runsc", "", "runsc"),
    ("", "runsc", "runsc"),
    ("runsc", "runsc", "runsc"),
    ("runc", "runsc", "RUNTIME_NOT_ALLOWED"),
    ("kata", "", "UNSUPPORTED"),
    ("", "sysbox-runc", "BACKEND_UNAVAILABLE"),
]


@pytest.mark.parametrize(("wanted", "required", "result"), RUNTIMES)
def test_a_runtime_is_the_required_one_or_one_that_exists(
    wanted: str, required: str, result: str
) -> None:
    try:
        found = requests.choose_runtime(wanted, required, ("runc", "runsc"))
    except Problem as problem:
        found = problem.code
    assert found == result


# --- numbers


def test_memory_is_what_cannot_be_dropped() -> None:
    first = {"memory_stats": {"usage": 100, "stats": {"total_inactive_file": 30}}}
    second = {"memory_stats": {"usage": 100, "stats": {"inactive_file": 40}}}
    assert (requests.memory(first), requests.memory(second)) == (70, 60)


@pytest.mark.parametrize("stats", [None, {}, {"memory_stats": None}, {"memory_stats": {}}, []])
def test_a_container_that_has_ended_uses_an_unknown_amount(stats: object) -> None:
    assert requests.memory(stats) is None
    assert requests.pids(stats) is None


def test_volumes_count_only_if_all_of_them_are_known() -> None:
    sizes: dict[str, Any] = {"a": {"Size": 1}, "b": {"Size": 2}, "c": None, "d": {"Size": -1}}
    df = {"Volumes": [{"Name": name, "UsageData": size} for name, size in sizes.items()]}
    assert requests.volume_size(df, ("a", "b")) == 3
    for names in (("a", "c"), ("a", "d"), ("a", "x")):
        assert requests.volume_size(df, names) is None
    assert requests.volume_size(None, ("a",)) is None
