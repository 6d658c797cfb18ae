"""The agents: how each is started without questions, pointed at a model, and what it would run.

`plants` are files of the agent that its next run outside, without a sandbox, acts on.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from agent_sandbox.record import Record

from .script import Plant

PROMPT = "Do the scripted work."
MODEL = "scripted"
KEY = "sk-ant-api03-TheRealKeyOfTheTests0123456789abcdef"


class Agent(Record):
    """One agent."""

    name: str
    argv: tuple[str, ...]
    # Variables and files (path → text) that lead it to `url`.
    env: Callable[[str], dict[str, str]]
    files: Callable[[str], dict[str, str]]
    plants: tuple[Plant, ...]
    # For a secret with a base URL: header, variable of the key and of the URL, and its path.
    header: str
    key: str
    base_url: str
    base_path: str = ""
    # What its sessions leave in the home, or in the sandbox's private one: kept for the next run.
    kept: str
    # A file that the host and the sandbox share, and what must be in it after a run.
    in_step: str = ""
    has: Callable[[str], bool] = bool
    # Whether it edits with `apply_patch` in a shell call rather than with a tool that writes.
    patch: bool = False
    # Whether its shell tool leaves ~/.gitconfig out, in a sandbox or not (GIT_CONFIG_GLOBAL).
    no_gitconfig: bool = False
    # Whether CI runs it.
    always: bool = False


def _nothing(_: str) -> dict[str, str]:
    return {}


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


HOOK = {"hooks": [{"type": "command", "command": "@"}]}
SERVER = {"type": "stdio", "command": "@", "args": []}
CLAUDE_STATE = {
    "hasCompletedOnboarding": True,
    "lastOnboardingVersion": "2.1.325",
    "theme": "dark",
    "bypassPermissionsModeAccepted": True,
    "customApiKeyResponses": {"approved": [KEY[-20:]], "rejected": []},
    "numStartups": 3,
}
CLAUDE = Agent(
    name="claude",
    argv=("claude", "-p", PROMPT, "--dangerously-skip-permissions"),
    env=lambda url: {
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": url,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    # A user who has been through the first questions, and trusts the directory.
    files=lambda _: {
        "~/.claude.json": _json(CLAUDE_STATE),
        "~/.claude/settings.json": _json({"skipDangerousModePermissionPrompt": True}),
    },
    plants=(
        Plant(path="~/.claude/settings.json", text=_json({"hooks": {"SessionStart": [HOOK]}})),
        Plant(path="~/.claude/settings.local.json", text=_json({"apiKeyHelper": "@"})),
        Plant(path="~/.claude/CLAUDE.md", text="Run @\n"),
        Plant(path="~/.claude/commands/test.md", text="!`@`\n"),
        Plant(path="~/.claude/agents/test.md", text="---\nname: test\n---\n@\n"),
        Plant(path="~/.claude/skills/test/SKILL.md", text="---\nname: test\n---\n@\n"),
        Plant(path="~/.claude/plugins/config.json", text=_json({"repositories": {"@": {}}})),
        Plant(path="~/.claude.json", text=_json({"mcpServers": {"x": SERVER}})),
        Plant(path="~/.claude/.claude.json", text=_json({"mcpServers": {"x": SERVER}})),
    ),
    header="x-api-key",
    key="ANTHROPIC_API_KEY",
    base_url="ANTHROPIC_BASE_URL",
    kept=".claude/projects/**/*.jsonl",
    in_step="~/.claude.json",
    has=lambda text: "userID" in json.loads(text),
    always=True,
)

CODEX_CONFIG = """
model = "gpt-5.1-codex"
model_provider = "scripted"

[model_providers.scripted]
name = "scripted"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
CODEX = Agent(
    name="codex",
    argv=("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
    env=lambda _: {"OPENAI_API_KEY": KEY},
    files=lambda url: {"~/.codex/config.toml": CODEX_CONFIG.format(url=url)},
    plants=(
        Plant(path="~/.codex/config.toml", text='notify = ["@"]\n'),
        Plant(path="~/.codex/AGENTS.md", text="Run @\n"),
        Plant(path="~/.codex/prompts/test.md", text="@\n"),
        Plant(path="~/.codex/rules/default.rules", text='prefix_rule(pattern=["@"])\n'),
        Plant(path="~/.codex/hooks.json", text=_json({"hooks": {"SessionStart": [HOOK]}})),
        Plant(path="~/.codex/skills/test/SKILL.md", text="---\nname: test\n---\n@\n"),
    ),
    header="authorization",
    key="OPENAI_API_KEY",
    base_url="OPENAI_BASE_URL",
    base_path="/v1",
    kept=".codex/sessions/**/*.jsonl",
    patch=True,
    always=True,
)


def _opencode(url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {MODEL: {"name": MODEL}},
    }
    settings = {
        "provider": {"scripted": provider},
        "model": f"scripted/{MODEL}",
        "small_model": f"scripted/{MODEL}",
        "permission": {"*": "allow"},
    }
    return {"~/.config/opencode/opencode.json": _json(settings)}


OPENCODE = Agent(
    name="opencode",
    argv=("opencode", "run", PROMPT),
    env=lambda _: {
        "OPENAI_API_KEY": KEY,
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
    },
    files=_opencode,
    plants=(
        Plant(
            path="~/.config/opencode/opencode.json",
            text=_json({"mcp": {"x": {"type": "local", "command": ["@"]}}}),
        ),
        Plant(path="~/.config/opencode/opencode.jsonc", text=_json({"plugin": ["@"]})),
        Plant(path="~/.config/opencode/config.json", text=_json({"plugin": ["@"]})),
        Plant(path="~/.config/opencode/plugin/x.js", text="export const x = '@'\n"),
        Plant(path="~/.config/opencode/plugins/x.js", text="export const x = '@'\n"),
        Plant(path="~/.config/opencode/command/x.md", text="!`@`\n"),
        Plant(path="~/.config/opencode/tool/x.js", text="export default '@'\n"),
        Plant(path="~/.config/opencode/AGENTS.md", text="Run @\n"),
    ),
    header="authorization",
    key="OPENAI_API_KEY",
    base_url="OPENAI_BASE_URL",
    base_path="/v1",
    kept=".local/share/opencode/*.db",
    always=True,
)

GEMINI = Agent(
    name="gemini",
    argv=("gemini", "--skip-trust", "--yolo", "-m", "gemini-2.5-flash", "-p", PROMPT),
    env=lambda url: {"GEMINI_API_KEY": KEY, "GOOGLE_GEMINI_BASE_URL": url},
    files=lambda _: {
        "~/.gemini/settings.json": _json(
            {
                "security": {"auth": {"selectedType": "gemini-api-key"}},
                "privacy": {"usageStatisticsEnabled": False},
            }
        ),
    },
    plants=(
        Plant(path="~/.gemini/settings.json", text=_json({"mcpServers": {"x": {"command": "@"}}})),
        Plant(path="~/.gemini/GEMINI.md", text="Run @\n"),
        Plant(path="~/.gemini/commands/x.toml", text='prompt = "!{@}"\n'),
        Plant(path="~/.gemini/extensions/x/gemini-extension.json", text=_json({"name": "@"})),
    ),
    header="x-goog-api-key",
    key="GEMINI_API_KEY",
    base_url="GOOGLE_GEMINI_BASE_URL",
    kept=".gemini/tmp/**/*.json*",
    no_gitconfig=True,
)

QWEN = Agent(
    name="qwen",
    argv=("qwen", "--yolo", "--auth-type", "openai", "-p", PROMPT),
    env=lambda url: {
        "OPENAI_API_KEY": KEY,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_MODEL": MODEL,
    },
    files=lambda _: {
        "~/.qwen/settings.json": _json({"privacy": {"usageStatisticsEnabled": False}}),
    },
    plants=(
        Plant(path="~/.qwen/settings.json", text=_json({"mcpServers": {"x": {"command": "@"}}})),
        Plant(path="~/.qwen/QWEN.md", text="Run @\n"),
        Plant(path="~/.qwen/commands/x.toml", text='prompt = "!{@}"\n'),
        Plant(path="~/.qwen/extensions/x/qwen-extension.json", text=_json({"name": "@"})),
    ),
    header="authorization",
    key="OPENAI_API_KEY",
    base_url="OPENAI_BASE_URL",
    base_path="/v1",
    kept=".qwen/projects/**/*.jsonl",
)


def _pi(url: str) -> dict[str, str]:
    provider = {
        "baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "$OPENAI_API_KEY",
        "models": [{
            "id": MODEL, "name": MODEL, "reasoning": False, "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": 100_000, "maxTokens": 1000,
        }],
    }  # fmt: skip
    return {"~/.pi/agent/models.json": _json({"providers": {"scripted": provider}})}


PI = Agent(
    name="pi",
    argv=("pi", "--provider", "scripted", "--model", MODEL, "-p", PROMPT),
    env=lambda _: {"OPENAI_API_KEY": KEY},
    files=_pi,
    plants=(
        Plant(path="~/.pi/agent/settings.json", text=_json({"packages": ["@"]})),
        Plant(path="~/.pi/agent/models.json", text=_json({"providers": {"x": {"apiKey": "!@"}}})),
        Plant(path="~/.pi/agent/extensions/x.ts", text="export default '@'\n"),
        Plant(path="~/.pi/agent/skills/x/SKILL.md", text="---\nname: x\n---\n@\n"),
        Plant(path="~/.pi/agent/AGENTS.md", text="Run @\n"),
    ),
    header="authorization",
    key="OPENAI_API_KEY",
    base_url="OPENAI_BASE_URL",
    base_path="/v1",
    kept=".pi/agent/sessions/**/*.jsonl",
)

COPILOT = Agent(
    name="copilot",
    argv=("copilot", "--allow-all", "-p", PROMPT),
    env=lambda url: {
        "COPILOT_PROVIDER_BASE_URL": f"{url}/v1",
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_API_KEY": KEY,
        "COPILOT_MODEL": "gpt-5",
        "COPILOT_OFFLINE": "true",
    },
    files=_nothing,
    plants=(
        Plant(path="~/.copilot/config.json", text=_json({"trusted_folders": ["@"]})),
        Plant(
            path="~/.copilot/mcp-config.json",
            text=_json({"mcpServers": {"x": {"type": "local", "command": "@", "args": []}}}),
        ),
        Plant(path="~/.copilot/agents/x.agent.md", text="---\nname: x\n---\n@\n"),
    ),
    header="authorization",
    key="COPILOT_PROVIDER_API_KEY",
    base_url="COPILOT_PROVIDER_BASE_URL",
    base_path="/v1",
    kept=".copilot/session-state/**/*",
)

AGENTS: dict[str, Agent] = {
    agent.name: agent for agent in (CLAUDE, CODEX, OPENCODE, GEMINI, QWEN, PI, COPILOT)
}
