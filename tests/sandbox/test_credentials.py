"""Values are read outside, and what a sandbox may have written is never used for that."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.host import libraries
from agent_sandbox.policy.credentials import Secret
from agent_sandbox.policy.model import Limits, Mount, Plan
from agent_sandbox.sandbox import credentials

if TYPE_CHECKING:
    from pathlib import Path

REAL = "sk-the-real-value-0123456789"


def secret(kind: str, *origin: str, base_url: str = "URL") -> Secret:
    return Secret(
        name="a", host="a.example", port=443, header="x-api-key", format="", kind=kind,
        origin=origin, variable="KEY", base_url=base_url, where="c.toml",
    )  # fmt: skip


def plan(project: Path, *secrets: Secret, ca: str = "") -> Plan:
    mounts = (Mount(kind="rw", dest=str(project), source=str(project), level="rw"),)
    return Plan(
        mounts=mounts, env={"KEY": "(placeholder)", "PATH": "/usr/bin"}, env_sources={},
        cwd=str(project), network=False, docker=False, limits=Limits(), profile="none",
        project=str(project), home="/h", home_mode="private", home_key="", home_points=(),
        secrets=secrets, network_ca=ca, notices=(),
    )  # fmt: skip


def handed(made: Plan, env: dict[str, str], argv: tuple[str, ...] = ()) -> tuple[str, str]:
    """Placeholder and value."""
    shown, outside = credentials.hand_out(made, env, "/h", argv)
    rows: Any = outside["secrets"]
    (row,) = rows
    assert shown.env["KEY"] == row["placeholder"]
    return shown.env["KEY"], row["value"]


@pytest.mark.parametrize("kind", ["env", "file", "command"])
def test_a_value_is_read_and_a_placeholder_shown(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "key"
    file.write_text(f"  {REAL}\n")
    origin = {"env": ["K"], "file": [str(file)], "command": ["cat", str(file)]}[kind]
    env = {"K": REAL, "PATH": os.environ["PATH"]}
    placeholder, value = handed(plan(tmp_path / "p", secret(kind, *origin)), env)
    assert value == REAL
    assert placeholder.startswith("sk-")
    assert placeholder != REAL
    assert len(placeholder) >= len(REAL)


def test_placeholders_differ_from_run_to_run(tmp_path: Path) -> None:
    made = plan(tmp_path, secret("env", "K"))
    assert len({handed(made, {"K": REAL})[0] for _ in range(50)}) == 50


@pytest.mark.parametrize(
    "origin", [("false",), ("no-such-program",), ("sh", "-c", "exit 3"), ("sh", "-c", ":")]
)
def test_a_program_that_fails_stops_the_start(tmp_path: Path, origin: tuple[str, ...]) -> None:
    with pytest.raises(HostError) as caught:
        handed(plan(tmp_path, secret("command", *origin)), {"PATH": os.environ["PATH"]})
    assert caught.value.code == "no-secret"


def test_a_program_that_does_not_end_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "COMMAND_SECONDS", 0.2)
    with pytest.raises(HostError, match="did not end"):
        handed(plan(tmp_path, secret("command", "sleep", "60")), {"PATH": os.environ["PATH"]})


def test_a_program_runs_where_no_project_file_tells_it_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = plan(tmp_path, secret("command", "sh", "-c", "echo at-this-place:$PWD"))
    assert handed(made, {"PATH": os.environ["PATH"]})[1] == "at-this-place:/"


def test_cannot_choose_the_program_from_a_writable_directory(tmp_path: Path) -> None:
    """By a file, or by a link to a program of the system's. Control: elsewhere it is taken."""
    project, elsewhere = tmp_path / "p", tmp_path / "e"
    for folder in (project, elsewhere):
        folder.mkdir()
        (folder / "get").write_text(f"#!/bin/sh\necho {REAL}\n")
        (folder / "get").chmod(0o755)
    (project / "env").symlink_to("/usr/bin/env")
    env = {"PATH": f"{project}:relative::{elsewhere}"}
    made = plan(project, secret("command", "get"))
    assert handed(made, env)[1] == REAL
    assert credentials._program("get", made, env) == f"{elsewhere}/get"
    for name in ("get", "env"):
        assert credentials._program(name, made, {"PATH": str(project)}) == ""
        assert credentials._program(f"{project}/{name}", made, {}) == ""


def test_cannot_reach_a_program_by_way_of_the_project(tmp_path: Path) -> None:
    """A link of the user's that leads through the project. Control: one that does not."""
    project, elsewhere = tmp_path / "p", tmp_path / "e"
    for folder in (project, elsewhere):
        folder.mkdir()
        (folder / "bin").symlink_to("/usr/bin")
    (tmp_path / "through").symlink_to("p/bin")
    (tmp_path / "around").symlink_to("e/bin")
    made = plan(project, secret("command", "env"))
    for place in ("through", "p/bin"):
        assert credentials._program("env", made, {"PATH": f"{tmp_path}/{place}"}) == ""
        assert credentials._program(f"{tmp_path}/{place}/env", made, {}) == ""
    found = credentials._program("env", made, {"PATH": f"{tmp_path}/around"})
    assert found == f"{os.path.realpath('/usr/bin')}/env"


def test_cannot_choose_what_the_program_starts(tmp_path: Path) -> None:
    """PATH and the like of the caller's lead into the project. Control: they would be found."""
    project = tmp_path / "p"
    project.mkdir()
    (project / "inner").write_text(f"#!/bin/sh\necho planted-{REAL}\n")
    (project / "inner").chmod(0o755)
    (tmp_path / "outer").write_text(f"#!/bin/sh\ninner || echo {REAL}${{PYTHONPATH-}}${{KEPT-}}\n")
    (tmp_path / "outer").chmod(0o755)
    env = {
        "PATH": f"{project}:/usr/bin:/bin", "PYTHONPATH": f"/x:{project}/lib", "KEPT": "kept",
    }  # fmt: skip
    origin = str(tmp_path / "outer")
    assert handed(plan(project, secret("command", origin)), env)[1] == f"{REAL}kept"
    other = plan(tmp_path / "other", secret("command", origin))
    assert handed(other, env)[1] == f"planted-{REAL}"


def test_cannot_be_what_the_program_is_told_to_run(tmp_path: Path) -> None:
    """An argument in the project. Control: elsewhere it is run."""
    for name in ("p", "e"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "get.sh").write_text(f"echo {REAL}\n")
    env = {"PATH": os.environ["PATH"]}
    for place, good in (("p", False), ("e", True)):
        made = plan(tmp_path / "p", secret("command", "sh", f"{tmp_path}/{place}/get.sh"))
        if good:
            assert handed(made, env)[1] == REAL
            continue
        with pytest.raises(HostError, match="can write"):
            handed(made, env)


def test_no_message_has_the_value(tmp_path: Path) -> None:
    made = plan(tmp_path, secret("env", "K"))
    for value, argv in ((REAL + "\n" + REAL, ()), (REAL, ("echo", REAL))):
        with pytest.raises(HostError) as caught:
            handed(made, {"K": value}, argv)
        assert REAL not in f"{caught.value.message} {caught.value.hint}"


# --- certificates


def test_certificates_that_the_command_can_write_are_refused(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "p", tmp_path / "e"
    for folder in (project, elsewhere):
        folder.mkdir()
        (folder / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    # Also by way of a link in the project.
    (project / "link").symlink_to(elsewhere / "ca.pem")
    (tmp_path / "through").symlink_to("p/link")
    for name in ("p/ca.pem", "p/link", "through"):
        with pytest.raises(HostError) as caught:
            credentials.hand_out(plan(project, ca=f"{tmp_path}/{name}"), {}, "/h", ())
        assert caught.value.code == "bad-ca"
    _, outside = credentials.hand_out(plan(project, ca=f"{elsewhere}/ca.pem"), {}, "/h", ())
    assert str(outside["ca"]).startswith("-----BEGIN")


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_certificates_that_are_none_stop_the_start(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(HostError, match=r"network\.ca"):
        credentials.hand_out(plan(tmp_path / "p", ca=f"{tmp_path}/ca.pem"), {}, "/h", ())


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where TLS has to be opened."""
    monkeypatch.setattr(libraries, "_candidates", lambda: [str(tmp_path)])
    with pytest.raises(HostError) as caught:
        handed(plan(tmp_path / "p", secret("env", "K", base_url="")), {"K": REAL})
    assert caught.value.code == "no-cryptography"
    assert "agent-sandbox[secrets]" in caught.value.hint
    assert handed(plan(tmp_path / "p", secret("env", "K")), {"K": REAL})


def test_cannot_plant_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment in the project is passed over. Control: elsewhere it is taken."""
    places = [tmp_path / name for name in ("p", "e")]
    for place in places:
        (place / "cryptography").mkdir(parents=True)
        (place / "cryptography" / "__init__.py").touch()
    monkeypatch.setattr(libraries, "_candidates", lambda: [str(place) for place in places])
    _, outside = credentials.hand_out(
        plan(places[0], secret("env", "K", base_url="")), {"K": REAL}, "/h", ()
    )
    assert outside["library"] == str(places[1])


def test_the_library_of_this_interpreter_is_found() -> None:
    pytest.importorskip("cryptography")
    assert libraries.find(lambda _: True)
