"""Tables of the kernel and files of other programs: read as they are meant, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from agent_sandbox.host import facts
from agent_sandbox.host.locate import Locator
from agent_sandbox.launch import hierarchy, verify
from agent_sandbox.policy import engines

from .bound import fuzz
from .mutation import mutated

# Names as they may be on a disk: the kernel escapes blank, tab, newline and backslash, no more.
NAMES = st.text("ab \t\n\\0134\r\x0b\x0c\x1c\x85\u2028é\udc80#-", min_size=1, max_size=6)
POINTS = st.lists(NAMES, max_size=3).map(lambda parts: "/" + "/".join(parts))
DEVICES = st.sampled_from(("8:1", "0:25", "0:1"))


def mangled(path: str) -> str:
    """As the kernel writes it: mangle() in fs/proc_namespace.c."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in path)


def mount_line(device: str, root: str, point: str) -> str:
    return f"36 35 {device} {mangled(root)} {mangled(point)} rw,nosuid master:1 - ext4 /dev/x rw\n"


@fuzz(300, mounts=st.lists(st.tuples(DEVICES, POINTS, POINTS), max_size=5))
def test_every_mount_is_read_whatever_its_name(mounts: list[tuple[str, str, str]]) -> None:
    """A line that is read as two, or not at all, would be a mount that nobody compared."""
    table = "".join(mount_line(*mount) for mount in mounts)
    found = [(entry.device, entry.root, entry.point) for entry in verify.parse(table)]
    assert found == mounts


@fuzz(200, path=POINTS, controllers=st.lists(st.sampled_from(("memory", "pids", "cpuacct"))))
def test_our_own_group_is_found_whatever_its_name(path: str, controllers: list[str]) -> None:
    names = ",".join(dict.fromkeys(controllers))
    kind, options = ("cgroup", f"rw,{names}") if names else ("cgroup2", "rw")
    # A newline in a group's name is not escaped there, and so cannot be told apart.
    path = path.replace("\n", "")
    table = mount_line("0:30", "/", "/mnt/\u2028 a") + (
        f"42 35 0:29 / /sys/fs/cgroup rw,nosuid - {kind} cgroup {options}\n"
    )
    found = hierarchy.hierarchies(table, f"3:{names}:{path}\n")
    assert [h.own for h in found] == [("/sys/fs/cgroup" + path).rstrip("/")]


TABLES = (
    "usage_usec 123\nuser_usec 1\nsystem_usec 2\n",
    "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n",
)


@fuzz(100, text=st.sampled_from(TABLES), key=st.text(max_size=8))
def test_a_counter_that_is_not_there_is_zero(text: str, key: str) -> None:
    expected = dict(line.split(" ") for line in text.splitlines()).get(key, "0")
    assert hierarchy.counter(text, key) == int(expected)


DOCUMENTS = (
    '{"Name":"x","Metadata":{},"Endpoints":{"docker":{"Host":"unix:///run/x.sock","SkipTLSVerify":false}}}',
    '{"Endpoints": {"docker": {"Host": "unix:\\/\\/\\/home\\/u\\/a b.sock"}}}',
    '{"Endpoints":{"docker":{"Host":"\\u0075nix:\\u002f\\u002f\\u002fx.sock"}}}',
    '{"Endpoints":{"docker":{"Host":"unix:///a\0b.sock"}}}',
    '{"Endpoints":{"docker":{"Host":"ssh://u@h"},"kubernetes":{"Host":"unix:///k.sock"}}}',
)  # fmt: skip
PIECES = (
    "\0", "\\u0000", "\\u002f", "unix://", "unix:///", '"', "\\", "{", "[" * 50, "\udc80",
    "\\ud800", "null", "1e999", "é", "\n", "/",
)  # fmt: skip


def plant(home: Path, meta: str, config: str) -> None:
    """A docker configuration with one context, as its command line keeps it."""
    shutil.rmtree(home, ignore_errors=True)
    # sha256 of "x", under which docker keeps the context x
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    place = home / ".docker" / "contexts" / "meta" / digest
    place.mkdir(parents=True)
    (place / "meta.json").write_bytes(meta.encode("utf-8", "surrogatepass"))
    (home / ".docker" / "config.json").write_bytes(config.encode("utf-8", "surrogatepass"))


def hosts(value: Any) -> list[str]:
    """Every address of an engine in a context's document."""
    if isinstance(value, dict):
        here = [value["Host"]] if isinstance(value.get("Host"), str) else []
        return here + [host for inner in value.values() for host in hosts(inner)]
    return [h for inner in value for h in hosts(inner)] if isinstance(value, list) else []


@fuzz(300, meta=mutated(DOCUMENTS, PIECES), name=st.sampled_from(("x", "default", "", "\ud800", 1)))
def test_every_socket_of_a_docker_context_is_found(tmp_path: Path, meta: str, name: object) -> None:
    """What docker would connect to is what we hide; nothing in such a file stops a start."""
    home = tmp_path / "home"
    plant(home, meta, json.dumps({"currentContext": name}))
    locator = Locator()
    found = facts._context_sockets(f"{home}/.docker")
    for path in found:
        locator.find(path)
    current = facts._current_context(str(home), {})
    try:
        # As Go reads it: what is no UTF-8 becomes U+FFFD.
        document = json.loads(meta.encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
    except ValueError:
        return
    for host in hosts(document):
        socket = engines.unix_path(host) or ""
        if host.startswith("unix://") and socket.startswith("/") and kernel_can(socket):
            assert socket in found
    if current is not None and kernel_can(current) and name == "x":
        assert current in found or not current.startswith("/")


@fuzz(100, config=mutated(('{"currentContext": "x", "auths": {}}',), PIECES))
def test_any_docker_configuration_is_read_without_an_error(tmp_path: Path, config: str) -> None:
    home = tmp_path / "home"
    plant(home, DOCUMENTS[0], config)
    facts._current_context(str(home), {})


def kernel_can(path: str) -> bool:
    """Whether a path can be given to the kernel, and is the same text to Go and to Python."""
    try:
        return b"\0" not in path.encode()
    except UnicodeEncodeError:
        return False
