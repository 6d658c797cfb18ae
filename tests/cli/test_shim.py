"""Shims: typing a name means the sandboxed one, and never a loop.

A stand-in for agent-sandbox says what it was asked; tests/kernel/test_whereabouts.py has the real.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.cli import shim, shim_text
from agent_sandbox.errors import CommandError, HostError, UsageError
from conftest import must_work

SYSTEM = "/usr/bin:/bin"
STAND_IN = '#!/bin/sh\necho "sandboxed:$AGENT_SANDBOX_SHIM" "$@"\n'


class Home:
    """A home with a stand-in for agent-sandbox, and directories with programs."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.shims = base / "data" / "agent-sandbox" / "shims"
        self.ours = self.program("ours", "agent-sandbox", STAND_IN)
        self.env = {
            "HOME": str(base), "XDG_DATA_HOME": str(base / "data"), "SHELL": "/bin/bash",
            "XDG_CONFIG_HOME": str(base / "config"),
        }  # fmt: skip
        monkeypatch.setattr("sys.argv", [str(base / "ours" / "sandboxctl")])
        self._patch = monkeypatch
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("ZDOTDIR", raising=False)
        self.path(str(self.shims), str(base / "bin"), SYSTEM)

    def path(self, *parts: str) -> str:
        """Set PATH."""
        self.env["PATH"] = ":".join(parts)
        self._patch.setenv("PATH", self.env["PATH"])
        return self.env["PATH"]

    def program(self, place: str, name: str, text: str = "") -> Path:
        """An executable script; without a text it says where it is."""
        path = self.base / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or f'#!/bin/sh\necho "{place}/{name}" "$@"\n')
        path.chmod(0o755)
        return path

    def type(self, name: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """What a shell does with a name."""
        return subprocess.run(
            ["/usr/bin/env", name, *args], env={**self.env, **env}, cwd=self.base,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(Path(os.path.realpath(tmp_path)), monkeypatch)


def test_a_typed_name_is_the_sandboxed_program(home: Home) -> None:
    """By its own path, with its arguments as they are."""
    real = home.program("bin", "claude")
    assert home.type("claude", "a").stdout == "bin/claude a\n"  # the control
    assert shim.main(["install", "claude"]) == 0
    done = home.type("claude", "-p", "a  b", "", "*", "--")
    assert (done.stdout, done.returncode) == (f"sandboxed:1 -- {real} -p a  b  * --\n", 0)


def test_a_shim_passes_on_exit_code_and_input(home: Home) -> None:
    """It becomes the program."""
    home.ours.write_text('#!/bin/sh\nshift; exec "$@"\n')
    home.program("bin", "claude", "#!/bin/sh\ncat; exit 37\n")
    shim.main(["install", "claude"])
    done = subprocess.run(
        [home.shims / "claude"], env=home.env, input=b"in", capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == (b"in", 37)


@pytest.mark.parametrize("word", ["false", "0", "off", "no", "False", "OFF"])
def test_the_way_round(home: Home, word: str) -> None:
    """AGENT_SANDBOX=false runs the program itself, and says so; nothing else does."""
    home.program("bin", "claude")
    shim.main(["install", "claude"])
    done = home.type("claude", "x", AGENT_SANDBOX=word)
    assert done.stdout == "bin/claude x\n"
    assert "without a sandbox" in done.stderr
    for other in ("", "true", "falsey", "-"):
        assert home.type("claude", AGENT_SANDBOX=other).stdout.startswith("sandboxed:1 -- ")


def test_a_shim_survives_upgrades(home: Home) -> None:
    """What is found is what is there at the call: replaced, moved, or in another directory."""
    real = home.program("bin", "claude")
    shim.main(["install", "claude"])
    real.unlink()
    home.program("versions", "2.0")
    real.symlink_to(home.base / "versions" / "2.0")
    assert home.type("claude").stdout == f"sandboxed:1 -- {real}\n"
    real.unlink()
    other = home.program("other/bin", "claude")
    home.path(str(home.shims), str(home.base / "bin"), str(other.parent), SYSTEM)
    assert home.type("claude").stdout == f"sandboxed:1 -- {other}\n"


def test_a_shim_does_not_find_itself(home: Home) -> None:
    """Not when its directory is on PATH twice, behind a link, or when a link leads to it."""
    real = home.program("bin", "claude")
    shim.main(["install", "claude"])
    (home.base / "link").symlink_to(home.shims)
    (home.base / "mine").mkdir()
    (home.base / "mine" / "claude").symlink_to(home.shims / "claude")
    others = [str(home.base / "link"), str(home.shims), str(home.base / "mine")]
    for first in others:
        home.path(first, *others, str(real.parent), SYSTEM)
        assert home.type("claude").stdout == f"sandboxed:1 -- {real}\n"


def test_another_directory_of_shims_is_passed_by(home: Home) -> None:
    """Such as that of another XDG_DATA_HOME."""
    real = home.program("bin", "claude")
    shim.main(["install", "claude"])
    shutil.copytree(home.shims, home.base / "old")
    home.path(str(home.base / "old"), str(home.shims), str(real.parent), SYSTEM)
    assert home.type("claude").stdout == f"sandboxed:1 -- {real}\n"


@pytest.mark.parametrize("off", ["", "false"])
def test_a_loop_ends(home: Home, off: str) -> None:
    """Copies of shims that lead to each other, and a wrapper that calls its own name."""
    home.ours.write_text('#!/bin/sh\nshift; exec "$@"\n')
    home.program("bin", "claude")
    shim.main(["install", "claude"])
    for place in ("one", "two"):
        home.program(place, "claude", (home.shims / "claude").read_text())
    home.path(*(str(home.base / p) for p in ("one", "two")), SYSTEM)
    done = home.type("claude", AGENT_SANDBOX=off)
    assert done.returncode == 125
    assert "leads to itself" in done.stderr
    home.program("bin", "claude", "#!/bin/sh\nclaude\nexit $?\n")
    home.path(str(home.shims), str(home.base / "bin"), SYSTEM)
    done = home.type("claude", AGENT_SANDBOX=off)
    assert done.returncode == 125
    assert done.stderr.count("leads to itself") == 1


def test_agents_that_start_agents_are_no_loop(home: Home) -> None:
    """Three levels deep."""
    home.ours.write_text('#!/bin/sh\nshift; exec "$@"\n')
    nested = '#!/bin/sh\n[ $# = 0 ] && echo deep && exit\nshift\nclaude "$@"\n'
    home.program("bin", "claude", nested)
    shim.main(["install", "claude"])
    assert home.type("claude", "1", "2", "3").stdout == "deep\n"


def test_a_relative_directory_is_not_searched(home: Home) -> None:
    """What '.' holds belongs to whoever wrote the project."""
    shim.main(["install", "claude"])
    home.program(".", "claude")
    home.path(str(home.shims), ".", "", SYSTEM)
    assert home.type("claude").returncode == 127
    (home.shims / "claude").unlink()
    assert home.type("claude").stdout == "./claude\n"  # the control: env finds it


def test_without_agent_sandbox_nothing_runs(home: Home) -> None:
    """The shim fails closed; the way round stays open; a new place on PATH will do."""
    real = home.program("bin", "claude")
    shim.main(["install", "claude"])
    home.ours.unlink()
    done = home.type("claude")
    assert (done.returncode, done.stdout) == (125, "")
    assert home.type("claude", AGENT_SANDBOX="false").stdout == "bin/claude\n"
    home.program("bin", "agent-sandbox", STAND_IN)
    assert home.type("claude").stdout == f"sandboxed:1 -- {real}\n"


def test_without_the_program_there_is_an_error(home: Home) -> None:
    shim.main(["install", "claude"])
    done = home.type("claude")
    assert done.returncode == 127
    assert "cannot find a claude" in done.stderr


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "-x", ".x", "a b", "a'b", "a\nb", "é", "sh", "agent-sandbox"]
)
def test_names_that_are_no_commands(home: Home, name: str) -> None:
    with pytest.raises(UsageError):
        shim.main(["install", "--", name])
    assert not home.shims.exists()


def test_what_is_not_ours_stays(home: Home) -> None:
    """Neither install nor remove touches another file in the directory."""
    shim.main(["install", "codex"])
    other = home.shims / "claude"
    other.write_text("#!/bin/sh\necho mine\n")
    with pytest.raises(HostError, match="something else"):
        shim.main(["install", "claude"])
    with pytest.raises(UsageError):
        shim.main(["remove", "claude"])
    assert "mine" in other.read_text()


# --- start-up files

SHELLS = {
    "bash": (".bashrc", ["bash", "--norc", "--noprofile", "-c", '. "$HOME/.bashrc"; {}']),
    "zsh": (".zshrc", ["zsh", "-f", "-c", '. "$HOME/.zshrc"; {}']),
    "fish": ("config/fish/conf.d/agent-sandbox.fish", ["fish", "-c", "{}"]),
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("data", ["data", "it's a $HOME"])
def test_a_new_shell_finds_the_shims_first(
    home: Home, shell: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when PATH has them somewhere behind; twice is as once; and removing restores it."""
    must_work(shutil.which(shell), f"needs {shell}")
    name, line = SHELLS[shell]
    home.env["SHELL"], home.env["XDG_DATA_HOME"] = f"/usr/bin/{shell}", str(home.base / data)
    for key in ("SHELL", "XDG_DATA_HOME"):
        monkeypatch.setenv(key, home.env[key])
    shims = home.base / data / "agent-sandbox" / "shims"
    home.program("bin", "claude")
    file = home.base / name
    before = "" if shell == "fish" else "# mine\nalias x=y"
    if before:
        file.write_text(before)
        file.chmod(0o600)
    for _ in range(2):
        assert shim.main(["install", "claude", "--rc"]) == 0
    assert file.read_text().count(shim_text.BEGIN) == 1
    for path in (f"{home.base}/bin:{SYSTEM}", f"{home.base}/bin:{shims}:{SYSTEM}"):
        argv = [word.format("command -v claude; echo $PATH") for word in line]
        done = subprocess.run(
            argv, env={**home.env, "PATH": path}, capture_output=True, text=True, check=False
        )
        found, path_now = done.stdout.splitlines()
        assert found == f"{shims}/claude", done.stderr
        assert path_now.count(str(shims)) == 1
    assert shim.main(["remove", "claude"]) == 0
    assert not shims.exists()
    if before:
        assert file.read_text() == before + "\n"
        assert file.stat().st_mode & 0o777 == 0o600
    else:
        assert not file.exists()


def test_without_rc_no_file_is_touched(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """The line is shown instead."""
    (home.base / ".bashrc").write_text("# mine\n")
    home.path(SYSTEM)
    shim.main(["install", "claude"])
    assert (home.base / ".bashrc").read_text() == "# mine\n"
    assert shim_text.line("bash", str(home.shims)) in capsys.readouterr().err


def test_a_linked_start_up_file_stays_a_link(home: Home) -> None:
    """Dotfiles often lie in a repository."""
    real = home.base / "dotfiles"
    real.write_text("# mine\n")
    (home.base / ".bashrc").symlink_to(real)
    shim.main(["install", "claude", "--rc"])
    assert (home.base / ".bashrc").is_symlink()
    assert shim_text.BEGIN in real.read_text()


def test_half_a_block_is_left_alone() -> None:
    """Whoever removed the end would lose the rest of the file."""
    text = f"a\n{shim_text.BEGIN}\nb\n"
    assert shim_text.without_block(text) == text


# --- status


def status(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    capsys.readouterr()
    code = shim.main(["status", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 1
    return code, {one["name"]: one for one in told["shims"]}


def test_status_tells_what_is_wrong(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "_version", lambda real: f"1.0 {Path(real).name}")
    real = home.program("bin", "claude")
    shim.main(["install", "claude", "codex"])
    code, found = status(capsys)
    assert (code, found["claude"]["state"], found["codex"]["state"]) == (1, shim.OK, shim.MISSING)
    assert (found["claude"]["real"], found["claude"]["version"]) == (str(real), "1.0 claude")
    shim.main(["remove", "codex"])
    assert status(capsys)[0] == 0

    def closed(real: str) -> str:
        raise CommandError(f"cannot run '{real}'", hint="h", code="c", exit_code=126)

    monkeypatch.setattr(shim, "_version", closed)
    code, found = status(capsys)
    assert (code, found["claude"]["state"]) == (1, shim.CLOSED)
    monkeypatch.setattr(shim, "_version", lambda _: "")

    home.path(str(home.base / "bin"), str(home.shims), SYSTEM)
    code, found = status(capsys)
    assert (code, found["claude"]["state"]) == (1, shim.HIDDEN)
    assert str(real) in found["claude"]["detail"]

    home.path(str(home.shims), str(home.base / "bin"), SYSTEM)
    script = home.shims / "claude"
    script.write_text(script.read_text() + "# older\n")
    assert status(capsys)[1]["claude"]["state"] == shim.STALE
    shim.main(["install", "claude"])
    assert status(capsys)[1]["claude"]["state"] == shim.OK

    home.program("copy", "claude", script.read_text())
    home.path(str(home.shims), str(home.base / "copy"), SYSTEM)
    assert status(capsys)[1]["claude"]["state"] == shim.LOOP


def test_status_without_shims(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert shim.main(["status"]) == 0
    assert "no shims" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["install"], ["remove"], ["remove", "--all", "x"], ["status", "x"], ["x"],
              ["install", "--json", "x"]]
)  # fmt: skip
def test_words_that_make_no_sense(home: Home, words: list[str]) -> None:
    with pytest.raises(UsageError):
        shim.main(words)
