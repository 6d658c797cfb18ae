"""`sandboxctl docker check` says what the filter would say, and asks no engine."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.cli import docker
from agent_sandbox.policy.docker.values import Bind, Grants
from conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

GRANTS = Grants(
    owner="check", images=("alpine",), binds=(Bind(host_path="/ws", writable=True),), network="on"
)


def asked(**document: object) -> dict[str, Any]:
    return docker.verdict(docker.request_of(document), GRANTS)


def create(**host: object) -> dict[str, Any]:
    return asked(
        method="POST", path="/containers/create", body={"Image": "alpine", "HostConfig": host}
    )


def test_what_passes_is_shown_as_it_would_be_sent() -> None:
    answer = create(Binds=["/ws:/x"])
    assert answer["verdict"] == "allowed"
    assert answer["request"]["body"]["HostConfig"]["Mounts"][0]["Source"] == "/ws"
    assert {"kind": "image", "name": "alpine:latest"} in answer["references"]
    assert "limit.memory" in answer["mutations"]


@pytest.mark.parametrize(
    ("host", "rule"),
    [({"Privileged": True}, "create.privileged"), ({"Binds": ["/:/x"]}, "create.binds")],
)
def test_a_refusal_names_its_rule(host: dict[str, object], rule: str) -> None:
    answer = create(**host)
    assert answer["verdict"] == "refused"
    assert answer["rule"] == rule
    assert answer["request"] is None
    assert docker.lines(answer) == [f"refused with 403: {answer['message']}"]


def test_images_are_judged_by_the_list() -> None:
    answer = asked(method="POST", target="/containers/create", body={"Image": "private"})
    assert answer["rule"] == "image.allow-list"


def test_a_body_may_be_text() -> None:
    answer = asked(method="POST", path="/containers/create", text='{"Image":"a","Image":"b"}')
    assert answer["rule"] == "body.duplicate"


@pytest.mark.parametrize(
    "document", [[], 1, {}, {"method": "GET"}, {"path": 1}, {"path": "/", "headers": "x"}]
)
def test_a_file_that_is_no_request_is_an_error(document: object) -> None:
    with pytest.raises(ValueError, match=r"object|strings"):
        docker.request_of(document)


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "home").mkdir(exist_ok=True)
    project = tmp_path / "project"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"),
        # Nobody answers there, and nobody is asked.
        "DOCKER_HOST": "unix:///nonexistent",
    }  # fmt: skip
    return subprocess.run(
        [str(ROOT / "sandboxctl"), "docker", *words],
        cwd=project, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_exit_status_is_the_verdict(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    file = project / "request.json"
    body = {"Image": "alpine", "HostConfig": {"Binds": [f"{project}:/x"]}}
    file.write_text(
        json.dumps({"method": "POST", "path": "/v1.41/containers/create", "body": body})
    )
    allowed = run(tmp_path, "check", "--json", "--docker-image", "alpine", str(file))
    assert allowed.returncode == 0, allowed.stderr
    assert json.loads(allowed.stdout)["verdict"] == "allowed"
    refused = run(tmp_path, "check", str(file))
    assert refused.returncode == 1
    assert "docker.images" in refused.stdout
    for words in ((), ("check",), ("check", str(tmp_path / "missing")), ("run", str(file))):
        wrong = run(tmp_path, *words)
        assert wrong.returncode == 125
        assert "Traceback" not in wrong.stderr
