"""What each of the four solutions puts in the place of the socket, and what then stops working."""

from __future__ import annotations

from ..record import Record
from .edit import PLAIN
from .model import ACCEPT_LABEL, WHY_LABEL
from .nodes import Node, Place

NO_SOCKET, DIND, SYSBOX, SERVICE = "no-socket", "dind", "sysbox", "service"
SOLUTIONS = (NO_SOCKET, DIND, SYSBOX, SERVICE)
SOCKET = "/var/run/docker.sock"
SYSBOX_RUNTIME = "sysbox-runc"
# Rootless: the agent is root over its engine. In the ordinary image a privileged container
# inside would be root over the devices of the host.
DIND_IMAGE = "docker:28-dind-rootless"
# Our own, made by packaging/Dockerfile; its entry point is sandboxctl.
IMAGE = "agent-sandbox:latest"
BUILD_IMAGE = (
    f"make the image {IMAGE} in a checkout of agent-sandbox: "
    "docker build -t agent-sandbox -f packaging/Dockerfile ."
)
SERVICE_NAME, FILTER_NAME = "sandbox-service", "docker-readonly"
SERVICE_PORT = 8650
# A volume that the filter shares with its readers. They have it read-only: that is enough to
# connect, and they cannot put a socket of their own there.
FILTER_DIRECTORY = "/run/docker-readonly"
FILTER_SOCKET = f"{FILTER_DIRECTORY}/docker.sock"
LIMITS: tuple[tuple[str, str | float], ...] = (
    ("mem_limit", "4g"),
    ("pids_limit", 512),
    ("cpus", 2.0),
)

STOPS: dict[str, tuple[str, ...]] = {
    NO_SOCKET: (
        "docker commands inside: ps, run, build, compose, testcontainers",
        "whatever starts, stops or watches containers of the host",
    ),
    DIND: (
        (
            "images, containers, volumes and networks of the host are not seen: each agent has its "
            "own, empty engine, and pulls and builds its own images"
        ),
        (
            "-v PATH:… and published ports mean the engine's container, not the agent's and not "
            "the host's: share files by docker cp, a build context or a volume"
        ),
        (
            "what needs a kernel feature that a rootless engine lacks: privileged containers that "
            "mount disks, AppArmor, some cgroup limits, ports below 1024"
        ),
        "the engine's container is privileged, because the engine needs it; the agent is not",
    ),
    SYSBOX: (
        "the host needs Sysbox: https://github.com/nestybox/sysbox",
        "the image must bring its own dockerd and start it; without one there is no docker inside",
        "images, containers, volumes and networks of the host are not seen",
    ),
    SERVICE: (
        "docker commands inside: agents ask the service to run code, by URL and token",
        (
            "images that ALLOWED_IMAGES does not name, and runs that take longer than "
            "MAX_EXECUTION_TIME seconds"
        ),
        "the service holds the socket and is root over the host: nothing but agents may reach it",
    ),
}


class Wish(Record):
    """What was asked for."""

    solution: str
    agents: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    allowed_images: tuple[str, ...] = ()
    max_execution_time: int = 300


NOWHERE = Place(file="", line=0, base="/")


def tree(value: object) -> Node:
    """A plain value as nodes."""
    if isinstance(value, dict):
        return Node(place=NOWHERE, fields={str(k): tree(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return Node(place=NOWHERE, items=tuple(tree(v) for v in value))
    if isinstance(value, (bool, int, float)):
        return Node(place=NOWHERE, text=str(value).lower(), tag=PLAIN)
    return Node(place=NOWHERE, text=None if value is None else str(value))


def _hardened() -> dict[str, object]:
    return {
        "restart": "unless-stopped",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        **dict(LIMITS),
    }


def engine(agent: str) -> dict[str, object]:
    """A private engine for one agent. Its name on its network is `docker`: the certificate's."""
    return {
        "image": DIND_IMAGE,
        "privileged": True,
        "restart": "unless-stopped",
        "environment": {"DOCKER_TLS_CERTDIR": "/certs"},
        "volumes": [
            f"{agent}-docker-certs:/certs/client",
            f"{agent}-docker-data:/home/rootless/.local/share/docker",
        ],
        "networks": {f"{agent}-docker": {"aliases": ["docker"]}},
        # Everything that the agent starts counts here.
        **dict(LIMITS),
        "pids_limit": 4096,
        "labels": {
            ACCEPT_LABEL: "privileged shared-writable new-privileges root-user",
            WHY_LABEL: f"the private engine of {agent}; it runs as uid 1000 and holds no host "
            "socket",
        },
    }


def read_filter() -> dict[str, object]:
    """The filter with its read-only policy. It talks by unix sockets alone."""
    return {
        "image": IMAGE,
        "command": [
            "docker", "serve", "--read-only", "--own-project", f"--socket={FILTER_SOCKET}",
            # The volume says who gets there, and readers have users of their own.
            "--mode=666", "--audit=-",
        ],
        "network_mode": "none",
        "read_only": True,
        **_hardened(),
        # The group of the socket differs between hosts; root without capabilities owns it.
        "user": "0:0",
        "volumes": [f"{SOCKET}:{SOCKET}:ro", f"{FILTER_NAME}:{FILTER_DIRECTORY}"],
        "labels": {
            ACCEPT_LABEL: "docker-socket root-user",
            WHY_LABEL: "the only holder of the socket; it answers questions and changes nothing",
        },
    }  # fmt: skip


def service(wish: Wish) -> dict[str, object]:
    """The sandbox service, the one holder of the socket."""
    return {
        "image": IMAGE,
        # Plain HTTP: nobody but the agents is on its network, which has no way out.
        "command": [
            "serve", f"--listen=0.0.0.0:{SERVICE_PORT}", "--plain-http", "--socket=none",
            # The name that agents call it by: others are refused (DNS rebinding).
            f"--public-host={SERVICE_NAME}", "--backend=docker", "--data=/data",
        ],
        "read_only": True,
        "tmpfs": ["/tmp"],
        **_hardened(),
        # The group of the socket differs between hosts; root without capabilities owns it.
        "user": "0:0",
        "environment": {
            "ALLOWED_IMAGES": ",".join(wish.allowed_images),
            "MAX_EXECUTION_TIME": str(wish.max_execution_time),
            "TOKENS_DIR": "/run/secrets",
        },
        "secrets": [token(agent) for agent in wish.agents],
        "volumes": [f"{SOCKET}:{SOCKET}", f"{SERVICE_NAME}:/data"],
        "networks": [SERVICE_NAME],
        "labels": {
            ACCEPT_LABEL: "docker-socket root-user",
            WHY_LABEL: "the one holder of the socket; agents reach it by URL and token",
        },
    }  # fmt: skip


def token(agent: str) -> str:
    """The name of an agent's secret."""
    return f"{agent}-sandbox-token"


def token_file(agent: str) -> str:
    """Where its token lies, beside the compose file."""
    return f"./secrets/{agent}-sandbox.token"


def make_tokens(agents: tuple[str, ...]) -> str:
    """How to make the tokens.

    The engine mounts each file as it is, and inside nobody is its owner: not the agent, and not
    the service, which is root without the capability to read what is not its own. So the directory
    keeps others on the host out, and the files are open.
    """
    files = " ".join(map(token_file, agents))
    return (
        "make the tokens, in a directory that only you can enter: mkdir -p secrets && "
        f"chmod 700 secrets && (umask 022 && for f in {files}; do openssl rand -hex 32 > $f; done)"
    )
