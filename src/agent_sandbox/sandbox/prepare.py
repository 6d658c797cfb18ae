"""The steps that command line, library and service share: plan, check, build, preview.

On the launch path of `agent-sandbox`, so anything heavy is imported where it is used. Nothing here
prints or exits.
"""

from __future__ import annotations

import os

from ..errors import (
    EXIT_CANNOT_EXECUTE,
    EXIT_NOT_FOUND,
    CommandError,
    HostError,
    UsageError,
)  # fmt: skip
from ..host import command as host_command
from ..host import facts as host_facts
from ..host import files, tools
from ..host.locate import Locator
from ..launch import bwrap, filters, sweeping, workspace
from ..policy import explain, merge, model, paths
from ..policy.resolve import resolve, widened_paths
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..launch.limits import Enforcer
    from ..launch.workspace import Workspace


class Request(Record):
    """What a caller wants: settings of the outermost layer, a place and a command."""

    argv: tuple[str, ...]
    values: Mapping[str, model.Setting]
    env: Mapping[str, str]
    cwd: str | None = None
    config: str | None = None
    # False: only the built-in layer and `values`, as the library does by default.
    read_files: bool = True


class Prepared(Record):
    """A resolved request: everything that `--debug`, `why` and the strategy need."""

    policy: model.Policy
    facts: model.HostFacts
    plan: model.Plan
    layers: tuple[model.Layer, ...]


def plan(request: Request) -> Prepared:
    """Read the configuration and the machine, and decide. Changes nothing."""
    locator = Locator()
    env = dict(request.env)
    place = host_facts.place(env, request.cwd, locator)
    layers: list[model.Layer] = []
    if request.read_files:
        config = _config_path(request.config, place.path)
        layers = files.read_layers(env, place.home.real, place.real, config, place.state_dir)
    flags = model.Layer(rank=model.FLAGS, values=request.values)
    name = request.argv[0] if request.argv else ""

    def decide(chosen: list[model.Layer]) -> tuple[model.Policy, model.HostFacts, model.Plan]:
        policy = merge.merge(
            chosen, project=place.real, home=place.home.real, command=name, env=env
        )
        facts = host_facts.gather(policy, place, env, locator)
        if policy.profile.value != "none":
            policy, facts = _without_strange(policy, facts, chosen)
        return policy, facts, resolve(policy, facts)

    def _without_strange(
        policy: model.Policy, facts: model.HostFacts, chosen: list[model.Layer]
    ) -> tuple[model.Policy, model.HostFacts]:
        """No profile by name for a program that a sandbox may have made: it would be its choice."""
        from ..host import agentstate

        program = agentstate.chose_itself(name, policy, facts, locator)
        if not program:
            return policy, facts
        policy = merge.merge(chosen, project=place.real, home=place.home.real, command="", env=env)
        told = agentstate.not_chosen(name, program)
        policy = policy.replace(notices=(*policy.notices, told))
        return policy, host_facts.gather(policy, place, env, locator)

    # Judged first: a file that may not ask for something must not stop the start in another way.
    project = _project_layer(layers)
    if project is not None and request.config is not None and not _in(project.file, place.real):
        # The user's own, from a place where no sandbox writes.
        project = None
    below = [layer for layer in layers if layer.rank < model.PROJECT]
    asked = merge.widenings(project, below, [flags]) if project is not None else []
    if project is not None and asked:
        _require_trust(project, place.state_dir, asked)
    policy, facts, made = decide([*layers, flags])
    if project is not None and _has_grants(policy):
        # The user's flags count as granted or taken: a deeper or exact rule must not lift them.
        more = widened_paths(policy, facts, decide([*below, flags])[2], made)
        if more:
            _require_trust(project, place.state_dir, more)
    return Prepared(policy=policy, facts=facts, plan=made, layers=(*layers, flags))


def _project_layer(layers: Sequence[model.Layer]) -> model.Layer | None:
    return next((layer for layer in layers if layer.rank == model.PROJECT), None)


def _in(file: str, directory: str) -> bool:
    return paths.within(os.path.realpath(file), directory)


def _has_grants(policy: model.Policy) -> bool:
    """Whether the project's own file shows or opens paths."""
    return any(merge.is_project(r) and r.level != model.EXCLUDE for r in policy.rules)


def _config_path(config: str | None, cwd: str) -> str | None:
    if config is None or config.startswith("/"):
        return config
    return paths.normalise(f"{cwd}/{config}")


def _require_trust(layer: model.Layer, state_dir: str, asked: Sequence[str]) -> None:
    # Only when the project's file asks for more than it may.
    from ..host.trust import is_trusted

    if not is_trusted(state_dir, layer.file, layer.text):
        raise merge.untrusted(layer.file, asked)


def check_command(prepared: Prepared, argv: Sequence[str]) -> None:
    """Fail before the start when the command, its links or its interpreter would not be visible."""
    if not argv or not argv[0]:
        raise UsageError("cannot run an empty command", code="no-command")
    made = prepared.plan
    path = made.env.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    locator = Locator()
    problem: CommandError | None = None
    for found in host_command.candidates(argv[0], path, made.cwd, locator):
        problem = _obstacle(made, argv[0], found, path, locator)
        if problem is None:
            return
    if problem is None and not _may_be_private(made, argv[0], path):
        raise CommandError(
            f"cannot run '{argv[0]}': command not found",
            hint=_spelling_hint(argv[0]),
            code="command-not-found",
            exit_code=EXIT_NOT_FOUND,
        )
    if problem is not None:
        raise problem


def _spelling_hint(name: str) -> str:
    if name in ("on", "off", "true", "false"):
        return f"switches take their value with '=': --network={name}"
    if " " in name:
        return "give the command and its arguments as separate words, or use sh -c"
    return "check the spelling and PATH"


def _refuse(name: str, why: str, hint: str = "") -> CommandError:
    return CommandError(
        f"cannot run '{name}': {why}",
        hint=hint,
        code="command-not-executable",
        exit_code=EXIT_CANNOT_EXECUTE,
    )


def _obstacle(
    made: model.Plan, name: str, found: host_command.Candidate, path: str, locator: Locator
) -> CommandError | None:
    """Why one file cannot be the command, or None."""
    if found.match.kind == "dir":
        return _refuse(name, "it is a directory")
    hidden = _hidden(made, found.match)
    if hidden:
        why = f"'{hidden}' is not visible in the sandbox"
        return _refuse(name, why, f"show it with --ro '{hidden}'")
    if not found.executable:
        hint = f"make it executable: chmod +x '{found.match.real}'"
        return _refuse(name, "permission denied", hint)
    return _script_obstacle(made, name, found, path, locator)


def _script_obstacle(
    made: model.Plan, name: str, found: host_command.Candidate, path: str, locator: Locator
) -> CommandError | None:
    """Why a script's interpreter cannot be started, or None."""
    hidden = ""
    if found.interpreter:
        match = locator.find(found.interpreter)
        if match is None:
            return _refuse(name, f"its interpreter '{found.interpreter}' does not exist")
        hidden = _hidden(made, match)
    if not hidden and found.looked_up:
        inner = [
            _hidden(made, c.match)
            for c in host_command.candidates(found.looked_up, path, made.cwd, locator)
            if c.executable
        ]
        hidden = inner[0] if inner and all(inner) else ""
    if hidden:
        why = f"its interpreter '{hidden}' is not visible in the sandbox"
        return _refuse(name, why, f"show it with --ro '{hidden}'")
    return None


def _hidden(made: model.Plan, match: model.Match) -> str:
    """The first path on the way to a file that the plan does not show, or nothing."""
    placed = {m.dest for m in made.mounts if m.kind == "symlink"}
    for link in match.links:
        if link.at not in placed and explain.look_up(made, link.at).level not in ("ro", "rw"):
            return link.at
    if explain.look_up(made, match.real).level not in ("ro", "rw", "private"):
        return match.real
    if explain.look_up(made, match.real).level == "private":
        # The host's file of that name is not what the sandbox sees there.
        return match.real
    return ""


def _may_be_private(made: model.Plan, name: str, path: str) -> bool:
    """Whether the command may exist only inside, in the private home or /tmp."""
    wanted = [name] if name.startswith("/") else [f"{part}/{name}" for part in path.split(":")]
    return any(
        explain.look_up(made, paths.normalise(p)).level == "private"
        for p in wanted
        if p.startswith("/")
    )


class Built(Record):
    """A sandbox that is ready to start: the command and the directories that go with it."""

    command: bwrap.Command
    space: Workspace
    shield: bool


def find_tools(prepared: Prepared) -> tools.Tools:
    """The programs that a start needs, checked."""
    program = tools.find_bwrap(prepared.facts.env, prepared.plan.project)
    if program is None:
        raise tools.missing_bwrap()
    return tools.check(program, bwrap.REQUIRED_OPTIONS, prepared.facts.state_dir)


def build(prepared: Prepared, argv: Sequence[str], *, heeded: Sequence[str] = ()) -> Built:
    """Make the directories of a run and the command that uses them.

    `heeded` names signals that bwrap is to ignore and the command to heed.
    """
    # Not for a plan alone.
    from ..policy import whereabouts

    facts, made = prepared.facts, prepared.plan
    if made.egress is not None or made.publish:
        _check_proxy()
    made, outside = _hand_out(prepared, argv)
    workspace.open_state(facts.state_dir, facts.uid)
    if made.git_auth is not None:
        # Only with keys or credentials.
        from ..launch import gitauth

        gitauth.check(made.git_auth)
    sweeping.sweep(facts.state_dir)
    found = find_tools(prepared)
    reset = found.env if heeded and _sees(made, found.env) else ""
    reset = made.moved.get(reset, reset)
    space = workspace.create(facts.state_dir)
    try:
        home = workspace.private_home(facts.state_dir, made.home_key)
        _remember_excludes(prepared)
        _remember_parses(prepared)
        workspace.prepare(made, space, home, _naming_texts(prepared))
        if made.secrets:
            outside = {**outside, **_certificate_file(made, space.path)}
        command = bwrap.command(
            whereabouts.filled(made, prepared.policy, facts),
            bwrap.Places(
                work=space.path,
                home=home,
                masks=f"{facts.state_dir}/mask",
            ),
            argv,
            program=found.bwrap,
            filter_bytes=filters.program(facts.state_dir, os.uname().machine, made.seccomp),
            reset_signals=reset,
            heeded=heeded,
            copies=_git_texts(prepared),
            outside=outside,
        )
    except BaseException:
        sweeping.remove(space, keep=False)
        raise
    command = command.replace(lock=f"{space.path}/{workspace.LOCK}")
    return Built(command=command, space=space, shield=bool(reset) and "=" not in argv[0])


def _hand_out(prepared: Prepared, argv: Sequence[str]) -> tuple[model.Plan, Mapping[str, object]]:
    """The plan with placeholders in its variables; values of secrets, for the proxy alone."""
    made = prepared.plan
    if not made.secrets and not made.network_ca:
        return made, {}
    # Only with secrets.
    from . import credentials

    return credentials.hand_out(made, prepared.facts.env, prepared.facts.home.real, argv)


def _certificate_file(made: model.Plan, work: str) -> Mapping[str, object]:
    """A file that the proxy fills before the command starts, where one is shown."""
    from ..policy.credentials import BUNDLE_FILE, intercepted

    if not intercepted(made.secrets):
        return {}
    path = f"{work}/net/{BUNDLE_FILE}"
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    return {"bundle": path}


def _check_proxy() -> None:
    """Refuse a network that nobody would control: without the proxy there is no start."""
    from ..launch.egress import PROGRAM

    if not os.path.exists(PROGRAM):
        raise HostError(
            f"cannot control the network: the proxy is not available: no '{PROGRAM}'",
            hint="install agent-sandbox anew, or use --network=off",
            code="no-proxy",
        )


def _remember_excludes(prepared: Prepared) -> None:
    """Let a later run know what this one hides, whatever it is called then."""
    rules, facts = prepared.policy.rules, prepared.facts
    if any(r.level == model.EXCLUDE and r.source.layer > model.BUILT_IN for r in rules):
        from ..host import memory

        project = prepared.plan.project
        old = memory.read(facts.state_dir, project)
        text = memory.dump(memory.renewed(old, rules, facts.matches))
        workspace.remember(memory.place(facts.state_dir, project), text)


def _remember_parses(prepared: Prepared) -> None:
    """Let a later run do without a parser."""
    if any(layer.parsed is not None for layer in prepared.layers):
        from ..host import parses

        state_dir = prepared.facts.state_dir
        data = parses.dump(parses.read(state_dir), prepared.layers)
        if data:
            filters.store(parses.place(state_dir), data)


def _sees(made: model.Plan, path: str) -> bool:
    return bool(path) and explain.look_up(made, os.path.realpath(path)).level in ("ro", "rw")


def _git_texts(prepared: Prepared) -> dict[str, str]:
    """What git inside reads, by the source of its mount. In memory: it needs no file of a run."""
    texts = {
        f"{model.WORK_GIT}/{index}": config.cleaned
        for index, config in enumerate(prepared.facts.git_config)
        if config.cleaned is not None
    }
    if prepared.plan.git_exclude:
        texts[f"{model.WORK_GIT}/exclude"] = prepared.plan.git_exclude
    return texts


def _naming_texts(prepared: Prepared) -> dict[str, str]:
    """Our own versions of the files about names, by their place in the workspace."""
    if not prepared.facts.naming:
        return {}
    from ..host import names
    from ..policy import naming

    texts = naming.texts(names.switch(), names.own())
    return {
        f"net/{naming.copy_name(match.path)}": texts[match.path] for match in prepared.facts.naming
    }


def preview(prepared: Prepared, argv: Sequence[str]) -> bwrap.Command:
    """The command as it would be, with nothing made on disk."""
    facts = prepared.facts
    program = tools.find_bwrap(facts.env, prepared.plan.project) or "bwrap"
    work = f"{facts.state_dir}/run/dry-run"
    home = workspace.private_home(facts.state_dir, prepared.plan.home_key)
    return bwrap.command(
        prepared.plan,
        bwrap.Places(work=work, home=home, masks=f"{facts.state_dir}/mask"),
        argv,
        program=program,
        filter_bytes=b"",
        copies=_git_texts(prepared),
    )


def has_limits(made: model.Plan) -> bool:
    """Whether the plan limits more than time."""
    limits = made.limits
    return not (limits.memory is None and limits.pids is None and limits.cpu_time is None)


def make_enforcer(made: model.Plan, uid: int, space: Workspace) -> Enforcer | None:
    """The limits of a plan, or None. The module is loaded only when there is one."""
    if not has_limits(made):
        return None
    from ..launch.limits import enforcer

    name, record = os.path.basename(space.path), f"{space.path}/{workspace.GROUPS}"
    return enforcer(made.limits, uid=uid, name=name, record=record)


def start_failed(code: int, said: str = "") -> HostError:
    """The error for a sandbox that bwrap could not build."""
    return HostError(
        f"cannot build the sandbox: bwrap ended with {code} before the command started"
        + (f": {said}" if said else ""),
        hint="'sandboxctl doctor' finds the cause on this machine",
        code="bwrap-failed",
    )
