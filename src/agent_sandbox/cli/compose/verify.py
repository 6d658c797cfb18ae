"""`sandboxctl compose verify`: attacks a running project from inside each of its agents.

Nothing is started but the probe itself, by `docker exec`. Where an image holds nothing that could
ask, the same questions are asked from outside, in the agent's file system and as its user.
"""

from __future__ import annotations

import os
import sys

from ...compose import probe, read
from ...errors import HostError, UsageError
from . import outside
from .arguments import parse
from .files import found, host, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...compose.probe import Agent, Row, Verdict

VERSION = 1
SECONDS = 120
# A name that no server answers for should fail soon.
EXEC = ("exec", "-e", "RES_OPTIONS=timeout:1 attempts:1")
SHELLS = (("sh", "-c"), ("/bin/sh", "-c"), ("/busybox/sh", "-c"), ("bash", "-c"))


def main(words: list[str]) -> int:
    """Attack, show, and end with 1 when anything got through or was not tried."""
    given = parse(
        words, switches=("--json", "--no-accept"),
        values=("-p", "--project", "--service", "--env-file"),
    )  # fmt: skip
    name = given.one("-p") or given.one("--project") or os.environ.get("COMPOSE_PROJECT_NAME", "")
    if not name:
        name = load(given, found(given.rest, override=True), host()).name
    agents = running(name, given.every("--service"))
    engine = docker("info", "--format", "{{.ID}}").strip()
    mark = f"agent-sandbox-verify-{os.urandom(8).hex()}"
    verdicts: list[Verdict] = []
    details: list[dict[str, object]] = []
    try:
        accept = "--no-accept" not in given.switches
        for agent, rows in attacks(agents, mark):
            verdicts += probe.verdicts(agent, rows, engine, accept=accept)
            details += [_detail(agent, row, engine) for row in rows]
    finally:
        left = leftovers(mark, len(agents))
    if "--json" in given.switches:
        _json(name, verdicts, details)
    else:
        sys.stdout.write(probe.table(verdicts))
    for one in left:
        sys.stderr.write(f"sandboxctl: notice: removed {one}, which an attack had made\n")
    return 1 if any(v.outcome in probe.FAILING for v in verdicts) else 0


def _detail(agent: Agent, row: Row, engine: str) -> dict[str, object]:
    outcome, words = probe.judged(row, engine)
    return {
        "service": agent.service, "target": row.target, "tool": row.tool, "outcome": outcome,
        "detail": words,
    }  # fmt: skip


def _json(name: str, verdicts: Sequence[Verdict], details: Sequence[dict[str, object]]) -> None:
    import json

    rows = [{field: getattr(v, field) for field in type(v).__fields__} for v in verdicts]
    data = {"version": VERSION, "project": name, "attacks": rows, "addresses": details}
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


# --- the engine's command line --------------------------------------------------------------------


def docker(*words: str) -> str:
    """`docker WORDS…`, the user's own, with the user's own context."""
    code, out, err = docker_code(*words)
    if code:
        raise HostError(
            f"docker {words[0]}: {err.strip() or f'ended with {code}'}",
            hint="is the engine running, and may you use it?", code="compose-engine",
        )  # fmt: skip
    return out


def docker_code(*words: str) -> tuple[int, str, str]:
    """The same, with its exit code."""
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603 - words, no shell
            ["docker", *words],  # noqa: S607 - the user's own
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        raise HostError(
            "cannot find 'docker'", hint="install the docker command line", code="compose-engine"
        ) from None
    except subprocess.TimeoutExpired:
        return 124, "", f"no end after {SECONDS} seconds"
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode(
        "utf-8", "replace")  # fmt: skip


def running(name: str, services: Sequence[str]) -> list[Agent]:
    """The project's running containers, by service."""
    import json

    name = read.project_name(name)
    ids = docker("ps", "-q", "--filter", f"label=com.docker.compose.project={name}").split()
    found = [probe.agent(data) for data in json.loads(docker("inspect", *ids))] if ids else []
    missing = sorted(set(services) - {agent.service for agent in found})
    if not found or missing:
        what = f"service {missing[0]} of project {name}" if missing else f"project {name}"
        raise UsageError(
            f"{what} is not running", hint="start it first, or name it with -p", code="usage"
        )
    chosen = [agent for agent in found if not services or agent.service in services]
    return sorted(chosen, key=lambda agent: (agent.service, agent.id))


def leftovers(mark: str, count: int) -> list[str]:
    """Containers that an attack made and could not remove itself."""
    found: list[str] = []
    for number in range(count):
        label = f"label={probe.LABEL}={mark}-{number}"
        code, out, _ = docker_code("ps", "-aq", "--filter", label)
        for one in out.split() if code == 0 else ():
            docker_code("rm", "-f", one)
            found.append(one)
    return found


# --- the attack -----------------------------------------------------------------------------------


def attacks(agents: Sequence[Agent], mark: str) -> Iterator[tuple[Agent, tuple[Row, ...]]]:
    """All agents at a time, since a name that nobody answers to takes seconds to fail."""
    from concurrent.futures import ThreadPoolExecutor

    rests = [(f"{mark}-{n}", one.image, probe.LABEL) for n, one in enumerate(agents)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        inside = list(pool.map(attack, agents, rests))
    # Forks, so only once the threads are gone.
    for agent, rest, rows in zip(agents, rests, inside, strict=True):
        sockets = [t for t in probe.targets(agent) if t.startswith("unix:")]
        # A container that was taken over may answer as it likes: sockets are asked from outside.
        yield agent, merged(rows, probe.rows(outside.ask(agent.pid, sockets, rest)))


def attack(agent: Agent, rest: tuple[str, str, str]) -> tuple[Row, ...]:
    """Everything that one agent can ask, by whatever means its image has."""
    targets = probe.targets(agent)
    rows: tuple[Row, ...] = ()
    for shell in SHELLS:
        words = (*shell, probe.SHELL, "sh", *rest, probe.PYTHON_INSIDE, probe.PERL, *targets)
        _, out, _ = docker_code(*EXEC, agent.id, *words)
        rows = probe.rows(out)
        if rows:
            break
    else:
        for program in (("python3", "-c", probe.PYTHON_INSIDE), ("perl", "-e", probe.PERL)):
            rows = rows or probe.rows(docker_code(*EXEC, agent.id, *program, *rest, *targets)[1])
    return rows


def merged(inside: Sequence[Row], outside: Sequence[Row]) -> tuple[Row, ...]:
    """Both answers, without those of inside that were none."""
    known = {row.target for row in outside}
    kept = [r for r in inside if r.get("ping") != "-untried" or r.target not in known]
    return (*kept, *outside)
