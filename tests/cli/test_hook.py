"""The hook for Claude Code: it replaces the command, or the command does not run.

What the real program does with it is in tests/agents.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.cli import hook, ourselves
from agent_sandbox.errors import HostError, UsageError
from conftest import must_work

SANDBOX = "/opt/it's here/agent-sandbox"
COMMANDS = (
    "echo hi", "echo 'a  b' \"$HOME\" `id` $(id)", "cat <<X\n$HOME\n'\"\nX", "a && b; c | d & e",
    "'", "''", "\\", "!!", "echo \N{SNOWMAN}", "# only a comment", "x\t\ny",
)  # fmt: skip


def call(command: object = "echo hi", tool: str = "Bash", **more: Any) -> bytes:
    """What Claude Code writes to a hook."""
    given = {"command": command, **more.pop("tool_input", {})}
    told = {"hook_event_name": "PreToolUse", "tool_name": tool, "tool_input": given, "cwd": "/p"}
    return json.dumps({**told, **more}).encode()


def specific(data: bytes, *flags: str, approve: bool = False) -> dict[str, Any]:
    said = hook.decide(data, SANDBOX, list(flags), approve=approve)
    assert list(said) == ["hookSpecificOutput"]
    told = said["hookSpecificOutput"]
    assert isinstance(told, dict)
    assert told["hookEventName"] == "PreToolUse"
    return told


def test_only_the_command_is_replaced() -> None:
    """Claude takes the answer for the whole input."""
    data = call("ls", tool_input={"description": "d", "timeout": 5, "run_in_background": True})
    told = specific(data, "--network=off")
    line = "AGENT_SANDBOX=on '/opt/it'\\''s here/agent-sandbox' '--network=off' '--' 'bash' '-c'"
    assert told["updatedInput"] == {
        "command": f"{line} 'ls'", "description": "d", "timeout": 5, "run_in_background": True,
    }  # fmt: skip


def test_nothing_is_approved_unless_asked_for() -> None:
    """Claude's own questions stay."""
    assert "permissionDecision" not in specific(call())
    assert specific(call(), approve=True)["permissionDecision"] == "allow"


@pytest.mark.parametrize("shell", ["bash", "zsh", "dash"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_shell_outside_reads_one_word(tmp_path: Path, shell: str, command: str) -> None:
    """Whatever the model wrote, only agent-sandbox runs outside, and gets exactly that."""
    must_work(shutil.which(shell), f"needs {shell}")
    sandbox = tmp_path / "it's here"
    sandbox.write_text('#!/bin/sh\nprintf "%s\\0" "$AGENT_SANDBOX" "$@"\n')
    sandbox.chmod(0o755)
    line = hook.wrapped(command, str(sandbox), ["--ro", "a b"])
    done = subprocess.run(
        [shell, "-c", line], env={"AGENT_SANDBOX": "false", "PATH": "/usr/bin:/bin"},
        capture_output=True, check=False,
    )  # fmt: skip
    words = done.stdout.decode().split("\0")[:-1]
    assert words == ["on", "--ro", "a b", "--", "bash", "-c", command], done.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"{}", call(None), call(3), call("a\0b"), call(tool="Edit"),
        call(hook_event_name="PostToolUse"), b"[" * 100_000,
        json.dumps({"hook_event_name": "PreToolUse", "tool_name": "Bash"}).encode(),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_cannot_be_read_is_blocked(
    data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 2: any other code would let Claude run the command as it is."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    monkeypatch.setattr(ourselves, "find", lambda _name: SANDBOX)
    assert hook.main(["claude"]) == 2
    assert capsys.readouterr().out == ""


def test_without_agent_sandbox_it_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(call())))
    monkeypatch.setattr(ourselves, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    monkeypatch.setattr("sys.argv", [str(tmp_path / "sandboxctl")])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hook.main(["claude"]) == 2
    assert "cannot find" in capsys.readouterr().err


@pytest.mark.parametrize("data", [call(tool="PowerShell"), call(None, tool="Monitor")])
def test_tools_without_a_shell_are_denied(data: bytes) -> None:
    if b"Monitor" in data:
        data = data.replace(b'"command": null', b'"ws": {}')
    assert specific(data)["permissionDecision"] == "deny"


def test_the_answer_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(call("ls"))))
    monkeypatch.setattr(ourselves, "find", lambda _name: SANDBOX)
    assert hook.main(["claude", "--approve", "--ro", "x"]) == 0
    told = json.loads(capsys.readouterr().out)["hookSpecificOutput"]
    assert told["updatedInput"]["command"].endswith(" '--ro' 'x' '--' 'bash' '-c' 'ls'")
    assert told["permissionDecision"] == "allow"


# --- settings

OWN: dict[str, Any] = {
    "model": "x",
    "env": {"A": "b"},
    "hooks": {
        "PreToolUse": [{"matcher": "Edit", "hooks": [{"type": "command", "command": "mine"}]}],
        "Stop": [{"hooks": []}],
    },
}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = Path(os.path.realpath(tmp_path))
    for name in ("agent-sandbox", "sandboxctl"):
        (base / name).write_text("#!/bin/sh\n")
        (base / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(base))
    monkeypatch.setenv("XDG_DATA_HOME", str(base / "data"))
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.setattr("sys.argv", [str(base / "sandboxctl")])
    return base / ".claude" / "settings.json"


@pytest.mark.parametrize("way", [[], ["--prefix"]])
@pytest.mark.parametrize("before", [None, {}, OWN])
def test_settings_of_the_user_stay(settings: Path, way: list[str], before: object) -> None:
    """Installed twice is installed once; removed, the file says what it said."""
    if before is not None:
        settings.parent.mkdir()
        settings.write_text(json.dumps(before))
        settings.chmod(0o600)
    for _ in range(2):
        assert hook.main(["install", "claude", *way]) == 0
    text = settings.read_text()
    assert text.count("sandboxctl" if not way else "claude-shell") == 1
    if before:
        found = json.loads(text)
        assert found["model"] == "x"
        assert found["env"]["A"] == "b"
        assert found["hooks"]["PreToolUse"][0] == OWN["hooks"]["PreToolUse"][0]
        assert settings.stat().st_mode & 0o777 == 0o600
    assert hook.main(["remove", "claude"]) == 0
    assert json.loads(settings.read_text()) == (before or {})
    assert not list((settings.parent.parent / "data").rglob("claude-shell"))


def test_the_other_way_takes_the_first_ones_place(settings: Path) -> None:
    """Both at once would be a sandbox in a sandbox."""
    hook.main(["install", "claude"])
    hook.main(["install", "claude", "--prefix"])
    assert "hooks" not in json.loads(settings.read_text())
    hook.main(["install", "claude"])
    assert "env" not in json.loads(settings.read_text())


def entry(settings: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(settings.read_text())["hooks"]["PreToolUse"][0]["hooks"][0]
    return found


@pytest.mark.parametrize("broken", ["gone", "fails"])
def test_the_installed_line_fails_closed(settings: Path, broken: str) -> None:
    """Our command may be gone, or broken: the code is 2 in either case."""
    hook.main(["install", "claude"])
    program = settings.parent.parent / "sandboxctl"
    line = entry(settings)["command"]
    assert entry(settings)["onFailure"] == "block"
    assert subprocess.run(["sh", "-c", line], check=False).returncode == 0  # the control
    if broken == "gone":
        program.unlink()
    else:
        program.write_text("#!/bin/sh\nexit 1\n")
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)
    assert done.returncode == 2


def test_the_prefix_hands_over_one_word(settings: Path) -> None:
    """Claude quotes the whole setting: it can only be a program."""
    base = settings.parent.parent
    (base / "agent-sandbox").write_text('#!/bin/sh\nprintf "%s\\0" "$AGENT_SANDBOX" "$@"\n')
    hook.main(["install", "claude", "--prefix", "--network=off"])
    program = json.loads(settings.read_text())["env"]["CLAUDE_CODE_SHELL_PREFIX"]
    env = {"PATH": "/usr/bin:/bin", "AGENT_SANDBOX": "false"}
    done = subprocess.run([program, "a 'b'\n$c"], env=env, capture_output=True, check=False)
    words = done.stdout.decode().split("\0")[:-1]
    assert words == ["on", "--network=off", "--", "bash", "-c", "a 'b'\n$c"]
    (base / "agent-sandbox").unlink()
    assert subprocess.run([program, "true"], capture_output=True, check=False).returncode != 0


def test_settings_for_everybody_name_a_program_for_everybody(
    settings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root's home is closed to others; both ways of asking know what is ours."""
    managed = "/etc/claude-code/managed-settings.json"
    hook.main(["print", "claude", "--prefix", "--settings", managed])
    shown = json.loads(capsys.readouterr().out)
    assert shown["env"] == {hook.PREFIX: "/etc/claude-code/agent-sandbox/claude-shell"}
    assert hook.cleaned(shown) == {}


def test_print_changes_nothing(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hook.main(["print", "claude", "--approve"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "'--approve'" in shown["hooks"]["PreToolUse"][0]["hooks"][0]["command"]
    assert not settings.exists()


@pytest.mark.parametrize("text", ["{", "[]", "// comment\n{}"])
def test_settings_that_are_no_table_are_left_alone(settings: Path, text: str) -> None:
    settings.parent.mkdir()
    settings.write_text(text)
    with pytest.raises(HostError):
        hook.main(["install", "claude"])
    assert settings.read_text() == text


@pytest.mark.parametrize(
    "words",
    [
        [], ["x"], ["install"], ["install", "codex"], ["install", "claude", "--nonsense"],
        ["install", "claude", "word"], ["install", "claude", "--debug"],
        ["install", "claude", "--prefix", "--approve"],
    ],
)  # fmt: skip
def test_words_that_make_no_sense(settings: Path, words: list[str]) -> None:
    """Flags are checked now, not at every call."""
    with pytest.raises(UsageError):
        hook.main(words)
    assert not settings.exists()
