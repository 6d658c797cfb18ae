"""The docker backend with a real dockerd: commands, their end, life and files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend.docker import DockerBackend
from agent_sandbox.service.backend.interface import Files, Terminal
from agent_sandbox.service.values import Resources
from engine import Engine

from .service_lab import (
    BOUNDS,
    MIB,
    PATIENCE,
    SHELLS,
    Stage,
    bytes_of,
    content,
    joined,
    left,
    perform,
    refused,
    shell_images,
    tar,
)  # fmt: skip

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def images(daemon: Engine) -> dict[str, str]:
    return shell_images(daemon)


@pytest.fixture(params=SHELLS)
def image(request: pytest.FixtureRequest, images: dict[str, str]) -> str:
    return images[request.param]


# --- commands


def test_a_command_has_its_streams_directory_variables_and_user(daemon: Engine, image: str) -> None:
    async def story(stage: Stage) -> None:
        text = 'pwd; echo "$HOME $A $B"; id -u; echo wrong >&2; exit 7'
        ended, out, err = await stage.sh(text, env={"B": "2"})
        assert (ended.code, ended.started, ended.signal) == (7, True, "")
        assert (out, err) == ("/workspace\n/home/agent 1 2\n1000\n", "wrong\n")
        ended, out, _ = await stage.sh("pwd; touch x; touch ~/y", cwd="/home/agent")
        assert (ended.code, out) == (0, "/home/agent\n")

    perform(daemon, story, image, env={"A": "1", "B": "1"})


NOT_STARTED = [
    (("no-such-program",), "", 127, "not found"),
    (("/bin/no-such-program",), "", 127, "not found"),
    (("/etc/passwd",), "", 126, "not executable"),
    (("/etc",), "", 126, "not executable"),
    (("true",), "/nowhere", 126, "working directory"),
    (("true",), "/etc/passwd", 126, "working directory"),
]


def test_a_command_that_cannot_start_says_why(daemon: Engine, image: str) -> None:
    async def story(stage: Stage) -> None:
        for argv, cwd, code, why in NOT_STARTED:
            running, said = await stage.start(*argv, cwd=cwd)
            ended = await running.wait()
            assert (ended.code, ended.started, said) == (code, False, [])
            assert why in ended.error
        # Control: these codes can also be a command's own.
        for code in (126, 127):
            ended, _, _ = await stage.sh(f"exit {code}")
            assert (ended.code, ended.started, ended.error) == (code, True, "")

    perform(daemon, story, image)


def test_arguments_arrive_as_they_are(daemon: Engine, image: str) -> None:
    words = ["", " ", "a b", "$HOME", "`id`", "*", "\n", "-n", "'\"", "ä", "\\", "!1"]

    async def story(stage: Stage) -> None:
        running, said = await stage.start("sh", "-c", 'for w; do echo "[$w]"; done', "x", *words)
        await running.wait()
        assert joined(said, 1) == "".join(f"[{word}]\n" for word in words)

    perform(daemon, story, image)


def test_input_is_passed_on_and_ends(daemon: Engine, image: str) -> None:
    data = os.urandom(3 * MIB)

    async def story(stage: Stage) -> None:
        running, said = await stage.start("cat", input=True)
        await running.write(data[:MIB])
        await running.write(data[MIB:])
        await running.close_input()
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert ended.code == 0
        assert b"".join(piece for _, piece in said) == data
        with pytest.raises(BrokenPipeError):
            await running.write(b"x")
        # Without input there is none.
        ended, out, _ = await stage.sh("cat; echo end")
        assert out == "end\n"

    perform(daemon, story, image)


def test_a_terminal_has_a_size_that_can_change(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        # The engine sets the size just after the start.
        text = """until [ "$(stty size)" = "30 91" ]; do sleep 0.01; done
trap 'stty size; exit 4' WINCH; echo up; while :; do sleep 0.05; done"""
        running, said = await stage.start("sh", "-c", text, terminal=Terminal(rows=30, columns=91))
        await said.word("up")
        await running.resize(Terminal(rows=40, columns=92))
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert ended.code == 4
        assert "40 92" in joined(said, 1)
        # Ctrl-D is the end of the input.
        running, said = await stage.start("cat", terminal=Terminal())
        await running.write(b"hello\n")
        await said.word("hello")
        await running.close_input()
        assert (await asyncio.wait_for(running.wait(), PATIENCE)).code == 0

    perform(daemon, story)


def test_a_signal_reaches_the_commands_own_handler(daemon: Engine, image: str) -> None:
    async def story(stage: Stage) -> None:
        text = "trap 'echo caught; exit 5' TERM; echo up; while :; do sleep 0.05; done"
        running, said = await stage.start("sh", "-c", text)
        await said.word("up")
        await running.signal(signal.SIGTERM)
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert (ended.code, joined(said, 1)) == (5, "up\ncaught\n")
        running, said = await stage.start("sleep", "1000")
        await running.signal(signal.SIGINT)
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert (ended.code, ended.signal) == (130, "SIGINT")

    perform(daemon, story, image)


def test_a_child_that_keeps_the_pipes_neither_delays_the_end_nor_outlives_it(
    daemon: Engine, image: str
) -> None:
    async def story(stage: Stage) -> None:
        ended, out, _ = await stage.sh("sleep 1001 & (setsid sleep 1002 &); echo done")
        assert (ended.code, out) == (0, "done\n")
        assert await stage.processes() == []

    perform(daemon, story, image)


def test_a_kill_ends_all_of_an_execution_and_nothing_else(daemon: Engine, image: str) -> None:
    async def story(stage: Stage) -> None:
        # Its children leave the session, ignore signals, and have no environment left to tell.
        text = """trap '' TERM INT HUP
(setsid env -i sh -c "trap '' TERM; echo up; sleep 1001" &)
sleep 1002"""
        victim, heard = await stage.start("sh", "-c", text)
        other, said = await stage.start("sh", "-c", "(setsid sleep 1003 &); echo up; sleep 1004")
        await heard.word("up")
        await said.word("up")
        await victim.kill()
        ended = await asyncio.wait_for(victim.wait(), PATIENCE)
        assert (ended.code, ended.signal) == (137, "SIGKILL")
        running = " ".join(await stage.processes())
        assert "1001" not in running
        assert "1002" not in running
        # Control: the other one is all there.
        assert "sleep 1003" in running
        assert "sleep 1004" in running
        await other.kill()
        assert (await asyncio.wait_for(other.wait(), PATIENCE)).code == 137
        assert await stage.processes() == []

    perform(daemon, story, image)


def test_memory_is_bounded_and_the_kill_is_told(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        hog = "x=$(head -c {} /dev/zero | tr '\\0' a); echo ${{#x}}"
        ended, out, _ = await stage.sh(hog.format(200_000_000))
        assert (ended.code, ended.exceeded, out) == (137, "memory", "")
        # Control: less of it is fine, and a kill by hand is no limit.
        ended, out, _ = await stage.sh(hog.format(1_000_000))
        assert (ended.exceeded, out) == ("", "1000000\n")
        ended, _, _ = await stage.sh("kill -9 $$")
        assert (ended.code, ended.exceeded) == (137, "")

    perform(daemon, story)


def test_processes_are_bounded(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        _, out, err = await stage.sh("for i in $(seq 40); do sleep 9 & done; echo all")
        assert "fork" in err
        assert out == ""

    perform(daemon, story, resources=BOUNDS.replace(pids=24))
    perform(daemon, _forty)


async def _forty(stage: Stage) -> None:
    # Control: with the usual bound they fit.
    _, out, _ = await stage.sh("for i in $(seq 40); do sleep 9 & done; echo all")
    assert out == "all\n"


def test_one_file_is_never_larger_than_the_disk_limit(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh("dd if=/dev/zero of=big bs=1M count=40; wc -c <big")
        assert out == f"{16 * MIB}\n"

    perform(daemon, story)


def test_output_of_many_megabytes_is_complete(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        total = 0

        def sink(_: int, data: bytes) -> None:
            nonlocal total
            total += len(data)

        from agent_sandbox.service.backend.interface import Start

        start = Start(
            execution="e", argv=("sh", "-c", "dd if=/dev/zero bs=1M count=40 2>/dev/null")
        )
        running = await stage.backend.start(stage.sandbox, start, sink)
        assert (await asyncio.wait_for(running.wait(), PATIENCE)).code == 0
        assert total == 40 * MIB

    perform(daemon, story)


# --- life


def test_a_second_sandbox_of_the_same_id_is_an_error_and_changes_nothing(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        await stage.sh("echo mine >f")
        assert await refused(stage.backend.create(stage.sandbox)) == "CONFLICT"
        _, out, _ = await stage.sh("cat f")
        assert out == "mine\n"

    perform(daemon, story)


def test_a_container_that_has_ended_is_started_again_with_its_files(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        await stage.sh("echo kept >f; echo kept >~/g")
        stage.daemon.run("kill", stage.name)
        _, out, _ = await stage.sh("cat f ~/g")
        assert out == "kept\nkept\n"

    perform(daemon, story)


def test_a_paused_sandbox_stands_still_and_goes_on(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        running, said = await stage.start("sh", "-c", "while :; do echo x; sleep 0.02; done")
        await said.word("x")
        await stage.backend.pause(stage.sandbox)
        state = stage.daemon.run("inspect", "-f", "{{.State.Paused}}", stage.name).stdout.strip()
        assert state == "true"
        assert await refused(stage.sh("true")) == "WRONG_STATE"
        count = len(said)
        await stage.backend.resume(stage.sandbox)
        await said.until(lambda: len(said) > count + 3)
        await running.kill()
        await running.wait()

    perform(daemon, story)


def test_usage_is_what_is_used(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        before = await stage.backend.usage(stage.sandbox)
        running, said = await stage.start(
            "sh", "-c", "dd if=/dev/zero of=f bs=1M count=3; chmod 000 f; echo up; sleep 1000"
        )
        await said.word("up")
        after = await stage.backend.usage(stage.sandbox)
        assert before.disk is not None
        assert after.disk is not None
        assert after.disk - before.disk >= 3 * MIB
        assert after.pids is not None
        assert after.pids > (before.pids or 0)
        assert 0 < (after.memory or 0) < 64 * MIB
        await running.kill()

    perform(daemon, story)


def test_a_file_cannot_be_hidden_from_the_measure(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        await stage.sh("mkdir d; dd if=/dev/zero of=d/f bs=1M count=5; chmod 000 d")
        # Control: inside, nobody sees it any more.
        _, out, _ = await stage.sh("du -sk . 2>/dev/null")
        assert int(out.split()[0]) < 1024
        usage = await stage.backend.usage(stage.sandbox)
        assert (usage.disk or 0) >= 5 * MIB
        # What the engine says itself, for a service that is not root.
        stage.backend._disk._places = dict.fromkeys(stage.backend._disk._places, "")
        usage = await stage.backend.usage(stage.sandbox)
        assert (usage.disk or 0) >= 5 * MIB

    perform(daemon, story)


def test_a_service_that_a_mode_stops_does_not_measure_by_walking() -> None:
    code = "from agent_sandbox.service.backend.docker_disk import sees_all; print(sees_all())"
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    for prefix, wanted in ((bare, "False\n"), ([], "True\n")):
        done = subprocess.run(
            [*prefix, sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == wanted


KILLED = """
import asyncio, sys
from agent_sandbox.service.backend.docker import DockerBackend
from agent_sandbox.service.backend.interface import Start
from agent_sandbox.service.values import RUNNING, Sandbox
async def main():
    backend = DockerBackend(sys.argv[1], instance=sys.argv[2])
    sandbox = Sandbox(id="sbx-k", owner="a", backend="docker", state=RUNNING,
                      digest=await backend.resolve("busybox:test"))
    await backend.create(sandbox)
    text = "echo kept >f; trap '' TERM; while :; do sleep 1000; done"
    await backend.start(sandbox, Start(execution="e", argv=("sh", "-c", text)), lambda *_: None)
    print("up", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_no_process_outlives_a_service_that_was_killed(daemon: Engine) -> None:
    instance = "0123456789abcdef"
    name = f"agent-sandbox-{instance}-sbx-k"
    # Control: a container of somebody else goes on.
    daemon.run("run", "-d", "--network=none", "--name=goes-on", "busybox:test", "sleep", "1000")
    service = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(daemon.socket), instance], stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        assert service.stdout is not None
        assert service.stdout.readline() == b"up\n"
        # Control: it runs as long as the service does.
        assert daemon.run("inspect", "-f", "{{.State.Running}}", name).stdout == "true\n"
        service.kill()
        daemon.run("wait", name, timeout=PATIENCE)
        assert daemon.run("inspect", "-f", "{{.State.Running}}", "goes-on").stdout == "true\n"
        asyncio.run(_restarted(daemon, instance, name))
    finally:
        service.kill()
        service.communicate()
        daemon.run("rm", "-f", "goes-on", name, check=False)
    assert left(daemon, instance) == []


async def _restarted(daemon: Engine, instance: str, name: str) -> None:
    from agent_sandbox.service.values import RUNNING, Sandbox

    sandbox = Sandbox(id="sbx-k", owner="a", backend="docker", state=RUNNING)
    backend = DockerBackend(str(daemon.socket), instance=instance)
    assert await backend.reconcile({"sbx-k": sandbox}) == {"sbx-k"}
    stage = Stage(backend, sandbox, daemon)
    _, out, _ = await stage.sh("cat f")
    assert out == "kept\n"
    # What is not known goes, and its volumes with it.
    assert await backend.reconcile({}) == frozenset()
    await backend.close()
    assert daemon.run("inspect", name, check=False).returncode != 0


def test_reconcile_leaves_other_services_and_other_containers_alone(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        other = DockerBackend(str(daemon.socket), instance="fedcba9876543210")
        await other.create(stage.sandbox)
        forged = "org.agent-sandbox.service.sandbox=" + stage.sandbox.id
        daemon.run("run", "-d", "--network=none", "--name=alien", "--label", forged, "busybox:test",
                   "sleep", "1000")  # fmt: skip
        try:
            assert await stage.backend.reconcile({}) == frozenset()
            assert daemon.run("inspect", stage.name, check=False).returncode != 0
            # The other service's sandbox of the same id, and the alien, run on.
            for name in (stage.name.replace(stage.backend._instance, "fedcba9876543210"), "alien"):
                found = daemon.run("inspect", "-f", "{{.State.Running}}", name).stdout
                assert found == "true\n"
        finally:
            await other.delete(stage.sandbox)
            await other.close()
            daemon.run("rm", "-f", "alien")

    perform(daemon, story)


def test_an_image_without_a_shell_leaves_nothing(daemon: Engine, tmp_path: Path) -> None:
    empty = tmp_path / "empty.tar"
    empty.write_bytes(tar(("hello", b"x", "")))
    daemon.run("import", empty, "no-shell:test")
    with pytest.raises(Exception, match="needs /bin/sh"):
        perform(daemon, _forty, "no-shell:test")


def test_a_runtime_that_the_engine_lacks_is_refused_clearly(daemon: Engine) -> None:
    async def story() -> tuple[bool, str, str]:
        backend = DockerBackend(str(daemon.socket), instance="0" * 16, required="runsc")
        support = await backend.probe()
        from agent_sandbox.service.values import RUNNING, Sandbox

        digest = await backend.resolve("busybox:test")
        sandbox = Sandbox(id="s", owner="a", backend="docker", state=RUNNING, digest=digest)
        return support.ok, support.reason, await refused(backend.create(sandbox))

    assert asyncio.run(story()) == (
        False, "the engine does not have the required runtime 'runsc'", "BACKEND_UNAVAILABLE",
    )  # fmt: skip
    assert left(daemon, "0" * 16) == []


def test_a_runtime_that_the_engine_has_is_used(daemon: Engine) -> None:
    async def story(stage: Stage) -> str:
        return daemon.run("inspect", "-f", "{{.HostConfig.Runtime}}", stage.name).stdout

    assert perform(daemon, story, runtime="io.containerd.runc.v2") == "io.containerd.runc.v2\n"


# --- files


def test_a_file_is_written_read_listed_and_removed(daemon: Engine, image: str) -> None:
    async def story(stage: Stage) -> None:
        files = stage.files
        path = "/workspace/a/b/ü x\n'.txt"
        entry = await files.write(path, bytes_of(b"hel", b"lo\0"), limit=100, mode=0o640)
        assert (entry.path, entry.kind, entry.size, entry.mode) == (path, "file", 6, 0o640)
        assert await files.entry(path) == entry
        found, pieces = await files.read(path, 2)
        assert (found.size, await content(pieces)) == (6, b"llo\0")
        _, out, _ = await stage.sh("stat -c '%u %a' a a/b a/b/*")
        assert out == "1000 755\n1000 755\n1000 640\n"
        await stage.sh("ln -s b a/link; mkfifo a/p")
        listed, more = await files.list("/workspace", depth=9, most=100)
        assert [(one.path, one.kind, one.target) for one in listed] == [
            ("/workspace/a", "directory", ""), ("/workspace/a/b", "directory", ""),
            (path, "file", ""), ("/workspace/a/link", "symlink", "b"),
            ("/workspace/a/p", "other", ""),
        ]  # fmt: skip
        assert not more
        listed, more = await files.list("/workspace", depth=1, most=100)
        assert ([one.path for one in listed], more) == (["/workspace/a"], False)
        listed, more = await files.list("/workspace", depth=9, most=2)
        assert (len(listed), more) == (2, True)
        # A link that stays inside is followed; the path is the one that was asked for.
        entry, pieces = await files.read(path.replace("/b/", "/link/"))
        assert (entry.path, await content(pieces)) == (path.replace("/b/", "/link/"), b"hello\0")
        assert (await files.entry("/workspace/a/link")).target == "b"
        assert await refused(files.delete("/workspace/a", recursive=False)) == "CONFLICT"
        await files.delete("/workspace/a/link", recursive=False)
        await files.delete("/workspace/a", recursive=True)
        assert await refused(files.entry("/workspace/a")) == "NOT_FOUND"
        assert await refused(files.delete("/workspace/a", recursive=True)) == "NOT_FOUND"
        made = await files.make("/home/agent/x/y")
        assert (made.path, made.kind) == ("/home/agent/x/y", "directory")
        assert await files.make("/home/agent/x/y") == made

    perform(daemon, story, image)


def put(path: str, *pieces: bytes) -> Callable[[Files], Coroutine[Any, Any, Any]]:
    return lambda files: files.write(path, bytes_of(*pieces), limit=4)


REFUSED: list[tuple[str, Callable[[Files], Coroutine[Any, Any, Any]]]] = [
    ("NOT_FOUND", lambda files: files.read("/workspace/none")),
    ("CONFLICT", lambda files: files.read("/workspace/f/x")),
    ("NOT_FOUND", lambda files: files.read("/workspace/broken")),
    ("NOT_FOUND", lambda files: files.entry("/workspace/none")),
    ("NOT_FOUND", lambda files: files.list("/workspace/none", depth=1, most=1)),
    ("NOT_FOUND", lambda files: files.pack("/workspace/none")),
    ("CONFLICT", lambda files: files.read("/workspace")),
    ("CONFLICT", lambda files: files.read("/workspace/d")),
    ("CONFLICT", lambda files: files.read("/workspace/p")),
    ("CONFLICT", lambda files: files.make("/workspace/f")),
    ("CONFLICT", put("/workspace/d", b"")),
    ("CONFLICT", put("/workspace/f/x", b"")),
    ("TOO_LARGE", put("/workspace/n", b"12", b"345")),
    ("FORBIDDEN", put("/tmp/x", b"")),
    ("FORBIDDEN", lambda files: files.delete("/workspace", recursive=True)),
    ("FORBIDDEN", lambda files: files.read("/etc/passwd")),
    ("FORBIDDEN", lambda files: files.read("/workspacex")),
    ("INVALID", lambda files: files.read("/workspace/../etc/passwd")),
    ("INVALID", lambda files: files.read("workspace/f")),
    ("INVALID", lambda files: files.entry("/workspace/./f")),
    ("INVALID", lambda files: files.read("/workspace/a\0b")),
]


def test_files_that_cannot_be_what_is_asked_are_refused(daemon: Engine, image: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.sh("mkdir d; mkfifo p; echo x >f; ln -s nowhere broken")
        found = [await refused(doing(stage.files)) for _, doing in REFUSED]
        assert found == [code for code, _ in REFUSED]
        assert await refused(stage.files.entry("/workspace/n")) == "NOT_FOUND"
        # Control.
        assert await refused(put("/workspace/n", b"1234")(stage.files)) == ""

    perform(daemon, story, image)


def test_a_file_is_replaced_as_one_step(daemon: Engine) -> None:
    size = 4 * MIB

    async def story(stage: Stage) -> None:
        # Somebody looks all the time: there is always a whole file.
        look = "echo up; while :; do wc -c <f; [ -e stop ] && exit; done | uniq"
        await stage.files.write("/workspace/f", bytes_of(b"a" * size), limit=size)
        running, said = await stage.start("sh", "-c", look)
        await said.word("up")
        for letter in (b"b", b"c", b"d"):
            await stage.files.write("/workspace/f", bytes_of(letter * size), limit=size)
        await stage.sh("touch stop")
        await running.wait()
        assert joined(said, 1) == f"up\n{size}\n"
        listed, _ = await stage.files.list("/workspace", depth=1, most=9)
        assert [one.path for one in listed] == ["/workspace/f", "/workspace/stop"]

    perform(daemon, story)


def test_an_upload_that_breaks_off_leaves_nothing(daemon: Engine) -> None:
    async def broken() -> object:
        yield b"half"
        raise ConnectionResetError

    async def story(stage: Stage) -> None:
        with pytest.raises(ConnectionResetError):
            await stage.files.write("/workspace/f", broken(), limit=100)  # type: ignore[arg-type]
        listed, _ = await stage.files.list("/workspace", depth=1, most=9)
        assert listed == []

    perform(daemon, story)


def test_a_tree_goes_out_and_comes_back(daemon: Engine, image: str) -> None:
    async def story(stage: Stage) -> None:
        text = """mkdir -p t/d; echo one >t/d/1; ln t/d/1 t/d/2; ln -s d/1 t/l; ln -s /usr/bin/x t/a
chmod 750 t/d; chmod 700 t/d/1; mkfifo t/p; touch t/empty"""
        await stage.sh(text)
        packed = await content(await stage.files.pack("/workspace/t"))
        assert await stage.files.unpack("/workspace/n/t", bytes_of(packed), limit=MIB) == 6
        check = """cd n/t; cat d/1 d/2 l; readlink l; readlink a; stat -c '%a %u' d d/1; ls"""
        _, out, _ = await stage.sh(check)
        wanted = "one\none\none\nd/1\n/usr/bin/x\n750 1000\n700 1000\na\nd\nempty\nl\n"
        assert out == wanted
        single = await content(await stage.files.pack("/workspace/t/d/1"))
        assert await stage.files.unpack("/workspace/s", bytes_of(single), limit=MIB) == 1
        assert (await stage.files.entry("/workspace/s/1")).size == 4

    perform(daemon, story, image)


def test_archives_that_are_too_large_or_broken_are_refused(daemon: Engine) -> None:
    import gzip

    async def story(stage: Stage) -> None:
        unpack = stage.files.unpack
        bomb = gzip.compress(tar(("zero", bytes(30 * MIB), "")))
        assert len(bomb) < MIB
        assert await refused(unpack("/workspace", bytes_of(bomb), limit=MIB)) == "TOO_LARGE"
        for wrong in (b"x" * 600, tar(("a", b"x" * 9000, ""))[:3000], tar(("../a", b"", ""))):
            assert await refused(unpack("/workspace", bytes_of(wrong), limit=MIB)) == "INVALID"
        # Control.
        assert await unpack("/workspace", bytes_of(tar(("fine", b"x", ""))), limit=MIB) == 1

    perform(daemon, story)


def test_inspection_shows_every_protection(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        (found,) = json.loads(daemon.run("inspect", stage.name).stdout)
        host = found["HostConfig"]
        assert host["Memory"] == host["MemorySwap"] == 64 * MIB
        assert (host["NanoCpus"], host["PidsLimit"]) == (2_000_000_000, 64)
        assert [one["Type"] for one in found["Mounts"]] == ["volume", "volume"]
        assert found["HostConfig"]["LogConfig"]["Type"] == "none"
        assert list(found["NetworkSettings"]["Networks"]) == ["none"]

    perform(daemon, story, resources=Resources(memory=64 * MIB, cpus=2.0, pids=64, disk=MIB))
