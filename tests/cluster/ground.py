"""A real Kubernetes cluster on this machine: an API server alone, or with nodes.

    ground.py [--alone] [--nodes N]     starts one, prints where it is, ends it with its input

Every machine is a set of namespaces (machine.py). They hang on one bridge, in the control plane's
namespace, with this machine: `host — control — n1 — n2`. So no port is taken here, pods have
addresses that this machine can reach, and nothing here forwards or translates packets.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import build, images, programs
from .keys import Authority
from .machine import KERNEL, Groups, Machine, do, names, wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .images import Image

HOME = Path("/srv")
LOCKS = Path("/run/lock")
PREFIX = "agsbx-k8s-"
# Where an image of ours has the agent (service/backend/pod_env.py).
AGENT = "opt/agent-sandbox"
NEEDED = (
    "etcd", "containerd", "ctr", "runc", "ip", "unshare", "nsenter", images.BUSYBOX,
    f"{programs.CNI}/bridge",
)  # fmt: skip
START_SECONDS = 120.0
# Profiles that an operator puts on nodes.
PROFILES = Path(__file__).resolve().parents[2] / "deploy" / "seccomp"
METADATA = "169.254.169.254"


def missing(*, alone: bool = False) -> str:
    """Why no cluster can start here; empty when one can."""
    if os.geteuid():
        return "a cluster needs root"
    built = build.lacking(build.API if alone else build.PROGRAMS)
    needed = [program for program in NEEDED if not shutil.which(program)]
    if built or needed:
        return f"needs {', '.join((*built, *needed))}: make test-cluster"
    return ""


class Api:
    """Requests to the API server by a client that is not the one under test."""

    def __init__(self, host: str, keys: Path, user: str = "admin") -> None:
        self._host = host
        self._context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        self._context.load_cert_chain(keys / f"{user}.crt", keys / f"{user}.key")

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        """Status and body."""
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        call = http.client.HTTPSConnection(self._host, context=self._context, timeout=30)
        with contextlib.closing(call):
            call.request(method, path, body=data, headers={**kind, **named})
            got = call.getresponse()
            return got.status, got.read()

    def __call__(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        """The answer's object; an error raises."""
        status, data = self.ask(method, path, body, **headers)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {data.decode()}")
        return json.loads(data)

    def ready(self) -> bool:
        """Whether it serves, and has what every cluster has."""
        paths = ("/readyz", "/api/v1/namespaces/default")
        try:
            return all(self.ask("GET", path)[0] == 200 for path in paths)
        except OSError:
            return False


class Cluster:
    """What runs, and what can be done to it."""

    def __init__(self, number: int, base: Path, *, alone: bool) -> None:
        self.bin = build.place()
        self.number = number
        self.base = base
        self.net = programs.Network(number=number)
        self.keys = base / "keys"
        self.kubeconfig = self.keys / "admin.conf"
        self.url = f"https://{self.net.control}"
        self.nodes: dict[str, Machine] = {}
        self.images: dict[str, Image] = {}
        self._alone = alone
        self._authority = self._certify()
        self.api = Api(self.net.control, self.keys)
        self.control = self._machine("control")

    # Control plane.

    def _machine(self, name: str) -> Machine:
        return Machine(name, self.base / name, f"{PREFIX}{self.number}-{name}")

    def _certify(self) -> Authority:
        made = Authority(self.keys)
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
        hosts = (self.net.control, self.net.service, "127.0.0.1", *names)
        made.pair("apiserver", "kube-apiserver", hosts=hosts)
        made.signing("accounts")
        users = {
            "admin": ("admin", "system:masters"),
            "controllers": ("system:kube-controller-manager", ""),
            "scheduler": ("system:kube-scheduler", ""),
        }
        for name, (common, group) in users.items():
            made.pair(name, common, group)
            made.kubeconfig(name, self.url)
        return made

    def start_control(self) -> None:
        """Start etcd and the API server; they are not ready when this returns."""
        net, control = self.net, self.control
        do("ip", "link", "add", net.link, "type", "veth", "peer", "name", "host", "netns",
           str(control.pid))  # fmt: skip
        do("ip", "address", "add", f"{net.host}/24", "dev", net.link)
        do("ip", "link", "set", net.link, "up")
        do("ip", "route", "add", net.services, "via", net.control)
        control.ip("link", "add", "br0", "type", "bridge")
        for address in (f"{net.control}/24", f"{net.service}/32"):
            control.ip("address", "add", address, "dev", "br0")
        control.ip("link", "set", "br0", "up")
        control.ip("link", "set", "host", "master", "br0", "up")
        data = control.base / "etcd"
        data.mkdir()
        control.order("mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", data)
        control.start("etcd", programs.etcd(str(data)))
        server = programs.apiserver(self.bin, self.keys, net, alone=self._alone)
        control.start("apiserver", server)

    def finish_control(self) -> None:
        """Wait for the API server, then start what decides."""
        self._wait("API server", self.api.ready)
        if self._alone:
            return
        config = self.keys / "controllers.conf"
        self.control.start("controllers", programs.controllers(self.bin, self.keys, config))
        self.control.start("scheduler", programs.scheduler(self.bin, self.keys / "scheduler.conf"))

    # Nodes.

    def make_node(self, name: str) -> None:
        """Start a node, or one that was killed: its network, and its containerd with images."""
        index, known = int(name[1:]), self.nodes.get(name)
        if known is not None:
            known.end()
        node = self.nodes[name] = self._machine(name)
        self._attach(node, index)
        self._furnish(node, index)
        node.start("containerd", ["containerd", "--config", node.base / "containerd.toml"])
        # One that was killed has them on its disk.
        for image in self.images.values() if known is None else ():
            self._import(node, image)

    def join_node(self, name: str) -> None:
        """Start its kubelet: not before the API server is there, or it waits longer each time."""
        node, index = self.nodes[name], int(name[1:])
        command = programs.kubelet(
            self.bin, node.base, self.keys / f"{name}.conf", name, self.net.node(index)
        )
        node.start("kubelet", command)

    def _attach(self, node: Machine, index: int) -> None:
        """Put a node on the bridge, with ways to all others."""
        net, address = self.net, self.net.node(index)
        # The kernel takes its time to remove the devices of one that was killed.
        with contextlib.suppress(RuntimeError):
            self.control.ip("link", "delete", node.name)
        self.control.ip("link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns",
                        str(node.pid))  # fmt: skip
        self.control.ip("link", "set", node.name, "master", "br0", "up")
        node.ip("address", "add", f"{address}/24", "dev", "eth0")
        node.ip("link", "set", "eth0", "up")
        node.ip("route", "add", "default", "via", net.host)
        node.ip("route", "add", net.services, "via", net.control)
        # kubelet looks for a cloud there, and would wait eleven seconds for an answer.
        node.ip("route", "add", "unreachable", METADATA)
        node.order("put", "/proc/sys/net/ipv4/ip_forward", "1")
        do("ip", "route", "replace", net.pods(index), "via", address)
        self.control.ip("route", "replace", net.pods(index), "via", address)
        for other in self.nodes.values():
            if other is not node and other.alive:
                number = int(other.name[1:])
                other.ip("route", "replace", net.pods(index), "via", address)
                node.ip("route", "replace", net.pods(number), "via", net.node(number))

    def _furnish(self, node: Machine, index: int) -> None:
        """Files and mounts of a node; some paths are fixed in the programs."""
        base, name = node.base, node.name
        for part in ("cni", "log", "kubelet/seccomp"):
            (base / part).mkdir(parents=True, exist_ok=True)
        for profile in PROFILES.glob("*.json"):
            shutil.copy(profile, base / "kubelet" / "seccomp")
        if not self._authority.path(f"{name}.crt").exists():
            hosts = (name, self.net.node(index))
            self._authority.pair(name, f"system:node:{name}", "system:nodes", hosts)
            self._authority.kubeconfig(name, self.url)
        settings = programs.kubelet_settings(self.keys, name, node.groups.name)
        (base / "kubelet.json").write_text(json.dumps(settings))
        pause = self.images["pause"].tag
        (base / "containerd.toml").write_text(programs.containerd_settings(base, pause))
        chain = programs.cni_settings(self.net.pods(index))
        (base / "cni" / "10-pods.conflist").write_text(json.dumps(chain))
        node.order("mount", "--make-rshared", "/")
        node.order("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/run")
        node.order("mount", "--bind", base / "log", "/var/log")
        node.order("run", "hostname", name)
        for path, value in KERNEL.items():
            node.order("hide", path, value)

    def _import(self, node: Machine, image: Image) -> None:
        """Give an image to a node, by tag and by digest."""
        words = ("ctr", "--namespace", "k8s.io", "images", "import", "--all-platforms")
        command = node.inside(*words, image.archive)

        def imported() -> bool:
            # containerd may not listen yet.
            done = subprocess.run(command, capture_output=True, check=False)
            return done.returncode == 0

        wait(f"{image.tag} on {node.name}", imported, START_SECONDS)

    def add(self, image: Image) -> Image:
        """Give one more image to all nodes."""
        self.images[Path(image.archive).stem] = image
        for node in self.nodes.values():
            self._import(node, image)
        return image

    def profile(self, name: str, document: object) -> None:
        """Give all nodes a seccomp profile (`localhostProfile: NAME`)."""
        for node in self.nodes.values():
            (node.base / "kubelet" / "seccomp" / name).write_text(json.dumps(document))

    # Faults.

    def kill_node(self, name: str) -> None:
        """The power goes: without a word, which a dying kernel of its own would not say either."""
        self.cut_node(name)
        self.nodes[name].kill()

    def freeze_node(self, name: str) -> None:
        """Nothing on it makes a step, and nothing of it goes away."""
        self.nodes[name].freeze()

    def cut_node(self, name: str) -> None:
        """The cable is out: all on it runs on, and nobody hears of it."""
        self.control.ip("link", "set", name, "down")

    def heal(self, name: str) -> None:
        """Undo what was done to a node, and wait until it serves again."""
        if not self.nodes[name].alive:
            self.make_node(name)
            self.join_node(name)
        self.nodes[name].thaw()
        self.control.ip("link", "set", name, "up")
        self._wait(f"{name} ready", lambda: self.ready(name))

    # Questions.

    def ready(self, name: str) -> bool:
        """Whether the API server thinks that a node serves."""
        try:
            status, data = self.api.ask("GET", f"/api/v1/nodes/{name}")
        except OSError:
            return False
        if status != 200:
            return False
        node = json.loads(data)
        conditions = {c["type"]: c["status"] for c in node["status"].get("conditions", ())}
        # The taint stays a moment longer, and would evict new pods.
        return conditions.get("Ready") == "True" and not node["spec"].get("taints")

    def api_status(self, method: str, path: str) -> int:
        """The status of an answer."""
        return self.api.ask(method, path)[0]

    def settled(self) -> bool:
        """Whether pods can be made: the namespace has its service account."""
        path = "/api/v1/namespaces/default/serviceaccounts/default"
        status, data = self.api.ask("GET", path)
        return status == 200 and bool(json.loads(data).get("secrets"))

    def kubectl(self, *words: str, check: bool = True, **options: Any) -> str:
        """`kubectl WORDS` as the administrator."""
        done = subprocess.run(
            [self.bin / "kubectl", "--kubeconfig", self.kubeconfig, *words],
            check=False,
            **{"capture_output": True, "text": True, "timeout": 120, **options},
        )
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr}")
        return str(done.stdout)

    def _wait(self, what: str, holds: object) -> None:
        try:
            wait(what, holds, START_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The end of every log."""
        found = sorted(self.base.glob("*/*.log"))
        return "\n".join(f"== {path}\n{path.read_text()[-1500:]}" for path in found)

    def end(self) -> None:
        """Take all of it away."""
        for machine in (*self.nodes.values(), self.control):
            machine.end()


def bundle(base: Path) -> Path | None:
    """Our agent as it is baked into images; None as long as there is no such module."""
    target = base / "bundle"
    source = Path(__file__).resolve().parents[2] / "src"
    if not (source / "agent_sandbox" / "pod" / "bundle.py").exists():
        return None
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "agent_sandbox.pod.bundle", target], capture_output=True,
        text=True, check=False, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(source)},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"agent_sandbox.pod.bundle: {done.stderr}")
    return target


def make_images(base: Path) -> dict[str, Image]:
    """The archives that every node gets."""
    place = base / "images"
    place.mkdir()
    small = images.busybox()
    agent = bundle(base)
    layers = [images.debian(), *([images.folder(agent, AGENT)] if agent else [])]
    sleep = ["/bin/busybox", "sleep", "2147483647"]
    return {
        "pause": images.image(place, "pause", [small], Entrypoint=sleep),
        "plain": images.image(place, "plain", [small], Cmd=["/bin/sh"]),
        "base": images.image(place, "base", layers, Cmd=["/bin/bash"], WorkingDir="/workspace"),
    }


def _free() -> tuple[int, Any]:
    """A number that no living cluster has, and its lock. What dead ones have left is removed."""
    chosen: tuple[int, Any] | None = None
    for number in range(programs.CLUSTERS):
        lock = (LOCKS / f"{PREFIX}{number}").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        _clear(number)
        if chosen is None:
            chosen = number, lock
        else:
            lock.close()
    if chosen is None:
        raise RuntimeError("all numbers of clusters are taken")
    return chosen


def _clear(number: int) -> None:
    """Remove what a cluster has left that was killed."""
    for name in names(f"{PREFIX}{number}-"):
        Groups(name).remove()
    link = programs.Network(number=number).link
    if os.path.exists(f"/sys/class/net/{link}"):
        do("ip", "link", "delete", link, check=False)
    for left in HOME.glob(f"{PREFIX}{number}-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def running(*, nodes: int = 2, alone: bool = False) -> Iterator[Cluster]:
    """A cluster that is ready for pods, or an API server alone."""
    number, lock = _free()
    base = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{number}-", dir=HOME))
    base.chmod(0o755)
    made: Cluster | None = None
    try:
        made = Cluster(number, base, alone=alone)
        made.start_control()
        if not alone:
            made.images = make_images(base)
            for index in range(1, nodes + 1):
                made.make_node(f"n{index}")
        made.finish_control()
        for name in made.nodes:
            made.join_node(name)
        for name in made.nodes:
            made._wait(f"{name} ready", lambda name=name: made.ready(name))
        if not alone:
            made._wait("service account", made.settled)
        yield made
    finally:
        if made is not None:
            made.end()
        _clear(number)
        lock.close()


def _tell(cluster: Cluster, seconds: float) -> None:
    """Say where it is, here and in a file."""
    said = {
        "base": str(cluster.base),
        "kubeconfig": str(cluster.kubeconfig),
        "kubectl": str(cluster.bin / "kubectl"),
        "images": {name: image.name for name, image in cluster.images.items()},
        "seconds": round(seconds, 1),
    }
    (cluster.base / "cluster.json").write_text(json.dumps(said, indent=1))
    print(json.dumps(said, indent=1), flush=True)


def main(words: list[str]) -> None:
    """Run one until the input ends or a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="etcd and API server only")
    parser.add_argument("--nodes", type=int, default=2)
    chosen = parser.parse_args(words)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running(nodes=chosen.nodes, alone=chosen.alone) as cluster:
        _tell(cluster, time.monotonic() - began)
        for line in sys.stdin:
            verb, *names = line.split() or [""]
            if verb in {"kill_node", "freeze_node", "cut_node", "heal"}:
                getattr(cluster, verb)(*names)
                print("ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
