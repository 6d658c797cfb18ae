"""Each finding, in each way in which it can be written."""

# ruff: noqa: E501 - a compose file reads better in one piece
from __future__ import annotations

import json

import pytest

from agent_sandbox.compose import report, rules
from compose.conftest import HOME, Ctl, found, ids

QUIET = "    user: '1000'\n    security_opt: ['no-new-privileges:true']\n"


def service(*lines: str, top: str = "") -> str:
    """A service `a` with these lines from line 3 on."""
    return "services:\n  a:\n" + "".join(f"    {line}\n" for line in lines) + top


def rule_ids(text: str | dict[str, str], *names: str, **env: str) -> set[str]:
    return {f.rule.id for f in found(text, *names, **env)}


SOCKETS = [
    "/var/run/docker.sock", "/run/docker.sock", "//var//run/./docker.sock", "/run/../run/docker.sock",
    "/var/run", "/run", "/run/", "/", "/var", "/run/docker", "/proc/1/root/run/docker.sock",
    "/proc/self/root/var/run", "/run/user/1000/docker.sock", "/run/user/1000", "/run/user",
    "/run/user/1000/podman/podman.sock", "/run/podman/podman.sock", "/run/podman",
    "/run/containerd/containerd.sock", "/run/containerd", "/var/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock", "/run/buildkit/buildkitd.sock",
    "~/.docker/run/docker.sock", "~/.colima/default/docker.sock", "~/.docker/run",
    "/srv/elsewhere/docker.sock", "/var/lib/incus/unix.socket", "/run/libvirt/libvirt-sock",
]  # fmt: skip


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("mode", ["", ":ro", ":rw,z"])
def test_a_socket_is_found_by_any_path(path: str, mode: str) -> None:
    findings = found(service("image: x", "volumes:", f"  - {path}:/x{mode}"))
    hit = [f for f in findings if f.rule.id == "docker-socket"]
    assert [(f.severity, f.place.line) for f in hit] == [("critical", 5)]
    assert ("read-only restricts nothing" in hit[0].message) == (mode == ":ro")


@pytest.mark.parametrize(
    "target", ["/var/run/docker.sock", "/run/podman/podman.sock", "/x/docker.sock"]
)
def test_a_socket_is_found_by_where_it_goes(target: str) -> None:
    """Whatever the source is called."""
    assert "docker-socket" in rule_ids(service("volumes:", f"  - ./s:{target}"))
    assert "docker-socket" in rule_ids(service("volumes:", f"  - ${{S}}:{target}"))


@pytest.mark.parametrize(
    "path", ["./run", "./docker", "/srv/data", "/run/myapp", "/run/user/1000/pulse", "~/project",
             "/home/someone/project", "/var/lib/app", "/etc/localtime", "./docker.sock.d"],
)  # fmt: skip
def test_other_paths_are_no_sockets(path: str) -> None:
    text = service("volumes:", f"  - {path}:/x:ro")
    assert rule_ids(text) <= {"root-user", "no-limits", "new-privileges"}


LONG = [
    ("volumes:", "  - type: bind", "    source: /var/run/docker.sock", "    target: /s"),
    ("volumes:", "  - {source: /run, target: /s, read_only: true}"),
    ("volumes: [{type: bind, source: /run/docker.sock, target: /s}]",),
    ("volumes: ['./a:/a', '/run/docker.sock:/s']",),
    ("use_api_socket: true",),
]


@pytest.mark.parametrize("lines", LONG)
def test_a_socket_is_found_in_long_syntax(lines: tuple[str, ...]) -> None:
    assert "docker-socket" in rule_ids(service(*lines))


TABLES = [
    "volumes:\n  v:\n    driver_opts: {type: none, o: bind, device: /var/run/docker.sock}\n",
    "volumes:\n  v:\n    driver: local\n    driver_opts:\n      o: bind\n      device: /run\n",
    # The kernel looks at no type once it is a bind mount.
    "volumes:\n  v:\n    driver_opts: {type: nfs, o: 'addr=x,rbind', device: /run/docker.sock}\n",
    "volumes:\n  v:\n    driver_opts: {type: tmpfs, o: bind, device: run/docker.sock}\n",
]


@pytest.mark.parametrize("top", TABLES)
def test_a_socket_is_found_behind_a_named_volume(top: str) -> None:
    text = service("volumes: ['v:/x']", top=top)
    hit = next(f for f in found(text) if f.rule.id == "docker-socket")
    assert hit.place.line > 3
    assert "volume v" in hit.message


@pytest.mark.parametrize("kind", ["secrets", "configs"])
@pytest.mark.parametrize("use", ["[s]", "[{source: s, target: /tmp/x}]"])
def test_a_socket_is_found_behind_a_secret_or_config(kind: str, use: str) -> None:
    text = service(f"{kind}: {use}", top=f"{kind}:\n  s:\n    file: /run/docker.sock\n")
    hit = next(f for f in found(text) if f.rule.id == "docker-socket")
    assert hit.place.line == 6


def test_a_link_of_this_host_is_followed() -> None:
    from agent_sandbox.compose import read
    from compose.conftest import machine

    host = machine({"c.yml": service("volumes: ['./s:/x']")})
    host = host.replace(real=lambda path: "/run/docker.sock" if path == "/p/s" else path)
    findings = rules.check(read.load(["/p/c.yml"], host), HOME)
    assert "docker-socket" in {f.rule.id for f in findings}


FIELDS = [
    ("privileged: true", "privileged", "critical"),
    ("privileged: yes", "privileged", "critical"),
    ("privileged: 'on'", "privileged", "critical"),
    ("privileged: ${P:-true}", "privileged", "critical"),
    ("post_start: [{command: x, privileged: true}]", "privileged", "critical"),
    ("build: {context: ., privileged: true}", "privileged", "critical"),
    ("build: {context: ., entitlements: [security.insecure]}", "privileged", "critical"),
    ("network_mode: host", "host-namespace", "critical"),
    ("pid: host", "host-namespace", "critical"),
    ("pid: 'container:x'", "host-namespace", "medium"),
    ("ipc: host", "host-namespace", "critical"),
    ("uts: host", "host-namespace", "critical"),
    ("userns_mode: host", "host-namespace", "critical"),
    ("cgroup: host", "host-namespace", "critical"),
    ("build: {context: ., network: host}", "host-namespace", "high"),
    ("cap_add: [SYS_ADMIN]", "capability", "critical"),
    ("cap_add: [cap_sys_ptrace]", "capability", "critical"),
    ("cap_add: [all]", "capability", "critical"),
    ("cap_add: [NET_ADMIN]", "capability", "medium"),
    ("devices: ['/dev/sda:/dev/sda']", "device", "critical"),
    ("devices: [{source: /dev/mem, target: /m}]", "device", "critical"),
    ("devices: ['/dev/null/../sda:/dev/x']", "device", "critical"),
    ("devices: ['vendor.com/class=all']", "device", "critical"),
    ("device_cgroup_rules: ['a *:* rwm']", "device", "critical"),
    ("security_opt: ['seccomp:unconfined']", "unconfined", "high"),
    ("security_opt: ['apparmor=unconfined']", "unconfined", "high"),
    ("security_opt: ['systempaths=unconfined']", "unconfined", "high"),
    ("security_opt: ['label:disable']", "unconfined", "high"),
    ("group_add: [docker]", "docker-group", "high"),
    ("group_add: ['999']", "docker-group", "high"),
    ("group_add: ['${DOCKER_GID:-123}']", "docker-group", "high"),
    ("group_add: ['${GID}']", "docker-group", "high"),
    ("user: '1000:docker'", "docker-group", "high"),
    ("user: root", "root-user", "medium"),
    ("user: '0:1000'", "root-user", "medium"),
    ("user: '00'", "root-user", "medium"),
    ("image: x", "root-user", "low"),
    ("image: x", "no-limits", "low"),
    ("image: x", "new-privileges", "low"),
    ("volumes: ['/etc:/x:ro']", "host-path", "high"),
    ("volumes: ['/etc/cron.d:/x']", "host-path", "critical"),
    ("volumes: ['/:/x']", "host-path", "critical"),
    ("volumes: ['~/.ssh:/x:ro']", "host-path", "high"),
    ("volumes: ['~:/x']", "host-path", "critical"),
    ("volumes: ['/var/lib/docker:/x']", "host-path", "critical"),
    ("volumes: ['./a:/x:rshared']", "propagation", "high"),
    ("volumes: [{type: bind, source: ./a, target: /x, bind: {propagation: rshared}}]", "propagation", "high"),
    ("volumes_from: ['container:x']", "other-container", "high"),
    ("provider: {type: x}", "host-program", "high"),
    ("sysctls: {kernel.core_pattern: x}", "host-program", "medium"),
    ("cgroup_parent: /", "host-program", "medium"),
    ("environment: {DOCKER_HOST: 'tcp://10.0.0.1:2375'}", "engine-address", "critical"),
    ("environment: ['DOCKER_HOST=tcp://x:2376', DOCKER_TLS_VERIFY=0]", "engine-address", "critical"),
    ("environment: ['DOCKER_HOST=tcp://x:2376', DOCKER_TLS_VERIFY=1]", "engine-address", "high"),
    ("environment: {DOCKER_HOST: 'ssh://root@x'}", "engine-address", "high"),
    ("environment: {CONTAINER_HOST: 'unix:///run/x'}", "engine-address", "medium"),
    ("environment: {DOCKER_TLS_CERTDIR: ''}", "open-engine", "critical"),
    ("command: dockerd -H tcp://0.0.0.0:2375", "open-engine", "critical"),
    ("ports: ['2375:2375']", "open-engine", "critical"),
    ("ports: [{target: 2376, published: 2376}]", "open-engine", "critical"),
    ("environment: {API_KEY: abc}", "secret", "high"),
    ("environment: ['DB_PASSWORD=hunter2']", "secret", "high"),
    ("environment: {X: sk-0123456789abcdef}", "secret", "high"),
    ("environment: {DB: 'postgres://u:p@h/d'}", "secret", "high"),
    ("environment: {API_KEY: '${API_KEY}'}", "secret", "low"),
    ("environment: [API_KEY]", "secret", "low"),
    ("build: {context: ., args: {NPM_TOKEN: x}}", "secret", "high"),
    ("volumes: ['${WHERE}:/data']", "unresolved", "medium"),
    ("privileged: ${P}", "unresolved", "medium"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "rule", "severity"), FIELDS)
def test_a_line_is_found(line: str, rule: str, severity: str) -> None:
    findings = found(service(line))
    hits = [f for f in findings if f.rule.id == rule]
    assert severity in {f.severity for f in hits}
    assert {f.place.line for f in hits} <= {2, 3}


HARMLESS = [
    "privileged: false", "privileged: 'no'", "network_mode: bridge", "network_mode: 'service:b'",
    "cap_add: [NET_BIND_SERVICE, CHOWN]", "cap_drop: [ALL]", "devices: ['/dev/fuse']",
    "security_opt: ['no-new-privileges:true', 'seccomp:./profile.json']", "user: '1000:1000'",
    "environment: {PASSWORD_FILE: /run/secrets/p, MAX_TOKENS: '100', TOKEN_TTL: '5'}",
    "environment: {URL: 'https://example.org/a@b'}", "ports: ['127.0.0.1:8080:80']",
    "volumes: ['data:/data']", "volumes: [/data]", "sysctls: {net.core.somaxconn: 1}",
    "environment: {DOCKER_HOST: ''}", "command: run tcp://x", "tmpfs: /run",
]  # fmt: skip


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_not_found(line: str) -> None:
    assert ids(found(service(line))) == []


def test_limits_count_in_both_places() -> None:
    text = service("mem_limit: 1g", "deploy: {resources: {limits: {pids: 5, cpus: '1'}}}")
    assert "no-limits" not in rule_ids(text)
    text = service("mem_limit: 1g", "pids_limit: -1", "cpus: 0")
    assert "no limit for pids, cpus" in {f.message for f in found(text)}


def test_a_volume_that_is_a_disk_is_found() -> None:
    for definition in ("driver_opts: {type: ext4, device: /dev/vda}", "driver: some/plugin",
                       "driver_opts: {type: proc, device: proc}",
                       "driver_opts: {type: nfs, o: addr=h, device: ':/x'}"):  # fmt: skip
        top = f"volumes:\n  v: {{{definition}}}\n"
        assert "volume-driver@5" in ids(found(service("volumes: ['v:/x']", top=top)))
    top = "volumes:\n  v: {driver_opts: {type: tmpfs, device: tmpfs}}\n"
    assert ids(found(service("volumes: ['v:/x']", top=top))) == []


@pytest.mark.parametrize("definition", ["{external: true, name: host}", "{driver: host}"])
def test_a_network_that_is_the_hosts_is_found(definition: str) -> None:
    text = service("networks: [n]", top=f"networks:\n  n: {definition}\n")
    assert "host-namespace@5" in ids(found(text))


def test_a_private_engine_with_tls_is_clean() -> None:
    text = service(
        "environment: {DOCKER_HOST: 'tcp://docker:2376', DOCKER_TLS_VERIFY: '1'}",
        top="  e:\n    networks: {n: {aliases: [docker]}}\nnetworks: {n: {}}\n",
    )
    assert "engine-address" not in rule_ids(text)


SHARED = [
    ("./t:/t", "./t:/t", True), ("./t:/t", "./t/:/other", True), ("v:/t", "v:/t", True),
    ("./t:/t", "./t/sub:/t", True), ("./t:/t:ro", "./t:/t", False), ("./t:/t", "./u:/t", False),
    ("v:/t", "w:/t", False), ("./t:/t", "t:/t", False),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "shared"), SHARED)
def test_what_two_agents_can_write_is_found(one: str, other: str, shared: bool) -> None:
    text = f"services:\n  a:\n    volumes: ['{one}']\n  b:\n    volumes: ['{other}']\n"
    assert ("shared-writable" in rule_ids(text)) == shared


def test_a_label_answers_for_one_rule_of_one_service() -> None:
    line = "volumes: ['/run/docker.sock:/run/docker.sock']"
    label = "labels: {agent-sandbox.accept: docker-socket, agent-sandbox.why: it is the proxy}"
    findings = found(service(line, label, "privileged: true", top=f"  b:\n    {line}\n"))
    assert ids(findings) == ["docker-socket@7", "privileged@5"]
    accepted = next(f for f in findings if f.accepted)
    assert (accepted.service, accepted.answer) == ("a", "it is the proxy")
    shown = report.text(findings, lambda path: path, colour=False)
    assert "accepted by label: it is the proxy" in shown


def test_findings_go_from_bad_to_less() -> None:
    findings = found(service("user: root", "privileged: true", "environment: {A_TOKEN: x}"))
    grades = [f.severity for f in findings]
    assert grades == sorted(grades, key=rules.SEVERITIES.index, reverse=True)
    assert [len(rules.failing(findings, s)) for s in rules.SEVERITIES] == [5, 3, 2, 1]


def test_names_cannot_drive_a_terminal() -> None:
    text = 'services:\n  "a\\e[31m":\n    privileged: true\n'
    shown = report.text(found(text), lambda path: path, colour=False)
    assert "\x1b" not in shown


def test_a_secrets_value_is_never_shown() -> None:
    findings = found(service("environment: {API_KEY: hunter2hunter2}"))
    assert "hunter2" not in report.text(findings, lambda path: path, colour=False)
    assert "hunter2" not in json.dumps(report.rows(findings, lambda path: path))


def test_sarif_names_rule_file_and_line() -> None:
    accept = "labels: {agent-sandbox.accept: privileged}"
    findings = found(service("privileged: true", accept, "pid: host"))
    data = report.sarif(findings, lambda path: path[3:] + " ä", "1")
    run = data["runs"][0]  # type: ignore[index]
    known = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} <= known
    first = run["results"][0]
    assert (first["ruleId"], first["level"]) == ("host-namespace", "error")
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "c.yml%20%C3%A4"
    assert place["region"]["startLine"] == 5
    suppressed = [r["ruleId"] for r in run["results"] if "suppressions" in r]
    assert suppressed == ["privileged"]


def test_every_rule_says_why_and_what_to_do(ctl: Ctl) -> None:
    for rule in rules.RULES:
        assert rule.severity in rules.SEVERITIES
        assert rule.why
        assert rule.fix
