"""`sandboxctl audit`: reads, proves, copies and shortens the trail."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import As

from agent_sandbox.cli import ctl
from agent_sandbox.service.audit import Audit, places

from .audit_trails import AGENT, Clock, findings, logs, make, split, write

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = ctl.main(["audit", *map(str, words)])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture
def data(tmp_path: Path) -> Path:
    found = tmp_path / "data"
    found.mkdir(mode=0o700)
    make(found / "audit")
    return found


# --- verify


def test_a_whole_trail_is_said_to_be_whole(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "verify", "--data", data)
    assert code == 0
    assert out.startswith("whole: 12 lines in ")
    head = out.split()[-1]
    assert run(capfd, "verify", "--head", head, "--data", data)[0] == 0
    code, out, _ = run(capfd, "verify", "--head", "12:" + "0" * 64, "--data", data)
    assert code == 1
    assert "that was expected" in out
    code, out, _ = run(capfd, "verify", "--json", "--data", data)
    found = json.loads(out)
    assert (found["ok"], found["lines"], found["head"]) == (True, 12, head)


def test_damage_is_told_with_its_place_and_the_exit_code(
    data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = logs(data / "audit")[1]
    path.write_bytes(path.read_bytes().replace(b'"echo"', b'"true"', 1))
    code, out, _ = run(capfd, "verify", "--data", data)
    assert code == 1
    assert f"{path.name}:1: was changed" in out
    assert "NOT whole" in out
    code, out, _ = run(capfd, "verify", "--json", "--data", data)
    assert code == 1
    assert json.loads(out)["findings"][0]["file"] == path.name


def test_it_works_as_each_identity(runner: As) -> None:
    data = runner.project() / "data"
    runner.sandboxctl("token", "new", "worker", "--data", data)
    done = runner.sandboxctl("audit", "verify", "--data", data)
    assert (done.returncode, done.stderr) == (0, "")
    done = runner.sandboxctl("audit", "tail", "--data", data)
    assert "token.new owner sbx_" in done.stdout


def test_another_user_reads_nothing(user: As, superuser: As) -> None:
    data = superuser.project() / "data"
    superuser.sandboxctl("token", "new", "worker", "--data", data)
    for action in ("tail", "verify", "export"):
        done = user.sandboxctl("audit", action, "--data", data)
        assert done.returncode == 125
        assert done.stdout == ""


def test_where_there_is_no_trail_it_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capfd, "verify", "--data", tmp_path / "none")
    assert code == 125
    assert "no audit trail" in err
    assert not (tmp_path / "none").exists()


# --- tail


def test_the_last_lines_are_shown_in_order(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "tail", "-n", "3", "--data", data)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()] == ["9", "10", "11"]
    assert "allow exec.start worker exc-11 echo 11" in out
    _, out, _ = run(capfd, "tail", "-n", "3", "--json", "--data", data)
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [10, 11, 12]


def test_lines_are_filtered(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    audit = Audit(str(data / "audit"), clock=Clock(1_800_000_000.0))
    audit.write(
        AGENT.replace(name="other"), "sandbox.create", decision="deny", rule="limits.max_memory",
        reason="too much",
    )  # fmt: skip
    for words in (
        ("--decision", "deny"), ("--agent", "other"), ("--action", "sandbox"),
        ("--since", "2027-01-01"),
    ):  # fmt: skip
        _, out, _ = run(capfd, "tail", *words, "--data", data)
        assert len(out.splitlines()) == 1
        assert "deny sandbox.create other [limits.max_memory] too much" in out
    assert run(capfd, "tail", "--until", "2020-01-01", "--data", data)[1] == ""
    assert run(capfd, "tail", "--target", "exc-3", "--data", data)[1].count("\n") == 1


def test_a_line_cannot_drive_the_terminal(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    audit = Audit(str(data / "audit"))
    audit.write(AGENT.replace(name="\x1b[2J"), "x", reason="a\nb\x1b]0;t\x07", target="\u202e")
    _, out, _ = run(capfd, "tail", "-n", "1", "--data", data)
    assert out.count("\n") == 1
    assert out[:-1].isprintable()


def test_new_lines_are_followed(data: Path) -> None:

    script = "import sys; from agent_sandbox.cli import ctl; sys.exit(ctl.main())"
    command = [sys.executable, "-c", script, "audit", "tail", "-f", "-n", "1", "--data", str(data)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    ) as process:
        assert process.stdout is not None
        try:
            # What was there; then it follows.
            assert "exc-11" in process.stdout.readline()
            audit = Audit(str(data / "audit"), rotate_bytes=1000)
            for number in range(100, 105):
                write(audit, number)
                assert f"exc-{number}" in process.stdout.readline()
        finally:
            process.terminate()


# --- export


def test_a_copy_has_the_lines_as_they_are(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = b"".join(path.read_bytes() for path in logs(data / "audit"))
    code, out, _ = run(capfd, "export", "--data", data)
    assert (code, out) == (0, whole.decode())
    copy = tmp_path / "copy"
    code, out, err = run(capfd, "export", "-o", copy, "--data", data)
    assert (code, out) == (0, "")
    assert "12 lines" in err
    assert copy.read_bytes() == whole
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    # It replaces nothing.
    code, _, err = run(capfd, "export", "-o", copy, "--data", data)
    assert code == 125
    assert copy.read_bytes() == whole
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert run(capfd, "export", "-o", tmp_path / "link", "--data", data)[0] == 125
    assert not (tmp_path / "target").exists()


def test_a_part_is_exported(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capfd, "export", "--since", "2023-11-14T22:13:22Z", "--until", "2023-11-14T22:13:24Z",
        "--data", data,
    )  # fmt: skip
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [4, 5, 6, 7]


# --- prune


def test_old_files_are_removed_and_the_trail_stays_whole(
    data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = logs(data / "audit")
    code, out, err = run(capfd, "prune", "--keep-days", "30", "--data", data)
    assert code == 0, err
    assert out.splitlines() == [f"removed {path.name}" for path in before[:-1]]
    assert findings(data / "audit") == []
    record = json.loads(split(logs(data / "audit")[-1])[-1])
    assert (record["action"], record["actor"]["agent"]) == ("audit.prune", "owner")
    # What is young stays.
    assert run(capfd, "prune", "--keep-days", "30000", "--data", data)[1] == ""
    assert run(capfd, "verify", "--data", data)[0] == 0


def test_a_damaged_trail_is_not_shortened(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (data / "audit" / places.name_of(1)).unlink()
    before = logs(data / "audit")
    code, _, err = run(capfd, "prune", "--keep-days", "1", "--data", data)
    assert code == 125
    assert "not whole" in err
    assert logs(data / "audit") == before


@pytest.mark.parametrize(
    "words",
    [
        (), ("burn",), ("tail", "x"), ("tail", "-n", "0"), ("tail", "-n", "many"),
        ("tail", "--since", "yesterday"), ("verify", "--head", "x"), ("verify", "--head", "1:2"),
        ("prune",), ("prune", "--keep-days", "0"), ("prune", "--keep-days", "-1"), ("export", "-x"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_mistakes_are_told(
    data: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    before = [path.read_bytes() for path in logs(data / "audit")]
    code, out, err = run(capfd, *words, "--data", data)
    assert (code, out) == (125, "")
    assert err.startswith("sandboxctl: error: ")
    assert [path.read_bytes() for path in logs(data / "audit")] == before
