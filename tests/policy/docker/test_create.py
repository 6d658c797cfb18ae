"""Containers: each field by itself, at its default, and beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent_sandbox.policy.docker import create as table
from agent_sandbox.policy.docker.decision import decide, rebuild
from agent_sandbox.policy.docker.values import OWNER_LABEL, Decision, Found, Reference, Upstream

from .world import (
    CLOSED,
    GRANTS,
    OWNER,
    again,
    ask,
    create,
    host,
    id_of,
    look,
    refusal,
    request,
    sent,
)

RUN_NETWORK = id_of("network", f"agent-sandbox-{OWNER}")
# Field of HostConfig → values that are never sent on.
FORBIDDEN: dict[str, list[Any]] = {
    "Privileged": [True],
    "CapAdd": [["ALL"], ["SYS_ADMIN"], ["cap_sys_admin"], ["MKNOD"], ["SETFCAP"], ["Sys_Ptrace"]],
    "Devices": [[{"PathOnHost": "/dev/sda"}], [{}]],
    "DeviceCgroupRules": [["c 1:3 rwm"]],
    "DeviceRequests": [[{"Driver": "cdi", "DeviceIDs": ["x"]}], [{"Count": -1}]],
    "NetworkMode": ["host", "container:victim", "container:", "other-tenant-net", "HOST", "ns:/x"],
    "PidMode": ["host", "container:victim", "Host"],
    "IpcMode": ["host", "container:victim"],
    "UTSMode": ["host"],
    "UsernsMode": ["host", "private"],
    "CgroupnsMode": ["host"],
    "Cgroup": ["host"],
    "CgroupParent": ["/", "system.slice"],
    "SecurityOpt": [
        ["apparmor=unconfined"], ["apparmor:unconfined"], ["seccomp=unconfined"], ["disable"],
        ["systempaths=unconfined"], ["no-new-privileges:false"], ["label:disable"], [""],
    ],
    "MaskedPaths": [[], ["/proc/kcore"]],
    "ReadonlyPaths": [[], ["/proc/sys"]],
    "Sysctls": [{"net.ipv4.ip_forward": "1"}, {"kernel.msgmax": "1"}],
    "Runtime": ["runc", "io.containerd.kata.v2"],
    "Annotations": [{"run.oci.handler": "krun"}],
    "LogConfig": [{"Type": "syslog"}, {"Type": "gelf", "Config": {"gelf-address": "udp://x"}},
                  {"Type": "json-file", "Config": {"splunk-capath": "/etc/shadow"}}],
    "OomScoreAdj": [-1, -1000, 1001],
    "OomKillDisable": [True],
    "MemorySwap": [-1],
    "Memory": [-1, (1 << 30) + 1],
    "MemoryReservation": [-1, 1 << 40],
    "KernelMemory": [1],
    "NanoCpus": [-1, 1_500_000_001],
    "CpuQuota": [150_001],
    "CpuShares": [4096],
    "CpuRealtimeRuntime": [950_000],
    "CpusetMems": ["0"],
    "CpusetCpus": ["0;1", "a"],
    "PidsLimit": [-1, 201],
    "Ulimits": [[{"Name": "memlock", "Soft": 1, "Hard": 1}], [{"Name": "nofile", "Soft": -1}],
                [{"Name": "nofile", "Soft": 5, "Hard": 1}], [{"Name": "nofile", "Hard": 1 << 30}]],
    "ShmSize": [-1, 1 << 40],
    "StorageOpt": [{"size": "100G"}],
    "BlkioWeight": [500],
    "BlkioWeightDevice": [[{"Path": "/etc/shadow", "Weight": 1}]],
    "BlkioDeviceReadBps": [[{"Path": "/root/x", "Rate": 1}]],
    "RestartPolicy": [{"Name": "whatever"}],
    "PortBindings": [
        {"80/tcp": [{"HostIp": "10.0.0.1", "HostPort": "8080"}]},
        {"80/tcp": [{"HostIp": "", "HostPort": "80"}]},
        {"80/tcp": [{"HostPort": "1000-2000"}]},
        {"80/tcp": [{"HostPort": "70000"}]},
        {"99999/tcp": []},
        {"80/tcp": [{"HostPort": "8080", "Other": "x"}]},
        {"80": [], "80/tcp": []},
    ],
    "ExtraHosts": [["h:host-gateway"], ["h=host-gateway"], ["h:1.2.3.4\n6.6.6.6 x"], ["h"]],
    "Dns": [["example.org"], ["1.2.3"]],
    "Links": [["victim:db"], ["/victim:db"], ["nobody:x"]],
    "VolumesFrom": [["victim"], ["victim:ro"], ["mine-db:z"]],
    "VolumeDriver": ["sshfs"],
    "GroupAdd": [["0"], ["docker"]],
    "Isolation": ["hyperv"],
    "Tmpfs": [{"/x": "suid"}, {"/x": "dev"}, {"/x": "size=2g"}, {"/x": "size=0"}, {"/proc": ""},
              {"/sys/fs": ""}, {"x": ""}, {"/a/../proc": ""}, {"/x": "uid=0,mode=4777"}],
    "ConsoleSize": [[1], [1, 2, 3]],
    "Init": [1],
}  # fmt: skip
WRONG_TYPES: tuple[object, ...] = ("x", 1, True, ["x"], [1], {"x": "y"}, {"x": {}}, [[]], [{}])


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in FORBIDDEN.items() for value in values]
)
def test_a_dangerous_value_is_refused(field: str, value: object) -> None:
    assert refusal(create(host={field: value})).startswith(("create.", "owner.", "mount."))


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in FORBIDDEN.items() for value in values]
)
def test_a_field_of_the_host_beside_the_image_is_refused(field: str, value: object) -> None:
    # Up to Docker 26 the engine reads them there, too.
    if field not in table.CONFIG:
        assert refusal(create({field: value})) == "create.unknown"


@pytest.mark.parametrize("field", sorted(table.HOST))
def test_null_is_the_default_of_every_field(field: str) -> None:
    assert host(create(host={field: None})) == host(create(host={}))


@pytest.mark.parametrize("field", sorted(table.HOST))
@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.swapcase])
def test_another_spelling_of_a_field_is_refused(field: str, spelling: Callable[[str], str]) -> None:
    assert refusal(create(host={spelling(field): None})) == "create.unknown"


@pytest.mark.parametrize("field", sorted({**table.HOST, **table.CONFIG}))
@pytest.mark.parametrize("value", WRONG_TYPES, ids=repr)
def test_a_value_of_another_type_is_a_verdict_too(field: str, value: object) -> None:
    body = {"HostConfig": {field: value}} if field in table.HOST else {field: value}
    answer = create(**body)
    assert isinstance(answer, (Decision, Upstream))


def test_every_forbidden_field_has_a_row() -> None:
    assert set(FORBIDDEN) <= set(table.HOST)


def test_limits_are_set_where_none_are_asked_for() -> None:
    made = host(create())
    assert made["Memory"] == made["MemorySwap"] == 1 << 30
    assert made["NanoCpus"] == 1_500_000_000
    assert made["PidsLimit"] == 200
    assert made["LogConfig"]["Config"]["max-size"] == "10m"


def test_smaller_limits_are_kept() -> None:
    made = host(create(host={"Memory": 64 << 20, "CpuQuota": 50_000, "PidsLimit": 10}))
    assert made["Memory"] == made["MemorySwap"] == 64 << 20
    assert made["NanoCpus"] == 500_000_000
    assert "CpuQuota" not in made
    assert made["PidsLimit"] == 10


def test_swap_is_never_more_than_memory() -> None:
    made = host(create(host={"Memory": 64 << 20, "MemorySwap": 1 << 40}))
    assert made["MemorySwap"] == 64 << 20


def test_two_ways_to_say_processors_are_refused() -> None:
    assert refusal(create(host={"NanoCpus": 10**9, "CpuQuota": 1000})) == "create"


def test_the_capabilities_that_reach_the_host_are_always_dropped() -> None:
    assert host(create())["CapDrop"] == ["MKNOD", "SETFCAP"]
    assert host(create(host={"CapDrop": ["cap_net_raw"]}))["CapDrop"] == [
        "MKNOD", "NET_RAW", "SETFCAP",
    ]  # fmt: skip
    made = host(create(host={"CapDrop": ["all"], "CapAdd": ["CAP_CHOWN", "kill"]}))
    assert made["CapDrop"] == ["ALL"]
    assert made["CapAdd"] == ["CHOWN", "KILL"]


@pytest.mark.parametrize(
    "word", ["no-new-privileges", "no-new-privileges=true", "no-new-privileges:true"]
)
def test_privileges_may_be_given_up(word: str) -> None:
    assert host(create(host={"SecurityOpt": [word]}))["SecurityOpt"] == ["no-new-privileges"]


@pytest.mark.parametrize("mode", [None, "", "default", "bridge"])
def test_the_default_network_is_the_run_s_own(mode: str | None) -> None:
    assert host(create(host={"NetworkMode": mode} if mode is not None else {}))["NetworkMode"] == (
        RUN_NETWORK
    )


def test_networks_and_containers_are_named_by_id() -> None:
    assert host(create(host={"NetworkMode": "mine"}))["NetworkMode"] == id_of("network", "mine")
    own = id_of("container", "mine-db")
    assert host(create(host={"NetworkMode": "container:mine-db"}))["NetworkMode"] == (
        f"container:{own}"
    )
    assert host(create(host={"PidMode": "container:mine-db"}))["PidMode"] == f"container:{own}"
    assert host(create(host={"Links": ["mine-db:db"]}))["Links"] == [f"{own}:db"]
    assert host(create(host={"VolumesFrom": ["mine-db:ro"]}))["VolumesFrom"] == [f"{own}:ro"]
    assert host(create(host={"NetworkMode": "none"}))["NetworkMode"] == "none"


def test_aliases_pass_and_addresses_do_not() -> None:
    config = {"EndpointsConfig": {"proj_default": {"Aliases": ["web", "w_1"], "IPAMConfig": {}}}}
    made = sent(create(NetworkingConfig=config))["NetworkingConfig"]["EndpointsConfig"]
    assert made == {id_of("network", "proj_default"): {"Aliases": ["web", "w_1"]}}
    for field, value in (
        ("IPAMConfig", {"IPv4Address": "10.0.0.1"}), ("MacAddress", "02:42:ac:11:00:02"),
        ("DriverOpts", {"com.docker.network.endpoint.sysctls": "x"}), ("GwPriority", 5),
        ("Links", ["victim:x"]), ("Other", 1),
    ):  # fmt: skip
        refusal(create(NetworkingConfig={"EndpointsConfig": {"mine": {field: value}}}))
    for name in ("host", "other-tenant-net", "VICTIM", ""):
        config = {"EndpointsConfig": {name: {}}}
        answer = create(NetworkingConfig=config)
        if name:
            refusal(answer)


def test_a_container_of_a_closed_sandbox_resolves_nothing_outside() -> None:
    made = host(create(host={"Dns": ["8.8.8.8"], "DnsSearch": ["x.org"]}, grants=CLOSED))
    assert made["Dns"] == ["192.0.2.1"]
    assert "DnsSearch" not in made
    assert host(create(host={"Dns": ["8.8.8.8"]}))["Dns"] == ["8.8.8.8"]


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "127.0.0.1"])
def test_ports_are_published_on_the_loopback(address: str) -> None:
    asked = {"5432/tcp": [{"HostIp": address, "HostPort": "15432"}], "80": None, "53/udp": []}
    made = host(create(host={"PortBindings": asked}))["PortBindings"]
    anywhere = [{"HostIp": "127.0.0.1", "HostPort": ""}]
    assert made == {
        "5432/tcp": [{"HostIp": "127.0.0.1", "HostPort": "15432"}],
        "80/tcp": anywhere, "53/udp": anywhere,
    }  # fmt: skip


def test_publishing_all_ports_becomes_a_list_of_them() -> None:
    made = host(create({"Image": "alpine"}, {"PublishAllPorts": True}))
    assert "PublishAllPorts" not in made
    assert made["PortBindings"] == {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]}


def test_the_owner_cannot_be_set_or_taken() -> None:
    labels = sent(create({"Labels": {"a": "b", "com.docker.compose.project": "p"}}))["Labels"]
    assert labels[OWNER_LABEL] == OWNER
    assert labels["a"] == "b"
    for forged in (
        {OWNER_LABEL: "run2"}, {"org.agent-sandbox.other": "x"}, {"ORG.agent-sandbox.owner": "x"},
        {"traefik.enable": "true"}, {"caddy": "x"}, {"caddy_0": "x"}, {"socketproxy.role": "x"},
        {"com.centurylinklabs.watchtower.enable": "1"}, {"ofelia.enabled": "1"}, {"": "x"},
    ):  # fmt: skip
        assert refusal(create({"Labels": forged})) == "create.labels"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("Env", ["NVIDIA_VISIBLE_DEVICES=all"], "create.env"),
        ("Env", ["nvidia_visible_devices=all"], "create.env"),
        ("WorkingDir", "/proc/self/fd/8", "create.working-dir"),
        ("WorkingDir", "//proc/self/fd/8", "create.working-dir"),
        ("WorkingDir", "/./proc/self/fd/8", "create.working-dir"),
        ("WorkingDir", "/tmp/../proc/self", "create.working-dir"),
        ("User", "0:0:0", "create.user"),
        ("User", "x\n", "create.user"),
        ("MacAddress", "02:42:ac:11:00:02", "create.mac-address"),
        ("OnBuild", ["RUN x"], "create.on-build"),
        ("Hostname", "a b", "create.hostname"),
        ("Volumes", {"/proc": {}}, "create.volumes"),
        ("Volumes", {"/x": {"o": 1}}, "create.volumes"),
        ("Image", "", "image.name"),
        ("Image", "a b", "image.name"),
        ("Image", None, "create.image"),
    ],
)
def test_a_dangerous_configuration_is_refused(field: str, value: object, rule: str) -> None:
    assert refusal(create({field: value})) == rule


def test_images_are_named_by_what_was_checked() -> None:
    assert sent(create({"Image": "alpine"}))["Image"] == id_of("image", "alpine:latest")
    assert sent(create({"Image": "docker.io/library/python:3.11"}))["Image"] == id_of(
        "image", "python:3.11"
    )
    # The run's own tag stands before all others.
    assert sent(create({"Image": "app"}))["Image"] == id_of(
        "image", "agent-sandbox-run1/app:latest"
    )


@pytest.mark.parametrize(
    ("image", "rule"),
    [
        ("private/other:1", "image.allow-list"),
        ("private", "image.allow-list"),
        ("python:2.7", "image.allow-list"),
        ("evil.example/alpine", "image.allow-list"),
        ("agent-sandbox-run2/app", "image.allow-list"),
        (id_of("image", "private/other:1"), "image.missing"),
        (id_of("image", "agent-sandbox-run2/app:latest"), "image.missing"),
        ("python:3.99", "image.missing"),
    ],
)
def test_an_image_that_is_not_on_the_list_cannot_be_used(image: str, rule: str) -> None:
    assert refusal(create({"Image": image})) == rule


def test_a_list_of_every_image_does_not_hold_those_of_other_runs() -> None:
    everything = GRANTS.replace(images=("*", "**"))
    assert isinstance(create({"Image": "private/other:1"}, grants=everything), Upstream)
    assert refusal(create({"Image": "agent-sandbox-run2/app"}, grants=everything)) == (
        "image.allow-list"
    )
    foreign = id_of("image", "agent-sandbox-run2/app:latest")
    assert refusal(create({"Image": foreign}, grants=everything)) == "image.missing"


def test_the_number_of_containers_is_limited() -> None:
    asked = decide(request("POST", "/containers/create", {"Image": "alpine"}), GRANTS)
    found = look(asked.references, GRANTS)
    count = Reference(kind="count", name="containers")
    for number, allowed in ((3, True), (4, False), (100, False)):
        found[count] = Found(id="", owner=OWNER, extra={"count": number})
        answer = rebuild(asked, GRANTS, found)
        assert isinstance(answer, Upstream) == allowed
    found[count] = None
    assert refusal(rebuild(asked, GRANTS, found)) == "limit.containers"


def test_a_name_that_somebody_else_has_is_a_conflict_without_an_id() -> None:
    taken = ask(request("POST", "/containers/create?name=victim", {"Image": "alpine"}))
    assert isinstance(taken, Decision)
    assert taken.status == 409
    assert id_of("container", "victim") not in taken.message
    assert isinstance(
        ask(request("POST", "/containers/create?name=fresh", {"Image": "alpine"})), Upstream
    )


def test_volumes_of_the_image_get_an_owner() -> None:
    asked = decide(request("POST", "/containers/create", {"Image": "alpine"}), GRANTS)
    found = look(asked.references, GRANTS)
    image = Reference(kind="image", name="alpine:latest")
    seen = found[image]
    assert seen is not None
    found[image] = seen.replace(extra={**seen.extra, "volumes": {"/var/lib/data/": {}}})
    mounts = host(rebuild(asked, GRANTS, found))["Mounts"]
    assert mounts == [
        {
            "Type": "volume", "Target": "/var/lib/data",
            "VolumeOptions": {"Labels": {OWNER_LABEL: OWNER}},
        }
    ]  # fmt: skip


def test_a_shell_that_forgets_to_look_gets_a_refusal() -> None:
    asked = decide(request("POST", "/containers/create", {"Image": "alpine"}), GRANTS)
    assert asked.allowed
    assert isinstance(rebuild(asked, GRANTS, {}), Decision)
    odd = {r: Found(id="x/../y", owner=OWNER, extra={"count": 0}) for r in asked.references}
    assert isinstance(rebuild(asked, GRANTS, odd), Decision)


@pytest.mark.parametrize(
    ("host_config", "confined"),
    [
        ({"Binds": ["/ws:/x"]}, True),
        ({"Mounts": [{"Type": "bind", "Source": "/ws", "Target": "/x"}]}, True),
        ({"Binds": ["/ws:/x"], "SecurityOpt": ["no-new-privileges"]}, True),
        # The files of another container, or that container itself.
        ({"VolumesFrom": ["mine-db"]}, True),
        ({"PidMode": "container:mine-db"}, True),
        ({"Binds": ["/ws:/x:ro"]}, False),
        ({"Binds": ["/usr:/x"]}, False),
        ({"Binds": ["mine:/x"]}, False),
        ({}, False),
    ],
)
def test_who_can_write_to_the_host_s_files_is_confined(
    host_config: dict[str, Any], confined: bool
) -> None:
    grants = GRANTS.replace(seccomp='{"defaultAction":"SCMP_ACT_ERRNO"}')
    answer = create(host=host_config, grants=grants)
    options = host(answer).get("SecurityOpt", [])
    assert (f"seccomp={grants.seccomp}" in options) == confined
    assert ("no-new-privileges" in options) == ("SecurityOpt" in host_config)
    assert isinstance(answer, Upstream)
    assert ask(again(answer), grants) == answer
    assert "SecurityOpt" not in host(create(host={"Binds": ["/ws:/x"]}))


def test_the_profile_cannot_be_chosen() -> None:
    grants = GRANTS.replace(seccomp="{}")
    for word in ("seccomp=unconfined", 'seccomp={"a":1}', "seccomp:{}", "seccomp="):
        assert refusal(create(host={"SecurityOpt": [word]}, grants=grants)) == "create.security-opt"
    made = host(create(host={"SecurityOpt": ["seccomp={}"]}, grants=grants))
    assert "SecurityOpt" not in made
    assert refusal(create(host={"SecurityOpt": ["seccomp={}"]})) == "create.security-opt"


def test_no_limit_is_the_largest_that_the_kernel_takes() -> None:
    made = host(create(grants=GRANTS.replace(pids=1 << 62)))
    assert made["PidsLimit"] == 1 << 22
