"""The public classes: Policy, Sandbox, Process, Wrapped and Result.

    from agent_sandbox import Policy, Sandbox
    result = Sandbox(Policy(project=".", network="off")).run(["pytest", "-q"], capture=True)

A program pays no interpreter start: a run costs little more than bwrap itself. Commands get a
session of their own, so the program's terminal and its Ctrl-C stay the program's. Nothing here
prints or exits; errors are exceptions with message, hint and code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ..errors import EXIT_SIGNAL_BASE, EXIT_TIMEOUT, SandboxError, UsageError
from ..launch import (
    descriptors,
    stand_in,
    sweeping,
)
from ..policy import decode, model, paths, settings
from ..record import Record
from . import starting
from .changes import Changes
from .containers import Containers
from .gitlog import GitLog
from .prepare import Prepared, Request, build, check_command, has_limits, plan
from .process import Process, sooner
from .traffic import Traffic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

    from ..launch.workspace import Workspace
    from ..policy.triggers import Finding
    from .asynchronous import AsyncProcess

    Stream = int | IO[bytes] | None


class Policy(Record):
    """What a sandbox may do, for programs. Paths may be relative to the project, globs, or `~`."""

    project: str = "."
    # None, here and below: the default of the command line, or what the policy files say.
    network: str | bool | None = None
    # Hosts to let through and to refuse, as for --allow and --deny; ports as for --publish.
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    publish: Sequence[str] = ()
    docker: str | bool | None = None
    # For docker="filtered": images that containers may be made of, and where they may come from.
    docker_images: Sequence[str] = ()
    docker_registries: Sequence[str] = ()
    docker_keep: bool | None = None
    # "ssh-agent", "helper" or "both"; keys and hosts as for --git-key and --git-host.
    git_auth: str | None = None
    git_keys: Sequence[str] = ()
    git_hosts: Sequence[str] = ()
    home: str | None = None
    seccomp: str | None = None
    read: Sequence[str] = ()
    write: Sequence[str] = ()
    exclude: Sequence[str] = ()
    presets: Sequence[str] = ()
    profile: str | None = None
    # Rules for commands, as for --cmd: False, "@git", or the path of a script.
    commands: Mapping[str, bool | str] = {}
    # Variables to set; None takes one out that would otherwise be passed.
    env: Mapping[str, str | None] = {}
    keep_env: Sequence[str] = ()
    timeout: float | str | None = None
    memory: int | str | None = None
    pids: int | str | None = None
    cpu_time: float | str | None = None
    tmp_size: int | str | None = None
    # True: also read the user's and the project's policy files, as the command line does.
    # A string: that file in place of the project's.
    config: bool | str = False


POLICY_KEYS: tuple[tuple[str, str], ...] = (
    ("network", "network"), ("allow", "allow"), ("deny", "deny"), ("publish", "publish"),
    ("docker", "docker"), ("docker_images", "docker.images"),
    ("docker_registries", "docker.registries"), ("docker_keep", "docker.keep"),
    ("git_auth", "git.auth"), ("git_keys", "git.keys"), ("git_hosts", "git.hosts"),
    ("home", "home"), ("seccomp", "seccomp"),
    ("read", "filesystem.ro"),
    ("write", "filesystem.rw"), ("exclude", "filesystem.exclude"),
    ("presets", "filesystem.presets"), ("profile", "profile"), ("commands", "commands"),
    ("keep_env", "env.keep"),
    ("timeout", "limits.timeout"), ("memory", "limits.memory"), ("pids", "limits.pids"),
    ("cpu_time", "limits.cpu-time"), ("tmp_size", "limits.tmp-size"),
)  # fmt: skip


def policy_values(policy: Policy) -> dict[str, model.Setting]:
    """The public Policy as settings of the flag layer; defaults are left to the table."""
    values: dict[str, model.Setting] = {}
    for field, key in POLICY_KEYS:
        value = getattr(policy, field)
        if value is None or value in ((), {}):
            continue
        if isinstance(value, str) and settings.BY_KEY[key].kind in settings.LISTS:
            raise UsageError(
                f"cannot use Policy.{field}: must be a list, not a string",
                code="bad-value",
            )
        where = f"Policy.{field}"
        if isinstance(value, (list, tuple)):
            value = tuple(os.fspath(item) for item in value)
        decoded = decode.decode_value(settings.BY_KEY[key], value, where)
        values[key] = model.Setting(
            value=decoded, source=model.Source(layer=model.FLAGS, where=where)
        )
    return values


class Result(Record):
    """How a command ended, with its output when it was captured."""

    argv: tuple[str, ...]
    code: int
    out: bytes = b""
    err: bytes = b""
    timed_out: bool = False
    # "memory" or "cpu-time" when that limit ended the command.
    exceeded: str = ""
    duration: float = 0.0
    notices: tuple[str, ...] = ()
    # Control files that the run has changed, and what was done about them.
    changes: tuple[Finding, ...] = ()
    # Whom the command reached or was refused, where a proxy decides.
    network: Traffic = Traffic()
    # What it asked of the container engine, with docker="filtered".
    containers: Containers = Containers()
    # What git had signed and handed in, with git_auth.
    git: GitLog = GitLog()

    @property
    def ok(self) -> bool:
        """Whether the command succeeded."""
        return self.code == 0

    @property
    def signal(self) -> int | None:
        """The signal that ended the command, if one did."""
        return self.code - EXIT_SIGNAL_BASE if EXIT_SIGNAL_BASE < self.code < 192 else None

    @property
    def stdout(self) -> str:
        """Captured standard output as text."""
        return self.out.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Captured standard error as text."""
        return self.err.decode("utf-8", "replace")


class Wrapped:
    """A command line for programs that start processes themselves.

    Start `argv` with exactly the descriptors `fds` passed and `env` as its environment, and call
    `close` when it has ended.
    """

    def __init__(
        self, argv: list[str], fds: tuple[int, ...], space: Workspace, changes: Changes
    ) -> None:
        self.argv = argv
        self.fds = fds
        self._changes = changes
        # Known when it is closed.
        self.changes: tuple[Finding, ...] = ()
        # The command's variables are among bwrap's arguments. Nothing of the caller's environment
        # may reach bwrap itself: it runs outside, and LD_PRELOAD would run there with it.
        self.env: dict[str, str] = {}
        self._space: Workspace | None = space

    def close(self) -> None:
        """Close the descriptors and remove the workspace. Safe to call twice."""
        if self._space is None:
            return
        for fd in self.fds:
            os.close(fd)
        # Whoever was started may have been killed before it could end its sandbox.
        sweeping.end_orphans(os.path.basename(self._space.path), looks=2)
        self.changes = self._changes.settle()
        sweeping.remove(self._space, keep=False)
        self._space = None

    def __enter__(self) -> Wrapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sandbox:
    """Runs commands under one Policy. Safe to use from several threads."""

    def __init__(
        self, policy: Policy | None = None, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self.policy = policy if policy is not None else Policy()
        self.environ = environ
        self._values = policy_values(self.policy)

    def plan(
        self, argv: Sequence[str], *, cwd: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Prepared:  # fmt: skip
        """Decide what a command would see, without starting anything."""
        config = self.policy.config
        prepared = plan(
            Request(
                argv=_arguments(argv),
                values=self._values,
                env=dict(os.environ if self.environ is None else self.environ),
                cwd=os.path.abspath(os.fspath(self.policy.project)),
                config=config if isinstance(config, str) else None,
                read_files=config is not False,
            )
        )
        changes = {**self.policy.env, **(env or {})}
        return prepared.replace(plan=_adjusted(prepared.plan, changes, cwd))

    def run(
        self, argv: Sequence[str], *, input: bytes | str | None = None, capture: bool = False,
        timeout: float | None = None, cwd: str | None = None,
        env: Mapping[str, str | None] | None = None, check: bool = False,
    ) -> Result:  # fmt: skip
        """Run a command to its end. A timeout is a Result; with `check` a failure is an error."""
        started = time.monotonic()
        pipe = subprocess.PIPE if capture else None
        with self.popen(
            argv, cwd=cwd, env=env, stdout=pipe, stderr=pipe,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        ) as process:  # fmt: skip
            data = input.encode() if isinstance(input, str) else input
            out, err = process.finish(data, sooner(timeout, process.limit))
        result = Result(
            argv=process.argv,
            code=EXIT_TIMEOUT if process.timed_out else process.wait(),
            out=out,
            err=err,
            timed_out=process.timed_out,
            exceeded=process.exceeded,
            duration=time.monotonic() - started,
            notices=process.notices,
            changes=process.changes,
            network=process.network,
            containers=process.containers,
            git=process.git,
        )
        if check and not result.ok:
            raise CommandFailed(result)
        return result

    def popen(
        self, argv: Sequence[str], *, stdin: Stream = None, stdout: Stream = None,
        stderr: Stream = None, cwd: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Process:  # fmt: skip
        """Start a command; streams are as for subprocess.Popen, in bytes."""
        prepared = self.plan(argv, env=env, cwd=cwd)
        check_command(prepared, argv)
        return starting.start(prepared, _arguments(argv), stdin, stdout, stderr)

    def wrap(
        self, argv: Sequence[str], *, cwd: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Wrapped:  # fmt: skip
        """The command line that runs `argv` in the sandbox, for programs with their own spawn.

        It is a small supervisor of ours, which does in its own process what `popen` does here.
        """
        prepared = self.plan(argv, env=env, cwd=cwd)
        check_command(prepared, argv)
        if has_limits(prepared.plan):
            raise UsageError(
                "cannot wrap a command with resource limits",
                hint="use run or popen for this policy",
                code="wrap-with-limits",
            )
        built = build(prepared, argv)
        changes = Changes(prepared, os.path.basename(built.space.path))
        try:
            changes.begin()
        except BaseException:
            sweeping.remove(built.space, keep=False)
            raise
        spec = descriptors.memory_file(stand_in.dump(built.command))
        # The last word names the run: what it has just forked and is not bwrap yet is found by it
        # when somebody kills the supervisor at that moment.
        name = sweeping.called(os.path.basename(built.space.path))
        line = [sys.executable, "-I", "-S", stand_in.__file__, str(spec), name]
        return Wrapped(line, (spec,), built.space, changes)

    async def arun(
        self, argv: Sequence[str], *, input: bytes | str | None = None, capture: bool = False,
        timeout: float | None = None, cwd: str | None = None,
        env: Mapping[str, str | None] | None = None, check: bool = False,
    ) -> Result:  # fmt: skip
        """`run` for asyncio. Cancelling it kills the command and cleans up."""
        from .asynchronous import run

        return await run(
            self, argv, input=input, capture=capture, timeout=timeout, cwd=cwd, env=env,
            check=check,
        )  # fmt: skip

    async def apopen(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> AsyncProcess:
        """Start a command with its three streams as asyncio streams."""
        from .asynchronous import start

        return await start(self, argv, cwd=cwd, env=env)


class CommandFailed(SandboxError):
    """A command that `check=True` required to succeed did not."""

    def __init__(self, result: Result) -> None:
        how = "timed out" if result.timed_out else f"ended with {result.code}"
        super().__init__(f"command '{result.argv[0]}' {how}", code="command-failed")
        self.result = result


def _arguments(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, (str, bytes)):
        raise UsageError(
            "cannot run a string: pass a list of arguments",
            hint='for a shell command: ["sh", "-c", "…"]',
            code="bad-value",
        )
    arguments = tuple(os.fspath(a) for a in argv)
    if any("\0" in a for a in arguments):
        raise UsageError("cannot run a command with a NUL in it", code="bad-value")
    return arguments


def _adjusted(made: model.Plan, changes: Mapping[str, str | None], cwd: str | None) -> model.Plan:
    """The plan with explicit variables set or taken out, and another working directory."""
    env, why = dict(made.env), dict(made.env_sources)
    for name, value in changes.items():
        decode.check_variable("env", name, "Policy.env")
        if value is not None and not decode.is_text(value):
            raise UsageError(f"cannot set {name}: its value has a NUL in it", code="bad-value")
        if value is None:
            env.pop(name, None)
        else:
            env[name], why[name] = value, "Policy.env"
    if cwd is None:
        return made.replace(env=env, env_sources=why)
    if not decode.is_text(cwd):
        raise UsageError("cannot run there: the path has a NUL in it", code="bad-cwd")
    inside = paths.normalise(cwd if cwd.startswith("/") else f"{made.project}/{cwd}")
    env["PWD"] = inside
    return made.replace(env=env, env_sources=why, cwd=inside)
