"""The command: exit codes, formats, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from compose.conftest import TEAM, Ctl
from conftest import ROOT

SOCK = "/var/run/docker.sock:/var/run/docker.sock"
BAD = f"services:\n  a:\n    image: x\n    volumes: ['{SOCK}']\n"
CLEAN = (
    "services:\n  a:\n    image: x\n    user: '1000'\n    mem_limit: 1g\n    pids_limit: 9\n"
    "    cpus: 1\n    security_opt: ['no-new-privileges:true']\n"
)
MEDIUM = CLEAN.replace("'1000'", "root")


@pytest.mark.parametrize(
    ("text", "flags", "code"),
    [
        (CLEAN, (), 0), (CLEAN, ("--fail-on", "low"), 0), (BAD, (), 1), (MEDIUM, (), 0),
        (MEDIUM, ("--fail-on=medium",), 1), (BAD, ("--fail-on", "critical"), 1),
        (BAD, ("--fail-on", "never"), 125), (BAD, ("--what",), 125), ("a: [", (), 125),
        (BAD, ("--json", "--sarif"), 125), (BAD, ("--fail-on",), 125),
    ],
)  # fmt: skip
def test_exit_codes_of_check(ctl: Ctl, text: str, flags: tuple[str, ...], code: int) -> None:
    ctl.write("c.yml", text)
    done = ctl("check", "c.yml", *flags)
    assert done.returncode == code, done.stderr
    assert ("error:" in done.stderr) == (code == 125)


@pytest.mark.parametrize(
    "words", [(), ("chek",), ("secure",), ("secure", "c.yml", "--solution", "x", "-o", "o")]
)
def test_wrong_words_are_refused(ctl: Ctl, words: tuple[str, ...]) -> None:
    ctl.write("c.yml", BAD)
    done = ctl(*words)
    assert (done.returncode, done.stdout) == (125, "")
    assert "hint:" in done.stderr


def test_a_missing_file_is_named(ctl: Ctl) -> None:
    done = ctl("check", "no.yml")
    assert done.returncode == 125
    assert "no.yml" in done.stderr
    assert ctl("check").returncode == 125


def test_text_says_where_what_why_and_fix(ctl: Ctl) -> None:
    ctl.write("c.yml", BAD)
    lines = ctl("check", "c.yml").stdout.splitlines()
    assert lines[0].startswith("c.yml:4: critical: a: mounts /var/run/docker.sock")
    assert lines[0].endswith("[docker-socket]")
    assert lines[1].startswith("    why: ")
    assert lines[2].startswith("    fix: ")
    assert lines[-1] == "c.yml: 1 critical, 3 low"


def test_json_and_sarif_are_readable(ctl: Ctl) -> None:
    ctl.write("c.yml", BAD)
    data = ctl.json("check", "c.yml")
    assert (data["version"], data["failing"], data["failOn"]) == (1, 1, "high")
    first = data["findings"][0]
    assert (first["rule"], first["file"], first["line"]) == ("docker-socket", "c.yml", 4)
    assert {"severity", "service", "message", "why", "fix", "accepted"} <= set(first)
    done = ctl("check", "c.yml", "--sarif")
    assert done.returncode == 1
    assert json.loads(done.stdout)["version"] == "2.1.0"


def test_colour_only_on_a_terminal(ctl: Ctl) -> None:
    ctl.write("c.yml", BAD)
    assert "\x1b" not in ctl("check", "c.yml").stdout
    for variables, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        ours, theirs = pty.openpty()
        code = "import sys; from agent_sandbox.cli.ctl import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "compose", "check", "c.yml"], stdout=theirs,
            cwd=ctl.directory, env={"PYTHONPATH": str(ROOT / "src"), **variables},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        while b"3 low" not in shown:
            shown += os.read(ours, 4096)
        process.wait(30)
        os.close(ours)
        assert (b"\x1b[" in shown) == coloured


def test_the_override_beside_a_file_counts(ctl: Ctl) -> None:
    ctl.write("compose.yaml", CLEAN)
    ctl.write("compose.override.yaml", f"services:\n  a:\n    volumes: ['{SOCK}']\n")
    assert ctl("check").returncode == 1
    assert ctl("check", "compose.yaml").returncode == 1
    assert ctl("check", "compose.yaml", "--no-override").returncode == 0
    assert ctl("check", "compose.override.yaml").returncode == 1


def test_a_planted_link_to_the_socket_is_seen(ctl: Ctl) -> None:
    (ctl.directory / "harmless").symlink_to("/run/docker.sock")
    ctl.write("c.yml", CLEAN + "    volumes: ['./harmless:/x']\n")
    assert ctl("check", "c.yml").returncode == 1


def test_env_files_and_accepted_findings(ctl: Ctl) -> None:
    ctl.write(
        "c.yml",
        CLEAN
        + "    volumes: ['${S:-./x}:/x']\n    labels: {agent-sandbox.accept: docker-socket}\n",
    )
    ctl.write("e", "S=/run/docker.sock\n")
    assert ctl("check", "c.yml", "--no-accept").returncode == 0
    assert ctl("check", "c.yml", "--env-file", "e").returncode == 0
    assert ctl("check", "c.yml", "--env-file", "e", "--no-accept").returncode == 1
    assert ctl("check", "c.yml", "--env-file", "none").returncode == 125


def test_secure_writes_over_nothing_unless_told(ctl: Ctl) -> None:
    ctl.write("c.yml", BAD)
    ctl.write("o.yml", "mine\n")
    words = ("secure", "c.yml", "--solution", "no-socket", "-o", "o.yml")
    done = ctl(*words)
    assert done.returncode == 125
    assert (ctl.directory / "o.yml").read_text() == "mine\n"
    assert ctl(*words, "--force").returncode == 0
    assert "docker.sock" not in (ctl.directory / "o.yml").read_text()
    assert sorted(os.listdir(ctl.directory)) == ["c.yml", "o.yml"]


def test_secure_follows_no_link(ctl: Ctl) -> None:
    target = ctl.write("target", "mine\n")
    ctl.write("c.yml", BAD)
    (ctl.directory / "o.yml").symlink_to(target)
    words = ("secure", "c.yml", "--solution", "no-socket", "-o", "o.yml")
    assert ctl(*words).returncode == 125
    assert ctl(*words, "--force").returncode == 0
    assert target.read_text() == "mine\n"


def test_secure_shows_the_diff_and_what_will_stop(ctl: Ctl) -> None:
    ctl.write("docker-compose.yml", (TEAM / "docker-compose.yml").read_text())
    done = ctl("secure", "docker-compose.yml", "--solution", "service", "-o", "s.yml")
    assert "-    - /var/run/docker.sock:/var/run/docker.sock  # to start jobs" in done.stdout
    assert "This will stop working:" in done.stdout
    assert "ALLOWED_IMAGES is empty" in done.stdout
    assert "shared-writable" in done.stdout


def fake_docker(directory: Path, body: str) -> str:
    path = directory / "bin" / "docker"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("echo '{\"runc\":{}}'", 125, "no runtime sysbox-runc, only: runc"),
        ('echo \'{"runc":{},"sysbox-runc":{}}\'', 0, ""),
        ("echo no engine >&2; exit 1", 125, "no engine"),
        ("echo '[]'", 125, "cannot ask"),
    ],
)
def test_sysbox_needs_its_runtime(ctl: Ctl, body: str, code: int, words: str) -> None:
    ctl.write("c.yml", BAD)
    path = fake_docker(ctl.directory, body)
    command = ("secure", "c.yml", "--solution", "sysbox", "-o", "s.yml")
    done = ctl(*command, PATH=path)
    assert done.returncode == code
    assert words in done.stderr
    if code:
        assert ctl(*command, "--no-runtime-check", PATH=path).returncode == 0


def test_without_the_library_the_remedy_is_named(ctl: Ctl) -> None:
    """`-S` leaves site-packages out, and an interpreter without the library finds none there."""
    ctl.write("c.yml", BAD)
    code = (
        "import sys; sys.modules['ruamel'] = None; "
        "from agent_sandbox.cli.ctl import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compose", "check", "c.yml"], cwd=ctl.directory,
        capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 125
    assert "agent-sandbox[compose]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_checkouts_command_finds_the_library(ctl: Ctl) -> None:
    """It starts with -I -S."""
    ctl.write("c.yml", BAD)
    entry = ROOT / "src" / "agent_sandbox" / "cli" / "entry.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", entry, "ctl", "compose", "check", "c.yml"],
        cwd=ctl.directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr


def test_completion_offers_what_there_is() -> None:
    from agent_sandbox.cli import completion
    from agent_sandbox.cli.compose import ACTIONS
    from agent_sandbox.compose.solutions import SOLUTIONS

    assert completion.COMPOSE == ACTIONS
    assert completion.SOLUTIONS == SOLUTIONS
    source = (ROOT / "src" / "agent_sandbox" / "cli" / "compose").rglob("*.py")
    text = "".join(path.read_text() for path in source)
    assert [flag for flag in completion.COMPOSE_FLAGS if f'"{flag}"' not in text] == []


def test_the_page_names_every_rule() -> None:
    from agent_sandbox.compose.rules import RULES

    page = (ROOT / "docs" / "compose.md").read_text()
    assert [rule.id for rule in RULES if f"`{rule.id}`" not in page] == []


def test_help_names_every_flag(ctl: Ctl) -> None:
    from agent_sandbox.cli import completion

    for words in (("--help",), ("check", "--help"), ("verify", "-h"), ("secure", "x", "--help")):
        done = ctl(*words)
        assert done.returncode == 0
        assert [flag for flag in completion.COMPOSE_FLAGS if flag not in done.stdout] == []
