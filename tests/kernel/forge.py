"""A forge on this machine's loopback: a real sshd, a real smart-http server, a real ssh-agent."""

from __future__ import annotations

import base64
import http.server
import itertools
import os
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conftest import must_work
from kernel.conftest import World, end_group, eventually

if TYPE_CHECKING:
    from conftest import As

SSHD = "/usr/sbin/sshd"
PASSWORD = "correct-horse"
_numbers = itertools.count(1)


def key(world: World, name: str) -> Path:
    """A key of the user's, with its name as the comment."""
    path = world.path(f"~/.ssh/{name}")
    if not path.parent.exists():
        world.mkdir("~/.ssh").chmod(0o700)
    made = world.outside(
        "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{name}@test", "-f", path
    )
    assert made.returncode == 0, made.stderr
    return path


class Agent:
    """The user's ssh-agent."""

    def __init__(self, world: World) -> None:
        self.socket = str(world.home / "agent.sock")
        self._world = world
        self._process = world.runner.popen(
            ["ssh-agent", "-D", "-a", self.socket], env=world.env(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert eventually(lambda: os.path.exists(self.socket), 30)

    def add(self, path: Path) -> None:
        done = self._world.outside("ssh-add", "-q", path, env={"SSH_AUTH_SOCK": self.socket})
        assert done.returncode == 0, done.stderr

    def listed(self) -> str:
        return self._world.outside("ssh-add", "-l", env={"SSH_AUTH_SOCK": self.socket}).stdout

    def end(self) -> None:
        end_group(self._process)


class Listening:
    """A socket on the loopback; each connection is served by a thread."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._started: list[subprocess.Popen[Any]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._started.append(self.serve(connection))

    def serve(self, connection: socket.socket) -> subprocess.Popen[Any]:
        raise NotImplementedError

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for process in self._started:
            end_group(process)


class Sshd(Listening):
    """A real sshd, by `-i` once per connection, as a user who can log in as itself alone."""

    def __init__(self, server: As) -> None:
        must_work(os.path.exists(SSHD), "needs sshd")
        base = server.shared / f"sshd-{next(_numbers)}"
        self._server = server
        self.base = server.directory(base)
        self.authorized = base / "authorized_keys"
        self.authorized.write_text("")
        made = server.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", base / "host_key"], cwd=base
        )
        assert made.returncode == 0, made.stderr
        (base / "sshd_config").write_text(
            f"HostKey {base}/host_key\nAuthorizedKeysFile {base}/authorized_keys\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
            "KbdInteractiveAuthentication no\n"
        )
        make_repository(server, base / "repo.git")
        super().__init__()

    def serve(self, connection: socket.socket) -> subprocess.Popen[Any]:
        return self._server.popen(
            [SSHD, "-i", "-e", "-f", self.base / "sshd_config"], cwd=self.base,
            stdin=connection, stdout=connection, stderr=subprocess.DEVNULL, text=False,
        )  # fmt: skip

    def authorize(self, key_path: Path) -> None:
        with self.authorized.open("a") as file:
            file.write(key_path.with_name(key_path.name + ".pub").read_text())

    def known(self) -> str:
        """Its line in known_hosts."""
        public = " ".join((self.base / "host_key.pub").read_text().split()[:2])
        return f"[localhost]:{self.port} {public}\n"

    @property
    def url(self) -> str:
        return f"ssh://{self._server.name}@localhost:{self.port}{self.base}/repo.git"


def make_repository(server: As, path: Path) -> None:
    """A bare repository with one commit."""
    script = (
        f"git init -q --bare -b main {path} && cd {path} && "
        "tree=$(git mktree </dev/null) && "
        "commit=$(git -c user.name=x -c user.email=x@x commit-tree -m first $tree) && "
        "git update-ref refs/heads/main $commit && git config http.receivepack true"
    )
    done = server.run(["sh", "-c", script], cwd=path.parent)
    assert done.returncode == 0, done.stderr


class Https:
    """git http-backend behind TLS and a password."""

    def __init__(self, server: As, user: str = "alice") -> None:
        base = server.shared / f"https-{next(_numbers)}"
        self.base = server.directory(base)
        make_repository(server, base / "repo.git")
        made = subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
                "subjectAltName=DNS:localhost", "-keyout", base / "key.pem", "-out",
                base / "cert.pem",
            ],
            capture_output=True, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        self.certificate = (base / "cert.pem").read_text()
        wanted = "Basic " + base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        handler = type("Handler", (Backend,), {"server_as": server, "base": base, "wanted": wanted})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(base / "cert.pem", base / "key.pem")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/repo.git"

    def end(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Backend(http.server.BaseHTTPRequestHandler):
    """CGI, as far as git needs it."""

    server_as: As
    base: Path
    wanted: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _serve(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != self.wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="test"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        env: dict[str, str | None] = {
            "GIT_PROJECT_ROOT": str(self.base), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path,
            "QUERY_STRING": query, "REQUEST_METHOD": self.command, "REMOTE_USER": "alice",
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }  # fmt: skip
        process = self.server_as.popen(
            ["git", "http-backend"], cwd=self.base, env=env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=False,
        )  # fmt: skip
        said: Any = process.communicate(body)[0]  # type: ignore[arg-type]
        head, _, content = bytes(said).partition(b"\r\n\r\n")
        headers = [line.partition(": ") for line in head.decode().split("\r\n")]
        status = next((value for name, _, value in headers if name == "Status"), "200 OK")
        self.send_response(int(status.split()[0]))
        for name, _, value in headers:
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
