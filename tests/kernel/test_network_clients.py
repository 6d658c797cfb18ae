"""Clients that people use, behind the proxy: with no setting at all, and with the variables."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import IS_ROOT, must_work
from kernel.conftest import eventually
from kernel.internet import Internet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.conftest import World

pytestmark = [pytest.mark.kernel, pytest.mark.network]

# The variables that name a proxy, taken away or left.
WITHOUT = (
    "unset HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy "
    "NODE_USE_ENV_PROXY;"
)
BOTH = pytest.mark.parametrize("before", ["", WITHOUT], ids=["variables", "bare"])
HTTP_BACKEND = "/usr/lib/git-core/git-http-backend"
# Files, and git's own server behind CGI.
SHOP = r"""
import http.server, os, pathlib, socket, socketserver, ssl, subprocess, sys

base, certificate, port = sys.argv[1:4]

class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def __init__(self, *args): super().__init__(*args, directory=base)
    def log_message(self, *_): pass
    def do_GET(self):
        if self.path.startswith("/git/"): return self.git(b"")
        super().do_GET()
    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size); self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        self.git(body)
    def git(self, body):
        path, _, query = self.path.partition("?")
        env = {
            "GIT_PROJECT_ROOT": base + "/git", "GIT_HTTP_EXPORT_ALL": "1", "PATH": os.environ["PATH"],
            "PATH_INFO": path.removeprefix("/git"), "QUERY_STRING": query, "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""), "REMOTE_USER": "test",
            "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }
        said = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True).stdout
        head, _, content = said.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200")[:3]))
        for name, value in fields.items(): self.send_header(name, value)
        self.send_header("Content-Length", str(len(content))); self.end_headers()
        self.wfile.write(content)

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True

server = Server(("::", int(port)), Handler)
if certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
"""
# RFC 6455, as far as a test needs it: a handshake, then what comes goes back.
ECHO = r"""
import base64, hashlib, socket, sys, threading

def talk(client):
    head = b""
    while not head.endswith(b"\r\n\r\n"): head += client.recv(1)
    fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
    key = fields["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    client.sendall(("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept}\r\n\r\n").encode())
    while True:
        first = client.recv(2, socket.MSG_WAITALL)
        if len(first) < 2: return
        size = first[1] & 127
        mask, data = client.recv(4, socket.MSG_WAITALL), client.recv(size, socket.MSG_WAITALL)
        client.sendall(bytes((first[0], size)) + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))

server = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True)
print("ready", flush=True)
while True: threading.Thread(target=talk, args=(server.accept()[0],), daemon=True).start()
"""
ECHO_PORT = 8600
# What a client does, with the plain socket that it has.
WEBSOCKET = r"""
import base64, os, socket, sys
def websocket(s, host):
    s.settimeout(10)
    s.sendall((f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + base64.b64encode(os.urandom(16)).decode() + "\r\n\r\n").encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"): head += s.recv(1)
    print(head.split(b"\r\n")[0].decode())
    for text in (b"hello", b"x" * 100):
        mask = os.urandom(4)
        s.sendall(bytes((0x81, 0x80 | len(text))) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(text)))
        assert s.recv(2 + len(text), socket.MSG_WAITALL)[2:] == text
    print("echoed")
"""
SSHD = "/usr/sbin/sshd"
SSHD_CONFIG = """
ListenAddress [::]:22
ListenAddress 0.0.0.0:22
HostKey {base}/host_key
AuthorizedKeysFile {base}/client_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
HELD = 500
PORT = 8500
SITE = f"https://site.example:{PORT}"
ALLOW = ("--allow", f"site.example:{PORT}")


def wheel() -> bytes:
    """A package for pip, with nothing but a name."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("agsbx_demo.py", "HELLO = 'from the index'\n")
        archive.writestr(
            "agsbx_demo-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: agsbx-demo\nVersion: 1.0\n",
        )
        archive.writestr(
            "agsbx_demo-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("agsbx_demo-1.0.dist-info/RECORD", "")
    return data.getvalue()


def package() -> bytes:
    """A package for npm."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, text in {
            "package.json": json.dumps(
                {"name": "agsbx-demo", "version": "1.0.0", "main": "index.js"}
            ),
            "index.js": "module.exports = 'from the registry'\n",
        }.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


def fill(base: Path) -> None:
    """What the shop has: a repository, an index of wheels, a registry."""

    def git(*args: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *identity, *args], check=True, capture_output=True)

    git("init", str(base / "work"))
    git("-C", str(base / "work"), "commit", "--allow-empty", "-m", "first")
    git("clone", "--bare", str(base / "work"), str(base / "git" / "repo.git"))
    git("-C", str(base / "git" / "repo.git"), "config", "http.receivepack", "true")
    index = base / "simple" / "agsbx-demo"
    index.mkdir(parents=True)
    name = "agsbx_demo-1.0-py3-none-any.whl"
    (index / name).write_bytes(wheel())
    (index / "index.html").write_text(f'<a href="{name}">{name}</a>')
    (base / "demo.tgz").write_bytes(package())
    version = {"name": "agsbx-demo", "version": "1.0.0", "dist": {"tarball": f"{SITE}/demo.tgz"}}
    told = {"name": "agsbx-demo", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (base / "agsbx-demo").write_text(json.dumps(told))
    (base / "hello.txt").write_text("hello\n")


@pytest.fixture(scope="module")
def net(places: Path) -> Iterator[Internet]:
    """An internet with a shop."""
    must_work(IS_ROOT, "needs root for network namespaces of its own")
    base = places / "clients"
    shop = base / "shop"
    shop.mkdir(parents=True)
    base.chmod(0o755)
    fill(shop)
    (base / "shop.py").write_text(SHOP)
    (base / "echo.py").write_text(ECHO)
    # A real SSH server is on 22.
    internet = Internet(base, ports="80,443,8080,8443,9000")
    try:
        internet.serve(base / "shop.py", str(shop), str(internet.certificate), str(PORT))
        internet.serve(base / "echo.py", str(ECHO_PORT))
        start_sshd(internet)
        yield internet
    finally:
        internet.end()


def start_sshd(internet: Internet) -> None:
    """An SSH server of the distribution's, with keys of its own."""
    must_work(os.path.exists(SSHD), "needs sshd")
    base = internet.base
    for key in ("host_key", "client_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(base / key)]
        subprocess.run(keygen, check=True)
    (base / "sshd_config").write_text(SSHD_CONFIG.format(base=base))
    # The directory that it gives up its rights in.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    server = (
        f"{SSHD} -t -f {base}/sshd_config && echo ready && exec {SSHD} -D -e -f {base}/sshd_config"
    )
    internet.start_there("sh", "-c", f"{server} 2>{base}/sshd.log")
    log = base / "sshd.log"
    assert eventually(lambda: log.exists() and "0.0.0.0 port 22" in log.read_text())


def ssh_command(net: Internet, world: World) -> str:
    """How git is to call ssh: with the test's key, and without the user's own files."""
    key = world.write("client_key", (net.base / "client_key").read_text(), 0o600)
    return f"ssh -F none -i {key} -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"


def trusting(net: Internet, world: World) -> str:
    """Shell text that makes clients trust the shop's certificate."""
    pem = world.write("public.pem", (net.base / "public.pem").read_text())
    names = (
        "CURL_CA_BUNDLE",
        "SSL_CERT_FILE",
        "GIT_SSL_CAINFO",
        "PIP_CERT",
        "NODE_EXTRA_CA_CERTS",
        "npm_config_cafile",
    )
    return "export " + " ".join(f"{name}={pem}" for name in names) + ";"


def need(*tools: str) -> None:
    """Where a client is not installed, it cannot be tried."""
    for tool in tools:
        must_work(shutil.which(tool, path="/usr/bin:/bin:/usr/local/bin"), f"needs {tool}")


@BOTH
def test_git_clones_and_pushes_over_https(net: Internet, world: World, before: str) -> None:
    """Against git's own server."""
    must_work(os.path.exists(HTTP_BACKEND), "needs git http-backend")
    script = (
        f"{before} {trusting(net, world)} set -e; git clone -q {SITE}/git/repo.git copy; cd copy; "
        "git -c user.name=x -c user.email=x@y commit -q --allow-empty -m second; "
        f"git push -q origin HEAD:refs/heads/by-{world.base.name}-{bool(before)}; git ls-remote -q | wc -l"
    )
    done = net.sh(world, script, *ALLOW)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3


@BOTH
def test_pip_installs_from_an_index(net: Internet, world: World, before: str) -> None:
    """A wheel."""
    script = (
        f"{before} {trusting(net, world)} /usr/bin/python3 -m pip -q install --index-url {SITE}/simple --target lib agsbx-demo && "
        "PYTHONPATH=lib /usr/bin/python3 -c 'import agsbx_demo; print(agsbx_demo.HELLO)'"
    )
    there = subprocess.run(
        ["/usr/bin/python3", "-m", "pip", "--version"], capture_output=True, check=False
    )
    must_work(there.returncode == 0, "needs pip for /usr/bin/python3")
    done = net.sh(world, script, *ALLOW)
    assert done.stdout == "from the index\n", done.stderr


@BOTH
def test_npm_installs_from_a_registry(net: Internet, world: World, before: str) -> None:
    """A package."""
    need("npm", "node")
    world.write("package.json", "{}")
    script = (
        f"{before} {trusting(net, world)} npm install --no-audit --no-fund --silent --fetch-retries=0 --registry {SITE}/ agsbx-demo && "
        "node -e 'console.log(require(\"agsbx-demo\"))'"
    )
    done = net.sh(world, script, *ALLOW)
    assert done.stdout.splitlines()[-1:] == ["from the registry"], done.stderr


@BOTH
def test_node_fetches(net: Internet, world: World, before: str) -> None:
    """Its own `fetch`, which old versions do not let use a proxy."""
    need("node")
    code = f"fetch('{SITE}/hello.txt').then(r => r.text()).then(t => process.stdout.write(t))"
    done = net.sh(world, f'{before} {trusting(net, world)} node -e "{code}"', *ALLOW)
    assert done.stdout == "hello\n", done.stderr


@BOTH
def test_python_fetches(net: Internet, world: World, before: str) -> None:
    """The standard library."""
    code = (
        f"import urllib.request as u; print(u.urlopen('{SITE}/hello.txt').read().decode(), end='')"
    )
    done = net.sh(world, f'{before} {trusting(net, world)} /usr/bin/python3 -c "{code}"', *ALLOW)
    assert done.stdout == "hello\n", done.stderr


def test_java_fetches_without_any_setting(net: Internet, world: World) -> None:
    """The JVM reads none of the variables."""
    need("java")
    world.write(
        "Get.java",
        "import java.net.*; public class Get { public static void main(String[] a) throws Exception {"
        "System.out.print(new String(new URL(a[0]).openStream().readAllBytes())); } }",
    )
    done = net.sh(world, "java Get.java http://site.example:8080/", "--allow", "site.example:8080")
    assert done.stdout.startswith("site.example:8080 at "), done.stderr


@BOTH
def test_go_fetches(net: Internet, world: World, before: str) -> None:
    """Its resolver is its own, and reads resolv.conf itself."""
    need("go")
    world.write(
        "get.go",
        'package main; import ("fmt"; "io"; "net/http"); func main() { r, err := http.Get("http://site.example:8080/"); '
        "if err != nil { fmt.Println(err); return }; b, _ := io.ReadAll(r.Body); fmt.Print(string(b)) }",
    )
    script = (
        f"{before} GOFLAGS=-mod=mod GO111MODULE=off GOCACHE=/tmp/go CGO_ENABLED=0 go run get.go"
    )
    done = net.sh(world, script, "--allow", "site.example:8080")
    assert done.stdout.startswith("site.example:8080 at "), done.stderr


def test_git_clones_and_pushes_over_ssh(net: Internet, world: World) -> None:
    """Against a real server, with no setting but the key; another host is refused."""
    need("ssh")
    clone = f"GIT_SSH_COMMAND='{ssh_command(net, world)}' git clone -q root@{{}}:{net.base}/shop/git/repo.git copy"
    script = (
        f"set -e; export GIT_SSH_COMMAND='{ssh_command(net, world)}'; {clone.format('site.example')}; cd copy; "
        "git -c user.name=x -c user.email=x@y commit -q --allow-empty -m third; "
        f"git push -q origin HEAD:refs/heads/ssh-{world.base.name}; git ls-remote -q | grep -c ssh-{world.base.name}"
    )
    done = net.sh(world, script, "--allow", "site.example:22")
    assert done.stdout == "1\n", done.stderr
    refused = net.sh(
        world, f"rm -r copy; {clone.format('other.example')}", "--allow", "site.example:22"
    )
    assert refused.returncode != 0
    assert "other.example:22 is refused" in refused.stderr


def test_ssh_is_told_why(net: Internet, world: World) -> None:
    """The client prints our text; an allowed one reaches the server."""
    need("ssh")
    ssh = "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -T git@{} 2>&1"
    refused = net.sh(world, ssh.format("other.example"), "--allow", "site.example")
    assert "other.example:22" in refused.stdout
    assert "--allow" in refused.stdout
    reached = net.sh(world, ssh.format("site.example -v"), "--allow", "site.example")
    assert "remote software version OpenSSH" in reached.stdout


def test_a_websocket_is_opened(net: Internet, world: World) -> None:
    """Frames go both ways: without any setting, and in a tunnel of the proxy port."""
    host = f"site.example:{ECHO_PORT}"
    code = (
        f"{WEBSOCKET}\nwebsocket(socket.create_connection(('site.example', {ECHO_PORT})), '{host}')\n"
        f"s = socket.create_connection(('127.0.0.1', 3128)); s.sendall(b'CONNECT {host} HTTP/1.1\\r\\n\\r\\n')\n"
        "assert b' 200 ' in s.recv(4096)\n"
        f"websocket(s, '{host}')\n"
    )
    done = net.sandbox(world, "--allow", host, "/usr/bin/python3", "-c", code)
    assert done.stdout.splitlines() == ["HTTP/1.1 101 Switching Protocols", "echoed"] * 2, (
        done.stderr
    )


@BOTH
@pytest.mark.parametrize("module", ["requests", "httpx"])
def test_python_libraries_fetch(net: Internet, world: World, before: str, module: str) -> None:
    """Over TLS, with the certificate that the variables name."""
    there = ["/usr/bin/python3", "-c", f"import {module}"]
    must_work(subprocess.run(there, check=False).returncode == 0, f"needs {module}")
    code = f"import {module}; print({module}.get('{SITE}/hello.txt').text, end='')"
    bundle = "export REQUESTS_CA_BUNDLE=$SSL_CERT_FILE;"
    script = f'{before} {trusting(net, world)} {bundle} /usr/bin/python3 -c "{code}"'
    done = net.sh(world, script, *ALLOW)
    assert done.stdout == "hello\n", done.stderr


def test_names_have_addresses_of_both_kinds(net: Internet, world: World) -> None:
    """Asked for one, the other, or any; each leads to the host, whatever kind it has outside."""
    code = (
        "import socket, urllib.request\n"
        "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNSPEC):\n"
        "    for flags in (0, socket.AI_ADDRCONFIG):\n"
        "        found = socket.getaddrinfo('both.example', 8080, family, socket.SOCK_STREAM, 0, flags)\n"
        "        print(len(found), len({f for f, *_ in found}), all(a[0].startswith(('198.1', '2001:2:')) for *_, a in found))\n"
        "        for f, kind, _, _, address in found:\n"
        "            s = socket.socket(f, kind); s.settimeout(10); s.connect(address)\n"
        "            s.sendall(b'GET / HTTP/1.0\\r\\nHost: both.example:8080\\r\\n\\r\\n')\n"
        "            assert b'both.example:8080 at ' in b''.join(iter(lambda: s.recv(999), b''))\n"
    )
    done = net.sandbox(world, "--allow", "both.example:8080", "/usr/bin/python3", "-c", code)
    assert done.stdout.splitlines() == ["1 1 True"] * 4 + ["2 2 True"] * 2, done.stderr


def test_five_hundred_connections_are_held(net: Internet, world: World) -> None:
    """All at once, through a real sandbox; each gets its own answers, at the start and at the end."""
    code = (
        f"{WEBSOCKET}\nimport contextlib, io\nheld = []\n"
        f"for _ in range({HELD}):\n"
        f"    s = socket.create_connection(('site.example', {ECHO_PORT}))\n"
        f"    with contextlib.redirect_stdout(io.StringIO()): websocket(s, 'site.example:{ECHO_PORT}')\n"
        "    held.append(s)\n"
        "for number, s in enumerate(held): s.sendall(b'\\x81\\x84' + bytes(4) + b'%04d' % number)\n"
        "print(sum(s.recv(6, socket.MSG_WAITALL)[2:] == b'%04d' % n for n, s in enumerate(held)))\n"
    )
    argv = world.argv("--allow", f"site.example:{ECHO_PORT}", "/usr/bin/python3", "-c", code)
    done = net.run(world, "sh", "-c", 'ulimit -S -n 1024; exec "$@"', "sh", *argv)
    assert done.stdout == f"{HELD}\n", done.stderr
