"""The table agent × check: made by the runs, printed at their end, and kept in docs/agents.md.

`AGENT_SANDBOX_WRITE_TABLE=1 make test-agents AGENTS=all` renews the page; every other run compares.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from agent_sandbox.record import Record
from conftest import ROOT

from . import verdicts
from .roster import AGENTS
from .stage import BASE_URL, ON, Done, Stage
from .verdicts import Before

PAGE = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- begin agents-tested -->", "<!-- end agents-tested -->"
PACKAGES = {
    "claude": "@anthropic-ai/claude-code", "codex": "@openai/codex", "opencode": "opencode-ai",
    "gemini": "@google/gemini-cli", "qwen": "@qwen-code/qwen-code",
    "pi": "@earendil-works/pi-coding-agent", "copilot": "@github/copilot",
}  # fmt: skip


class Check(Record):
    """A row: its title, and what stands in it when every run was as it should be."""

    title: str
    good: str


CONTROL, FULL_SCREEN = "control", "full screen"
CHECKS: dict[str, Check] = {
    "finished": Check(title="runs", good="yes"),
    FULL_SCREEN: Check(title="full screen", good="yes"),
    "edit": Check(title="edit", good="yes"),
    "own tool": Check(title="own edit tool", good="yes"),
    "tests": Check(title="tests", good="yes"),
    "commit": Check(title="commit", good="yes"),
    "state kept": Check(title="state kept", good="yes"),
    "~/.ssh": Check(title="`~/.ssh`", good="refused"),
    "~/.aws": Check(title="`~/.aws`", good="refused"),
    "~/.bashrc": Check(title="`~/.bashrc`", good="refused"),
    "agent's settings": Check(title="agent's settings", good="refused"),
    "git hooks": Check(title="git hooks", good="refused"),
    "docker": Check(title="docker", good="refused"),
    "variable": Check(title="secret variable", good="refused"),
    "loopback": Check(title="loopback", good="refused ¹"),
    "key": Check(title="API key", good="refused ²"),
    CONTROL: Check(title="without a sandbox", good="all succeed"),
}


def versions() -> dict[str, str]:
    """The version of each agent that is tested."""
    wanted = json.loads(Path(__file__).with_name("package.json").read_text())
    packages = {**wanted["dependencies"], **wanted["devDependencies"]}
    return {agent: packages[package] for agent, package in PACKAGES.items()}


def open_by_design(mode: str) -> set[str]:
    """What a sandbox does not close: the host's network if it is shared, a key that is passed."""
    return {ON: {"loopback", "key"}, BASE_URL: set[str]()}.get(mode, {"key"})


class Table:
    """What the runs of this session have shown."""

    def __init__(self) -> None:
        # Agent → check → whether each run was as it should be.
        self.rows: dict[str, dict[str, list[bool]]] = {}

    def note(self, agent: str, check: str, *, good: bool) -> None:
        """One result."""
        self.rows.setdefault(agent, {}).setdefault(check, []).append(good)

    def judge(self, stage: Stage, was: Before, done: Done, mode: str) -> None:
        """Look at what a run in a sandbox has done, write it down, and fail if it is wrong."""
        agent = stage.agent.name
        work = {name: check(stage, was, done) for name, check in verdicts.WORK.items()}
        worked = {name: check(stage, was) for name, check in verdicts.ATTACKS.items()}
        expected = open_by_design(mode)
        for name, good in work.items():
            self.note(agent, name, good=good)
        for name, bad in worked.items():
            self.note(agent, name, good=bad == (name in expected))
        failed = [name for name, good in work.items() if not good]
        wrong = [name for name, bad in worked.items() if bad != (name in expected)]
        assert not failed, f"not done: {failed}\n{verdicts.story(stage, done)}"
        assert not wrong, f"not as expected: {wrong}\n{verdicts.story(stage, done)}"

    def column(self, agent: str) -> list[str]:
        """An agent's cells, from its name down."""
        found = self.rows[agent]
        cells = [
            "–" if name not in found else check.good if all(found[name]) else "**no**"
            for name, check in CHECKS.items()
        ]
        return [agent, versions()[agent], *cells]

    def text(self, old: str = "") -> str:
        """The whole table; agents that did not run keep the cells that they have."""
        kept = {column[0]: column for column in columns(old)}
        made = [self.column(name) if name in self.rows else kept.get(name) for name in AGENTS]
        titles = ["", "version", *(check.title for check in CHECKS.values())]
        rows = list(zip(titles, *(column for column in made if column), strict=True))
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def columns(text: str) -> list[tuple[str, ...]]:
    """The columns of a table, without the one of its titles."""
    lines = text.splitlines()
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return list(zip(*(rows[:1] + rows[2:]), strict=True))[1:]


def of_page() -> str:
    """The table in the documentation."""
    _, found, rest = PAGE.read_text().partition(BEGIN + "\n")
    table, ended, _ = rest.partition(END)
    assert found and ended, f"{PAGE.name} has lost the marks of the table"  # noqa: PT018
    return table.rstrip("\n")


def write(table: Table) -> None:
    """Renew the table in the documentation, and nothing else there."""
    new = f"{BEGIN}\n{table.text(of_page())}\n{END}"
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + new + rest.partition(END)[2])


def asked_to_write() -> bool:
    """Whether this session renews the page."""
    return os.environ.get("AGENT_SANDBOX_WRITE_TABLE") == "1"
