"""Container-engine sockets: where engines listen, and which names lead to them.

Any of these is root on the host, or close to it. They are unreachable unless `--docker` names one,
whatever else the policy shows.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

STANDARD = "/var/run/docker.sock"
# Where the socket is bound inside; /var/run leads to /run there.
INSIDE = "/run/docker.sock"

SYSTEM: tuple[str, ...] = (
    "/var/run/docker.sock", "/run/docker.sock", "/run/docker/docker.sock",
    "/run/podman/podman.sock", "/var/run/podman/podman.sock",
    "/run/containerd/containerd.sock", "/run/docker/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock", "/run/crio/crio.sock", "/var/run/crio/crio.sock",
    "/run/buildkit/buildkitd.sock", "/run/cri-dockerd.sock", "/run/dockershim.sock",
    "/run/snap.docker/docker.sock", "/var/snap/docker/common/run/docker.sock",
    "/var/lib/lxd/unix.socket", "/var/snap/lxd/common/lxd/unix.socket",
    "/var/lib/incus/unix.socket", "/run/incus/unix.socket", "/run/libvirt/libvirt-sock",
    "/var/run/libvirt/libvirt-sock", "/run/nerdctl/containerd.sock",
)  # fmt: skip
# Below $XDG_RUNTIME_DIR, for rootless engines.
RUNTIME: tuple[str, ...] = (
    "docker.sock", "podman/podman.sock", "buildkit/buildkitd.sock",
    "buildkit-default/buildkitd.sock",
    "containerd-rootless/api.sock", "containerd/containerd.sock", "crio/crio.sock",
)  # fmt: skip
HOME: tuple[str, ...] = (
    "~/.docker/run/docker.sock", "~/.docker/desktop/docker.sock",
    "~/.docker/desktop/docker-cli.sock", "~/.colima/docker.sock", "~/.colima/default/docker.sock",
    "~/.rd/docker.sock", "~/.orbstack/run/docker.sock", "~/.lima/docker/sock/docker.sock",
    "~/.lima/default/sock/docker.sock", "~/.local/share/containers/podman/machine/podman.sock",
    "~/.local/share/containers/podman/machine/qemu/podman.sock",
)  # fmt: skip
# Variables that say where an engine is. None of them is passed to the command.
VARIABLES: tuple[str, ...] = (
    "DOCKER_HOST", "CONTAINER_HOST", "CONTAINERD_ADDRESS", "BUILDKIT_HOST",
    "CONTAINER_RUNTIME_ENDPOINT",
)  # fmt: skip


# For clients of a filtered engine: BuildKit's tunnels are refused, so they must not be tried first,
# and what Ryuk removes is removed at the end of the run.
CLIENT_SETTINGS: Mapping[str, str] = {
    "DOCKER_BUILDKIT": "0",
    "COMPOSE_DOCKER_CLI_BUILD": "0",
    "TESTCONTAINERS_RYUK_DISABLED": "true",
}


def unix_path(address: str) -> str | None:
    """The path in `unix:///p`, `unix:/p`, `npipe`-free plain `/p`; None for any other address."""
    if address.startswith("unix://"):
        return address[len("unix://") :]
    if address.startswith("unix:"):
        return address[len("unix:") :]
    return address if address.startswith("/") else None


def candidates(env: Mapping[str, str], home: str, runtime_dirs: tuple[str, ...]) -> list[str]:
    """Every path under which an engine may be reachable here, most specific first."""
    named = [unix_path(env.get(name, "")) for name in VARIABLES]
    found = [path for path in named if path and path.startswith("/")]
    found += SYSTEM
    found += [f"{directory}/{name}" for directory in runtime_dirs for name in RUNTIME]
    found += [home + path[1:] for path in HOME]
    return list(dict.fromkeys(found))
