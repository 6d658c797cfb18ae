"""`sandboxctl remote` against a real server: exit codes, streams, signals, files, a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from agent_sandbox.cli import completion, ctl, remote, remote_options
from agent_sandbox.cli.remote_copying import place
from agent_sandbox.cli.remote_options import parse
from agent_sandbox.client import values
from agent_sandbox.errors import UsageError
from conftest import As
from service.conftest import Team, _root_team, _user_team, one, serve, team  # noqa: F401

# --- the command line


@pytest.mark.parametrize(
    ("words", "action", "values", "rest"),
    [
        ("run true", "run", {}, "true"),
        ("run --memory 1G sh -c --env", "run", {"--memory": "1G"}, "sh -c --env"),
        ("run -i -- -x", "run", {"--interactive": True}, "-x"),
        ("--json list", "list", {"--json": True}, ""),
        ("list --json", "list", {"--json": True}, ""),
        ("exec -d sbx-1 ls -l", "exec", {"--detach": True}, "sbx-1 ls -l"),
        ("exec sbx-1 --cwd /tmp ls -l", "exec", {"--cwd": "/tmp"}, "sbx-1 ls -l"),
        ("exec sbx-1 -- --cwd", "exec", {}, "sbx-1 --cwd"),
        ("run --env=A=b --env C= true", "run", {"--env": {"A": "b", "C": ""}}, "true"),
        ("run --allow a --allow b true", "run", {"--allow": ["a", "b"]}, "true"),
        ("run --timeout 1.5 --pids 9 x", "run", {"--timeout": 1.5, "--pids": 9}, "x"),
        ("run --retry true", "run", {"--retry": True}, "true"),
        ("cp - sbx-1:x", "cp", {}, "- sbx-1:x"),
        ("shell", "shell", {}, ""),
        ("shell sbx-1 ls -l", "shell", {}, "sbx-1 ls -l"),
    ],
)
def test_words_are_understood(
    words: str, action: str, values: Mapping[str, object], rest: str
) -> None:
    found = parse(words.split())
    assert (found.action, found.values, " ".join(found.words)) == (action, values, rest)


@pytest.mark.parametrize("other", ["--tty", "--interactive"])
def test_input_that_comes_later_excludes_a_second_start(other: str) -> None:
    client: Any = None
    with pytest.raises(UsageError, match=f"--retry and {other}"):
        remote.run(client, parse(["run", "--retry", other, "true"]))


def test_a_lost_command_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    lost = values.result({"execId": "exc-1", "state": "Lost", "exitCode": None, "timedOut": True,
                          "error": "the node is gone"})  # fmt: skip
    assert remote.ended(lost, parse(["run", "true"])) == 125
    assert "the command was lost: the node is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "", "--json", "fly", "run --fly x", "list --memory 1G", "cp one", "rm", "logs", "logs a b",
        "run --memory", "run --timeout soon x", "run --timeout -1 x", "run --timeout nan x",
        "create extra", "run --env A x", "list --json=1", "kill",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_the_usage(words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert caught.value.hint.startswith("sandboxctl remote")


def test_the_tables_agree() -> None:
    assert set(remote.ACTS) == {action.name for action in remote_options.ACTIONS}
    usage = next(verb.usage for verb in ctl.VERBS if verb.name == "remote")
    assert usage.split(" ", 1)[0].split("|") == [action.name for action in remote_options.ACTIONS]
    for action in remote_options.ACTIONS:
        assert set(action.flags) <= set(remote_options.BY_NAME)
        assert action.help in remote_options.help_text(action.name)
        assert action.name in remote_options.help_text()


def test_completion_offers_the_actions() -> None:
    for script in (completion.bash(), completion.zsh(), completion.fish()):
        for action in remote_options.ACTIONS:
            assert action.name in script
        assert "metadata" in script


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("sbx-1:/workspace/a", ("sbx-1", "/workspace/a")), ("sbx-1:a:b", ("sbx-1", "a:b")),
        ("sbx-1:", ("sbx-1", "/workspace")), ("a", None), ("./a:b", None), ("/x:y", None),
        (":a", None), ("-", None),
    ],
)  # fmt: skip
def test_a_place_in_a_sandbox_is_told_from_a_path(word: str, found: tuple[str, str] | None) -> None:
    assert place(word) == found


# --- a real server


class Remote:
    """`sandboxctl remote` as one agent."""

    def __init__(self, team_: Team, agent: str = "a") -> None:
        self.identity: As = team_.served.identity
        self.env: dict[str, str | None] = {
            "SANDBOX_API": team_.served.url, "SANDBOX_TOKEN": team_.tokens[agent],
        }  # fmt: skip
        self.token = team_.tokens[agent]

    def command(self, *words: str | os.PathLike[str]) -> list[str]:
        return self.identity.command("ctl", "remote", *words)

    def __call__(
        self, *words: str | os.PathLike[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        options.setdefault("env", self.env)
        done = self.identity.run(self.command(*words), **options)
        assert self.token not in done.stdout + done.stderr
        return done

    def out(self, *words: str | os.PathLike[str], **options: Any) -> str:
        """What must work; its output."""
        done = self(*words, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def popen(self, *words: str | os.PathLike[str], **options: Any) -> subprocess.Popen[str]:
        return self.identity.popen(
            self.command(*words), env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, **options,
        )  # fmt: skip


@pytest.fixture
def ctl_(one: Team) -> Remote:  # noqa: F811 - a fixture
    return Remote(one)


@pytest.fixture
def box(ctl_: Remote) -> Iterator[str]:
    made = ctl_.out("create", "--metadata", "test=remote").strip()
    yield made
    ctl_("rm", made)


@pytest.mark.kernel
def test_a_command_is_as_if_it_ran_here(ctl_: Remote) -> None:
    done = ctl_("run", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert ctl_.out("run", "-c", "echo $A $#", "--env", "A=b") == "b 0\n"
    assert ctl_.out("run", "-i", "tr", "a-z", "A-Z", input="text") == "TEXT"


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("run", "true"), 0),
        (("run", "false"), 1),
        (("run", "-c", "kill -TERM $$"), 143),
        (("run", "no-such-program"), 127),
        (("run", "--timeout", "0.3", "sleep", "30"), 124),
        (("run", "--memory", "64T", "true"), 125),
        (("exec", "sbx-none", "true"), 125),
        (("rm", "sbx-none"), 125),
    ],
)
def test_exit_codes(ctl_: Remote, words: tuple[str, ...], code: int) -> None:
    done = ctl_(*words)
    assert done.returncode == code, done.stderr
    # What is not the command's own doing is said.
    assert (done.stderr != "") == (code in (124, 125, 127))


@pytest.mark.kernel
def test_a_result_for_programs(ctl_: Remote) -> None:
    done = ctl_("run", "--json", "-c", "echo out; echo err >&2; exit 3")
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["exitCode"], shown["stdout"], shown["stderr"]) == (
        3, 3, "out\n", "err\n",
    )  # fmt: skip


@pytest.mark.kernel
def test_sandboxes_from_first_to_last(ctl_: Remote, box: str) -> None:
    assert re.fullmatch("sbx-[a-z2-7]{26}", box)
    assert re.search(rf"{box}\s+Running\s+bwrap.*test=remote", ctl_.out("list"))
    ctl_.out("exec", box, "sh", "-c", "echo kept > file")
    assert ctl_.out("exec", "--cwd", "/workspace", box, "cat", "file") == "kept\n"
    assert [one_["id"] for one_ in json.loads(ctl_.out("list", "--json")) if one_["id"] == box]
    assert ctl_.out("ps", box).count(box) == 2
    assert "agent-a" in ctl_.out("whoami")
    assert json.loads(ctl_.out("whoami", "--json"))["agent"] == "agent-a"
    ctl_.out("rm", box)
    assert box not in ctl_.out("list")


@pytest.mark.kernel
def test_a_command_that_nobody_waits_for(ctl_: Remote, box: str) -> None:
    script = "echo one; while ! [ -e go ]; do sleep 0.05; done; echo two; echo three >&2"
    started = ctl_.out("exec", "-d", box, "-c", script).strip()
    follower = ctl_.popen("logs", "-f", started)
    assert follower.stdout is not None
    with follower:
        # The first line comes before the second is there.
        assert follower.stdout.readline() == "one\n"
        assert ctl_.out("logs", started) == "one\n"
        ctl_.out("exec", box, "touch", "go")
        out, err = follower.communicate(timeout=30)
    assert (out, err, follower.returncode) == ("two\n", "three\n", 0)
    done = ctl_("logs", started)
    assert (done.stdout, done.stderr) == ("one\ntwo\n", "three\n")
    endless = ctl_.out("exec", "-d", box, "sleep", "1000").strip()
    ctl_.out("kill", endless)
    assert re.search(rf"{endless}.*Exited\s+137", ctl_.out("ps", box))
    trapped = ctl_.out(
        "exec", "-d", box, "-c", "trap 'exit 9' INT; touch up; while :; do sleep 0.05; done"
    )
    ctl_.out("exec", box, "-c", "until [ -e up ]; do sleep 0.05; done")
    ctl_.out("kill", "-s", "sigint", trapped.strip())
    ctl_.out("logs", "-f", trapped.strip())
    assert re.search(rf"{trapped.strip()}.*Exited\s+9", ctl_.out("ps", box))


@pytest.mark.kernel
def test_our_signals_are_the_commands(ctl_: Remote, box: str) -> None:
    script = "trap 'echo caught; exit 7' INT; echo up; while :; do sleep 0.05; done"
    process = ctl_.popen("exec", box, "-c", script)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("caught\n", 7)
    # One that does not listen is ended by the second.
    script = "trap 'echo got' TERM; echo up; while :; do sleep 0.05; done"
    process = ctl_.popen("exec", box, "-c", script)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "got\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 137


@pytest.mark.kernel
def test_a_command_ends_when_its_reader_has_gone(ctl_: Remote, box: str) -> None:
    process = ctl_.popen("exec", box, "yes")
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "y\n"
        process.stdout.close()
        assert process.wait(30) == 141
    assert re.search(r"Exited\s+137\s+yes", ctl_.out("ps", box))


# --- files


@pytest.mark.kernel
def test_files_are_copied_as_cp_does(ctl_: Remote, box: str) -> None:
    place_ = ctl_.identity.project()
    tree = place_ / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "file").write_text("text")
    (tree / "sub" / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "sub" / "run").chmod(0o755)
    ctl_.identity.own(place_)

    def copy(source: object, target: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return ctl_("cp", str(source), str(target), cwd=place_, **options)

    # In: a file, to a name, into a directory; a tree, into a directory, to a name, its content.
    for source, target in (
        (tree / "sub" / "file", f"{box}:named"), (tree / "sub" / "file", f"{box}:"),
        ("tree", f"{box}:/workspace"), ("tree", f"{box}:other"), ("tree/.", f"{box}:content"),
    ):  # fmt: skip
        done = copy(source, target)
        assert done.returncode == 0, done.stderr
    found = set(ctl_.out("exec", box, "find", ".", "-type", "f").split())
    assert found == {
        "./named", "./file", "./tree/sub/file", "./tree/sub/run", "./other/sub/file",
        "./other/sub/run", "./content/sub/file", "./content/sub/run",
    }  # fmt: skip
    assert ctl_.out("exec", box, "./tree/sub/run") == "ran\n"
    # Out: a file to a name, into a directory; a tree to a name, into a directory.
    copy(f"{box}:named", "back")
    copy(f"{box}:named", place_ / "tree")
    copy(f"{box}:tree", "copied")
    copy(f"{box}:/workspace/tree/", "copied")
    assert (place_ / "back").read_text() == "text"
    assert (place_ / "tree" / "named").read_text() == "text"
    assert (place_ / "copied" / "sub" / "file").read_text() == "text"
    assert (place_ / "copied" / "tree" / "sub" / "run").stat().st_mode & 0o777 == 0o755
    # Streams.
    assert copy("-", f"{box}:typed", input="typed").returncode == 0
    assert copy(f"{box}:typed", "-").stdout == "typed"


@pytest.mark.kernel
def test_what_cannot_be_copied_is_told(ctl_: Remote, box: str) -> None:
    place_ = ctl_.identity.project()
    for source, target, code in (
        ("missing", f"{box}:x", 125), (f"{box}:missing", "x", 125), ("a", "b", 125),
        (f"{box}:a", f"{box}:b", 125),
    ):  # fmt: skip
        done = ctl_("cp", source, target, cwd=place_)
        assert (done.returncode, "error:" in done.stderr) == (code, True)
        assert "Traceback" not in done.stderr
    ctl_.out("exec", box, "sh", "-c", "mkdir t; ln -s /etc/passwd t/out; echo x > t/in")
    done = ctl_("cp", f"{box}:t", "t", cwd=place_)
    assert (done.returncode, "left out: out" in done.stderr) == (1, True)
    assert [path.name for path in (place_ / "t").iterdir()] == ["in"]


# --- a terminal


class Screen:
    """A program under a terminal of ours."""

    def __init__(self, run: Remote, *words: str, rows: int = 20, columns: int = 70) -> None:
        self.fd, inner = pty.openpty()
        self.resize(rows, columns, tell=False)
        self.before = termios.tcgetattr(inner)
        self._inner = inner
        self.process = run.identity.popen(
            run.command(*words), env=run.env, stdin=inner, stdout=inner, stderr=inner,
        )  # fmt: skip
        self.seen = b""

    def resize(self, rows: int, columns: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:
            # It is not the session's terminal, so the kernel does not tell.
            self.process.send_signal(signal.SIGWINCH)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while text.encode() not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, self.seen
            ready, _, _ = select.select([self.fd], [], [], left)
            if ready:
                self.seen += os.read(self.fd, 65536)

    def end(self) -> int:
        code = self.process.wait(30)
        # Ours is as it was.
        assert termios.tcgetattr(self._inner) == self.before
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.fd)
        os.close(self._inner)


@pytest.fixture
def screen(ctl_: Remote) -> Iterator[Any]:
    shown: list[Screen] = []

    def start(*words: str, **options: Any) -> Screen:
        shown.append(Screen(ctl_, *words, **options))
        return shown[-1]

    yield start
    for one_ in shown:
        one_.close()


@pytest.mark.kernel
def test_a_shell_under_our_terminal(screen: Any, ctl_: Remote, box: str) -> None:
    shown = screen("shell", box)
    shown.type("stty size; echo mark-$((1+1))\r")
    shown.wait_for("mark-2")
    assert b"20 70" in shown.seen
    shown.resize(33, 99)
    # The size travels beside what is typed, so it is asked for until it is there.
    shown.type("until stty size | grep '33 99'; do sleep 0.05; done; echo sized\r")
    shown.wait_for("33 99\r\n")
    # Ctrl-C is a key for the command, not our end.
    shown.type("sh -c 'echo in-$((3+3)); exec sleep 1000'\r")
    shown.wait_for("in-6")
    shown.type("\x03")
    shown.type("echo after-$((2+2))\r")
    shown.wait_for("after-4")
    shown.type("exit 5\r")
    assert shown.end() == 5


@pytest.mark.kernel
def test_a_shell_without_an_id_has_a_sandbox_of_its_own(screen: Any, ctl_: Remote) -> None:
    before = ctl_.out("list")
    shown = screen("shell", "--metadata", "shell=own")
    shown.type("echo $((40+2)) > f; cat f; exit\r")
    shown.wait_for("42\r\n")
    assert shown.end() == 0
    assert ctl_.out("list") == before


@pytest.mark.kernel
def test_exec_with_a_terminal(screen: Any, box: str) -> None:
    shown = screen(
        "exec", "-t", box, "sh", "-c", "test -t 0 && stty size; read x; echo got-$x; exit 6"
    )
    shown.wait_for("20 70")
    shown.type("key\r")
    shown.wait_for("got-key")
    assert shown.end() == 6


@pytest.mark.kernel
def test_a_terminal_that_is_killed_leaves_no_command(screen: Any, ctl_: Remote, box: str) -> None:
    shown = screen("exec", "-t", box, "sh", "-c", "echo up; sleep 1000")
    shown.wait_for("up")
    shown.process.send_signal(signal.SIGTERM)
    assert shown.end() == 143
    assert "Running" not in ctl_.out("ps", box)


# --- errors


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SANDBOX_TOKEN": None}, "SANDBOX_TOKEN"),
        ({"SANDBOX_TOKEN": "sbx_aaaaaaaa_" + "b" * 43}, "wrong, expired or revoked"),
        ({"SANDBOX_API": "http://127.0.0.1:1"}, "sandboxctl serve"),
        ({"SANDBOX_API": "unix:///no/such"}, "sandboxctl serve"),
        ({"SANDBOX_API": "gopher://x"}, "use http://"),
        ({"SANDBOX_TOKEN": None, "SANDBOX_TOKEN_FILE": "/no/such"}, "/no/such"),
        ({"SANDBOX_API": "https://127.0.0.1:1", "SANDBOX_CA": "/no/such"}, "SANDBOX_CA"),
    ],
)
def test_an_error_says_what_helps(ctl_: Remote, env: dict[str, str | None], said: str) -> None:
    done = ctl_("whoami", env={**ctl_.env, **env})
    assert done.returncode == 125
    assert done.stderr.startswith("sandboxctl: error: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.kernel
def test_flags_say_where_and_who(ctl_: Remote) -> None:
    file = ctl_.identity.project() / "token"
    file.write_text(ctl_.token + "\n")
    ctl_.identity.own(file)
    url = str(ctl_.env["SANDBOX_API"])
    assert "agent-a" in ctl_.out("--url", url, "--token-file", file, "whoami", env={})


@pytest.mark.kernel
def test_the_owner_needs_neither_token_nor_address(one: Team) -> None:  # noqa: F811 - a fixture
    run = Remote(one)
    assert "agent    owner" in run.out("whoami", env={"SANDBOX_DATA": str(one.served.data)})


def test_output_of_others_cannot_drive_our_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    remote.show_table([("ID", "METADATA"), ("sbx-1", "a=\x1b[2J\x07")])
    assert "\x1b" not in capsys.readouterr().out


def test_help_needs_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["run", "--help"]):
        assert remote.main(words) == 0
    assert "--memory" in capsys.readouterr().out
