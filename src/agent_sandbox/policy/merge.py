"""Layers become one Policy. Later layers win; a project's own file may only tighten.

The tightening of path rules needs the file system and is judged in `resolve`; everything else here.
"""

from __future__ import annotations

from ..errors import PolicyError
from . import paths, presets, profiles, settings
from .model import (
    BUILT_IN,
    EXCLUDE,
    MANDATORY,
    PROJECT,
    RO,
    RW,
    Policy,
    Rule,
    Setting,
    Source,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .model import Layer
    from .profiles.places import Part

DEFAULT_SOURCE = Source(layer=BUILT_IN, where="built-in default")
NETWORK_KEYS = frozenset(("network", "allow", "deny", "publish"))
# `learn` reaches what `public` does.
MODE_WIDTH = {"off": 0, "allow": 1, "public": 2, "learn": 2, "on": 3}
PATH_KEYS = (("filesystem.rw", RW), ("filesystem.ro", RO), ("filesystem.exclude", EXCLUDE))


def merge(
    layers: Sequence[Layer], *, project: str, home: str, command: str, env: dict[str, str]
) -> Policy:
    """Combine the layers for a command that runs in `project`."""
    toggles = _listed(layers, "filesystem.presets")
    active = presets.switch([str(t.value) for t in toggles])
    profile, agent = _profile(layers, command)
    rules = [*_preset_rules(active, project, home, env)]
    parts: tuple[Part, ...] = ()
    if "@agents" in active and agent.state:
        # Only for a command with a profile.
        from .profiles import places

        parts = places.parts(agent, env, home=home, project=project)
        rules += places.rules(agent, parts, home)
    own = [rule for layer in layers for rule in _layer_rules(layer, project, home)]
    shows_home = _last(layers, "home").value == "host" or "@host" in active
    if shows_home or any(_touches(rule, home) for rule in own):
        rules += _secret_rules(agent, home)
    rules += own
    files = tuple(layer.file for layer in layers if layer.file)
    source = Source(layer=MANDATORY, where="policy files in use stay as they are")
    rules += [Rule(level=RO, pattern=file, glob=False, source=source, quiet=True) for file in files]
    rules += _secret_files(layers, home)
    set_values: dict[str, Setting] = {}
    for layer in layers:
        entry = layer.values.get("env.set")
        if entry is not None and isinstance(entry.value, dict):
            for name, value in entry.value.items():
                set_values[name] = Setting(value=value, source=entry.source)
    network = network_of(layers)
    return Policy(
        network=network,
        allow=(*_listed(layers, "allow"), *profiles.hosts(agent, str(network.value))),
        deny=tuple(_listed(layers, "deny")),
        publish=tuple(_listed(layers, "publish")),
        secrets=tuple(_listed(layers, "secret")),
        budgets=tuple(_listed(layers, "budget")),
        network_ca=str(_last(layers, "network.ca").value or ""),
        docker=_last(layers, "docker"),
        docker_options=_docker_options(layers),
        commands=_commands(layers),
        git_auth=_git_auth(layers),
        git_keys=tuple(_listed(layers, "git.keys")),
        git_hosts=tuple(_listed(layers, "git.hosts")),
        home=_last(layers, "home"),
        seccomp=_last(layers, "seccomp"),
        profile=profile,
        agent=agent,
        parts=parts,
        presets=tuple(
            Setting(value=name, source=_preset_source(name, toggles)) for name in sorted(active)
        ),
        rules=tuple(rules),
        env_keep=tuple(_listed(layers, "env.keep")),
        env_set=set_values,
        limits={
            row.key: _last(layers, row.key)
            for row in settings.ROWS
            if row.key.startswith("limits.")
        },
        files=files,
    )


def _docker_options(layers: Sequence[Layer]) -> dict[str, object]:
    """What the engine's filter is told; nothing where there is none."""
    if _last(layers, "docker").value != "filtered":
        return {}
    found: dict[str, object] = {}
    for row in settings.ROWS:
        if row.key.startswith("docker."):
            name = row.key.partition(".")[2]
            listed = row.kind == settings.IMAGES
            value = [s.value for s in _listed(layers, row.key)] if listed else None
            found[name] = tuple(value) if value is not None else _last(layers, row.key).value
    return found


def _git_auth(layers: Sequence[Layer]) -> Setting | None:
    """Whether git inside may have something signed or handed in; None for no."""
    asked = _last(layers, "git.auth")
    return asked if asked.value != "none" else None


def _commands(layers: Sequence[Layer]) -> dict[str, Setting]:
    if not any("commands" in layer.values for layer in layers):
        return {}
    from . import commands

    return commands.merge(layers)


def _last(layers: Sequence[Layer], key: str) -> Setting:
    for layer in reversed(layers):
        if key in layer.values:
            return layer.values[key]
    return Setting(value=settings.BY_KEY[key].default, source=DEFAULT_SOURCE)


def network_of(layers: Sequence[Layer]) -> Setting:
    """The network's mode: an allow-list says `allow`, unless its layer or a later one says more."""
    for layer in reversed(layers):
        if "network" in layer.values:
            return layer.values["network"]
        if "allow" in layer.values:
            return Setting(value="allow", source=layer.values["allow"].source)
    return Setting(value=settings.BY_KEY["network"].default, source=DEFAULT_SOURCE)


def _listed(layers: Sequence[Layer], key: str) -> list[Setting]:
    """Lists of all layers, one after the other."""
    found = []
    for layer in layers:
        entry = layer.values.get(key)
        if entry is not None and isinstance(entry.value, tuple):
            found += [Setting(value=item, source=entry.source) for item in entry.value]
    return found


def _preset_source(name: str, toggles: Sequence[Setting]) -> Source:
    for toggle in reversed(toggles):
        if name in presets.members(str(toggle.value).removeprefix("!")):
            return toggle.source
    return DEFAULT_SOURCE


def _profile(layers: Sequence[Layer], command: str) -> tuple[Setting, profiles.Profile]:
    own: dict[str, profiles.Profile] = {}
    for setting in _listed(layers, "profiles"):
        one = setting.value
        if isinstance(one, profiles.Profile):
            own[one.name] = one
    chosen = _last(layers, "profile")
    if chosen.value is None:
        name = profiles.by_command(command, own)
        chosen = Setting(value=name, source=Source(layer=BUILT_IN, where="the command's name"))
    return chosen, profiles.find(str(chosen.value), str(chosen.source), own)


def _preset_rules(
    active: frozenset[str], project: str, home: str, env: dict[str, str]
) -> list[Rule]:
    rules = []
    for preset in presets.PRESETS:
        if preset.name not in active:
            continue
        source = Source(layer=BUILT_IN, where=f"preset {preset.name}")
        for written in preset.ro:
            # Our own tables are clean: no need for the checks that a user's path gets.
            pattern = home + written[1:] if written[0] == "~" else f"{project}/{written}"
            rules.append(Rule(level=RO, pattern=pattern, glob=False, source=source, quiet=True))
    if "@toolchains" in active:
        rules += _variable_rules(home, project, env)
    return rules


def _variable_rules(home: str, project: str, env: dict[str, str]) -> list[Rule]:
    """Toolchains that a variable has moved. Never a whole home, nor a place the agent can write."""
    from .toolchains import VARIABLES

    rules = []
    for name, suffix in VARIABLES:
        value = env.get(name, "")
        if not value.startswith("/") or "\0" in value or "\n" in value:
            continue
        path = paths.normalise(value + suffix)
        if paths.within(home, path) or paths.within(project, path) or paths.within(path, project):
            continue
        source = Source(layer=BUILT_IN, where=f"preset @toolchains: ${name}")
        rules.append(Rule(level=RO, pattern=path, glob=False, source=source, quiet=True))
    return rules


def _touches(rule: Rule, home: str) -> bool:
    """Whether a rule may show something of the real home."""
    base = paths.split_glob(rule.pattern)[0] if rule.glob else rule.pattern
    return rule.level != EXCLUDE and (paths.within(base, home) or paths.within(home, base))


def _secret_rules(profile: profiles.Profile, home: str) -> list[Rule]:
    """Credentials in the home stay hidden in every wider view, but for the profile's own state."""
    from .secrets import HOME

    source = Source(layer=BUILT_IN, where="secrets of the home")
    return [
        Rule(level=EXCLUDE, pattern=home + path[1:], glob=False, source=source, quiet=True)
        for path in HOME
        if not any(paths.within(path, state.path) for state in profile.state)
    ]


def _secret_files(layers: Sequence[Layer], home: str) -> list[Rule]:
    """Files with values that stay outside are shown by no rule."""
    return [
        Rule(
            level=EXCLUDE, pattern=paths.normalise(home + file[1:] if file[0] == "~" else file),
            glob=False, source=Source(layer=MANDATORY, where=f"secret ({s.source})"), quiet=True,
        )
        for s in _listed(layers, "secret")
        for file in getattr(s.value, "files", ())
    ]  # fmt: skip


def _layer_rules(layer: Layer, project: str, home: str) -> list[Rule]:
    rules = []
    for key, level in PATH_KEYS:
        entry = layer.values.get(key)
        if entry is None or not isinstance(entry.value, tuple):
            continue
        for written in entry.value:
            pattern = paths.expand(written, base=project, home=home, where=entry.source.where)
            glob = paths.is_glob(written)
            if glob:
                for component in paths.split_glob(pattern)[1]:
                    if component != "**":
                        paths.compile_component(component, entry.source.where)
            rules.append(
                Rule(level=level, pattern=pattern, glob=glob, source=entry.source, written=written)
            )
    return rules


def widenings(project: Layer, below: Sequence[Layer], above: Sequence[Layer] = ()) -> list[str]:
    """What an untrusted project file asks for beyond the layers below it, paths apart.

    `above` are the flags: where they restrict the network, a project's lists would open it again.
    """
    found = _network_widenings(project, below, above)
    for key, entry in project.values.items():
        row = settings.BY_KEY[key]
        lower = _last(below, key)
        if key in NETWORK_KEYS:
            continue
        if key == "git.auth":
            # Neither way is part of the other.
            if entry.value not in ("none", lower.value):
                found.append(f'{key} = "{entry.value}"')
        elif row.kind == settings.CHOICE:
            if row.choices.index(str(entry.value)) > row.choices.index(str(lower.value)):
                found.append(f'{key} = "{entry.value}"')
        elif row.kind in (settings.SIZE, settings.COUNT, settings.DURATION):
            if lower.value is not None and _amount(entry.value) > _amount(lower.value):
                found.append(f"{key} above {lower.source}")
        elif key in ("profile", "env.keep", "env.set"):
            # A variable can send an agent, and the key it holds, to another server.
            shown = list(entry.value) if isinstance(entry.value, tuple) else entry.value
            found.append(f"{key} = {shown!r}")
        elif row.kind == settings.IMAGES and isinstance(entry.value, tuple) and entry.value:
            found.append(f"{key} = {list(entry.value)!r}")
        elif row.kind == settings.COMMANDS:
            from .commands import widenings as loosened

            found += loosened(entry.value, below)
        elif row.kind == settings.PRESETS and isinstance(entry.value, tuple):
            found += _preset_widenings(entry.value, below)
    return found


def _network_widenings(project: Layer, below: Sequence[Layer], above: Sequence[Layer]) -> list[str]:
    """The mode, if it is wider, and the lists, if anything is closed without them."""
    if not NETWORK_KEYS & project.values.keys():
        return []
    found = []
    lower, asked = network_of(below), network_of([*below, project])
    if MODE_WIDTH[str(asked.value)] > MODE_WIDTH[str(lower.value)]:
        found.append(f'network = "{asked.value}"')
    if {str(lower.value), str(network_of([*below, *above]).value)} != {"on"}:
        found += [
            f"{key} = {list(entry.value)!r}"
            for key, entry in project.values.items()
            if key in ("allow", "publish") and isinstance(entry.value, tuple) and entry.value
        ]
    return found


def _amount(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _preset_widenings(toggles: tuple[str, ...], below: Sequence[Layer]) -> list[str]:
    """Presets that a project switches on though they grant, or off though they protect."""
    before = [str(t.value) for t in _listed(below, "filesystem.presets")]
    was, now = presets.switch(before), presets.switch([*before, *toggles])
    found = [f"preset {name}" for name in sorted(now - was) if presets.BY_NAME[name].grants]
    found += [f"preset !{name}" for name in sorted(was - now) if not presets.BY_NAME[name].grants]
    return found


def untrusted(file: str, asked: Sequence[str]) -> PolicyError:
    """The refusal of a project file that opens its own cage."""
    return PolicyError(
        f"cannot use '{file}': it asks for more than your own settings grant: " + ", ".join(asked),
        hint="read it; if you agree, run 'sandboxctl trust' here, or take those lines out",
        code="untrusted-config",
    )


def is_project(rule: Rule) -> bool:
    """Whether a rule comes from the project's own file."""
    return rule.source.layer == PROJECT
