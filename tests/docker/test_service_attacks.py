"""What a command in a container of the service tries, each with a control that shows it works."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from agent_sandbox.service.backend.docker import DockerBackend
from agent_sandbox.service.backend.docker_engine import Engine as Asked
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import RUNNING, Sandbox
from engine import Engine

from .service_lab import (
    MIB,
    PATIENCE,
    Stage,
    bytes_of,
    content,
    perform,
    refused,
    shell_images,
    tar,
)  # fmt: skip

MARK = "only-the-host-has-this"


@pytest.fixture(scope="module")
def gnu(daemon: Engine) -> str:
    return shell_images(daemon)["dash"]


# --- the host


def test_cannot_reach_the_engine(daemon: Engine) -> None:
    look = f"find / -xdev -name '*.sock' 2>/dev/null; ls /run /var/run {daemon.socket} 2>&1; true"

    async def story(stage: Stage) -> str:
        _, out, _ = await stage.sh(look)
        return out

    found = perform(daemon, story)
    assert "docker.sock" not in found.replace(f"{daemon.socket}: No such file", "")
    # Control: the same look finds it where somebody has mounted it.
    mounted = daemon.run(
        "run", "--rm", "--network=none", "-v", f"{daemon.socket}:/run/docker.sock", "busybox:test",
        "sh", "-c", look,
    )  # fmt: skip
    assert "docker.sock" in mounted.stdout


def test_cannot_read_or_write_the_hosts_files(daemon: Engine, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(MARK)
    look = f"cat {secret} /proc/1/root{secret} /proc/self/root{secret}; echo x >{secret}"

    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh(look)
        assert out == ""
        mounts = json.loads(daemon.run("inspect", stage.name).stdout)[0]["Mounts"]
        assert {one["Type"] for one in mounts} == {"volume"}

    perform(daemon, story)
    assert secret.read_text() == MARK
    # Control.
    daemon.run("run", "--rm", "--network=none", "-v", f"{tmp_path}:{tmp_path}", "busybox:test",
               "sh", "-c", look)  # fmt: skip
    assert secret.read_text() == "x\n"


@pytest.fixture
def listener() -> Iterator[int]:
    """Somebody who listens on all of the host's addresses."""
    with socket.create_server(("", 0)) as server:

        def serve() -> None:
            try:
                while True:
                    server.accept()[0].close()
            except OSError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_cannot_reach_any_network(daemon: Engine, listener: int) -> None:
    dial = f"""nc -w 3 127.0.0.1 {listener} </dev/null && echo reached
ls /sys/class/net; cat /etc/resolv.conf"""

    async def story(stage: Stage) -> str:
        _, out, _ = await stage.sh(dial)
        return out

    found = perform(daemon, story)
    # Its own loopback is all that it has, and the host's resolver is not told.
    assert found.split() == ["lo", "nameserver", "127.0.0.1"]
    # Control.
    there = daemon.run("run", "--rm", "--network=host", "busybox:test", "sh", "-c", dial).stdout
    assert "reached" in there


def test_cannot_see_the_services_environment(
    daemon: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_SECRET", MARK)
    look = "env; cat /proc/*/environ"

    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh(look)
        assert MARK not in out
        # Control: it would be seen if it were given.
        _, out, _ = await stage.sh(look, env={"X": os.environ["SERVICE_SECRET"]})
        assert MARK in out

    perform(daemon, story)


def test_cannot_gain_privilege_by_a_program_of_the_image(daemon: Engine, gnu: str) -> None:
    daemon.run("run", "--network=none", "--name=suid", gnu, "chmod", "u+s", "/usr/bin/id")
    daemon.run("commit", "suid", "suid:test")
    daemon.run("rm", "suid")

    async def story(stage: Stage) -> str:
        _, out, _ = await stage.sh(
            "id -u; grep -E '^(Cap(Prm|Eff|Bnd)|NoNewPrivs|Seccomp):' /proc/self/status"
        )
        return out

    lines = perform(daemon, story, "suid:test").split()
    assert lines == ["1000", "CapPrm:", "0" * 16, "CapEff:", "0" * 16, "CapBnd:", "0" * 16,
                     "NoNewPrivs:", "1", "Seccomp:", "2"]  # fmt: skip
    # Control.
    run = ("run", "--rm", "--network=none", "--user=1000", "suid:test", "id", "-u")
    assert daemon.run(*run).stdout == "0\n"


def test_cannot_change_the_image_or_the_kernels_settings(daemon: Engine) -> None:
    write = (
        "for f in /x /etc/passwd /bin/busybox /proc/sys/kernel/core_pattern; do echo x >>$f; done"
    )

    async def story(stage: Stage) -> None:
        _, _, err = await stage.sh(write)
        assert err.count("can't create") == 4
        # Control: this is the place for it.
        ended, _, _ = await stage.sh("echo x >/workspace/x && echo x >/tmp/x && echo x >~/x")
        assert ended.code == 0

    perform(daemon, story)


def test_cannot_make_namespaces_or_mounts(daemon: Engine) -> None:
    tries = ("unshare -U true", "unshare -m true", "mount -t tmpfs none /tmp", "chroot / true")

    async def story(stage: Stage) -> None:
        for one in tries:
            ended, _, _ = await stage.sh(one)
            assert ended.code != 0, one

    perform(daemon, story)
    # Control.
    for one in tries[1:]:
        daemon.run("run", "--rm", "--network=none", "--cap-add=SYS_ADMIN", "busybox:test",
                   *one.split())  # fmt: skip


DECLARES = """mkdir -p /cache /home/other /workspace/w
echo from-the-image | tee /cache/f >/home/other/f
chmod 1777 /cache /home /home/other"""


def test_cannot_write_to_a_disk_that_nobody_counts(daemon: Engine) -> None:
    """An image may declare volumes; the engine makes them, and bounds none of them."""
    daemon.run("run", "--network=none", "--name=declares", "busybox:test", "sh", "-c", DECLARES)
    change = 'VOLUME ["/cache/", "/home", "/workspace", "/tmp", "/run/inside"]'
    daemon.run("commit", "--change", change, "declares", "declares:1")
    daemon.run("rm", "declares")
    before = daemon.run("volume", "ls", "-q").stdout
    write = """for d in /cache /home /home/other /run/inside
do head -c 1000000 /dev/zero >$d/new && echo wrote $d; done"""

    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh(f"{write}\ncat /cache/f; ls /workspace; echo x >f && cat f")
        assert out == "from-the-image\nx\n"
        mounts = json.loads(daemon.run("inspect", stage.name).stdout)[0]["Mounts"]
        writable = {one["Destination"] for one in mounts if one["RW"]}
        assert writable == {"/workspace", "/home/agent"}
        usage = await stage.backend.usage(stage.sandbox)
        assert (usage.disk or 0) < MIB

    perform(daemon, story, "declares:1")
    assert daemon.run("volume", "ls", "-q").stdout == before
    # Control: with the volumes that the engine makes by itself it writes.
    plain = ("run", "--rm", "--network=none", "--read-only", "--user=1000", "--cap-drop=ALL")
    done = daemon.run(*plain, "declares:1", "sh", "-c", write, check=False)
    assert done.stdout.split("\n")[:3] == ["wrote /cache", "wrote /home", "wrote /home/other"]
    daemon.run("rmi", "declares:1")


# --- what the service relies on


def test_cannot_forge_labels_through_the_api(daemon: Engine) -> None:
    forged = {
        "org.agent-sandbox.service.agent": "bob",
        "org.agent-sandbox.service.instance": "0" * 16,
        "org.agent-sandbox.owner": "x",
        "traefik.enable": "true",
    }

    async def story(stage: Stage) -> dict[str, str]:
        found: dict[str, str] = json.loads(daemon.run("inspect", stage.name).stdout)[0]["Config"]
        return found["Labels"]  # type: ignore[return-value]

    labels = perform(daemon, story, owner="alice", metadata=forged, env=forged)
    assert labels["org.agent-sandbox.service.agent"] == "alice"
    assert {name.rpartition(".")[2] for name in labels} == {
        "agent", "home", "instance", "sandbox", "work",
    }  # fmt: skip
    assert labels["org.agent-sandbox.service.instance"] != "0" * 16


def test_a_tag_that_is_moved_after_the_pin_changes_nothing(daemon: Engine) -> None:
    daemon.image("moving:1", files={"/which": "first"})
    daemon.image("other:1", files={"/which": "second"})

    async def story() -> str:
        backend = DockerBackend(str(daemon.socket), instance=secrets.token_hex(8))
        digest = await backend.resolve("moving:1")
        daemon.run("tag", "other:1", "moving:1")
        sandbox = Sandbox(id="s", owner="a", backend="docker", state=RUNNING, image="moving:1",
                          digest=digest)  # fmt: skip
        await backend.create(sandbox)
        try:
            _, out, _ = await Stage(backend, sandbox, daemon).sh("cat /which")
            return out
        finally:
            await backend.delete(sandbox)
            await backend.close()

    assert asyncio.run(story()) == "first"
    # Control: by its name it is the other one by now.
    named = daemon.run("run", "--rm", "--network=none", "moving:1", "cat", "/which")
    assert named.stdout == "second"


def test_a_name_is_never_taken_for_the_start_of_an_id(daemon: Engine) -> None:
    number = daemon.run("images", "-q", "--no-trunc", "busybox:test").stdout.strip()
    short = number.removeprefix("sha256:")[:12]

    async def story(name: str) -> str:
        backend = DockerBackend(str(daemon.socket), instance="0" * 16)
        return await backend.resolve(name)

    assert asyncio.run(refused(story(short))) == "INVALID"
    # Control: the engine itself takes it, and so do we where all of it is given.
    assert daemon.run("image", "inspect", short).returncode == 0
    assert asyncio.run(story(number)) == number


# --- the end of an execution


def test_cannot_outlive_an_execution_by_killing_its_wrapper(daemon: Engine) -> None:
    # The one with the parent 0 that is no child of ours: the wrapper, which would sweep.
    text = """(setsid sh -c 'echo up; sleep 1001' &)
for p in /proc/[0-9]*; do grep -q '^PPid:.0$' $p/status && kill -9 ${p##*/}; done
sleep 1002"""

    async def story(stage: Stage) -> None:
        ended, _, _ = await stage.sh(text)
        assert ended.code == 137
        assert await stage.processes() == []

    perform(daemon, story)
    # Control: of the engine's own exec the child is left.
    daemon.run("run", "-d", "--network=none", "--name=plain", "busybox:test", "sleep", "1000")
    try:
        daemon.run("exec", "plain", "sh", "-c", "(setsid sleep 1001 >/dev/null 2>&1 &); exit 3",
                   check=False)  # fmt: skip
        assert "sleep 1001" in daemon.run("top", "plain").stdout
    finally:
        daemon.run("rm", "-f", "plain")


BOMB = "f() { f & f & }; trap '' TERM; echo up; while :; do f; done"
# Kills whatever it may, as fast as it can: also what would end it.
FIGHTER = "echo up; while :; do kill -9 -1; done"


@pytest.mark.parametrize("text", [BOMB, FIGHTER])
def test_cannot_prevent_its_own_end(daemon: Engine, text: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.sh("echo kept >f")
        running, said = await stage.start("sh", "-c", text)
        await said.word("up")
        await asyncio.wait_for(running.kill(), PATIENCE)
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert ended.code != 0
        # The sandbox is as good as before.
        _, out, _ = await stage.sh("cat f")
        assert out == "kept\n"
        assert await stage.processes() == []

    perform(daemon, story)


def test_cannot_end_the_sandbox_from_inside(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        begun = daemon.run("inspect", "-f", "{{.State.StartedAt}}", stage.name).stdout
        await stage.sh("for p in /proc/[0-9]*; do kill -9 ${p##*/}; done; kill -9 -1")
        _, out, _ = await stage.sh("echo fine")
        assert out == "fine\n"
        # Not even started again.
        assert daemon.run("inspect", "-f", "{{.State.StartedAt}}", stage.name).stdout == begun

    perform(daemon, story)


def test_cannot_forge_the_words_of_the_wrapper(daemon: Engine) -> None:
    # It learns its token from its wrapper's arguments, and says that it ended well.
    text = """for p in /proc/[0-9]*; do grep -q '^PPid:.0$' $p/status || continue
t=$(tr '\\0' '\\n' <$p/cmdline | grep -x '[0-9a-f]\\{32\\}'); [ "$t" ] && echo "$t 0 0" >&2; done
exit 9"""

    async def story(stage: Stage) -> None:
        ended, _, err = await stage.sh(text)
        # Its own words are output like any other.
        assert (ended.code, err[32:]) == (9, " 0 0\n")

    perform(daemon, story)


# --- files


def test_cannot_have_the_images_secrets_read_by_a_link(daemon: Engine) -> None:
    daemon.run("run", "--network=none", "--name=sec", "busybox:test", "sh", "-c",
               f"echo {MARK} >/etc/shadow; chmod 400 /etc/shadow")  # fmt: skip
    daemon.run("commit", "sec", "secret:test")
    daemon.run("rm", "sec")
    links = (
        "ln -s /etc/shadow l; ln -s /etc d; ln -s ../../etc ~/r; ln -s d c; mkdir e; ln -s /etc e/d"
    )

    async def story(stage: Stage) -> None:
        await stage.sh(links)
        for path in ("/workspace/l", "/workspace/d/shadow", "/home/agent/r/shadow",
                     "/workspace/c/shadow", "/workspace/e/d/shadow"):  # fmt: skip
            assert await refused(stage.files.read(path)) == "FORBIDDEN"
            assert await refused(stage.files.pack(path)) == "FORBIDDEN"
        for doing in (stage.files.entry("/workspace/d/shadow"), stage.files.make("/workspace/d/x"),
                      stage.files.list("/workspace/d", depth=1, most=9),
                      stage.files.delete("/workspace/d/shadow", recursive=True),
                      stage.files.write("/workspace/d/x", bytes_of(b""), limit=9),
                      stage.files.unpack("/workspace/d", bytes_of(tar()), limit=MIB)):  # fmt: skip
            assert await refused(doing) == "FORBIDDEN"
        # A link itself is an entry like any other, and is packed as a link.
        assert (await stage.files.entry("/workspace/l")).target == "/etc/shadow"
        packed = await content(await stage.files.pack("/workspace"))
        assert MARK.encode() not in packed
        # Control: the engine reads it for everybody who asks.
        copied = daemon.run("cp", "-L", f"{stage.name}:/workspace/l", "-", text=False)
        assert MARK.encode() in bytes(copied.stdout)  # type: ignore[arg-type]

    perform(daemon, story, "secret:test")


def test_cannot_have_an_archive_unpacked_through_a_link(daemon: Engine) -> None:
    archive = tar(("x/planted", b"x", ""))

    async def story(stage: Stage) -> None:
        await stage.sh("ln -s /home/agent x")
        doing = stage.files.unpack("/workspace", bytes_of(archive), limit=MIB)
        assert await refused(doing) == "CONFLICT"
        _, out, _ = await stage.sh("ls ~; readlink x")
        assert out == "/home/agent\n"
        # Control: as it came, the engine unpacks it there, and as root.
        path = f"/containers/{stage.name}/archive"
        await Asked(str(daemon.socket)).upload(
            "PUT", path, {"path": "/workspace"}, bytes_of(archive)
        )
        _, out, _ = await stage.sh("stat -c %u ~/planted")
        assert out == "0\n"

    perform(daemon, story)


SWAP = """mkdir -p a/etc; echo mine >a/etc/hostname; ln -s / b; echo up
while :; do mv a t; mv b a; mv a b; mv t a; done 2>/dev/null"""


def test_cannot_lead_a_read_out_by_swapping_links(daemon: Engine) -> None:
    own = Path("/etc/hostname").read_text()

    async def story(stage: Stage) -> set[str]:
        running, said = await stage.start("sh", "-c", SWAP)
        await said.word("up")
        seen: set[str] = set()
        for _ in range(25):
            try:
                _, pieces = await stage.files.read("/workspace/a/etc/hostname")
                seen.add((await content(pieces)).decode())
            except Problem as problem:
                seen.add(type(problem).__name__)
        await running.kill()
        return seen

    seen = perform(daemon, story)
    # Its own file, a refusal, or at worst a file of its own container, which may be cut to the size
    # of the first; never one of the host.
    assert not [text for text in seen if text and own.startswith(text)]
    assert seen <= {"mine\n", "Problem", *("sandbox\n"[:size] for size in range(9))}


def test_a_path_cannot_be_a_second_question_to_the_engine(daemon: Engine) -> None:
    async def story(stage: Stage) -> None:
        for name in ("x&path=/etc/passwd", "x HTTP/1.1\r\nHost: y\r\n\r\n", "%2e%2e", "x?y#z", "ü"):
            path = f"/workspace/{quote(name, safe='') if name == '%2e%2e' else name}"
            await stage.files.write(path, bytes_of(name.encode()), limit=99)
            _, pieces = await stage.files.read(path)
            assert await content(pieces) == name.encode()

    perform(daemon, story)
