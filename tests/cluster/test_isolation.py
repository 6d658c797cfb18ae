"""What a command in a pod tries, each with a control that shows that it works for another pod."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend import pod_env

from . import images
from .ground import METADATA, Cluster
from .lab import PATIENCE, PODS, House, Stage
from .machine import wait

# Prints those of its words, HOST:PORT, that answer a connection.
DIAL = """
import socket, sys
for word in sys.argv[1:]:
    host, port = word.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 3).close()
        print(word)
    except OSError as error:
        print(word, error, file=sys.stderr)
"""
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


@contextlib.contextmanager
def stranger(cluster: Cluster, image: str, **container: Any) -> Iterator[str]:
    """A pod that nobody has confined, as Kubernetes makes one by default; its name."""
    name = f"stranger-{secrets.token_hex(3)}"
    spec = {"name": "main", "image": image, "command": ["sleep", "100000"], **container}
    cluster.api(
        "POST",
        PODS,
        {
            "metadata": {"name": name},
            "spec": {"containers": [spec], "terminationGracePeriodSeconds": 0},
        },
    )
    try:
        wait("a stranger runs", lambda: _phase(cluster, name) == "Running")
        yield name
    finally:
        cluster.api("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")


def _phase(cluster: Cluster, name: str) -> str:
    return str(cluster.api("GET", f"{PODS}/{name}")["status"]["phase"])


def address(cluster: Cluster, name: str) -> str:
    """A pod's address."""
    return str(cluster.api("GET", f"{PODS}/{name}")["status"]["podIP"])


# --- the cluster


def test_cannot_use_a_credential_of_the_cluster(house: House) -> None:
    look = f"cat {TOKEN}; find / -xdev -name token -type f 2>/dev/null; env | grep -i kubernetes"

    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh(look)
        assert out == ""
        mounts = json.dumps(stage.pod()["spec"])
        assert "secret" not in mounts.replace("imagePullSecrets", "")
        assert stage.pod()["spec"]["automountServiceAccountToken"] is False

    house.play(story)
    # Control: a pod as Kubernetes makes it has all of it.
    cluster = house.cluster
    with stranger(cluster, cluster.images["base"].name) as name:
        found = cluster.kubectl("exec", name, "--", "sh", "-c", look)
        assert found.startswith("ey")
        assert "KUBERNETES_SERVICE_HOST" in found


@pytest.fixture
def listener(two_nodes: Cluster) -> Iterator[str]:
    """Somebody on the machine that the service runs on."""
    with socket.create_server((two_nodes.net.host, 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{two_nodes.net.host}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(scope="module")
def metadata(two_nodes: Cluster) -> str:
    """What gives a cloud's credentials to whoever asks, on every node."""
    for node in two_nodes.nodes.values():
        with contextlib.suppress(RuntimeError):
            node.ip("route", "delete", "unreachable", METADATA)
            node.ip("address", "add", f"{METADATA}/32", "dev", "lo")
            node.start("metadata", ["busybox", "httpd", "-f", "-p", f"{METADATA}:80", "-h", "/etc"])
    return f"{METADATA}:80"


def test_cannot_reach_anything_with_the_network_off(
    house: House, listener: str, metadata: str
) -> None:
    cluster = house.cluster
    net = cluster.net

    async def story(stage: Stage) -> None:
        async def inner(other: Stage) -> None:
            pod = other.pod()["status"]["podIP"]
            own = stage.pod()["status"]["podIP"]
            targets = [
                f"{net.control}:443", f"{net.service}:443", f"{net.node(1)}:10250",
                f"{net.node(2)}:10250", metadata, listener, f"{pod}:{pod_env.PORT}",
                f"{own}:{pod_env.PORT}",
            ]  # fmt: skip
            running, said = await stage.start("python3", "-c", DIAL, *targets, "127.0.0.1:8651")
            ended = await asyncio.wait_for(running.wait(), PATIENCE)
            assert (ended.code, [data for number, data in said if number == 1]) == (0, [])
            # Control: the same program reaches all of it from a pod that is not confined, and from
            # this very pod, where the agent's own commands are not.
            with stranger(cluster, cluster.images["base"].name) as name:
                found = cluster.kubectl("exec", name, "--", "python3", "-c", DIAL, *targets)
            assert found.split() == targets
            name = stage.pod()["metadata"]["name"]
            found = cluster.kubectl("exec", name, "--", "python3", "-c", DIAL, *targets)
            assert found.split() == targets

        await house._played(inner, "base", {})

    house.play(story)


def test_cannot_be_commanded_by_somebody_without_the_services_certificate(house: House) -> None:
    async def story(stage: Stage) -> None:
        pod = stage.pod()["status"]["podIP"]
        assert (await stage.sh("true"))[0].code == 0  # control: with it
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            await asyncio.to_thread(_spoken, context, pod)
        # Nor by one that another authority has signed; this one signs for the whole cluster.
        keys = stage.cluster.keys
        context.load_cert_chain(keys / "admin.crt", keys / "admin.key")
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            await asyncio.to_thread(_spoken, context, pod)

    house.play(story)


def _spoken(context: ssl.SSLContext, address: str) -> bytes:
    """Whatever an agent answers; with TLS 1.3 a refusal comes with the first read."""
    with (
        socket.create_connection((address, pod_env.PORT), 10) as plain,
        context.wrap_socket(plain) as line,
    ):
        line.sendall(b"\0\0\0\x15\x01" + b'{"operation":"hello"}')
        answer = line.recv(100)
        if not answer:
            raise EOFError
        return answer


# --- the node


@pytest.fixture(scope="module")
def privileged(two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with a program that makes whoever runs it root."""
    tree = images.Tree()
    tree.file("usr/local/bin/rooted", Path("/usr/bin/id").read_bytes(), 0o4755)
    base = two_nodes.images["base"]
    layers = [*images.layers(base), tree.bytes()]
    folder = tmp_path_factory.mktemp("images")
    return two_nodes.add(images.image(folder, "rooted", layers)).name


def test_cannot_become_root(house: House, privileged: str) -> None:
    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh("rooted -u; grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
        uid, *rest = out.split()
        assert int(uid) > 0
        assert rest == [
            "CapInh:", "0" * 16, "CapPrm:", "0" * 16, "CapEff:", "0" * 16, "CapBnd:", "0" * 16,
            "CapAmb:", "0" * 16, "NoNewPrivs:", "1",
        ]  # fmt: skip
        for one in ("unshare -U true", "unshare -m true", "mount -t tmpfs none /tmp", "chroot /"):
            assert (await stage.sh(one))[0].code != 0, one

    house.play(story, privileged)
    # Control.
    context = {"runAsUser": 1000}
    with stranger(house.cluster, privileged, securityContext=context) as name:
        assert house.cluster.kubectl("exec", name, "--", "rooted", "-u") == "0\n"


WRITE = """for f in /x /etc/passwd /usr/bin/env /opt/agent-sandbox/x /proc/sys/kernel/core_pattern
do (echo x >>$f) 2>/dev/null && echo wrote $f; done; true"""


def test_cannot_change_the_image_the_agent_or_the_kernels_settings(house: House) -> None:
    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh(WRITE)
        assert out == ""
        # Control: this is the place for it.
        ended, _, _ = await stage.sh("echo x >/workspace/x && echo x >/tmp/x && echo x >~/x")
        assert ended.code == 0

    house.play(story)
    with stranger(house.cluster, house.cluster.images["base"].name) as name:
        found = house.cluster.kubectl("exec", name, "--", "sh", "-c", WRITE)
    assert found.split()[1::2] == ["/x", "/etc/passwd", "/usr/bin/env", "/opt/agent-sandbox/x"]


def test_cannot_see_the_node_or_another_sandbox(house: House) -> None:
    word = f"mark{secrets.token_hex(8)}"
    look = (
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; done 2>/dev/null;"
        "find / -xdev -type f -size -2 2>/dev/null | xargs grep -sl mark; hostname; ls /dev"
    )

    async def story(stage: Stage) -> None:
        async def inner(other: Stage) -> None:
            running, said = await other.start(
                "sh",
                "-c",
                f"echo {word} >~/f; echo {word} >/tmp/f; echo up; exec sleep 99 {word}; :",
            )
            await said.word("up")
            _, out, _ = await stage.sh(look)
            assert word not in out
            assert "kubelet" not in out
            assert "containerd" not in out
            # Control: there it is seen.
            _, out, _ = await other.sh(f"{look}; cat ~/f /tmp/f")
            assert word in out
            await running.kill()
            await running.wait()

        await house._played(inner, "base", {})

    house.play(story)


# --- the agent


def test_cannot_read_or_end_the_agent(house: House) -> None:
    # bwrap's own process has its command's words among its own, so all of the beginning counts.
    look = f"""for p in /proc/[0-9]*; do
n=$(tr '\\0' ' ' <$p/cmdline 2>/dev/null); case $n in "{" ".join(pod_env.COMMAND[1:5])} "*)
cat $p/environ 2>/dev/null; ls $p/fd 2>/dev/null; head -c 1 $p/mem 2>/dev/null
readlink $p/exe $p/cwd 2>/dev/null;; esac; done"""

    async def story(stage: Stage) -> None:
        before = stage.pod()["status"]["containerStatuses"][0]
        _, out, _ = await stage.sh(look)
        assert out == ""
        # Control: of itself it sees all of that.
        _, out, _ = await stage.sh("cd /proc/self && cat environ && ls fd && readlink exe")
        assert "HOME=" in out
        await stage.sh("for p in /proc/[0-9]*; do kill -9 ${p##*/}; done; kill -9 1; kill -9 -1")
        ended, out, _ = await stage.sh("echo fine")
        assert (ended.code, out) == (0, "fine\n")
        after = stage.pod()["status"]["containerStatuses"][0]
        assert after["containerID"] == before["containerID"]
        assert after["restartCount"] == 0

    house.play(story)


BOMB = "f() { f & f & }; trap '' TERM; echo up; while :; do f; done"
# Kills whatever it may, as fast as it can: also what would end it.
FIGHTER = "echo up; while :; do kill -9 -1; done"


@pytest.mark.parametrize("text", [BOMB, FIGHTER], ids=["bomb", "fighter"])
def test_cannot_prevent_its_own_end(house: House, text: str) -> None:
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
        assert stage.processes() == []

    house.play(story)
