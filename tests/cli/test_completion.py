"""Completion scripts: each shell accepts its own, and offers what the tables have."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from agent_sandbox.cli import completion, ctl, options
from agent_sandbox.errors import UsageError
from conftest import must_work

MAKERS = {"bash": completion.bash, "zsh": completion.zsh, "fish": completion.fish}


def shell(name: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a shell without the user's own settings."""
    must_work(shutil.which(name), f"needs {name}")
    bare = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[name]
    return subprocess.run(
        [name, *bare, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_shell_can_parse_its_script(name: str) -> None:
    """No syntax error."""
    must_work(shutil.which(name), f"needs {name}")
    done = subprocess.run(
        [name, "-n"], input=MAKERS[name](), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", MAKERS)
def test_every_flag_and_verb_is_offered(name: str) -> None:
    """The scripts come from the tables."""
    script = MAKERS[name]()
    for flag in options.TABLE:
        assert flag.name.removeprefix("--") in script
    for verb in ctl.VERBS:
        assert verb.name in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("agent-sandbox --net", "--network"),
        ("agent-sandbox --network = pub", "public"),
        ("agent-sandbox --network = le", "learn"),
        ("agent-sandbox --pub", "--publish"),
        ("agent-sandbox --home pri", "private"),
        ("agent-sandbox --profile cla", "claude"),
        ("sandboxctl doc", "doctor"),
        ("sandboxctl completion fi", "fish"),
        ("sandboxctl quarantine re", "restore"),
    ],
)
def test_bash_completes(words: str, expected: str) -> None:
    """By the function that the script registers."""
    function = "_sandboxctl" if words.startswith("sandboxctl") else "_agent_sandbox"
    array = " ".join(f"'{word}'" for word in words.split())
    done = shell(
        "bash",
        f"{completion.bash()}\nCOMP_WORDS=({array}); COMP_CWORD={len(words.split()) - 1}; "
        f"{function}; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    )
    assert expected in done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [("agent-sandbox --net", "--network"), ("sandboxctl doc", "doctor")],
)
def test_fish_completes(words: str, expected: str) -> None:
    """By fish's own engine."""
    done = shell("fish", f"{completion.fish()}\ncomplete -C '{words}'")
    assert any(line.startswith(expected) for line in done.stdout.splitlines()), done.stderr


def test_zsh_registers_both_commands() -> None:
    """With its completion system loaded."""
    done = shell(
        "zsh",
        "autoload -Uz compinit && compinit -D\n"
        + completion.zsh()
        + "\nprint $_comps[agent-sandbox] $_comps[sandboxctl]",
    )
    assert done.stdout.split() == ["_agent_sandbox", "_sandboxctl"], done.stderr


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_other_shells_are_a_usage_error(arguments: list[str]) -> None:
    """That names those that work."""
    with pytest.raises(UsageError, match="bash, zsh, fish"):
        completion.main(arguments)
