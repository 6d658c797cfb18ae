"""What the agent and the service have agreed on: names, numbers, one line of text. Pure."""

from __future__ import annotations

# The agent's protocol. A service speaks to no other.
VERSION = 1
PORT = 8651
# Where the bundle is in every pod, and the directory that holds a sandbox's files.
ROOT, PLACE = "/opt/agent-sandbox", "/sandbox"
# The one line that the agent prints: the engine's own log carries it to the service.
LINE = f"agent-sandbox-agent {VERSION} sha256:"

# Variables of the agent. All are public: whoever may see the pod may see them.
CA, UNCLAIMED, AT = "AGENT_SANDBOX_CA", "AGENT_SANDBOX_UNCLAIMED", "AGENT_SANDBOX_PORT"

# What of a container's variables reaches the agent (`enter`), and what each of its processes has
# instead of the image's: no locale, whose character sets are code (iconv(3)), no zone, no
# configuration and no modules of libcrypto.
PREFIX = "AGENT_SA"
VARIABLES = {
    "LC_ALL": "C", "TZ": ":/dev/null", "OPENSSL_CONF": "/dev/null", "OPENSSL_MODULES": "/dev/null",
    "OPENSSL_ENGINES": "/dev/null",
}  # fmt: skip

# Seconds between two signs of life while a command runs.
HEARTBEAT = 2.0
# How long a supervisor whose command has ended waits for another one on the same connection, and
# how long the service counts on that: a little less, or it would often ask when nobody listens.
STAY_SECONDS, COUNTED_SECONDS = 10.0, 8.0
# Input that may be on its way to a command that does not read.
WINDOW = 1 << 18

# What keeps what; the values that an agent may name.
GUARANTEES = {
    "filesystem": ("bwrap", "pod"),
    "network": ("netns", "seccomp", "pod"),
    "processes": ("pidns", "landlock", "landlock-trace", "pod"),
    "syscalls": ("seccomp",),
    "memory": ("cgroup",),
    "cpus": ("cgroup",),
    "pids": ("rlimit", ""),
    "disk": ("kubelet+server",),
}
# How the inner layer was built: with a /proc of its own, with the pod's, not at all.
FRESH, BOUND, NONE = "fresh", "bound", ""
FORMS = (FRESH, BOUND, NONE)
# Whether a sandbox is to have it.
INNER = ("preferred", "required", "off")
NETWORKS = ("off", "public")
