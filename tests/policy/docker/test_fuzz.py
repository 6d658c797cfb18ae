"""Random requests: a verdict or our own error, and nothing dangerous in what is sent.

What may be sent is listed here once more, by hand, and not taken from the tables under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.policy.docker import create as table
from agent_sandbox.policy.docker.decision import decide, filter_answer, rebuild, unchecked
from agent_sandbox.policy.docker.values import OWNER_LABEL, Decision, Grants, Request, Upstream

from .test_create import FORBIDDEN
from .world import CLOSED, GRANTS, OWNER, SUBPATH, again, ask, look, request

MEMORY, PIDS = GRANTS.memory, GRANTS.pids
ID = re.compile(r"[0-9a-f]{64}")
ROOTS = {b.host_path for b in GRANTS.binds if not b.hidden} | {"/dev/null", GRANTS.socket}
READ_ONLY = {"/usr", "/ws/.git/hooks", "/dev/null"}
VOLUME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
CAPS = set(
    "CHOWN DAC_OVERRIDE FSETID FOWNER NET_RAW SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT "
    "KILL AUDIT_WRITE".split()
)


def is_mount(mount: dict[str, Any]) -> object:
    options = mount.get("VolumeOptions", {})
    if mount["Type"] == "bind":
        return (
            mount["Source"] in ROOTS
            and (mount["Source"] not in READ_ONLY or mount["ReadOnly"] is True)
            and mount["BindOptions"] == {"Propagation": "rprivate"}
        )
    if mount["Type"] == "volume":
        rooted = str(mount.get("Source", "")).startswith("agent-sandbox-")
        owned = options.get("Labels") == {OWNER_LABEL: OWNER} or rooted
        plain = set(options) <= {"Labels", "NoCopy", "Subpath"}
        sub = str(options.get("Subpath", "x"))
        clean = not sub.startswith("/") and ".." not in sub.split("/")
        return owned and plain and clean and bool(VOLUME.fullmatch(mount.get("Source", "v")))
    return mount["Type"] == "tmpfs" and 0 < mount["TmpfsOptions"]["SizeBytes"] <= MEMORY


def is_network(mode: str) -> bool:
    return mode == "none" or bool(ID.fullmatch(mode.removeprefix("container:")))


def is_port(places: list[Any]) -> bool:
    return all(
        place["HostIp"] == "127.0.0.1"
        and all(int(port) >= 1024 for port in place["HostPort"].split("-") if port)
        for place in places
    )


def text(value: object) -> bool:
    return isinstance(value, str)


SAFE_HOST: dict[str, Callable[[Any], object]] = {
    "Memory": lambda v: 0 < v <= MEMORY,
    "MemorySwap": lambda v: 0 < v <= MEMORY,
    "MemoryReservation": lambda v: 0 < v <= MEMORY,
    "NanoCpus": lambda v: 0 < v <= 1_500_000_000,
    "CpuShares": lambda v: 2 <= v <= 1024,
    "CpusetCpus": text,
    "PidsLimit": lambda v: 0 < v <= PIDS,
    "Ulimits": lambda v: all(0 <= u["Soft"] <= u["Hard"] <= 1 << 50 for u in v),
    "OomScoreAdj": lambda v: 0 <= v <= 1000,
    "CapAdd": lambda v: set(v) <= CAPS,
    "CapDrop": lambda v: v == ["ALL"] or {"MKNOD", "SETFCAP"} <= set(v),
    "SecurityOpt": lambda v: v == ["no-new-privileges"],
    "Mounts": lambda v: all(is_mount(m) for m in v),
    "Tmpfs": lambda v: all("nosuid,nodev,size=" in o and ",suid" not in o for o in v.values()),
    "VolumesFrom": lambda v: all(ID.fullmatch(one.partition(":")[0]) for one in v),
    "NetworkMode": is_network,
    "PortBindings": lambda v: all(is_port(places) for places in v.values()),
    "ExtraHosts": lambda v: not any("gateway" in one for one in v),
    "Dns": lambda v: all(re.fullmatch(r"[0-9a-fA-F.:]+", one) for one in v),
    "DnsOptions": lambda v: all(map(text, v)),
    "DnsSearch": lambda v: all(map(text, v)),
    "Links": lambda v: all(ID.fullmatch(one.partition(":")[0]) for one in v),
    "PidMode": lambda v: bool(ID.fullmatch(v.removeprefix("container:"))),
    "IpcMode": lambda v: v in ("none", "private", "shareable") or v.startswith("container:"),
    "CgroupnsMode": lambda v: v == "private" or v.startswith("container:"),
    "LogConfig": lambda v: v["Type"] in ("json-file", "none"),
    "RestartPolicy": lambda v: v == {"Name": "no", "MaximumRetryCount": 0},
    "ShmSize": lambda v: 0 < v <= MEMORY,
    "AutoRemove": lambda v: v is True,
    "ReadonlyRootfs": lambda v: v is True,
    "Init": lambda v: isinstance(v, bool),
    "ConsoleSize": lambda v: len(v) == 2,
}
SAFE_CONFIG = set(
    "Hostname Domainname User AttachStdin AttachStdout AttachStderr Tty OpenStdin StdinOnce Env "
    "Cmd Entrypoint Shell Image WorkingDir ExposedPorts Labels StopSignal StopTimeout Healthcheck "
    "NetworkDisabled HostConfig NetworkingConfig".split()
)


def check(upstream: Upstream) -> None:
    """Only what is listed above, with the values that are."""
    body = json.loads(upstream.body)
    assert set(body) <= SAFE_CONFIG
    assert body["Labels"][OWNER_LABEL] == OWNER
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", body["Image"])
    assert not str(body.get("WorkingDir", "/")).startswith("/proc")
    for field, value in body["HostConfig"].items():
        assert SAFE_HOST[field](value), (field, value)
    for field in ("Memory", "NanoCpus", "PidsLimit", "CapDrop", "NetworkMode", "RestartPolicy"):
        assert field in body["HostConfig"]
    for name, endpoint in body["NetworkingConfig"].get("EndpointsConfig", {}).items():
        assert ID.fullmatch(name)
        assert set(endpoint) <= {"Aliases", "Links"}


Wild = st.SearchStrategy[dict[str, Any]]
SPECIAL = st.sampled_from([
    "", "host", "none", "bridge", "default", "mine", "container:MINE", "container:victim", "/",
    "/ws",
    "/ws:/x", "/ws/sub:/x", "/usr:/u", "/etc:/x", "mine:/v:ro", "ALL", "CHOWN", "unconfined",
    "always",
    "0.0.0.0", "127.0.0.1", "8080", "80/tcp", "bind", "volume", "tmpfs", "/x", "proj_data",
    "json-file",
    "no-new-privileges", "/var/run/docker.sock", "alpine", "../x", "private", "size=1m,exec",
])  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2048), st.integers(), SPECIAL, st.text(max_size=8)
)
INNER = st.sampled_from(
    "Type Source Target ReadOnly BindOptions VolumeOptions TmpfsOptions Labels Name Soft Hard "
    "HostIp HostPort Config Subpath DriverConfig NoCopy SizeBytes Propagation Options 80/tcp "
    "/x Aliases mine default IPAMConfig EndpointsConfig".split()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(INNER, st.text(max_size=4)), inner,
         max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip
MOUNTS = st.fixed_dictionaries(
    {"Type": st.sampled_from(["bind", "volume", "tmpfs"]), "Target": st.sampled_from(["/x",
     "/y/z"])},
    optional={
        "Source": st.sampled_from(["/ws", "/usr", "/ws/a", "/etc", "mine", "new", "other-tenant",
         ""]),
        "ReadOnly": st.booleans(), "VolumeOptions": VALUES, "TmpfsOptions": VALUES,
    },
)  # fmt: skip
FIELDS = sorted(table.HOST)
LIKELY = st.one_of(
    *(
        st.tuples(st.just(field), st.sampled_from([*values, None]))
        for field, values in FORBIDDEN.items()
    ),
    st.tuples(st.just("Mounts"), st.lists(MOUNTS, max_size=3)),
    st.tuples(
        st.just("PortBindings"),
        st.dictionaries(
            st.sampled_from(["80/tcp", "81", "53/udp"]),
            st.lists(st.fixed_dictionaries({}, optional={
                "HostIp": SPECIAL, "HostPort": st.integers(0, 70000).map(str),
            }), max_size=2),
        ),
    ),
    st.tuples(st.just("Memory"), st.integers(0, MEMORY)),
    st.tuples(st.just("Binds"), st.lists(SPECIAL, max_size=2)),
    st.tuples(st.just("NetworkMode"), SPECIAL),
    st.tuples(st.just("AutoRemove"), st.booleans()),
)  # fmt: skip
GOOD = {
    "Memory": st.integers(1, MEMORY), "MemorySwap": st.integers(0), "NanoCpus": st.integers(0,
     10**9),
    "PidsLimit": st.integers(0, PIDS), "CpuShares": st.integers(2, 1024),
    "AutoRemove": st.booleans(), "Init": st.booleans(), "ReadonlyRootfs": st.booleans(),
    "CapDrop": st.lists(st.sampled_from(["ALL", "cap_kill", "NET_RAW"]), max_size=2),
    "CapAdd": st.lists(st.sampled_from(["CHOWN", "cap_kill"]), max_size=2),
    "SecurityOpt": st.just(["no-new-privileges:true"]),
    "NetworkMode": st.sampled_from(["", "default", "none", "mine", "container:MINE"]),
    "RestartPolicy": st.just({"Name": "always"}), "PublishAllPorts": st.booleans(),
    "Binds": st.lists(st.sampled_from(["/ws:/a", "/usr:/b:rw", "mine:/c", "new:/d:ro"]),
     max_size=3),
    "Mounts": st.lists(
        st.sampled_from([
            {"Type": "bind", "Source": "/ws", "Target": "/e"}, {"Type": "volume", "Target": "/f"},
            {"Type": "tmpfs", "Target": "/g"}, {"Type": "volume", "Source": "mine", "Target": "/h"},
        ]), max_size=2,
    ),
    "Tmpfs": st.just({"/t": "exec,size=5m"}), "Dns": st.just(["1.1.1.1"]),
    "ShmSize": st.just(1 << 20),
    "PortBindings": st.just({"80/tcp": [{"HostIp": "0.0.0.0", "HostPort": "8080"}], "81": None}),
    "Links": st.just(["mine-db:db"]), "VolumesFrom": st.just(["MINE:ro"]),
    "LogConfig": st.sampled_from([{"Type": "local"}, {"Type": "none"}, {"Config": {}}]),
    "CpuQuota": st.integers(1000, 150_000), "Privileged": st.just(False), "Devices": st.just([]),
}  # fmt: skip
WILD: Wild = st.one_of(st.just({}), st.just({}), LIKELY.map(lambda pair: dict([pair])))
HOSTS: st.SearchStrategy[Any] = st.one_of(
    st.tuples(st.fixed_dictionaries({}, optional=GOOD), WILD).map(lambda both: both[0] | both[1]),
    st.tuples(st.fixed_dictionaries({}, optional=GOOD), WILD).map(lambda both: both[0] | both[1]),
    st.lists(LIKELY, max_size=3).map(dict),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    VALUES,
)
BODIES: Wild = st.fixed_dictionaries(
    {"Image": st.sampled_from(["alpine", "alpine", "app", "private"]), "HostConfig": HOSTS},
    optional={
        "Cmd": st.sampled_from([["true"], "true", None]), "Volumes": st.just({"/data": {}}),
        "Labels": st.sampled_from([{}, {"a": "b"}, {OWNER_LABEL: "run2"}]),
        "WorkingDir": st.sampled_from(["", "/app", "/proc/self/fd/7"]),
        "NetworkingConfig": st.sampled_from([
            None, {"EndpointsConfig": {"mine": {"Aliases": ["a"]}}},
            {"EndpointsConfig": {"host": {}}},
        ]),
    },
)  # fmt: skip
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(body=BODIES, grants=st.sampled_from([GRANTS, SUBPATH, CLOSED]))
def test_no_container_gets_more_than_is_listed(body: dict[str, Any], grants: Grants) -> None:
    answer = ask(request("POST", "/containers/create", body), grants)
    if isinstance(answer, Upstream):
        check(answer)
        assert ask(again(answer), grants) == answer
    else:
        assert not answer.allowed


@FUZZ
@given(host=st.lists(LIKELY, max_size=2).map(dict), config=st.dictionaries(
    st.sampled_from(sorted(table.CONFIG)), VALUES, max_size=2,
))  # fmt: skip
def test_no_mixture_of_fields_gets_more(host: dict[str, Any], config: dict[str, Any]) -> None:
    answer = ask(
        request("POST", "/containers/create", {"Image": "alpine", **config, "HostConfig": host})
    )
    if isinstance(answer, Upstream):
        check(answer)


def test_the_fuzzer_reaches_both_verdicts() -> None:
    assert isinstance(ask(request("POST", "/containers/create", {"Image": "alpine"})), Upstream)
    seen = ask(request("POST", "/containers/create", {
        "Image": "alpine", "HostConfig": {"Mounts": [{"Type": "bind", "Source": "/ws",
         "Target": "/x"}]},
    }))  # fmt: skip
    assert isinstance(seen, Upstream)
    check(seen)


WORDS = st.sampled_from([
    "containers", "images", "networks", "volumes", "exec", "build", "commit", "json", "create",
    "start",
    "MINE", "VICTIM", "mine", "alpine", "v1.41", "v1.24", "v1.12", "..", ".", "", "%2e", "%2F",
    "_ping",
    "prune", "attach", "archive", "tag", "e" * 64, "session", "libpod", "info", "events", "logs",
    "wait",
])  # fmt: skip
PARAMETERS = st.sampled_from([
    "all=1", "filters={}", 'filters={"label":["a"]}', "name=x", "t=a", "t=b", "remote=x", "path=/",
    "fromImage=alpine", "tag=1", "repo=x", "force=1", "networkmode=host", "signal=9", "v=1", "%",
    "a&a",
])  # fmt: skip
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "", "get"])


@FUZZ
@given(
    method=METHODS,
    words=st.lists(st.one_of(WORDS, st.text(max_size=5)), max_size=5),
    parameters=st.lists(PARAMETERS, max_size=3),
    body=st.one_of(st.binary(max_size=30), VALUES.map(lambda v: json.dumps(v).encode())),
    headers=st.lists(
        st.tuples(st.sampled_from(["Upgrade", "Content-Type", "X"]), st.text(max_size=8))
    ),
)
def test_any_request_has_a_verdict(
    method: str,
    words: list[str],
    parameters: list[str],
    body: bytes,
    headers: list[tuple[str, str]],
) -> None:
    target = "/" + "/".join(words) + ("?" + "&".join(parameters) if parameters else "")
    asked = Request(method=method, target=target, headers=tuple(headers), body=body)
    decided = decide(asked, GRANTS)
    made = rebuild(decided, GRANTS, look(decided.references, GRANTS))
    assert isinstance(made, (Decision, Upstream))
    assert isinstance(rebuild(decided, GRANTS, {}), (Decision, Upstream))
    assert isinstance(unchecked(asked, GRANTS), (Decision, Upstream))
    if isinstance(made, Upstream):
        assert made.path.startswith("/v1.41/")
        assert ".." not in made.path.split("/")
        assert "VICTIM" not in made.path
        assert "host" not in made.query.split("networkmode=")[-1][:4]
        assert ask(again(made)) == made


@FUZZ
@given(
    name=st.sampled_from(["containers", "inspect", "images", "image", "history", "networks",
     "network",
                          "volumes", "volume", "info", "events", "error", "removed", "progress",
                          ""]),
    document=st.recursive(
        SCALARS, lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from([
                "Labels", "Config", "Image", "Mounts", "RepoTags", "RepoDigests", "Volumes",
                "Name", "Actor",
                "Attributes", "HostConfig", "NetworkSettings", "Networks", "message", "Tags",
                OWNER_LABEL,
            ]), inner, max_size=5),
        ), max_leaves=12,
    ),
)  # fmt: skip
def test_any_answer_is_filtered_without_an_error(name: str, document: object) -> None:
    json.dumps(filter_answer(name, GRANTS, document))
