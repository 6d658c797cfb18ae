"""`sandboxctl doctor`: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.cli import doctor
from agent_sandbox.errors import UsageError
from agent_sandbox.policy.diagnosis import FAIL, OK, WARN, Finding
from conftest import As

FINDINGS = (
    Finding(check="machine", status=OK, cause="x86_64"),
    Finding(check="Landlock", status=WARN, cause="ABI 4", remedy="a newer kernel"),
    Finding(check="user namespace", status=FAIL, cause="no", remedy="first\n  second"),
    Finding(check="mounts", status=FAIL, cause="no", remedy="first\n  second"),
)
REFUSED = "bwrap: No permissions to create a new namespace"


@pytest.fixture
def refusing(tmp_path: Path) -> str:
    """A bwrap on a machine that lets it do nothing."""
    path = tmp_path / "bwrap"
    path.write_text(
        "#!/bin/sh\n"
        f'case $1 in --version|--help) exec {shutil.which("bwrap")} "$@";; esac\n'
        f"echo '{REFUSED}' >&2; exit 1\n"
    )
    path.chmod(0o755)
    return str(path)


def test_the_report_has_a_line_for_each_check() -> None:
    """Remedies below it, none twice, and the verdict last."""
    assert doctor.render(FINDINGS, colour=False).splitlines() == [
        "ok    machine         x86_64",
        "warn  Landlock        ABI 4",
        "        a newer kernel",
        "FAIL  user namespace  no",
        "        first",
        "          second",
        "FAIL  mounts          no",
        "        as for 'user namespace'",
        "",
        "this machine cannot run agent-sandbox: 2 checks fail",
    ]
    assert doctor.render(FINDINGS[:2], colour=False).endswith(
        "\n\nthis machine can run agent-sandbox"
    )


def test_the_report_is_json_for_programs() -> None:
    """With a version, and remedies in full."""
    report = json.loads(doctor.render_json(FINDINGS))
    assert (report["version"], report["ok"]) == (1, False)
    assert report["checks"][3] == {
        "check": "mounts", "status": "fail", "cause": "no", "remedy": "first\n  second",
    }  # fmt: skip
    assert json.loads(doctor.render_json(FINDINGS[:2]))["ok"] is True


def test_only_warnings_do_not_fail() -> None:
    """They say what is weaker, not what is missing."""
    assert doctor.works(FINDINGS[:2])
    assert not doctor.works(FINDINGS)


@pytest.mark.parametrize("argument", ["--yaml", "now", "--bwrap"])
def test_unknown_arguments_are_errors(argument: str) -> None:
    """Nothing is tried then."""
    with pytest.raises(UsageError, match=argument):
        doctor.main([argument])


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """And tries nothing."""
    assert doctor.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--json", "--bwrap"))


@pytest.mark.kernel
def test_a_working_machine_passes(runner: As) -> None:
    """As root and as a user, for people and for programs."""
    done = runner.sandboxctl("doctor")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith("\nthis machine can run agent-sandbox\n")
    assert "\x1b" not in done.stdout
    report = json.loads(runner.sandboxctl("doctor", "--json").stdout)
    assert report["ok"] is True
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn"}
    assert all(check["remedy"] for check in report["checks"] if check["status"] == "warn")


@pytest.mark.kernel
def test_it_works_from_anywhere(runner: As) -> None:
    """Also where no project could be."""
    for place in ("/", "/usr/bin"):
        assert "bwrap is not on the PATH" not in runner.sandboxctl("doctor", cwd=place).stdout


@pytest.mark.kernel
def test_a_machine_that_refuses_fails(refusing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 1 and the reason."""
    assert doctor.main(["--bwrap", refusing]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  user namespace        " in shown
    assert REFUSED in shown
    assert "this machine cannot run agent-sandbox: 7 checks fail" in shown
    assert doctor.main([f"--bwrap={refusing}", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_machine_without_bwrap_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With how to install it; everything else is still read."""
    assert doctor.main(["--bwrap", f"{tmp_path}/none"]) == 1
    shown = capsys.readouterr().out
    assert "no such file or directory" in shown
    assert "ok    machine" in shown
    assert doctor.explain_failure(None).startswith("FAIL  bwrap  bwrap is not on the PATH\n")


@pytest.mark.kernel
def test_a_failed_start_is_explained(refusing: str) -> None:
    """By what fails, and by nothing else."""
    text = doctor.explain_failure(refusing, f"{REFUSED}\n")
    assert text.startswith("FAIL  user namespace")
    assert REFUSED in text
    assert "ok  " not in text
    assert text.endswith("\n")


@pytest.mark.kernel
def test_a_failed_start_on_a_working_machine_is_explained() -> None:
    """By what bwrap said, whose control characters do not reach the terminal."""
    program = shutil.which("bwrap")
    text = doctor.explain_failure(program, "bwrap: Can't bind \x1b[2J/x\n")
    assert text.startswith("FAIL  this sandbox  bwrap: Can't bind ?[2J/x\n")
    assert "--debug" in text
    assert "bwrap ended before the command started" in doctor.explain_failure(program)


@pytest.mark.kernel
def test_agent_sandbox_itself_prints_the_diagnosis(runner: As) -> None:
    """Where namespaces cannot be made: here, inside a bwrap that forbids further ones."""
    project = runner.project()
    around = ["bwrap", "--unshare-user", "--disable-userns", "--dev-bind", "/", "/", "--"]
    assert runner.run([*around, "true"]).returncode == 0
    done = runner.run([*around, *runner.command("run", "true")], cwd=project)
    assert done.returncode == 125
    assert "agent-sandbox: error: cannot build the sandbox" in done.stderr
    assert "FAIL  user namespace" in done.stderr
    assert "user.max_user_namespaces" in done.stderr


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals(user: As, env: dict[str, str], coloured: bool) -> None:
    """Unless the user wants none."""
    ours, theirs = pty.openpty()
    try:
        process = user.popen(
            user.command("ctl", "doctor"), env={"TERM": "xterm", **env}, stdout=theirs,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # EIO: the other side is closed
            pass
        assert process.wait(60) == 0
    finally:
        os.close(ours)
    assert (b"\x1b[32mok" in shown) == coloured
    assert b"this machine can run" in shown
