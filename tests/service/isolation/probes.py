"""What runs inside: B, who has something of every kind, and A, who looks for it.

A's script gets facts that no real attacker has: where everything lies on the host.
"""

from __future__ import annotations

# Has a secret in every place that one sandbox can put it, and listens in every way.
HOLDER = """
import ctypes, json, os, socket, sys, time
word = sys.argv[1]
for place in ("/workspace", "/home/agent", "/tmp", "/dev/shm", "/run/user/1000"):
    with open(f"{place}/{word}", "w") as file: file.write(word)
held = []
for address in ("\\0" + word, f"/tmp/{word}.sock"):
    one = socket.socket(socket.AF_UNIX); one.bind(address); one.listen(); held.append(one)
port = socket.socket(); port.bind(("127.0.0.1", 0)); port.listen(); held.append(port)
seg = -1
libc = ctypes.CDLL(None, use_errno=True)
seg = libc.shmget(0x5eed, 4096, 0o1666)
print(json.dumps({"port": port.getsockname()[1], "shm": seg, "pid": os.getpid()}), flush=True)
"""

# Tries everything, and says what it got hold of.
SEEKER = """
import ctypes, glob, json, os, signal, socket, sys
facts = json.loads(sys.stdin.read())
word, found = facts["word"], []

def attempt(name, work):
    try:
        if work(): found.append(name)
    except OSError:
        pass

def texts(pattern):
    for path in glob.glob(pattern):
        try:
            # A pipe would wait for whoever writes it.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as file:
                yield file.read(1 << 20) or b""
        except OSError:
            continue

def connects(family, address):
    with socket.socket(family) as sock:
        sock.settimeout(2)
        sock.connect(address)
        return True

def walked():
    for top in ("/workspace", "/home", "/tmp", "/dev/shm", "/run", "/var", "/srv", "/mnt", "/opt"):
        for _, names, files in os.walk(top):
            if any(word in name for name in (*names, *files)): return True

attempt("a file by its name", walked)
for number, path in enumerate(facts["paths"]):
    attempt(f"path {number}", lambda: os.path.lexists(path))
attempt("abstract socket", lambda: connects(socket.AF_UNIX, "\\0" + word))
attempt("socket", lambda: connects(socket.AF_UNIX, f"/tmp/{word}.sock"))
attempt("loopback", lambda: connects(socket.AF_INET, ("127.0.0.1", facts["port"])))
attempt("shared memory", lambda: ctypes.CDLL(None).shmget(0x5eed, 4096, 0o666) >= 0)
for kind in ("cmdline", "environ", "mountinfo", "net/unix", "cwd/*", "root/*", "fd/*"):
    attempt(f"/proc: {kind}", lambda: any(word.encode() in text
                                          for text in texts(f"/proc/[0-9]*/{kind}")))
attempt("the service's secret", lambda: any(facts["secret"].encode() in text
                                            for text in texts("/proc/[0-9]*/environ")))
attempt("a variable", lambda: facts["secret"] in str(os.environ) or "sbx_" in str(os.environ))
attempt("the service's port", lambda: connects(socket.AF_INET, ("127.0.0.1", facts["service"])))
attempt("the service's socket", lambda: connects(socket.AF_UNIX, facts["socket"]))
print(json.dumps(found), flush=True)
# Everybody whom it can: the signal must not reach further than the namespace.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for pid in range(1, 1 << 16):
    if pid != os.getpid():
        try: os.kill(pid, signal.SIGKILL)
        except OSError: continue
for pid in (facts["pid"], -1):
    try: os.kill(pid, signal.SIGTERM)
    except OSError: continue
"""

# Both in one sandbox: the control.
TOGETHER = (
    HOLDER
    + """
import subprocess
facts = json.loads(sys.stdin.read())
facts["port"] = port.getsockname()[1]
subprocess.run([sys.executable, "-c", sys.argv[2]], input=json.dumps(facts), text=True)
"""
)
