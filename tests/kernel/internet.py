"""A small internet of the tests' own making: nothing that is sent here leaves the machine.

Two network namespaces with a cable between them. The first stands for the host: sandboxes are
started there, names are looked up in a hosts file of its own. In the second are servers with
addresses that are public elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conftest import must_work

if TYPE_CHECKING:
    from kernel.conftest import World

SITE, SITE6 = "93.184.216.34", "2606:4700:0:1::34"
PRIVATE = "10.77.0.2"
# What a lookup on the host says.
NAMES = {
    "site.example": (SITE,), "www.site.example": (SITE,), "other.example": (SITE,),
    "both.example": (SITE, SITE6), "six.example": (SITE6,),
    "inner.example": (PRIVATE,), "loop.example": ("127.0.0.1",),
}  # fmt: skip
# For scripts inside: without any variable that names a proxy.
BARE = "env -i PATH=/usr/bin:/bin "
CURL = BARE + "curl -sS -m 10 "
PORTS = "22,80,443,8080,8443,9000"
# A service on the host's own loopback.
LOCAL_PORT = 5000
SETUP = """
set -e
ip link add cable netns {host} type veth peer name cable netns {site}
nsenter -t {host} -n sh -ec '
    ip link set lo up; ip link set cable up
    ip addr add 93.184.216.1/24 dev cable; ip addr add 10.77.0.1/24 dev cable
    ip addr add 2606:4700:0:1::1/64 dev cable nodad'
nsenter -t {site} -n sh -ec '
    ip link set lo up; ip link set cable up
    ip addr add 93.184.216.34/24 dev cable; ip addr add 10.77.0.2/24 dev cable
    ip addr add 2606:4700:0:1::34/64 dev cable nodad'
nsenter -t {host} -m mount --bind {base}/hosts /etc/hosts
nsenter -t {host} -m mount --bind {base}/nsswitch.conf /etc/nsswitch.conf
nsenter -t {host} -m mount --bind {base}/resolv.conf /etc/resolv.conf
"""
# HTTP on every port but 22, TLS on 443; each answer tells what reached the server. On 53 a name
# server that knows nothing and counts who asks: the page /questions tells.
SERVERS = r"""
import hashlib, http.server, os, socket, socketserver, ssl, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        size = int(self.path.rpartition("size=")[2] or 0) if "size=" in self.path else 0
        reached = f"{self.headers['Host']} at {self.connection.getsockname()[0]}"
        told = str(questions) if self.path == "/questions" else reached
        if self.path == "/key":
            # What stands in these headers, without repeating it.
            fields = [self.headers[name] or "" for name in ("X-Api-Key", "Authorization")]
            told = hashlib.sha256("".join(fields).encode()).hexdigest()
        self.answer(b"x" * size or told.encode() + b"\n")
    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True
    request_queue_size = 1024
    def server_bind(self):
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", 0

questions = 0

def names():
    global questions
    server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); server.bind(("::", 53))
    while True:
        data, peer = server.recvfrom(999)
        questions += 1
        server.sendto(data[:2] + b"\x81\x83" + data[4:6] + bytes(6) + data[12:], peer)

def greet(port):
    server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    while True:
        caller, _ = server.accept()
        caller.sendall(b"SSH-2.0-test\r\n"); caller.close()

if sys.argv[1] == "::":
    threading.Thread(target=names).start()
for port in map(int, sys.argv[2].split(",")):
    if port == 22:
        threading.Thread(target=greet, args=(port,)).start(); continue
    server = Server((sys.argv[1], port), Handler)
    if port == 443:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); context.load_cert_chain(sys.argv[3])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever).start()
print("ready", flush=True)
"""


class Internet:
    """The two namespaces, and how to start a sandbox in the first."""

    def __init__(self, base: Path, *, ports: str = PORTS) -> None:
        """Without ports there are no servers at all: the test brings its own."""
        for tool in ("unshare", "nsenter", "setpriv", "ip", "openssl"):
            must_work(shutil.which(tool), f"needs {tool}")
        self.base = base
        self._children: list[subprocess.Popen[str]] = []
        lines = "".join(f"{a} {name}\n" for name, found in NAMES.items() for a in found)
        (base / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + lines)
        (base / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
        (base / "resolv.conf").write_text(f"nameserver {SITE}\noptions timeout:2 attempts:1\n")
        (base / "servers.py").write_text(SERVERS)
        self.certificate = base / "certificate.pem"
        alternatives = ",".join(f"DNS:{name}" for name in NAMES)
        self._do(
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-keyout", str(self.certificate), "-out", str(base / "public.pem"),
            "-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={alternatives}",
        )  # fmt: skip
        (base / "public.pem").chmod(0o644)
        with self.certificate.open("a") as file:
            file.write((base / "public.pem").read_text())
        try:
            idle = ("sh", "-c", "echo ready; exec sleep 9999")
            self.host = self._start("unshare", "-m", "-n", *idle)
            if ports:
                self.site = self._serve("unshare", "-n", at="::", ports=ports)
            else:
                self.site = self._start("unshare", "-n", *idle)
            script = SETUP.format(host=self.host, site=self.site, base=base)
            self._do("sh", "-c", script)
            if ports:
                self._serve("nsenter", "-t", str(self.host), "-n", at="::1", ports=str(LOCAL_PORT))
        except BaseException:
            self.end()
            raise

    @staticmethod
    def _do(*argv: str) -> None:
        subprocess.run(argv, check=True, capture_output=True, text=True)

    def _start(self, *argv: str) -> int:
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child.pid

    def _serve(self, *before: str, at: str, ports: str) -> int:
        python = os.path.realpath(sys.executable)
        return self._start(
            *before, python, "-I", str(self.base / "servers.py"), at, ports, str(self.certificate)
        )

    def serve(self, script: Path, *args: str) -> None:
        """Start a server of a test's own on the other side; it says `ready`."""
        self.start_there(os.path.realpath(sys.executable), "-I", str(script), *args)

    def start_there(self, *argv: str) -> None:
        """Start any program on the other side that says `ready`."""
        self._start("nsenter", "-t", str(self.site), "-n", *argv)

    def enter(self, world: World, *argv: str) -> list[str]:
        """The command line that runs `argv` in the project, on this host, as the identity."""
        return [
            "nsenter", "-t", str(self.host), "-n", "-m",
            "setpriv", f"--reuid={world.runner.uid}", f"--regid={world.runner.gid}",
            "--clear-groups", "sh", "-c", 'cd "$0" && exec "$@"', str(world.project), *argv,
        ]  # fmt: skip

    def run(
        self, world: World, *argv: str, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there."""
        with self.popen(world, *argv) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def popen(self, world: World, *argv: str) -> subprocess.Popen[str]:
        """Start a program there."""
        return subprocess.Popen(
            self.enter(world, *argv), env=world.runner.environ(world.env()), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def sandbox(self, world: World, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `agent-sandbox ARGS…` there."""
        return self.run(world, *world.argv(*args))

    def sh(self, world: World, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script in a sandbox there."""
        return self.sandbox(world, *flags, "sh", "-c", script)

    def end(self) -> None:
        """End the servers; the namespaces go with their last process."""
        for child in self._children:
            child.kill()
            child.communicate()


def helpers(world: World) -> list[int]:
    """Live processes of our own for this world: supervisors, keepers, gates and proxies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            status = (entry / "status").read_text()
        except OSError:
            continue
        ours = os.fsencode(world.runner.source) in line
        if ours and f"Uid:\t{world.runner.uid}\t" in status and "State:\tZ" not in status:
            found.append(int(entry.name))
    return found


def in_namespace_of(pid: int, namespace: str) -> bool:
    """Whether a process is in our own namespace of a kind."""
    return os.readlink(f"/proc/{pid}/ns/{namespace}") == os.readlink(f"/proc/self/ns/{namespace}")


def gate_of(net: Internet, world: World) -> list[int]:
    """The helper in a network namespace that is neither the host's nor ours, out of the sandbox."""
    host = os.readlink(f"/proc/{net.host}/ns/net")
    mounts = os.readlink(f"/proc/{net.host}/ns/mnt")
    found = []
    for pid in helpers(world):
        try:
            names = [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt")]
        except OSError:
            continue
        if names[0] != host and names[1] == mounts and in_namespace_of(pid, "pid"):
            found.append(pid)
    return found


def proxy_of(world: World) -> list[int]:
    """The process that runs the proxy's program."""
    program = b"proxy/egress.py"
    found = helpers(world)
    return [pid for pid in found if program in Path(f"/proc/{pid}/cmdline").read_bytes()]
