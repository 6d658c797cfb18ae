"""What is asked of the engine, and what its answers mean. Pure.

Nothing that a client of the service says becomes a mount, a device, a label, an option or a
capability: of its wishes only the image's pin, the runtime's name, four numbers and the variables
of a command reach the engine.
"""

from __future__ import annotations

import posixpath
import re

from ...policy.docker import images
from ...policy.docker.values import Refused
from ...record import Record
from ..problems import Problem
from . import docker_scripts
from .interface import HOME, WORK, Support

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..values import Resources, Sandbox
    from .interface import Start

UID = 1000
# The process that keeps the container: a command of the sandbox must not be able to end it.
KEEPER = 65534
OLDEST_API = (1, 41)
# Not the label of the filter for sandboxes' own containers: each sees only what it has made.
LABEL = "org.agent-sandbox.service"
INSTANCE, SANDBOX, AGENT = f"{LABEL}.instance", f"{LABEL}.sandbox", f"{LABEL}.agent"
# Volumes are made in advance; these say which ones a container has.
VOLUMES = (f"{LABEL}.work", f"{LABEL}.home")
TARGETS = (WORK, HOME)
# In memory.
TEMPORARIES = TEMPORARY, RUNTIME = "/tmp", "/run"
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
SCRATCH = 64 << 20
# The names that containerd lists beside the short ones.
_RUNTIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Pair(Record):
    """The two volumes of a sandbox."""

    work: str
    home: str

    @property
    def names(self) -> tuple[str, str]:
        """In the order of TARGETS."""
        return self.work, self.home


# --- images


def reference(image: str) -> str:
    """A name as the engine is asked for it: complete, so that it is never the start of an id."""
    if images.is_id(image):
        return "sha256:" + image.removeprefix("sha256:")
    try:
        return str(images.parse(image))
    except Refused as error:
        raise Problem("INVALID", str(error), field="image", rule="image.name") from error


def pin(document: object, image: str) -> str:
    """The image's id: what it contains, whatever its name means later."""
    found = document.get("Id") if isinstance(document, dict) else None
    if not isinstance(found, str) or not images.DIGEST.fullmatch(found):
        raise Problem("BACKEND_UNAVAILABLE", f"the engine does not say what '{image}' is")
    return found


# --- containers


def container_name(instance: str, sandbox: str) -> str:
    """One name for one sandbox: the engine refuses a second container."""
    if not ID.fullmatch(sandbox):
        raise Problem("INVALID", "not the id of a sandbox")
    return f"agent-sandbox-{instance}-{sandbox}"


def labels(instance: str, sandbox: Sandbox, pair: Pair) -> dict[str, str]:
    """Whose it is. All of it is ours: metadata never becomes a label."""
    own = {INSTANCE: instance, SANDBOX: sandbox.id, AGENT: sandbox.owner}
    return {**own, **dict(zip(VOLUMES, pair.names, strict=True))}


def container(
    sandbox: Sandbox, *, instance: str, pair: Pair, runtime: str, declared: tuple[str, ...]
) -> dict[str, object]:
    """The body that creates a sandbox's container. `declared`: the volumes of its image."""
    if not images.DIGEST.fullmatch(sandbox.digest):
        raise Problem("INVALID", "the image is not pinned by its content", field="image")
    if sandbox.network.mode != "off":
        raise Problem(
            "UNSUPPORTED", f"the docker backend has no network '{sandbox.network.mode}'",
            hint="use network: off, or the bwrap backend", field="network", rule="docker.network",
        )  # fmt: skip
    return {
        # The pin, not the name: a tag that is moved in between changes nothing.
        "Image": sandbox.digest,
        "Entrypoint": [docker_scripts.SHELL, "-c", docker_scripts.KEEP],
        "Cmd": [],
        "User": f"{KEEPER}:{KEEPER}",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Labels": labels(instance, sandbox, pair),
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "Tty": False,
        # When whoever holds the input goes away, the input ends, and with it the container.
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": False,
        "HostConfig": {
            **bounds(sandbox.resources),
            "Init": True,
            "Runtime": runtime,
            "NetworkMode": "none",
            # The engine copies the host's resolver otherwise: names of the host's network.
            "Dns": ["127.0.0.1"],
            "DnsSearch": ["."],
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "Privileged": False,
            "SecurityOpt": ["no-new-privileges"],
            "IpcMode": "private",
            "PidMode": "",
            "CgroupnsMode": "private",
            "LogConfig": {"Type": "none", "Config": {}},
            "RestartPolicy": {"Name": "no"},
            "OomScoreAdj": 500,
            "Mounts": [
                volume_mount(name, target)
                for name, target in zip(pair.names, TARGETS, strict=True)
            ] + [fixed_mount(name, target, instance)
                 for target, name in fixed(instance, sandbox.digest, declared).items()],
            "Tmpfs": {
                TEMPORARY: f"rw,exec,nosuid,nodev,mode=1777,size={scratch(sandbox.resources)}",
                RUNTIME: f"rw,noexec,nosuid,nodev,mode=755,uid={UID},gid={UID},size=4m",
                # For what is mounted in it, and hardly more.
                **{target: "rw,nosuid,nodev,mode=755,size=64k" for target in declared
                   if above(target)},
            },
        },
    }  # fmt: skip


def volume_mount(name: str, target: str, *, copy: bool = False) -> dict[str, object]:
    """A volume of the engine's; there are no other mounts."""
    return {
        "Type": "volume", "Source": name, "Target": target,
        "VolumeOptions": {"NoCopy": not copy},
    }  # fmt: skip


def fixed(instance: str, pin: str, declared: tuple[str, ...]) -> dict[str, str]:
    """The names of the volumes for what an image declares, by their places: one for all sandboxes.

    The engine would make new ones for each otherwise, which a command might write, beyond every
    bound. These hold what the image has there, and are read-only, as the rest of the image is.
    """
    key = f"agent-sandbox-{instance}-{pin.removeprefix('sha256:')[:16]}"
    return {target: f"{key}-{n}" for n, target in enumerate(declared) if not above(target)}


def fixed_mount(name: str, target: str, instance: str) -> dict[str, object]:
    """One of them. The engine fills it when it makes it."""
    return {
        "Type": "volume", "Source": name, "Target": target, "ReadOnly": True,
        "VolumeOptions": {"NoCopy": False, "Labels": {INSTANCE: instance}},
    }  # fmt: skip


def above(target: str) -> bool:
    """Whether one of our mounts is below: there must be a directory for it, read-only or not."""
    return any(own.startswith(f"{target}/") for own in TARGETS)


def declared(document: object, image: str) -> tuple[str, ...]:
    """Where an image wants volumes, but for where we mount something ourselves."""
    config = document.get("Config") if isinstance(document, dict) else None
    found = config.get("Volumes") if isinstance(config, dict) else None
    places = {_place(str(one), image) for one in found} if isinstance(found, dict) else set()
    return tuple(sorted(places - {*TARGETS, *TEMPORARIES}))


def _place(path: str, image: str) -> str:
    """As the engine understands it; the engine takes no other ones."""
    place = "/" + posixpath.normpath(path).lstrip("/")
    if not path.startswith("/") or place == "/" or "\0" in path:
        raise Problem(
            "UNSUPPORTED", f"the image '{image}' declares the volume {path[:80]!r}",
            hint="use an image without it", field="image", rule="image.volume",
        )  # fmt: skip
    return place


def scratch(resources: Resources) -> int:
    """How large `/tmp` is. It is memory, and counts as such."""
    return SCRATCH if resources.memory is None else max(resources.memory // 2, 1 << 20)


def bounds(resources: Resources) -> dict[str, object]:
    """The limits that the kernel keeps."""
    found: dict[str, object] = {}
    if resources.memory is not None:
        # The same number for both: no swap.
        found |= {"Memory": resources.memory, "MemorySwap": resources.memory}
    if resources.cpus is not None:
        found["NanoCpus"] = round(resources.cpus * 1e9)
    if resources.pids is not None:
        found["PidsLimit"] = resources.pids
    limits = {"core": 0}
    if resources.disk is not None:
        # One file can never be larger than all of it may be.
        limits["fsize"] = resources.disk
    found["Ulimits"] = [{"Name": n, "Soft": v, "Hard": v} for n, v in sorted(limits.items())]
    return found


def execution(sandbox: Sandbox, start: Start, token: str) -> dict[str, object]:
    """The body that creates an execution."""
    env = {"HOME": HOME, **sandbox.env, **start.env}
    if start.terminal is not None:
        env.setdefault("TERM", "xterm-256color")
    command = docker_scripts.wrapped(token, start.cwd or WORK, start.argv)
    return process(
        command, env=env, tty=start.terminal is not None,
        stdin=start.input or start.terminal is not None,
    )  # fmt: skip


def process(
    command: list[str], *, env: Mapping[str, str] | None = None, tty: bool = False,
    stdin: bool = False,
) -> dict[str, object]:  # fmt: skip
    """The body that creates any process in a container: always the same user, never privileged."""
    return {
        "Cmd": command,
        "User": f"{UID}:{UID}",
        "WorkingDir": "/",
        "Env": [f"{name}={value}" for name, value in (env or {}).items()],
        "Tty": tty,
        "AttachStdin": stdin,
        "AttachStdout": True,
        "AttachStderr": True,
        "Privileged": False,
    }


# --- what the engine says


def support(info: object, api: tuple[int, int], *, podman: bool, required: str) -> Support:
    """What can be done with this engine."""
    if not isinstance(info, dict):
        return Support(ok=False, reason="the container engine does not describe itself")
    known = runtimes(info)
    reason = "podman is not supported: use dockerd" if podman else ""
    reason = reason or _objection(info, api, required, known)
    kept = {
        "memory": bool(info.get("MemoryLimit")), "cpus": bool(info.get("CpuCfsQuota")),
        "pids": bool(info.get("PidsLimit")),
    }  # fmt: skip
    return Support(
        ok=not reason,
        reason=reason,
        enforced={**{n: "cgroup" if yes else "" for n, yes in kept.items()}, "disk": "server"},
        images=True,
        pause=True,
        networks=("off",),
        runtimes=(required,) if required else known,
    )


def _objection(
    info: Mapping[str, object], api: tuple[int, int], required: str,
    known: tuple[str, ...],
) -> str:  # fmt: skip
    if api < OLDEST_API:
        return f"the engine's API is older than {OLDEST_API[0]}.{OLDEST_API[1]}"
    if required and required not in known:
        return f"the engine does not have the required runtime '{required}'"
    options = info.get("SecurityOptions")
    named = [str(one) for one in options] if isinstance(options, list) else []
    seccomp = [one for one in named if one.startswith("name=seccomp")]
    if not seccomp or any("profile=unconfined" in one for one in seccomp):
        return "the engine does not filter system calls (seccomp)"
    return ""


def runtimes(info: Mapping[str, object]) -> tuple[str, ...]:
    """The runtimes that the engine knows, its default first."""
    listed = info.get("Runtimes")
    names = [n for n in listed if _RUNTIME.fullmatch(n)] if isinstance(listed, dict) else []
    default = str(info.get("DefaultRuntime", ""))
    return tuple(sorted(names, key=lambda name: (name != default, name)))


def choose_runtime(wanted: str, required: str, known: tuple[str, ...]) -> str:
    """The runtime of a sandbox; "" is the engine's own choice."""
    chosen = wanted or required
    if required and chosen != required:
        raise Problem(
            "RUNTIME_NOT_ALLOWED", f"the runtime '{chosen}' is not the required one",
            hint=f"use {required}", rule="docker.runtime", field="runtime",
        )  # fmt: skip
    if chosen and chosen not in known:
        code = "BACKEND_UNAVAILABLE" if chosen == required else "UNSUPPORTED"
        raise Problem(
            code, f"the engine does not have the runtime '{chosen}'",
            hint=f"it has: {', '.join(known)}", rule="docker.runtime", field="runtime",
        )  # fmt: skip
    return chosen


def memory(stats: object) -> int | None:
    """The memory in use, without files that can be dropped at once, as `docker stats` has it."""
    found = stats.get("memory_stats") if isinstance(stats, dict) else None
    used = found.get("usage") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(used, int):
        return None
    detail = found.get("stats")
    table = detail if isinstance(detail, dict) else {}
    cache = table.get("inactive_file", table.get("total_inactive_file", 0))
    return max(0, used - cache) if isinstance(cache, int) else used


def pids(stats: object) -> int | None:
    """How many processes there are."""
    found = stats.get("pids_stats") if isinstance(stats, dict) else None
    number = found.get("current") if isinstance(found, dict) else None
    return number if isinstance(number, int) else None


def volume_size(document: object, names: tuple[str, ...]) -> int | None:
    """The sum of the sizes that `system/df` says of some volumes."""
    listed = document.get("Volumes") if isinstance(document, dict) else None
    sizes = {
        one.get("Name"): (one.get("UsageData") or {}).get("Size")
        for one in listed or []
        if isinstance(one, dict)
    }
    found = [size for size in map(sizes.get, names) if isinstance(size, int) and size >= 0]
    return sum(found) if len(found) == len(names) else None


def label(document: object, name: str) -> str:
    """A label of a container, from a list (`Labels`) or an inspection (`Config.Labels`)."""
    if not isinstance(document, dict):
        return ""
    config = document.get("Config")
    holder = config if isinstance(config, dict) else document
    table = holder.get("Labels")
    value = table.get(name, "") if isinstance(table, dict) else ""
    return value if isinstance(value, str) else ""


def pair(document: object) -> Pair | None:
    """The volumes that a container of ours has."""
    work, home = (label(document, name) for name in VOLUMES)
    return Pair(work=work, home=home) if work and home else None
