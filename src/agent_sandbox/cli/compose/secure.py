"""`sandboxctl compose secure`: writes the safe variant of a compose file."""

from __future__ import annotations

import os
import sys

from ...compose import report, rewrite, rules, solutions
from ...errors import HostError, PolicyError, SandboxError, UsageError, reason
from .arguments import HINT, parse
from .check import DEFAULT_FAIL_ON
from .files import content, host, load, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...compose.model import Project
    from ...compose.rules import Finding
    from .arguments import Given


def main(words: list[str]) -> int:
    """Write the safe variant."""
    given = parse(
        words, switches=("--force", "--no-runtime-check"),
        values=("--solution", "-o", "--output", "--env-file", "--agent", "--read-access",
                "--allow-image", "--max-execution-time"),
    )  # fmt: skip
    target = given.one("-o") or given.one("--output")
    solution = given.one("--solution")
    if len(given.rest) != 1 or not target or solution not in solutions.SOLUTIONS:
        raise UsageError(
            f"secure takes FILE, --solution {'|'.join(solutions.SOLUTIONS)} and -o OUT",
            hint=HINT, code="usage",
        )  # fmt: skip
    if solution == solutions.SYSBOX and "--no-runtime-check" not in given.switches:
        need_sysbox()
    file, target = os.path.abspath(given.rest[0]), os.path.abspath(target)
    machine = host()
    project = load(given, [file], machine)
    findings = rules.check(project, machine.home)
    wish = wished(given, solution, project, findings)
    refuse(rewrite.elsewhere(findings, file), "stands in another file", "secure that file first")
    old = content(file) or ""
    done = rewrite.secure(old, file, project, findings, wish)
    left = recheck(given, file, done.text)
    refuse(
        rules.failing(left, DEFAULT_FAIL_ON),
        "cannot be taken out by itself",
        "change it, and run this again",
    )
    write(target, done.text, force="--force" in given.switches)
    tell(old, done, file, target, left)
    return 0


def wished(
    given: Given, solution: str, project: Project, findings: tuple[Finding, ...]
) -> solutions.Wish:
    """What the flags ask for."""
    seconds = given.one("--max-execution-time") or "300"
    if not seconds.isascii() or not seconds.isdigit() or not 0 < int(seconds) <= 86400:
        raise UsageError("--max-execution-time takes 1 to 86400 seconds", hint=HINT, code="usage")
    readers = tuple(given.every("--read-access"))
    if readers and solution != solutions.NO_SOCKET:
        raise UsageError("--read-access belongs to no-socket", hint=HINT, code="usage")
    agents = tuple(given.every("--agent")) or rewrite.agents_of(project, findings)
    if not agents and rewrite.needs_agents(solution):
        raise UsageError(
            "no service has an engine today", hint="name one with --agent", code="usage"
        )
    return solutions.Wish(
        solution=solution, agents=tuple(a for a in agents if a not in readers), readers=readers,
        allowed_images=tuple(given.every("--allow-image")), max_execution_time=int(seconds),
    )  # fmt: skip


def need_sysbox() -> None:
    """The engine must know the runtime, or nothing of the file would start."""
    import json
    import subprocess

    try:
        done = subprocess.run(
            ["docker", "info", "--format", "{{json .Runtimes}}"],  # noqa: S607 - the user's own
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        known = json.loads(done.stdout) if done.returncode == 0 else None
        why = done.stderr.strip()
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        known, why = None, str(error)
    if not isinstance(known, dict):
        problem = f"cannot ask the engine for its runtimes: {why or 'no answer'}"
    elif solutions.SYSBOX_RUNTIME not in known:
        names = ", ".join(sorted(known)) or "none"
        problem = f"the engine has no runtime {solutions.SYSBOX_RUNTIME}, only: {names}"
    else:
        return
    raise HostError(
        problem, code="compose-sysbox",
        hint="install Sysbox, or --no-runtime-check when the file is for another host",
    )  # fmt: skip


def refuse(findings: Sequence[Finding], problem: str, hint: str) -> None:
    """Stop when something dangerous would stay."""
    if findings:
        first = findings[0]
        where = f"{shown(first.place.file)}:{first.place.line}"
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise PolicyError(
            f"{where}: {first.message} {problem}{more}", hint=hint, code="compose-remains"
        )


def recheck(given: Given, file: str, text: str) -> tuple[Finding, ...]:
    """What check says about the new text, in the old one's place."""
    machine = host({file: text})
    try:
        project = load(given, [file], machine)
    except SandboxError as error:
        raise PolicyError(
            f"the result cannot be read: {error.message}",
            hint="please report this, with the file", code="compose-remains",
        ) from None  # fmt: skip
    return rules.check(project, machine.home)


def write(path: str, text: str, *, force: bool) -> None:
    """A new file, or with --force in the place of the old one in one step."""
    aim = path + ".new" if force else path
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if force and os.path.lexists(aim):
            os.unlink(aim)
        with open(os.open(aim, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
        if force:
            os.rename(aim, path)
    except FileExistsError:
        raise UsageError(
            f"{path} exists", hint="--force writes over it", code="compose-exists"
        ) from None
    except OSError as error:
        raise HostError(f"cannot write {path}: {reason(error)}", code="compose-write") from None


def tell(
    old: str, done: rewrite.Rewritten, file: str, target: str, left: Sequence[Finding]
) -> None:
    """The diff and the notes."""
    import difflib

    colour = not os.environ.get("NO_COLOR") and sys.stdout.isatty()
    for line in difflib.unified_diff(
        old.splitlines(), done.text.splitlines(), shown(file), shown(target), lineterm=""
    ):
        paint = {"+": "\033[32m", "-": "\033[31m"}.get(line[:1], "") if colour else ""
        sys.stdout.write(f"{paint}{report.clean(line)}{report.PLAIN if paint else ''}\n")
    sections = (
        ("Removed:", done.removed), ("This will stop working:", done.stops),
        ("Left for you:", (*done.todo, *_remaining(left))),
    )  # fmt: skip
    for title, lines in sections:
        if lines:
            sys.stdout.write(f"\n{title}\n")
            sys.stdout.writelines(f"  - {report.clean(line)}\n" for line in lines)
    sys.stdout.write(f"\nwrote {report.clean(shown(target))}\n")


def _remaining(left: Sequence[Finding]) -> list[str]:
    counted = [f for f in left if not f.accepted]
    ids = dict.fromkeys(f.rule.id for f in counted)
    return [
        f"{rule}: {', '.join(dict.fromkeys(f.service for f in counted if f.rule.id == rule))}: "
        f"{rules.BY_ID[rule].fix}"
        for rule in ids
    ]
