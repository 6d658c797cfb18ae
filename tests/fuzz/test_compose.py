"""Compose files: whatever they hold is judged or refused, and a rewritten one can be read."""

# ruff: noqa: E501 - a compose file reads better in one piece
from __future__ import annotations

from hypothesis import strategies as st

from agent_sandbox.compose import read, report, rewrite, rules
from agent_sandbox.compose.nodes import parse
from agent_sandbox.compose.solutions import SOLUTIONS, Wish
from agent_sandbox.errors import InternalBug, SandboxError
from compose.conftest import HOME, TEAM, machine

from .bound import attempt, fuzz
from .mutation import mutated

SOCK = "/var/run/docker.sock:/var/run/docker.sock"
DOCUMENTS = (
    (TEAM / "docker-compose.yml").read_text(),
    (TEAM / "service.yml").read_text(),
    f"services:\n  a: {{image: x, volumes: ['{SOCK}', './x:/x'], privileged: true}}\n  b: {{extends: a}}\n",
    f"services:\n  a:\n    image: x\n    volumes: &v\n      - {SOCK}\n    environment: &e\n      A_TOKEN: abc\n  b:\n    volumes: *v\n    environment:\n      <<: *e\n      B: c\n",
    "services:\n  a:\n    volumes:\n      - type: bind\n        source: ${S:-/run}\n        target: /r\n      - v:/v\n    secrets: [s]\nvolumes:\n  v: {driver_opts: {o: bind, device: /run}}\nsecrets: {s: {file: /run/docker.sock}}\n",
)
PIECES = (
    "\0", "\r\n", "\t", " ", "\n", "#", ": ", "- ", "-", "[", "]", "{", "}", ",", "&a ", "*a", "*v", "*e",
    "<<: *e\n", "!reset ", "!override ", "|\n", ">\n", "'", '"', "? ", "---\n", "...\n", "%YAML 1.1\n---\n",
    "${A}", "${", "$", "null", "~", "[]", "{}", f"- {SOCK}\n", "privileged: true\n", "\u2028", "é", "\ufeff",
    "extends: a\n", "include: [c.yml]\n", "x-a: &a\n", "environment: [DOCKER_HOST=tcp://h:2375]\n",
)  # fmt: skip


@fuzz(80, text=mutated(DOCUMENTS, PIECES))
def test_any_text_is_judged_or_refused(text: str) -> None:
    def judge() -> str:
        project = read.load(["/p/c.yml"], machine({"c.yml": text}))
        findings = rules.check(project, HOME)
        report.sarif(findings, str, "1")
        return report.text(findings, str, colour=False)

    shown = attempt(judge)
    if isinstance(shown, str):
        assert all(line.isprintable() for line in shown.splitlines())
    else:
        assert not isinstance(shown, InternalBug)


@fuzz(60, text=mutated(DOCUMENTS, PIECES, 2), solution=st.sampled_from(SOLUTIONS))
def test_a_rewritten_text_can_be_read(text: str, solution: str) -> None:
    """Or it is refused; what is left over after all is what the command refuses to write."""
    try:
        project = read.load(["/p/c.yml"], machine({"c.yml": text}))
        findings = rules.check(project, HOME)
    except SandboxError:
        return
    agents = rewrite.agents_of(project, findings)
    wish = Wish(solution=solution, agents=agents)
    done = attempt(lambda: rewrite.secure(text, "/p/c.yml", project, findings, wish))
    if isinstance(done, SandboxError):
        assert not isinstance(done, InternalBug), text
        return
    parse(done.text, "f", "/")
    for name in agents:
        assert parse(done.text, "f", "/").get("services", name) is not None
