"""Endpoints: what is not in the table does not exist, and names become ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_sandbox.policy.docker.decision import decide, is_streamed, rebuild, unchecked
from agent_sandbox.policy.docker.target import build_query, encode, parse
from agent_sandbox.policy.docker.values import OWNER_LABEL, Decision, Refused, Request, Upstream

from .world import CLOSED, GRANTS, OWNER, again, ask, id_of, look, refusal, request, sent

MINE = id_of("container", "MINE")
APP = "agent-sandbox-run1/app:latest"
EXEC = "e" * 64
OWNED = {"label": [f"{OWNER_LABEL}={OWNER}"]}
# method, target, body → path that the engine gets, stream
OFFERED = [
    ("HEAD", "/_ping", None, "/_ping", "plain"),
    ("GET", "/_ping", None, "/_ping", "plain"),
    ("GET", "/v1.41/version", None, "/version", "plain"),
    ("GET", "/info", None, "/info", "plain"),
    ("GET", "/containers/json?all=1&limit=-1&size=0&trunc_cmd=0", None, "/containers/json",
     "plain"),
    ("GET", "/containers/MINE/json", None, f"/containers/{MINE}/json", "plain"),
    ("POST", "/containers/MINE/start", None, f"/containers/{MINE}/start", "plain"),
    ("POST", "/containers/MINE/start", {}, f"/containers/{MINE}/start", "plain"),
    ("POST", "/containers/MINE/stop?t=10", None, f"/containers/{MINE}/stop", "plain"),
    ("POST", "/containers/MINE/restart?t=0", None, f"/containers/{MINE}/restart", "plain"),
    ("POST", "/containers/MINE/kill?signal=SIGTERM", None, f"/containers/{MINE}/kill", "plain"),
    ("POST", "/containers/MINE/pause", None, f"/containers/{MINE}/pause", "plain"),
    ("POST", "/containers/MINE/unpause", None, f"/containers/{MINE}/unpause", "plain"),
    ("POST", "/containers/MINE/wait?condition=next-exit", None, f"/containers/{MINE}/wait",
     "follow"),
    ("POST", "/containers/MINE/resize?h=40&w=80", None, f"/containers/{MINE}/resize", "plain"),
    ("POST", "/containers/MINE/rename?name=other", None, f"/containers/{MINE}/rename", "plain"),
    ("POST", "/containers/MINE/attach?stream=1&stdin=1&stdout=1&stderr=1", None,
     f"/containers/{MINE}/attach", "hijack"),
    ("GET", "/containers/MINE/logs?stdout=1&follow=1&tail=all&since=0", None,
     f"/containers/{MINE}/logs", "follow"),
    ("GET", "/containers/MINE/logs?stdout=1&tail=10", None, f"/containers/{MINE}/logs", "download"),
    ("GET", "/containers/MINE/top?ps_args=-ef", None, f"/containers/{MINE}/top", "plain"),
    ("GET", "/containers/MINE/stats?stream=False", None, f"/containers/{MINE}/stats", "plain"),
    ("GET", "/containers/MINE/stats", None, f"/containers/{MINE}/stats", "follow"),
    ("GET", "/containers/MINE/changes", None, f"/containers/{MINE}/changes", "plain"),
    ("HEAD", "/containers/MINE/archive?path=%2Fetc", None, f"/containers/{MINE}/archive", "plain"),
    ("GET", "/containers/MINE/archive?path=/etc", None, f"/containers/{MINE}/archive", "download"),
    ("PUT", "/containers/MINE/archive?path=/tmp&noOverwriteDirNonDir=true", None,
     f"/containers/{MINE}/archive", "upload"),
    ("DELETE", "/containers/MINE?v=True&force=1&link=False", None, f"/containers/{MINE}", "plain"),
    ("POST", "/containers/MINE/update", {"Memory": 1 << 20}, f"/containers/{MINE}/update", "plain"),
    ("POST", "/containers/MINE/exec", {"Cmd": ["sh"], "AttachStdout": True, "Tty": True},
     f"/containers/{MINE}/exec", "plain"),
    ("POST", f"/exec/{EXEC}/start", {"Tty": True, "Detach": False},
     f"/exec/{id_of('exec', EXEC)}/start", "hijack"),
    ("POST", f"/exec/{EXEC}/start", {"Detach": True}, f"/exec/{id_of('exec', EXEC)}/start",
     "plain"),
    ("POST", f"/exec/{EXEC}/resize?h=1&w=2", None, f"/exec/{id_of('exec', EXEC)}/resize", "plain"),
    ("GET", f"/exec/{EXEC}/json", None, f"/exec/{id_of('exec', EXEC)}/json", "plain"),
    ("GET", "/images/json?only_ids=0&all=0", None, "/images/json", "plain"),
    ("GET", "/images/alpine/json", None, f"/images/{id_of('image', 'alpine:latest')}/json",
     "plain"),
    ("GET", "/images/app:latest/history", None, f"/images/{id_of('image', APP)}/history", "plain"),
    ("POST", "/images/create?fromImage=alpine&tag=3.19", None, "/images/create", "follow"),
    ("POST", "/images/alpine/tag?repo=mine&tag=1", None,
     f"/images/{id_of('image', 'alpine:latest')}/tag", "plain"),
    ("DELETE", "/images/app?force=0", None, "/images/agent-sandbox-run1/app:latest", "plain"),
    ("POST", "/commit?container=MINE&repo=snap", None, "/commit", "plain"),
    ("POST", "/build?t=x&dockerfile=Dockerfile", None, "/build", "upload"),
    ("GET", "/networks", None, "/networks", "plain"),
    ("GET", "/networks/mine", None, f"/networks/{id_of('network', 'mine')}", "plain"),
    ("POST", "/networks/create", {"Name": "n", "CheckDuplicate": True}, "/networks/create",
     "plain"),
    ("DELETE", "/networks/mine", None, f"/networks/{id_of('network', 'mine')}", "plain"),
    ("POST", "/networks/mine/connect", {"Container": "MINE", "EndpointConfig": {"Aliases": ["a"]}},
     f"/networks/{id_of('network', 'mine')}/connect", "plain"),
    ("POST", "/networks/mine/disconnect", {"Container": "MINE", "Force": True},
     f"/networks/{id_of('network', 'mine')}/disconnect", "plain"),
    ("POST", "/networks/prune", None, "/networks/prune", "plain"),
    ("GET", "/volumes", None, "/volumes", "plain"),
    ("GET", "/volumes/mine", None, "/volumes/mine", "plain"),
    ("POST", "/volumes/create", {"Name": "v", "Driver": None}, "/volumes/create", "plain"),
    ("DELETE", "/volumes/mine?force=1", None, "/volumes/mine", "plain"),
    ("POST", "/volumes/prune", None, "/volumes/prune", "plain"),
    ("POST", "/containers/prune", None, "/containers/prune", "plain"),
    ("GET", "/events?since=1&until=2", None, "/events", "follow"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "target", "body", "path", "stream"), OFFERED)
def test_what_clients_use_is_offered(
    method: str, target: str, body: object, path: str, stream: str
) -> None:
    answer = ask(request(method, target, body))
    assert isinstance(answer, Upstream), answer
    assert answer.method == method
    assert answer.path == f"/v1.41{path}"
    assert answer.stream == stream
    assert ("Upgrade", "tcp") in answer.headers or stream != "hijack"


@pytest.mark.parametrize(("method", "target", "body", "path", "stream"), OFFERED)
def test_a_rebuilt_request_is_rebuilt_the_same(
    method: str, target: str, body: object, path: str, stream: str
) -> None:
    first = ask(request(method, target, body))
    assert isinstance(first, Upstream)
    assert ask(again(first)) == first


@pytest.mark.parametrize(("method", "target", "body", "path", "stream"), OFFERED)
def test_a_read_only_socket_only_reads(
    method: str, target: str, body: object, path: str, stream: str
) -> None:
    answer = ask(request(method, target, body), GRANTS.replace(read_only=True))
    assert isinstance(answer, Upstream) == (method in ("GET", "HEAD"))


@pytest.mark.parametrize(("method", "target", "body", "path", "stream"), OFFERED)
def test_objects_of_others_do_not_exist(
    method: str, target: str, body: object, path: str, stream: str
) -> None:
    foreign = target.replace("MINE", "VICTIM").replace("/mine", "/other-tenant-net")
    foreign = foreign.replace(EXEC, "f" * 64).replace("/app", "/private")
    foreign = foreign.replace("volumes/other-tenant-net", "volumes/other-tenant")
    if foreign == target:
        return
    answer = ask(request(method, foreign, body))
    assert isinstance(answer, Decision)
    assert answer.status == 404 or answer.rule == "image.allow-list"
    for name in ("VICTIM", "other-tenant-net"):
        assert id_of("container", name) not in answer.message
        assert id_of("network", name) not in answer.message


@pytest.mark.parametrize(
    "line",
    """
    GET /
    GET /v1.41
    POST /session
    POST /grpc
    POST /v1.41/grpc
    GET /swarm
    POST /swarm/join
    GET /services
    POST /services/create
    GET /configs
    GET /secrets
    GET /plugins
    POST /plugins/pull?remote=x
    GET /system/df
    GET /debug/pprof/
    GET /debug/vars
    GET /debug/pprof
    GET /libpod/info
    GET /v4.0.0/libpod/info
    POST /v4.0.0/libpod/containers/create
    POST /libpod/containers/create
    GET /containers/MINE/export
    GET /containers/MINE/attach/ws
    POST /containers/MINE/checkpoints
    GET /containers/MINE/checkpoints
    POST /containers/MINE/copy
    POST /containers/MINE/json
    GET /containers/MINE
    PUT /containers/create
    GET /containers/create
    TRACE /_ping
    POST /images/load
    GET /images/get?names=alpine
    GET /images/alpine/get
    POST /images/alpine/push
    GET /images/search?term=x
    POST /images/prune
    POST /build/prune
    POST /build/cancel?id=x
    GET /distribution/alpine/json
    GET /images/alpine/attestations
    PUT /volumes/mine
    POST /auth
    OPTIONS /containers/json
    CONNECT /containers/json
    """.strip().splitlines(),
)
def test_everything_else_is_refused(line: str) -> None:
    method, target = line.split()
    answer = ask(request(method, target))
    assert isinstance(answer, Decision)
    assert answer.status in (400, 403, 404)
    assert answer.rule.startswith(("endpoint.", "target."))


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("", "target.form"), ("containers/json", "target.form"), ("*", "target.form"),
        ("http://x/containers/json", "target.form"), ("//containers/json", "target.path"),
        ("/containers//json", "target.path"), ("/containers/json/", "target.path"),
        ("/./containers/json", "target.path"), ("/x/../containers/json", "target.path"),
        ("/x/%2e%2e/containers/json", "target.path"), ("/%2E/containers/json", "target.path"),
        ("/containers%2fjson", "target.path"), ("/containers%2Fjson", "target.path"),
        ("/containers/%6", "target.encoding"), ("/containers/%zz", "target.encoding"),
        ("/containers/%ff/json", "target.encoding"), ("/containers/%00/json", "target.path"),
        ("/containers/%2525/json", "target.path"), ("/containers/%C5%BF/json", "target.path"),
        ("/containers/a\\b/json", "target.path"), ("/containers/json#x", "target.characters"),
        ("/containers/j son", "target.characters"), ("/containers/jſon", "target.characters"),
        ("/v1.041/info", "target.version"), ("/v01.41/info", "target.version"),
        ("/v1.41.0/info", "target.version"), ("/v1.23/info", "target.version"),
        ("/v1.12/info", "target.version"), ("/v1./info", "target.version"),
        ("/v2.0/info", "target.version"), ("/v1.42/info", "target.version"),
        ("/v1/info", "target.version"), ("/V1.41/info", "endpoint.unknown"),
        ("/v1.41/v1.41/info", "endpoint.unknown"), ("/Info", "endpoint.unknown"),
        ("/" + "a" * 20000, "target.size"), ("/info?" + "a=1&" * 100, "target.query"),
    ],
)  # fmt: skip
def test_a_target_with_two_readings_is_refused(target: str, rule: str) -> None:
    assert refusal(ask(request("GET", target))) == rule


def test_a_path_has_one_spelling() -> None:
    for target in ("/v1.41/containers/%63reate", "/v1.24/containers/create", "/containers/create"):
        assert decide(request("POST", target, {"Image": "alpine"}), GRANTS).normalised == (
            "/v1.41/containers/create"
        )


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("POST /containers/MINE/start?checkpoint=c", "start.query"),
        ("POST /containers/MINE/start?checkpoint-dir=/tmp", "start.query"),
        ("GET /containers/MINE/top?ps_args=e", "top.ps_args"),
        ("GET /containers/MINE/top?ps_args=-o%20pid,environ", "top.ps_args"),
        ("GET /containers/MINE/logs?since=x", "logs.since"),
        ("GET /containers/MINE/logs?stdout=maybe", "logs.stdout"),
        ("GET /containers/MINE/logs?stdout=1&stdout=0", "logs.query"),
        ("GET /containers/MINE/logs?Stdout=1", "logs.query"),
        ("DELETE /containers/MINE?link=1", "remove.link"),
        ("POST /containers/MINE/kill?signal=a%20b", "kill.signal"),
        ("POST /containers/MINE/rename?name=victim", "owner.container-name"),
        ("POST /containers/MINE/rename?name=..%2Fx", "rename.name"),
        ("POST /containers/MINE/rename?name=0123456789ab", "rename.name"),
        ("POST /images/create?fromSrc=-", "pull.from-src"),
        ("POST /images/create?fromSrc=http://x/", "pull.from-src"),
        ("POST /images/create", "pull.source"),
        ("POST /images/create?fromImage=evil.example/b", "image.allow-list"),
        ("POST /images/create?fromImage=private", "image.allow-list"),
        ("POST /images/create?fromImage=alpine&repo=x", "pull.repo"),
        ("POST /images/create?fromImage=alpine&changes=CMD", "pull.changes"),
        ("POST /images/create?fromImage=alpine:1&tag=../x", "pull.tag"),
        ("POST /images/create?fromImage=agent-sandbox-run1/x", "image.allow-list"),
        ("POST /images/alpine/tag", "tag.repo"),
        ("POST /images/alpine/tag?repo=agent-sandbox-run2/x", "image.tag"),
        ("POST /images/alpine/tag?repo=localhost:5000/x", "image.tag"),
        ("POST /images/private/tag?repo=x", "image.allow-list"),
        ("DELETE /images/alpine", "owner.image"),
        ("DELETE /images/alpine?force=1", "owner.image"),
        ("DELETE /images/agent-sandbox-run2/app", "owner.image"),
        ("POST /commit?container=VICTIM", "owner.container"),
        ("POST /commit", "commit.container"),
        ("POST /commit?container=MINE&changes=LABEL%20a=b", "commit.changes"),
        ("GET /containers/json?filters=x", "body.json"),
        ("GET /containers/json?filters=%7B%22a%22:%5B%5D%7D", "containers.filters"),
        ("GET /containers/json?before=VICTIM", "containers.before"),
        ("GET /networks/x/y", "endpoint.unknown"),
    ],
)
def test_a_parameter_that_is_not_offered_is_refused(line: str, rule: str) -> None:
    method, target = line.split()
    assert refusal(ask(request(method, target))) == rule


def test_lists_ask_for_one_s_own() -> None:
    for target in ("/containers/json", "/networks", "/volumes", "/events"):
        answer = ask(request("GET", target))
        assert isinstance(answer, Upstream)
        assert dict(parse(f"/x?{answer.query}").query)["filters"] == json.dumps(
            OWNED, separators=(",", ":")
        )
    asked = build_query((("filters", json.dumps({"label": {"a=b": True}, "name": ["x"]})),))
    answer = ask(request("GET", f"/containers/json?{asked}"))
    assert isinstance(answer, Upstream)
    sent_filters = json.loads(dict(parse(f"/x?{answer.query}").query)["filters"])
    assert sent_filters == {"label": ["a=b", *OWNED["label"]], "name": ["x"]}


def test_pruning_is_of_one_s_own() -> None:
    for kind in ("containers", "networks", "volumes"):
        answer = ask(request("POST", f"/{kind}/prune"))
        assert isinstance(answer, Upstream)
        assert encode(f"{OWNER_LABEL}={OWNER}") in answer.query


def test_a_pull_names_one_image_of_a_named_registry() -> None:
    for asked, name, tag in (
        ("fromImage=alpine", "docker.io/library/alpine", "latest"),
        ("fromImage=alpine:3.19", "docker.io/library/alpine", "3.19"),
        ("fromImage=alpine&tag=3.19", "docker.io/library/alpine", "3.19"),
        ("fromImage=alpine:3.19&tag=3.19", "docker.io/library/alpine", "3.19"),
        ("fromImage=ghcr.io/team/a/b&tag=1", "ghcr.io/team/a/b", "1"),
        (f"fromImage=alpine&tag=sha256:{'a' * 64}", "docker.io/library/alpine",
         f"sha256:{'a' * 64}"),
    ):  # fmt: skip
        answer = ask(request("POST", f"/images/create?{asked}"))
        assert isinstance(answer, Upstream), answer
        assert dict(parse(f"/x?{answer.query}").query) == {"fromImage": name, "tag": tag}
    nowhere = GRANTS.replace(registries=())
    assert refusal(ask(request("POST", "/images/create?fromImage=alpine"), nowhere)) == (
        "pull.registry"
    )


def test_tags_are_written_in_the_run_s_own_place() -> None:
    answer = ask(request("POST", "/images/alpine/tag?repo=python&tag=3.11"))
    assert isinstance(answer, Upstream)
    assert dict(parse(f"/x?{answer.query}").query) == {
        "repo": "agent-sandbox-run1/python", "tag": "3.11",
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {"Driver": "macvlan"}, {"Driver": "host"}, {"Driver": "ipvlan"}, {"Driver": "overlay"},
        {"Options": {"com.docker.network.bridge.name": "virbr0"}},
        {"Options": {"com.docker.network.bridge.host_binding_ipv4": "0.0.0.0"}},
        {"Options": {"com.docker.network.bridge.gateway_mode_ipv4": "routed"}},
        {"Options": {"parent": "eth0"}},
        {"IPAM": {"Config": [{"Subnet": "10.0.0.0/8"}]}}, {"IPAM": {"Driver": "x"}},
        {"IPAM": {"Options": {"a": "b"}}}, {"ConfigFrom": {"Network": "x"}}, {"ConfigOnly": True},
        {"Ingress": True}, {"Scope": "swarm"}, {"EnableIPv6": True},
        {"Labels": {OWNER_LABEL: "run2"}}, {"Name": "bridge"}, {"Name": "host"}, {"Name": ""},
        {"Name": "agent-sandbox-run1"}, {"Name": "other-tenant-net"}, {"Name": "a b"},
        {"Name": "0123456789ab"}, {"x": 1},
    ],
)  # fmt: skip
def test_a_network_that_reaches_further_is_refused(body: dict[str, Any]) -> None:
    refusal(ask(request("POST", "/networks/create", {"Name": "n", **body})))


def test_a_network_is_no_more_open_than_the_sandbox() -> None:
    asked = request("POST", "/networks/create", {"Name": "n", "Internal": False, "Options": {}})
    assert sent(ask(asked))["Internal"] is False
    for mode in ("off", "allow", "public", "learn", "whatever"):
        made = sent(ask(asked, GRANTS.replace(network=mode)))
        assert made["Internal"] is True
        assert made["Options"]["com.docker.network.bridge.inhibit_ipv4"] == "true"
    undone = {"Name": "n", "Options": {"com.docker.network.bridge.inhibit_ipv4": "false"}}
    made = sent(ask(request("POST", "/networks/create", undone), CLOSED))
    assert made["Options"]["com.docker.network.bridge.inhibit_ipv4"] == "true"
    podman = CLOSED.replace(engine=CLOSED.engine.replace(name="podman"))
    assert sent(ask(asked, podman))["Options"] == {}


def test_both_ends_of_a_connection_are_one_s_own() -> None:
    for network, container in (("mine", "VICTIM"), ("other-tenant-net", "MINE")):
        answer = ask(request("POST", f"/networks/{network}/connect", {"Container": container}))
        assert isinstance(answer, Decision)
        assert answer.status == 404
    body = {"Container": "MINE", "EndpointConfig": {"IPAMConfig": {"IPv4Address": "10.0.0.1"}}}
    refusal(ask(request("POST", "/networks/mine/connect", body)))


@pytest.mark.parametrize(
    "body",
    [
        {"Driver": "sshfs"}, {"DriverOpts": {"device": "/"}}, {"DriverOpts": {"size": "1"}},
        {"ClusterVolumeSpec": {}}, {"Labels": {"traefik.enable": "1"}}, {"Name": "other-tenant"},
        {"Name": "agent-sandbox-run1-x"}, {"Name": "../x"}, {"name": "x"},
    ],
)  # fmt: skip
def test_a_volume_of_another_kind_is_refused(body: dict[str, Any]) -> None:
    refusal(ask(request("POST", "/volumes/create", body)))


@pytest.mark.parametrize(
    "body",
    [
        {"Memory": 1 << 40}, {"PidsLimit": -1}, {"NanoCpus": 10**12}, {"CpuQuota": 10**9},
        {"MemorySwap": -1}, {"Devices": [{}]}, {"Privileged": True}, {"CgroupParent": "/"}, {},
        {"RestartPolicy": {"Name": "always"}}, {"Memory": 0},
    ],
)  # fmt: skip
def test_an_update_lifts_no_limit(body: dict[str, Any]) -> None:
    refusal(ask(request("POST", "/containers/MINE/update", body)))


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ({"Privileged": True}, "exec.privileged"), ({"WorkingDir": "/proc/self/fd/9"},
         "exec.working-dir"),
        ({"Env": ["NVIDIA_DRIVER_CAPABILITIES=all"]}, "exec.env"), ({"cmd": ["x"]}, "exec.unknown"),
        ({"User": "a b"}, "exec.user"),
    ],
)  # fmt: skip
def test_a_command_in_a_container_gets_no_more_than_the_container(
    body: dict[str, Any], rule: str
) -> None:
    assert refusal(ask(request("POST", "/containers/MINE/exec", {"Cmd": ["x"], **body}))) == rule


@pytest.mark.parametrize(
    ("headers", "rule"),
    [
        ([("Upgrade", "h2c")], "head.upgrade"), ([("Upgrade", "tcp")], "head.upgrade"),
        ([("upgrade", "websocket")], "head.upgrade"),
        ([("Content-Length", "5"), ("Transfer-Encoding", "chunked")], "head.framing"),
        ([("Content-Type", "text/plain")], "head.content-type"),
        ([("Content-Type", "application/x-www-form-urlencoded")], "head.content-type"),
        ([("Content-Type", "application/json"), ("content-type", "x")], "head.duplicate"),
    ],
)  # fmt: skip
def test_a_head_that_changes_the_reading_is_refused(headers: list[Any], rule: str) -> None:
    asked = Request(
        method="POST", target="/containers/create", headers=tuple(headers),
        body=b'{"Image":"alpine"}',
    )  # fmt: skip
    assert refusal(ask(asked)) == rule


@pytest.mark.parametrize(
    "kind", ["application/json", "APPLICATION/JSON", "application/json;charset=x"]
)
def test_json_has_more_than_one_name(kind: str) -> None:
    asked = request(
        "POST", "/containers/create", {"Image": "alpine"}, headers={"Content-Type": kind}
    )
    assert isinstance(ask(asked), Upstream)


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b"{", "body.json"), (b"{}{}", "body.json"), (b"\xff\xfe", "body.json"), (b"[]", "create"),
        (b'{"Image":"alpine","Image":"alpine"}', "body.duplicate"),
        (b'{"Image":"alpine","HostConfig":{"Memory":1},"HostConfig":{"Privileged":true}}',
         "body.duplicate"),
        (b'{"Image":"alpine","Ho\\u017ftConfig":{}}', "body.key"),
        (b'{"Image":"al\\ud800pine"}', "body.text"), (b'{"Image":"al\\u0000pine"}', "body.text"),
        (b'{"Image":"alpine","HostConfig":{"Memory":1e3}}', "body.number"),
        (b'{"Image":"alpine","HostConfig":{"Memory":1.0}}', "body.number"),
        (b'{"Image":"alpine","HostConfig":{"Memory":NaN}}', "body.number"),
        (b'{"Image":"alpine","HostConfig":{"Memory":' + b"9" * 5000 + b"}}", "body.number"),
        (b"[" * 100 + b"]" * 100, "body.depth"), (b"[" * 100_000, "body.json"),
        (b'"' + b"a" * (5 << 20) + b'"', "body.size"),
        (b"\xef\xbb\xbf{}", "body.json"),
    ],
)  # fmt: skip
def test_a_body_with_two_readings_is_refused(raw: bytes, rule: str) -> None:
    assert refusal(ask(request("POST", "/containers/create", raw=raw))) == rule


def test_no_body_goes_where_none_belongs() -> None:
    for target in (
        "/containers/MINE/start",
        "/containers/MINE/stop",
        "/images/create?fromImage=alpine",
    ):
        for raw in (b'{"Privileged":true}', b"fromImage=evil", b"[1]"):
            assert refusal(ask(request("POST", target, raw=raw))).startswith("body.")
    answer = ask(request("POST", "/containers/MINE/start", raw=b"null"))
    assert isinstance(answer, Upstream)
    assert answer.body == b""


def test_streams_are_known_from_the_head() -> None:
    assert is_streamed("POST", "/v1.41/build?t=x")
    assert is_streamed("PUT", "/containers/x/archive?path=/")
    for method, target in (("POST", "/containers/create"), ("GET", "/build"), ("POST", "//build")):
        assert not is_streamed(method, target)


def test_a_bad_set_up_refuses_everything() -> None:
    for owner in ("", "A", "a/b", "a b", "-", "a_b", "x" * 41, "a-b-c-d-e"):
        answer = decide(request("GET", "/_ping"), GRANTS.replace(owner=owner))
        assert not answer.allowed
        assert answer.status == 500


def test_a_refusal_stays_a_refusal() -> None:
    refused = decide(request("POST", "/session"), GRANTS)
    assert rebuild(refused, GRANTS, {}) == refused
    assert "DOCKER_BUILDKIT=0" in refused.message


def test_unchecked_requests_are_still_read_strictly() -> None:
    made = unchecked(request("POST", "/containers/create", {"Privileged": True}), GRANTS)
    assert isinstance(made, Upstream)
    assert made.path == "/v1.41/containers/create"
    for asked in (request("POST", "//x"), request("POST", "/x", raw=b'{"a":1,"a":2}')):
        assert isinstance(unchecked(asked, GRANTS), Decision)


def test_query_values_survive_both_ways() -> None:
    pairs = (("a", "x y&z=1+%"), ("ü", "é"))
    assert parse(f"/x?{build_query(pairs)}").query == pairs
    with pytest.raises(Refused):
        parse("/x?a=%zz")


def test_a_decision_names_what_it_needs_once() -> None:
    body = {"Image": "alpine", "HostConfig": {"NetworkMode": "mine"},
            "NetworkingConfig": {"EndpointsConfig": {"mine": {}}}}  # fmt: skip
    asked = decide(request("POST", "/containers/create", body), GRANTS)
    assert len(set(asked.references)) == len(asked.references)
    assert isinstance(rebuild(asked, GRANTS, look(asked.references, GRANTS)), Upstream)
