"""What a container may use: always limited, never more than the run's limits."""

from __future__ import annotations

import re

from .schema import DROP, inner, number, off, only, read, sequence, string, text, whole
from .values import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .schema import Policy, Site, Table
    from .values import Grants

NANO = 10**9
LOG = {"max-size": "10m", "max-file": "3"}
PERIOD = 100_000
# The kernel takes no larger limit; "none" in the settings is larger.
MOST_PIDS = 1 << 22
CPUSET = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
# Name → the highest hard limit. Limits that count per user would reach beyond the container.
ULIMITS = {"nofile": 1 << 20, "nproc": 1 << 16, "core": 0, "stack": 1 << 26, "fsize": 1 << 50}


def memory(site: Site, value: object) -> object:
    """Bytes, up to the limit; 0 is no wish."""
    amount = whole(site, value)
    if not 0 <= amount <= site.grants.memory:
        raise site.refuse(f"docker.memory allows {site.grants.memory} bytes")
    return amount or DROP


def swap(site: Site, value: object) -> object:
    """Swap is what memory is: -1 would lift the limit."""
    if whole(site, value) < 0:
        raise site.refuse("unlimited swap is not allowed")
    return DROP


def pids(site: Site, value: object) -> object:
    """Processes; 0 is no wish, -1 would be no limit."""
    amount = whole(site, value)
    if not 0 <= amount <= site.grants.pids:
        raise site.refuse(f"docker.pids allows {site.grants.pids}")
    return amount or DROP


def _cpus(site: Site, value: object) -> object:
    amount = whole(site, value)
    if not 0 <= amount <= int(site.grants.cpus * NANO):
        raise site.refuse(f"docker.cpus allows {site.grants.cpus:g}")
    return amount or DROP


def ulimits(site: Site, value: object) -> object:
    """Limits of a known kind, none unlimited."""
    found = []
    for item in sequence(site, value):
        entry = read(site, {"Name": text(), "Soft": whole, "Hard": whole}, item)
        name, soft, hard = entry.get("Name"), entry.get("Soft", 0), entry.get("Hard", 0)
        bound = ULIMITS.get(str(name))
        if bound is None or not isinstance(soft, int) or not isinstance(hard, int):
            raise site.refuse(f"the limit {str(name)[:20]!r} is not offered")
        if not 0 <= soft <= hard <= bound:
            raise site.refuse(f"{name} may be up to {bound}")
        found.append({"Name": name, "Soft": soft, "Hard": hard})
    return found or DROP


def restart(site: Site, value: object) -> object:
    """No container outlives the run: a policy is heard and not sent."""
    entry = read(site, {"Name": text(), "MaximumRetryCount": number(0, 1 << 31)}, value)
    name = entry.get("Name", "no")
    if name not in ("no", "always", "on-failure", "unless-stopped"):
        raise site.refuse(f"{str(name)[:20]!r} is not a restart policy", 400)
    if name != "no":
        site.changed("restart.no")
    return DROP


def _zero(*names: str) -> dict[str, Policy]:
    return dict.fromkeys(names, only(0))


def _none(*names: str) -> dict[str, Policy]:
    return dict.fromkeys(names, only([]))


RESOURCES: Table = {
    "Memory": memory,
    "MemorySwap": swap,
    "MemoryReservation": memory,
    "MemorySwappiness": lambda site, value: (number(-1, 100)(site, value), DROP)[1],
    "NanoCpus": _cpus,
    "CpuShares": number(2, 1024),
    "CpuPeriod": number(1000, 1_000_000),
    "CpuQuota": number(-1, 1 << 40),
    "CpusetCpus": lambda site, value: string(site, value, CPUSET) if value != "" else DROP,
    "CpusetMems": only(""),
    "PidsLimit": pids,
    "Ulimits": ulimits,
    "OomKillDisable": off(),
    # -1000 would let processes of the host die first.
    "OomScoreAdj": number(0, 1000),
    "CgroupParent": only("", why="would leave the budget of the container"),
    "RestartPolicy": restart,
    **_zero(
        "KernelMemory", "KernelMemoryTCP", "BlkioWeight", "CpuRealtimePeriod", "CpuRealtimeRuntime",
        "CpuCount", "CpuPercent", "IOMaximumIOps", "IOMaximumBandwidth",
    ),
    # The engine's error for a missing path would tell which files the host has.
    **_none(
        "BlkioWeightDevice", "BlkioDeviceReadBps", "BlkioDeviceWriteBps", "BlkioDeviceReadIOps",
        "BlkioDeviceWriteIOps", "Devices", "DeviceCgroupRules", "DeviceRequests",
    ),
}  # fmt: skip


def limited(site: Site, asked: dict[str, object]) -> dict[str, object]:
    """The wishes, with every limit set."""
    grants = site.grants
    nano = _nano(site, asked)
    limits = {key: value for key, value in asked.items() if key not in ("CpuPeriod", "CpuQuota")}
    limits["Memory"] = asked.get("Memory", grants.memory)
    # Equal to Memory: no swap on top of it.
    limits["MemorySwap"] = limits["Memory"]
    limits["NanoCpus"] = nano or int(grants.cpus * NANO)
    limits["PidsLimit"] = asked.get("PidsLimit", min(grants.pids, MOST_PIDS))
    for name in ("Memory", "NanoCpus", "PidsLimit"):
        if name not in asked:
            site.changed(f"limit.{name.lower()}")
    return limits


def _nano(site: Site, asked: dict[str, object]) -> int:
    """Processors by either way to say it: the engine takes one of them only."""
    if "NanoCpus" in asked:
        if "CpuQuota" in asked or "CpuPeriod" in asked:
            raise site.refuse("NanoCpus and CpuQuota exclude each other", 400)
        return whole(site, asked["NanoCpus"])
    quota, period = asked.get("CpuQuota", 0), asked.get("CpuPeriod", PERIOD)
    if not isinstance(quota, int) or not isinstance(period, int) or quota <= 0:
        return 0
    nano = quota * NANO // period
    site.changed("limit.cpu-quota")
    checked = _cpus(site.at("CpuQuota"), nano)
    return checked if isinstance(checked, int) else 0


def update(site: Site, value: object) -> dict[str, object]:
    """The body of `POST /containers/NAME/update`: within the limits of create."""
    body = read(site, RESOURCES, value)
    nano = _nano(site, body)
    sent = {key: item for key, item in body.items() if key not in ("CpuPeriod", "CpuQuota")}
    if nano:
        sent["NanoCpus"] = nano
    if "Memory" in sent:
        sent["MemorySwap"] = sent["Memory"]
    if not sent:
        raise Refused(f"{site.prefix}.empty", "nothing in this update may be changed")
    return sent


def log(site: Site, value: object) -> object:
    """Log drivers that stay here; the engine would connect for the others, from the host."""
    entry = read(site, {"Type": text(), "Config": _log_options}, value)
    if entry.get("Type", "json-file") not in ("json-file", "local", "none"):
        raise site.refuse("only the log drivers json-file, local and none are offered")
    if entry.get("Type") == "none":
        return {"Type": "none", "Config": {}}
    return log_default(site.grants)


def _log_options(site: Site, value: object) -> object:
    names = ("max-size", "max-file", "compress")
    return inner(dict.fromkeys(names, text("[0-9a-z]{1,12}")))(site, value)


def log_default(grants: Grants) -> dict[str, object]:
    """Logs of a bounded size."""
    config = {"max-size": "10m"} if grants.engine.name == "podman" else LOG
    return {"Type": "json-file", "Config": dict(config)}
