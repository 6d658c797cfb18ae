"""Takes protections of files away: mounts, what a run prepares for the next, git."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from escape.patching import (
    around,
    change_mounts,
    drop_mounts,
    module,
    nothing,
    of_command,
    of_options,
    of_plan,
    protection,
    put,
    tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# --- the file system ------------------------------------------------------------------------------


@protection("pins")
def _() -> None:
    put("policy.assemble", "_pin", nothing)


@protection("masks")
def _() -> None:
    drop_mounts(lambda m: m.level == "exclude" and m.rule.startswith("flag"))


@protection("read-only masks")
def _() -> None:
    binds = module("launch.bwrap").BINDS
    put("launch.bwrap", "BINDS", {**binds, "mask-file": "--bind", "mask-dir": "--bind"})


@protection("read-only mounts")
def _() -> None:
    change_mounts(lambda m: m.kind == "ro" and not m.source.startswith("@"), kind="rw")


@protection("mounts on files")
def _() -> None:
    drop_mounts(lambda m: m.kind == "ro" and m.file and m.source == m.dest)


@protection("private home")
def _() -> None:
    def change(plan: Any) -> Any:
        mounts = [m for m in plan.mounts if not m.source.startswith("@home")]
        kept = [m for m in mounts if m.kind != "symlink" or m.rule != "in the private home"]
        return plan.replace(mounts=(tree(plan.home), *kept), home_points=())

    of_plan(change)


@protection("private /tmp")
def _() -> None:
    change_mounts(lambda m: m.dest == "/tmp", source="/tmp")


@protection("devices of its own")
def _() -> None:
    def change(options: list[str]) -> Iterable[str]:
        at = options.index("--dev")
        return [*options[:at], "--dev-bind", "/dev", "/dev", *options[at + 2 :]]

    own = module("launch.verify").OWN
    put("launch.verify", "OWN", own | {"/dev/shm", "/dev/mqueue", "/dev/hugepages"})
    of_options(change)
    # They are no mounts of their own then.
    drop_mounts(lambda m: m.kind == "seal" and m.dest.startswith("/dev/"))


@protection("held names")
def _() -> None:
    of_plan(
        lambda plan: plan.replace(
            mounts=tuple(m for m in plan.mounts if m.kind != "hold"), placeholders=()
        )
    )


@protection("read-only holds")
def _() -> None:
    def writable(built: Any) -> Any:
        bulk = [("pin", d, d) if op == "ro" else (op, s, d) for op, s, d in built.bulk]
        return built.replace(bulk=tuple(bulk))

    of_command(writable)


@protection("watched names")
def _() -> None:
    put("launch.bwrap", "duties", lambda *_: ())


@protection("cut off from later mounts")
def _() -> None:
    joins = module("launch.joined")
    private = joins.MS_REC | joins.MS_PRIVATE

    def stay_attached(call: Callable[..., int], number: int, *arguments: Any) -> int:
        return 0 if len(arguments) > 3 and arguments[3] == private else call(number, *arguments)

    around("launch.syscalls", "syscall", stay_attached)
    put("launch.verify", "attached", lambda _: "")


@protection("hidden first process")
def _() -> None:
    drop_mounts(lambda m: m.dest == "/proc/1")


@protection("sealed device nodes")
def _() -> None:
    # Stand-ins for the host's nodes: the control must not harm the real ones.
    place = os.environ["AGSBX_HOST_DEVICES"]

    def opened(mount: Any) -> Any:
        if mount.kind != "seal" or not mount.dest.startswith("/dev/"):
            return mount
        return mount.replace(kind="rw", level="rw", source=place + mount.dest[len("/dev") :])

    of_plan(lambda plan: plan.replace(mounts=tuple(opened(m) for m in plan.mounts)))


@protection("sealed /proc")
def _() -> None:
    drop_mounts(lambda m: m.kind == "seal" and m.dest == "/proc")


@protection("read-only kernel settings")
def _() -> None:
    drop_mounts(lambda m: m.dest in ("/proc", "/proc/sys") and m.kind in ("ro", "seal"))


@protection("closed directories stop the start")
def _() -> None:
    put("host.locate", "check_open", nothing)


@protection("check of the built root")
def _() -> None:
    put("launch.verify", "stray", lambda *_: "")


# --- what a run has prepared for the next ---------------------------------------------------------


@protection("memory of excludes")
def _() -> None:
    put("host.memory", "recall", lambda *_: {})


@protection("no planted links")
def _() -> None:
    put("policy.resolve", "planted", nothing)


@protection("mount points without links")
def _() -> None:
    def naive(root: str, point: Any) -> None:
        path = f"{root}/{point.dest}"
        if point.kind == "dir":
            os.makedirs(path, exist_ok=True)
        elif point.kind != "symlink":
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "a").close()

    put("launch.workspace", "_prepare_point", naive)


@protection("PATH in the project shows nothing")
def _() -> None:
    def naive(claims: Any, links: Any, facts: Any, _: Any) -> None:
        for match in facts.path_dirs:
            module("policy.resolve")._show(claims, links, match, "ro", "PATH")

    put("policy.resolve", "_claim_path", naive)


@protection("git settings of the project name nothing")
def _() -> None:
    around(
        "host.git", "user_config",
        lambda old, home, env, locator, _: old(home, env, locator, "/nonexistent"),
    )  # fmt: skip


@protection("a home for each project")
def _() -> None:
    put("launch.workspace", "private_home", lambda state, _: f"{state}/homes/one")


@protection("escaped names of homes")
def _() -> None:
    def naive(state: str, key: str) -> str:
        project, _, profile = key.partition("\0")
        return f"{state}/homes/{profile}{project}/+home"

    put("launch.workspace", "private_home", naive)


# --- git ------------------------------------------------------------------------------------------


@protection("git control files")
def _() -> None:
    around("host.git", "layout", lambda old, *a, **o: _layout(old(*a, **o), control=()))


def _layout(found: Any, **fields: object) -> Any:
    return found and found.replace(**fields)


@protection("quarantine")
def _() -> None:
    changes = module("sandbox.changes").Changes
    changes.begin = nothing
    changes.settle = lambda _: ()


@protection("references of @git-strict")
def _() -> None:
    put("host.git", "_strict", lambda *_: [])


@protection("a repository points back")
def _() -> None:
    def naive(dot: str, top: str) -> tuple[str, str]:
        git = module("host.git")
        found = git._directory(git._read(dot)[len("gitdir:") :].strip(), top)
        return found, found

    put("host.git", "_linked", naive)


@protection("git credentials taken out")
def _() -> None:
    put("policy.gitconfig", "cleaned", lambda text: text)
