"""Takes the other protections away: authority, secrets, policy, the end of a run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from escape.patching import (
    Proxy,
    around,
    condition,
    drop_mounts,
    drop_options,
    module,
    nothing,
    of_options,
    of_plan,
    one_by_one,
    protection,
    put,
    tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# --- authority ------------------------------------------------------------------------------------


@protection("seccomp")
def _() -> None:
    # One instruction: BPF_RET, SECCOMP_RET_ALLOW.
    allow = bytes((0x06, 0, 0, 0)) + (0x7FFF0000).to_bytes(4, "little")
    put("launch.seccomp", "build", lambda *_, **__: allow)


@protection("landlock")
def _() -> None:
    put("launch.landlock", "restrict", lambda *_: False)


@protection("new keyring")
def _() -> None:
    put("launch.syscalls", "join_new_keyring", nothing)


@protection("closed descriptors")
def _() -> None:
    put("launch.descriptors", "hide_descriptors", nothing)


@protection("dropped capabilities")
def _() -> None:
    def change(options: list[str]) -> Iterable[str]:
        at = options.index("--cap-drop")
        return [*options[:at], "--cap-add", "ALL", *options[at + 2 :]]

    of_options(change)


@protection("no nested user namespaces")
def _() -> None:
    drop_options("--disable-userns")


@protection("user namespace")
def _() -> None:
    # Only root can do without; then bwrap keeps root's own capabilities.
    def change(options: list[str]) -> Iterable[str]:
        gone = ("--unshare-user", "--disable-userns", "--cap-drop", "ALL")
        return ["--cap-add", "ALL", *(o for o in one_by_one(options) if o not in gone)]

    of_options(change)
    around("launch.syscalls", "syscall", _without_joining)


def _without_joining(call: Callable[..., int], number: int, *arguments: Any) -> int:
    """The keeper joins the sandbox's user namespace; where there is none, it is in it already."""
    joins = module("launch.joined")
    if number == joins.NUMBERS[os.uname().machine][0] and arguments[1] == joins.CLONE_NEWUSER:
        return 0
    return call(number, *arguments)


@protection("pid namespace")
def _() -> None:
    of_options(lambda options: [o for o in one_by_one(options) if o != "--unshare-pid"])


@protection("die with parent")
def _() -> None:
    drop_options("--die-with-parent")


@protection("keeper ends an orphan")
def _() -> None:
    put("launch.keeping", "_kill", lambda _: None)


@protection("network namespace")
def _() -> None:
    of_plan(lambda plan: plan.replace(network=True))


# --- environment and secrets ----------------------------------------------------------------------


@protection("list of variables")
def _() -> None:
    def everything(old: Callable[..., Any], policy: Any, facts: Any, profile: Any) -> Any:
        env, why = old(policy, facts, profile)
        return {**facts.env, **env}, why

    around("policy.environment", "build", everything)


@protection("no passwords in variables")
def _() -> None:
    put("policy.environment", "has_userinfo", lambda _: False)


@protection("empty environment of bwrap")
def _() -> None:
    old = os.posix_spawn

    def spawn(path: str, argv: Any, env: Any, **options: Any) -> int:
        if path.endswith("bwrap"):
            env = {**os.environ, **env, **_set_in(sys.argv)}
        return old(path, argv, env, **options)

    setattr(os, "posix_spawn", spawn)  # noqa: B010 - its type is narrower


def _set_in(arguments: list[str]) -> dict[str, str]:
    """What --env sets: a supervisor that hands the command's environment to bwrap, too."""
    words = [arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word == "--env"]
    return dict(word.split("=", 1) for word in words if "=" in word)


@protection("secrets of the home")
def _() -> None:
    put("policy.merge", "_secret_rules", lambda *_: [])


@protection("secrets of root")
def _() -> None:
    put("host.facts", "_root_secrets", lambda *_: ())


@protection("sockets of services")
def _() -> None:
    put("host.facts", "_services", lambda *_: ())


@protection("engine sockets")
def _() -> None:
    drop_mounts(lambda m: m.rule == "container-engine socket")


@protection("protected parts of profiles")
def _() -> None:
    drop_mounts(lambda m: m.kind == "ro" and m.rule.startswith("profile"))


@protection("private state of agents")
def _() -> None:
    # The host's own directory, writable, in the place of the sandbox's; so there is nothing to
    # prepare, to copy or to keep in step.
    def shared(mount: Any) -> Any:
        return tree(mount.dest) if mount.source.startswith("@state/") else mount

    def change(plan: Any) -> Any:
        points = tuple(p for p in plan.home_points if not p.level.startswith("@state/"))
        mounts = tuple(shared(m) for m in plan.mounts)
        return plan.replace(mounts=mounts, home_points=points, steps=(), bare=())

    of_plan(change)


# --- policy ---------------------------------------------------------------------------------------


@protection("trust")
def _() -> None:
    put("sandbox.prepare", "_require_trust", nothing)


@protection("trust in a content")
def _() -> None:
    trust = module("host.trust")
    put(
        "host.trust",
        "is_trusted",
        lambda state, path, _: os.path.exists(trust._record(state, path)),
    )


@protection("one policy file in a place")
def _() -> None:
    files = module("host.files")

    def naive(stem: str) -> str | None:
        found = [stem + suffix for suffix in files.SUFFIXES if os.path.lexists(stem + suffix)]
        return found[-1] if found else None

    put("host.files", "find", naive)


@protection("policy files in use stay")
def _() -> None:
    drop_mounts(lambda m: m.rule == "policy files in use stay as they are")


@protection("own settings hidden")
def _() -> None:
    drop_mounts(lambda m: m.rule == "agent-sandbox's own settings")


@protection("own settings outside of the project")
def _() -> None:
    put("host.files", "_check_apart", nothing)


@protection("no link out for -C")
def _() -> None:
    put("host.facts", "_check_named", nothing)


@protection("excludes of runs above")
def _() -> None:
    put("host.facts", "_former", lambda *_: ())


@protection("no links to secrets")
def _() -> None:
    put("policy.resolve", "_reaches_secrets", lambda *_: False)


@protection("an agent's state is no environment")
def _() -> None:
    def naive(directory: str, _: str) -> str:
        root, name = os.path.split(directory)
        return root if name == "bin" and os.path.isfile(f"{root}/pyvenv.cfg") else directory

    put("host.facts", "_tool_root", naive)


@protection("no links in an agent's state")
def _() -> None:
    module("policy.profiles.ways").Judge.obstacle = nothing


@protection("own state hidden")
def _() -> None:
    drop_mounts(lambda m: m.rule == "agent-sandbox's own state")


@protection("own code read-only")
def _() -> None:
    put("host.facts", "_own_code", lambda *_: ())


@protection("bwrap of the system")
def _() -> None:
    def naive(env: Any, _: str) -> str | None:
        found = [f"{directory}/bwrap" for directory in env["PATH"].split(":")]
        return next((path for path in found if os.access(path, os.X_OK)), None)

    put("host.tools", "find_bwrap", naive)


@protection("env of the system")
def _() -> None:
    named = tuple(f"{directory}/env" for directory in os.environ["PATH"].split(":"))
    put("host.tools", "ENV_PROGRAMS", named)


# --- the end --------------------------------------------------------------------------------------


@protection("careful clean-up")
def _() -> None:
    def naive(top: str) -> None:
        for name in os.listdir(top):
            path = f"{top}/{name}"
            if os.path.isdir(path):
                naive(path)
            else:
                os.unlink(path)
        os.rmdir(top)

    def tolerant(top: str) -> None:
        try:
            naive(top)
        except (OSError, RecursionError):
            return

    put("launch.sweeping", "remove_tree", tolerant)


@protection("sweep")
def _() -> None:
    put("launch.sweeping", "sweep", lambda _: 0)


@protection("reports through no link")
def _() -> None:
    class Naive(Proxy):
        O_NOFOLLOW = 0

    class SamePath(Proxy):
        @staticmethod
        def realpath(path: str) -> str:
            return path

    report = module("cli.report")
    fake: Any = Naive(os)
    fake.path = SamePath(os.path)
    report.os = fake


@protection("restoring through no link")
def _() -> None:
    put("launch.quarantine", "DIRECTORY", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


@protection("printable messages")
def _() -> None:
    put("cli.output", "printable", lambda text: text)


@protection("terminal taken back")
def _() -> None:
    module("launch.execute")._Terminal.take_back = nothing


@protection("killed after the grace")
def _() -> None:
    module("launch.execute").Sandboxed.kill = nothing


@protection("size of /tmp")
def _() -> None:
    of_plan(lambda plan: plan.replace(limits=plan.limits.replace(tmp_size=None)))


@protection("half of the descriptors")
def _() -> None:
    put("launch.guards", "_halve_descriptors", nothing)


@protection("default limits")
def _() -> None:
    of_plan(lambda plan: plan.replace(limits=plan.limits.replace(default_pids=None)))


@protection("limits")
def _() -> None:
    put("sandbox.prepare", "make_enforcer", nothing)


# --- conditions -----------------------------------------------------------------------------------


@condition("short grace")
def _() -> None:
    module("launch.execute").GRACE = 0.3


@condition("small default limits")
def _() -> None:
    # The default is made to protect machines, not to be reached in a test.
    of_plan(lambda plan: plan.replace(limits=plan.limits.replace(default_pids=20)))


@condition("started by a program")
def _() -> None:
    # The library in place of the command line; everything below it is shared.
    def script() -> None:
        library = module("sandbox.library")
        result = library.Sandbox(library.Policy()).run(sys.argv[1:])
        os._exit(result.code)

    put("cli.run", "script", script)


@condition("a sandbox beside acts before the mounts")
def _() -> None:
    # The worst moment of a race, every time: after the plan, before bwrap.
    old = os.posix_spawn

    def spawn(path: str, *args: Any, **options: Any) -> int:
        if path.endswith("bwrap"):
            os.system(os.environ["AGSBX_MOMENT"])
        return old(path, *args, **options)

    setattr(os, "posix_spawn", spawn)  # noqa: B010 - its type is narrower
