"""What `--debug` prints: where each value came from, and each step of building the root."""

from __future__ import annotations

from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..sandbox.prepare import Prepared


def describe(prepared: Prepared, argv: Sequence[str]) -> str:
    """The plan in words."""
    from .. import __version__
    from ..launch import landlock

    policy, made, facts = prepared.policy, prepared.plan, prepared.facts
    lines = [f"agent-sandbox {__version__}", "config:"]
    lines += [f"  {file}" for file in policy.files] or ["  no policy file"]
    lines.append("policy:")
    for name in ("network", "docker", "home", "seccomp", "profile"):
        setting = getattr(policy, name)
        lines.append(f"  {name} = {setting.value}  [{setting.source}]")
    for name in ("allow", "deny", "publish"):
        lines += [f"  {name} {s.value}  [{s.source}]" for s in getattr(policy, name)]
    lines += [f"  command {n} = {s.value}  [{s.source}]" for n, s in policy.commands.items()]
    for key, setting in policy.limits.items():
        if setting.value is not None:
            lines.append(f"  {key} = {setting.value}  [{setting.source}]")
    lines.append("presets:")
    lines += [f"  {p.value}  [{p.source}]" for p in policy.presets]
    lines.append("rules:")
    for rule in policy.rules:
        for match in facts.matches.get(rule.pattern, ()):
            arrow = "" if match.real == rule.pattern else f" → {match.real}"
            lines.append(f"  {rule.level} {rule.pattern}{arrow}  [{rule.source}]")
    lines.append("mounts:")
    lines += [f"  {mount.describe()}" for mount in made.mounts]
    lines += [f"  {step.mode:<9}  {step.name} with {step.outside}" for step in made.steps]
    lines.append("environment:")
    lines += [f"  {name}  [{made.env_sources.get(name, '')}]" for name in sorted(made.env)]
    lines.append("kernel:")
    abi = landlock.abi()
    scoped = "on" if abi >= landlock.SCOPE_ABI else "not offered by this kernel: with the "
    if abi < landlock.SCOPE_ABI:
        scoped += "network on, abstract sockets of the host are reachable"
    lines.append(f"  Landlock ABI {abi}, scopes {scoped}")
    lines.append(f"command: {' '.join(argv)}")
    return "".join(output.printable(line) + "\n" for line in lines)
