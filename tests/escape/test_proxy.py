"""The proxy itself: streams that say something else on the way, and attempts to use or end it."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from escape.abroad import (
    ALLOWED,
    ELSEWHERE,
    PUBLIC,
    abroad,
    attack,
    descriptors_below,
    descriptors_stay_below,
    heard,
    net,
    peak_below,
    said,
    served,
    unwell,
    watched,
)  # fmt: skip
from escape.attack import Run, Trial, finish, prints, steps, trials
from kernel.conftest import end_group, eventually

if TYPE_CHECKING:
    from escape.attack import Scene

__all__ = ["abroad"]

pytestmark = [pytest.mark.kernel, pytest.mark.network, pytest.mark.usefixtures("abroad")]

SECOND = 'get("other.example", "/second")'

# --- names in streams -----------------------------------------------------------------------------


def is_ambiguous(scene: Scene) -> bool:
    """Whether a server got a head that two parsers may read differently."""
    for data in said(scene):
        head = data.partition(b"\r\n\r\n")[0].lower()
        framing = head.count(b"content-length") + head.count(b"transfer-encoding")
        if framing > 1 or b"\n " in head or head.count(b"\n") != head.count(b"\r\n"):
            return True
    return False


STREAMS = (
    attack(
        "another-host-in-http", "Host, an absolute target, a second Host",
        """
tcp("site.example", 80, get("other.example")); tcp("site.example", 80, get("other.example:80")); tcp("site.example", 80, get("OTHER.example."))
tcp("site.example", 80, b"GET http://other.example/ HTTP/1.1\\r\\nHost: site.example\\r\\n\\r\\n")
tcp("site.example", 80, get("site.example", more="Host: other.example\\r\\n"))
connect(b"site.example:80", get("other.example")); socks5(3, b"site.example", 80, get("other.example"))
proxied(b"GET http://site.example/ HTTP/1.1\\r\\nHost: other.example\\r\\n\\r\\n", b"")
""", "names in HTTP + requests built anew", setup=served(80), flags=ALLOWED,
        escaped=heard(b"other.example"),
    ),
    attack(
        "another-host-in-tls", "the server's name, whole and in pieces",
        """
data = hello("other.example"); parts = [data[:1], data[1:9], data[9:200], data[200:]]
records = data[:3] + struct.pack("!H", 40) + data[5:45] + data[:3] + struct.pack("!H", len(data) - 45) + data[45:]
for one in ([data], parts, [records]):
    tcp("site.example", 443, *one); connect(b"site.example:443", *one); socks5(3, b"site.example", 443, *one)
""", "names in TLS", setup=served(443), flags=ALLOWED, escaped=heard(b"other.example"),
    ),
    attack(
        "pipelined-requests", "a second one behind the first",
        f"""
for more in ("", "Connection: keep-alive\\r\\n"): tcp("site.example", 80, get("site.example", more=more) + {SECOND})
proxied(b"GET http://site.example/ HTTP/1.1\\r\\nHost: site.example\\r\\n\\r\\n" + {SECOND}, b"")
s = socket.create_connection(("site.example", 80), 5); s.settimeout(5); s.sendall(get("site.example")); s.recv(10)
try: talk(s, {SECOND})
except OSError as error: print(error)
""", "one request", setup=served(80), flags=ALLOWED, escaped=heard(b"/second"),
    ),
    attack(
        "smuggled-requests", "lengths that two servers read differently",
        f"""
body = "0\\r\\n\\r\\n".encode() + {SECOND}
for fields in ("Content-Length: 5\\r\\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\\r\\nContent-Length: 5",
        "Content-Length: 5\\r\\nContent-Length: 60", "Content-Length: 5\\r\\nTransfer-Encoding: xchunked",
        "Content-Length: 5\\r\\nTransfer-Encoding: identity\\r\\nTransfer-Encoding: chunked",
        "Content-Length: 5\\r\\nTransfer-Encoding:\\tchunked", "Content-Length: 5\\r\\nTransfer_Encoding: chunked"):
    tcp("site.example", 80, get("site.example", more=fields + "\\r\\n") + body)
""", "strict framing + requests built anew", setup=served(80), flags=ALLOWED, escaped=is_ambiguous,
    ),
    attack(
        "upgrade-that-is-none", "go on as if the server had agreed",
        f"""
s = socket.create_connection(("site.example", 80), 5); s.settimeout(5)
s.sendall(get("site.example", more="Connection: Upgrade\\r\\nUpgrade: websocket\\r\\n")); print(s.recv(4096))
try: talk(s, {SECOND})
except OSError as error: print(error)
""", "the server agrees to an upgrade", setup=served(80), flags=ALLOWED, escaped=heard(b"/second"),
    ),
)  # fmt: skip

# --- the helpers ----------------------------------------------------------------------------------

OTHER_PORT = 18080
# It is in another sandbox; whoever reaches it leaves a trace in that sandbox's project.
OTHER = """
import socket
server = socket.create_server(("127.0.0.1", 8000))
while True:
    peer, _ = server.accept()
    open("reached", "w").close(); peer.close()
"""


def another_sandbox(scene: Scene) -> None:
    """One that has published a port."""
    other = scene.mkdir("~/work/other")
    flags = ("--network=off", "--publish", f"{OTHER_PORT}:8000", "-C", str(other))
    process = net().popen(scene, *scene.argv(*flags, "/usr/bin/python3", "-c", OTHER))
    scene.cleanup.callback(end_group, process)
    scene.kept["trace"] = other / "reached"
    table = Path(f"/proc/{net().host}/net/tcp")
    assert eventually(lambda: f":{OTHER_PORT:04X} " in table.read_text())


def control_socket(scene: Scene) -> None:
    """Where the socket of `sandboxctl net` lies can be guessed from inside, if it is shown."""
    scene.mkdir("~/.local/state")


# Few enough to be left lying in a moment.
LIMITED = ("sh", "-c", 'ulimit -n 8192; exec "$@"', "sh")
START_SECONDS = 5.0


def beside(scene: Scene, argv: list[str]) -> Run:
    """Start another sandbox while this one holds on; note whether it could be."""
    process = net().popen(scene, *LIMITED, *argv)
    assert process.stdout is not None
    text = ""
    while line := process.stdout.readline():
        text += line
        if line == "done\n":
            other = net().popen(scene, *LIMITED, *scene.argv("--network=public", "true"))
            try:
                scene.kept["unwell"] = finish(other, START_SECONDS).code != 0
            except subprocess.TimeoutExpired:
                scene.kept["unwell"] = True
            break
    end = finish(process)
    return Run(code=end.code, text=text + end.text)


HELPERS = (
    attack(
        "descriptors-on-their-way", "more than a user may have, so that no other gate can send its own",
        """
import resource, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
fd, held = os.open("/dev/null", os.O_RDONLY), []
try:
    while True:
        held.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for _ in range(5): socket.send_fds(held[-1][0], [b"x"], [fd] * 200)
except OSError as error: print(error)
print("done", flush=True); sys.stdin.readline()
""", "half of the descriptors", flags=("--network=off",), invariant=8, drive=beside, escaped=unwell,
    ),
    attack(
        "another-sandbox", "by the port that it has published",
        f"""
for host in (b"127.0.0.1", b"localhost", OWN.encode()): connect(host + b":{OTHER_PORT}", b"x")
tcp("127.0.0.1", {OTHER_PORT}, b"x")
""", "rules for hosts + rules for addresses", flags=PUBLIC, setup=another_sandbox,
        escaped=lambda s: s.kept["trace"].exists(),
    ),
    attack(
        "command-the-proxy", "by its control socket, with the state directory's parent shown",
        """
import glob
socket.getaddrinfo("site.example", 80)
for path in glob.glob(state + "/run/*/control"):
    try:
        os.chdir(os.path.dirname(path))  # A whole path may be too long for a socket.
        s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect("control")
        s.sendall(b'{"do": "allow", "rules": ["site.example"]}\\n'); print(s.recv(4096))
    except OSError as error: print(error)
tcp("site.example", 80, get("site.example"))
""", "own state hidden", flags=("--rw", "~/.local", *ELSEWHERE), setup=steps(served(80), control_socket),
    ),
    attack(
        "kill-the-proxy", "and the gate, and all that can be seen",
        """
import glob, signal
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        words = open(path, "rb").read().split(b"\\0")
        if any(word.endswith(b"/egress.py") for word in words): os.kill(int(path.split("/")[2]), signal.SIGKILL); print("sent")
    except OSError as error: print(error)
""", "pid namespace + landlock", flags=PUBLIC, invariant=6,
        escaped=prints("proxy ended before the command did"),
    ),
)  # fmt: skip

# --- wearing it out -------------------------------------------------------------------------------

MANY = """
import fcntl, resource, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = []
def open_many(count, address, port, data):
    for _ in range(count):
        s = socket.socket(); s.setblocking(False); s.connect_ex((address, port)); held.append(s)
        try: s.send(data)
        except OSError: pass
def pour(count, size, address, port, piece):
    # All at once, as much as is taken.
    for _ in range(count):
        s = socket.create_connection((address, port)); held.append(s); s.settimeout(5)
        try:
            sent = 0
            while sent < size: sent += s.send(piece)
        except OSError as error: print(error)
    # Until the other side has read it, or has hung up.
    deadline = time.monotonic() + 5
    while any(struct.unpack("i", fcntl.ioctl(s, 0x5411, bytes(4)))[0] for s in held) and time.monotonic() < deadline: time.sleep(0.01)
def done():
    print("done", flush=True); sys.stdin.readline()
"""
# In MiB: what it needs for itself is less than the half.
MEMORY = 48

WEARING = (
    attack(
        "oversized-heads", "heads without an end, and fields without an end",
        MANY + """
pour(64, 1 << 20, "127.0.0.1", 3128, b"GET http://x/ HTTP/1.1\\r\\n" + b"X: " + b"a" * 65000 + b"\\r\\n"); done()
""", "size of a head", flags=PUBLIC, invariant=8, drive=watched(peak_below(MEMORY)), escaped=unwell,
    ),
    attack(
        "endless-blanks", "before a request that never comes",
        MANY + """
pour(64, 1 << 20, SITE, 80, b"\\r\\n" * 32768); done()
""", "blanks before a request", flags=("--network=public",), invariant=8,
        drive=watched(peak_below(MEMORY)), escaped=unwell,
    ),
    attack(
        "half-open-connections", "clients that begin and never go on, at every door",
        MANY + """
for address, port, data in ((SITE, 80, b"GET / HT"), (SITE, 443, b"\\x16\\3\\1"), ("127.0.0.1", 3128, b"\\5"), ("127.0.0.1", 3128, b""), ("127.0.0.1", 53, b"\\0")):
    open_many(60, address, port, data)
socket.getaddrinfo("site.example", 80); done()
""", "time for a handshake", flags=PUBLIC, invariant=8, conditions=("short handshakes",),
        drive=watched(descriptors_below(120, 3.0)), escaped=unwell,
    ),
    attack(
        "ten-thousand-connections", "more than it can have",
        MANY + """
told, tell = os.pipe()
if os.fork() == 0: open_many(5000, "127.0.0.1", 3128, b""); os.write(tell, b"x"); time.sleep(60); os._exit(0)
open_many(5000, SITE, 80, b"GET / HT"); os.read(told, 1); done()
""", "number of connections", flags=PUBLIC, invariant=8,
        drive=watched(descriptors_stay_below(4500, least=1000)), escaped=unwell,
    ),
)  # fmt: skip

ATTACKS = (*STREAMS, *HELPERS, *WEARING)


@trials(STREAMS)
def test_cannot_name_another_host_on_the_way(trial: Trial) -> None:
    trial.run()


@trials((*HELPERS, *WEARING))
def test_cannot_use_or_end_what_decides(trial: Trial) -> None:
    trial.run()
