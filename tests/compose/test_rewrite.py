"""Four solutions: exact texts for the team, and properties for every way to write a file."""

# ruff: noqa: E501 - a compose file reads better in one piece
from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.cli import dockerserve
from agent_sandbox.compose import rewrite, rules, solutions
from agent_sandbox.compose.edit import Document, scalar
from agent_sandbox.compose.nodes import parse
from agent_sandbox.compose.solutions import SOLUTIONS, Wish
from agent_sandbox.errors import PolicyError
from compose.conftest import HOME, TEAM, Ctl, found, load
from conftest import must_work

SOCK = "/var/run/docker.sock:/var/run/docker.sock"


def secured(text: str, solution: str = "no-socket", agents: tuple[str, ...] = ()) -> str:
    """The new text of c.yml, which check must find clean."""
    project = load(text)
    findings = rules.check(project, HOME)
    agents = agents or rewrite.agents_of(project, findings)
    done = rewrite.secure(
        text, "/p/c.yml", project, findings, Wish(solution=solution, agents=agents)
    )
    assert rules.failing(found(done.text), "high") == (), done.text
    return done.text


# docker-compose is a Python program; one process reads many files.
CONFIG = """
import sys
from compose.cli.main import main
for name in sys.argv[1:]:
    sys.argv = ["docker-compose", "-f", name, "config", "-q"]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(name)
"""


def config(directory: Path, *files: str) -> None:
    """`docker-compose config` takes them."""
    program = shutil.which("docker-compose")
    must_work(program, "needs docker-compose")
    python = Path(program or "").read_text().splitlines()[0].removeprefix("#!").split()
    done = subprocess.run(
        [*python, "-c", CONFIG, *files], cwd=directory, capture_output=True, text=True,
        check=False, timeout=120,
        env={"PATH": os.environ["PATH"], "HOME": "/", "OPENAI_API_KEY": "x", "API_KEY": "x",
             "A_TOKEN": "x", "B_TOKEN": "x"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_the_team_made_safe(ctl: Ctl, solution: str) -> None:
    """The text is exact, Compose reads it, and check finds nothing bad in it."""
    ctl.write("docker-compose.yml", (TEAM / "docker-compose.yml").read_text())
    flags = ("--no-runtime-check", "--allow-image", "python:3.12-slim")
    done = ctl("secure", "docker-compose.yml", "--solution", solution, "-o", "s.yml", *flags)
    assert done.returncode == 0, done.stderr
    text = (ctl.directory / "s.yml").read_text()
    golden = TEAM / f"{solution}.yml"
    if os.environ.get("AGENT_SANDBOX_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    config(ctl.directory, "s.yml")
    assert ctl("check", "s.yml").returncode == 0
    assert ctl("check", "docker-compose.yml").returncode == 1


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_the_teams_comments_and_order_stay(solution: str) -> None:
    old, new = (TEAM / "docker-compose.yml").read_text(), (TEAM / f"{solution}.yml").read_text()
    lines = new.splitlines()
    comments = [line for line in old.splitlines() if line.strip().startswith("#")]
    assert [line for line in lines if line.strip().startswith("#")] == comments
    kept = list(parse(old, "f", "/").mapped("services"))
    assert [name for name in parse(new, "f", "/").mapped("services") if name in kept] == kept
    # What stands below a comment still stands below it.
    for comment in comments:
        before = old.splitlines()[old.splitlines().index(comment) + 1]
        assert lines[lines.index(comment) + 1] == before


def test_read_access_goes_through_a_proxy(ctl: Ctl) -> None:
    ctl.write(
        "c.yml",
        f"services:\n  a:\n    image: x\n    volumes: ['{SOCK}:ro']\n  b: {{image: y, volumes: ['{SOCK}']}}\n",
    )
    done = ctl("secure", "c.yml", "--solution", "no-socket", "-o", "s.yml", "--read-access", "a")
    assert done.returncode == 0, done.stderr
    config(ctl.directory, "s.yml")
    assert ctl("check", "s.yml").returncode == 0
    tree = parse((ctl.directory / "s.yml").read_text(), "f", "/")
    mounts = {
        name: [item.text for item in service.listed("volumes")]
        for name, service in tree.mapped("services").items()
    }
    assert mounts == {
        "a": ["docker-readonly:/run/docker-readonly:ro"], "b": [],
        "docker-readonly": [f"{SOCK}:ro", "docker-readonly:/run/docker-readonly"],
    }  # fmt: skip
    assert (
        tree.string("services", "a", "environment", "DOCKER_HOST")
        == "unix:///run/docker-readonly/docker.sock"
    )
    assert tree.get("services", "b", "environment") is None
    assert tree.string("services", "docker-readonly", "network_mode") == "none"
    assert "docker build -t agent-sandbox -f packaging/Dockerfile ." in done.stdout


def test_the_filters_command_is_one_that_sandboxctl_takes() -> None:
    words = solutions.read_filter()["command"]
    assert isinstance(words, list)
    assert words[:2] == ["docker", "serve"]
    wanted = dockerserve.parse(words[2:])
    assert wanted.read_only
    assert wanted.own_project
    assert wanted.socket == solutions.FILTER_SOCKET


def test_a_volume_that_others_may_have_is_not_shared_with_a_filter(ctl: Ctl) -> None:
    ctl.write(
        "c.yml",
        f"services:\n  a: {{image: x, volumes: ['{SOCK}']}}\n  b: {{image: y, volumes: ['docker-readonly:/x']}}\n"
        "volumes: {docker-readonly: {}}\n",
    )
    done = ctl("secure", "c.yml", "--solution", "no-socket", "-o", "s.yml", "--read-access", "a")
    assert done.returncode == 125
    assert "already a volume" in done.stderr
    assert not (ctl.directory / "s.yml").exists()


STYLES = [
    f"services:\n  a:\n    image: x\n    volumes:\n    - {SOCK}\n    - ./x:/x\n",
    f"services:\n  a:\n    image: x\n    volumes:\n      - ./x:/x\n      - {SOCK}\n\n# end\n",
    f"services:\n  a: {{image: x, volumes: ['{SOCK}', './x:/x']}}\n",
    f"services:\n  a: {{image: x, volumes: ['./x:/x', '{SOCK}']}}\n",
    f"services:\n  a: {{image: x, volumes: ['{SOCK}']}}\n",
    f"services: {{a: {{image: x, volumes: ['{SOCK}'], privileged: true}}}}\n",
    '{"services": {"a": {"image": "x", "volumes": ["' + SOCK + '"], "pid": "host"}}}',
    f"services:\n  a:\n    image: x\n    volumes:\n      - {SOCK}\n",
    f"services:\n  a:\n    volumes:\n      - {SOCK}\n    image: x",
    "services:\n  a:\n    image: x\n    volumes:\n      - type: bind\n        source: /run\n        target: /r\n",
    "services:\n  a:\n    image: x\n    volumes:\n      -\n        type: bind\n        source: /run\n        target: /r\n      - ./x:/x\n",
    f"x-v: &v\n  - {SOCK}\nservices:\n  a:\n    image: x\n    volumes: *v\n  b:\n    image: x\n    volumes: *v\n",
    f"services:\n  a:\n    image: x\n    volumes: &v\n      - {SOCK}\n  b:\n    image: x\n    volumes: *v\n",
    f"x-s: &s {SOCK}\nservices:\n  a:\n    image: x\n    volumes:\n      - *s\n      - ./x:/x\n",
    f"x-w: &w\n  volumes: ['{SOCK}']\nservices:\n  a:\n    <<: *w\n    image: x\n  b:\n    <<: *w\n    image: y\n",
    f"x-w: &w {{privileged: true}}\nservices:\n  a:\n    <<: *w\n    image: x\n    volumes: ['{SOCK}']\n",
    "services:\n  a:\n    image: x\n    volumes: ['v:/x']\nvolumes:\n  v:\n    driver_opts: {type: none, o: bind, device: /run}\n",
    "services:\n  a:\n    image: x\n    secrets: [s]\n    environment: [DOCKER_HOST=tcp://h:2375, A=b]\nsecrets:\n  s: {file: /run/docker.sock}\n",
    "services:\n  a:\n    image: x\n    environment:\n      DOCKER_HOST: tcp://h:2376\n      DOCKER_TLS_VERIFY: '1'\n      DOCKER_CERT_PATH: /c\n",
    f"services:\n  a:\n    image: x\n    volumes: ['{SOCK}']\n    network_mode: host\n    user: '1000:docker'\n    cap_add: [ALL]\n",
    f"services:\n  a:\n    image: x\n    volumes: ['{SOCK}']\n    environment:\n      API_KEY: sk-0123456789abcdefg # mine\n",
    f"x-e: &e\n  API_KEY: sk-0123456789abcdefg\nservices:\n  a:\n    image: x\n    volumes: ['{SOCK}']\n    environment: *e\n",
    f"x-e: &e {{A: b}}\nservices:\n  a:\n    image: x\n    volumes: ['{SOCK}']\n    environment: *e\n    networks: {{n: {{}}}}\n    depends_on: {{b: {{condition: service_started}}}}\n  b:\n    image: y\n    environment: *e\nnetworks: {{n: {{}}}}\n",
    "x-e: &e {DOCKER_HOST: 'tcp://h:2375', A_TOKEN: sk-0123456789abcdefg, B_TOKEN: sk-0123456789abcdefg}\nservices:\n  a:\n    image: x\n    environment: *e\n",
    f"services:\n  a:\n    image: x\n    volumes: ['{SOCK}']\n    build:\n      context: .\n      args: [API_KEY=sk-0123456789abcdefg, A=b]\n",
    f"services:\r\n  a:\r\n    image: x\r\n    volumes:\r\n      - {SOCK}\r\n      - ./x:/x\r\n",
]  # fmt: skip


@pytest.mark.parametrize("text", STYLES, ids=range(len(STYLES)))
def test_every_style_can_be_made_safe(tmp_path: Path, text: str) -> None:
    """check is clean, Compose takes it, and nobody but a holder has the socket."""
    (tmp_path / "s").touch()
    for solution in SOLUTIONS:
        new = secured(text, solution)
        (tmp_path / f"{solution}.yml").write_text(new)
        for service in load(new).services:
            holds = [m for m in service.mounts if "docker.sock" in m.source]
            assert bool(holds) == (service.name == "sandbox-service")
            assert "privileged" not in service.node.mapped() or service.name.endswith("-docker")
            assert "sk-0123" not in new
            if "./x:/x" in text and service.name == "a":
                assert "/p/x" in {m.source for m in service.mounts}
    config(tmp_path, *(f"{solution}.yml" for solution in SOLUTIONS))


EXTENDS = f"services:\n  b:\n    image: x\n    volumes: ['{SOCK}']\n  a:\n    extends: b\n"


@pytest.mark.parametrize("solution", ["no-socket", "sysbox"])
def test_a_service_and_its_base_are_made_safe(tmp_path: Path, solution: str) -> None:
    (tmp_path / "c.yml").write_text(secured(EXTENDS, solution))
    config(tmp_path, "c.yml")


@pytest.mark.parametrize("solution", ["dind", "service"])
def test_an_agent_that_is_extended_would_share_its_access(tmp_path: Path, solution: str) -> None:
    with pytest.raises(PolicyError, match="a extends b") as caught:
        secured(EXTENDS, solution)
    assert caught.value.code == "compose-extends"
    (tmp_path / "c.yml").write_text(secured(EXTENDS, solution, agents=("a",)))
    config(tmp_path, "c.yml")


@pytest.mark.parametrize("use", ["*e", "{<<: *e, C: d}", "\n      <<: [*e]\n      C: d"])
def test_an_anchor_inside_of_an_agent_is_not_changed_for_the_others(use: str) -> None:
    text = (
        f"services:\n  a:\n    volumes: ['{SOCK}']\n    environment: &e\n      A: b\n"
        f"  b:\n    environment: {use}\n"
    )
    tree = parse(secured(text, "service"), "f", "/")
    assert "SANDBOX_API" in tree.mapped("services", "a", "environment")
    assert set(tree.mapped("services", "b", "environment")) <= {"A", "C"}
    assert "A" in tree.mapped("services", "b", "environment")


def test_what_services_share_is_not_changed_for_the_others() -> None:
    """An agent's own URL must not land in the anchor that another service uses."""
    text = f"x-e: &e\n  A: b\nservices:\n  a:\n    volumes: ['{SOCK}']\n    environment: *e\n  b:\n    environment: *e\n"
    tree = parse(secured(text, "service"), "f", "/")
    assert set(tree.mapped("services", "a", "environment")) == {
        "A",
        "SANDBOX_API",
        "SANDBOX_TOKEN_FILE",
    }
    assert set(tree.mapped("services", "b", "environment")) == {"A"}


def test_each_agent_has_a_network_an_engine_and_a_volume_of_its_own() -> None:
    tree = parse((TEAM / "dind.yml").read_text(), "f", "/")
    for name in ("orchestrator", "worker1", "worker2", "worker3"):
        agent, engine = (tree.get("services", n) for n in (name, f"{name}-docker"))
        assert agent is not None
        assert engine is not None
        assert not agent.truth("privileged")
        assert list(engine.mapped("networks")) == [f"{name}-docker"]
        assert engine.string("environment", "DOCKER_TLS_CERTDIR") == "/certs"
        users = [s for s in tree.mapped("services").values() if f"{name}-docker-certs:" in str(s)]
        assert len(users) == 2
        assert "certs:/certs/client:ro" in str(agent)


def test_each_agent_has_a_token_of_its_own() -> None:
    tree = parse((TEAM / "service.yml").read_text(), "f", "/")
    for name in ("orchestrator", "worker1", "worker2", "worker3"):
        held = [i.text for i in tree.listed("services", name, "secrets")]
        assert held == [f"{name}-sandbox-token"]
    assert tree.truth("networks", "sandbox-service", "internal")
    assert tree.get("services", "sandbox-service", "ports") is None


def test_a_finding_in_another_file_stops_it(ctl: Ctl) -> None:
    ctl.write("b.yml", f"services:\n  b:\n    image: x\n    volumes: ['{SOCK}']\n")
    ctl.write("c.yml", "services:\n  a:\n    extends: {file: b.yml, service: b}\n")
    done = ctl("secure", "c.yml", "--solution", "no-socket", "-o", "s.yml")
    assert done.returncode == 125
    assert "b.yml:4" in done.stderr
    assert not (ctl.directory / "s.yml").exists()


def test_an_engine_of_an_env_file_is_overruled(ctl: Ctl) -> None:
    ctl.write("e.env", "DOCKER_HOST=tcp://h:2375\n")
    ctl.write("c.yml", "services:\n  a:\n    image: x\n    env_file: e.env\n")
    assert ctl("check", "c.yml").returncode == 1
    done = ctl("secure", "c.yml", "--solution", "no-socket", "-o", "s.yml")
    assert done.returncode == 0, done.stderr
    assert ctl("check", "s.yml").returncode == 0


SCALARS = ["a", "/x/y", "true", "no", "1", "1.5", "", " a", "a: b", "#", "${A:?x}", "ä", "a\nb", "~",
           "-", "null", "0x1", "*a", "&a", "!a", "%a", "@a", "`a", "'a'", '"a"', "a#b", "2001:db8::1"]  # fmt: skip


@pytest.mark.parametrize("text", SCALARS)
def test_a_text_stays_that_text(text: str) -> None:
    import ruamel.yaml

    for version in ((1, 1), (1, 2)):
        yaml = ruamel.yaml.YAML(typ="safe", pure=True)
        yaml.version = version
        assert yaml.load(f"a: {scalar(text)}\n") == {"a": text}


def test_an_edit_leaves_every_other_byte() -> None:
    text = "a:   # one\n    b:  [1,  2]\n    c: |\n        x\n\n    d:\n    - e   # two\n# three\nf: g\n"
    document = Document(text)
    document.set(("a", "d2"), solutions.tree("new"))
    assert document.text == text.replace("# two\n", "# two\n    d2: new\n")
    document.remove(2, 9, lambda path: path == ("a", "b"))
    assert document.text == text.replace("# two\n", "# two\n    d2: new\n").replace(
        "[1,  2]", "[2]"
    )
