"""Agent profiles as data: which state an agent keeps, and which of its files the host would run.

`state` paths are shared with the real home, writable. `protect` paths below them stay read-only,
because the agent outside would execute what they say (hooks, plugins, MCP servers).
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record

NONE = "none"


class Profile(Record):
    """What one agent needs."""

    name: str
    commands: tuple[str, ...]
    state: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


PROFILES: tuple[Profile, ...] = (
    Profile(
        name="claude", commands=("claude",), state=("~/.claude", "~/.claude.json"),
        protect=(
            "~/.claude/settings.json", "~/.claude/settings.local.json", "~/.claude/CLAUDE.md",
            "~/.claude/agents", "~/.claude/commands", "~/.claude/hooks", "~/.claude/plugins",
            "~/.claude/skills", "~/.claude/local",
        ),
        env=(
            "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL",
            "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
            "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX",
        ),
    ),
    Profile(
        name="codex", commands=("codex",), state=("~/.codex",),
        protect=(
            "~/.codex/config.toml", "~/.codex/AGENTS.md", "~/.codex/prompts", "~/.codex/skills",
            "~/.codex/rules",
        ),
        env=("OPENAI_API_KEY", "CODEX_API_KEY", "OPENAI_BASE_URL"),
    ),
    Profile(
        name="opencode", commands=("opencode",),
        state=(
            "~/.local/share/opencode", "~/.local/state/opencode", "~/.cache/opencode",
            "~/.config/opencode",
        ),
        protect=(
            "~/.config/opencode/opencode.json", "~/.config/opencode/opencode.jsonc",
            "~/.config/opencode/plugin", "~/.config/opencode/plugins",
            "~/.config/opencode/command", "~/.config/opencode/agent",
            "~/.config/opencode/AGENTS.md",
        ),
        env=("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY", "OPENCODE_PERMISSION"),
    ),
    Profile(
        name="gemini", commands=("gemini",), state=("~/.gemini",),
        protect=(
            "~/.gemini/settings.json", "~/.gemini/GEMINI.md", "~/.gemini/commands",
            "~/.gemini/extensions",
        ),
        env=("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL"),
    ),
    Profile(
        name="qwen", commands=("qwen",), state=("~/.qwen",),
        protect=(
            "~/.qwen/settings.json", "~/.qwen/QWEN.md", "~/.qwen/commands", "~/.qwen/extensions",
        ),
        env=("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "DASHSCOPE_API_KEY"),
    ),
    Profile(
        name="pi", commands=("pi",), state=("~/.pi",),
        protect=(
            "~/.pi/agent/settings.json", "~/.pi/agent/extensions", "~/.pi/agent/skills",
            "~/.pi/agent/prompts", "~/.pi/agent/AGENTS.md",
        ),
        env=("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY"),
    ),
    Profile(
        name="copilot", commands=("copilot",), state=("~/.copilot", "~/.cache/copilot"),
        protect=(
            "~/.copilot/config.json", "~/.copilot/mcp-config.json", "~/.copilot/agents",
        ),
        env=("COPILOT_GITHUB_TOKEN", "COPILOT_MODEL", "COPILOT_PROVIDER_BASE_URL"),
    ),
    Profile(
        name="aider", commands=("aider",), state=("~/.aider",),
        env=("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_API_BASE"),
    ),
)  # fmt: skip

BY_NAME: dict[str, Profile] = {profile.name: profile for profile in PROFILES}
BY_COMMAND: dict[str, str] = {c: p.name for p in PROFILES for c in p.commands}
EMPTY = Profile(name=NONE, commands=())


def find(name: str, where: str) -> Profile:
    """The profile of that name."""
    if name == NONE:
        return EMPTY
    profile = BY_NAME.get(name)
    if profile is None:
        raise PolicyError(
            f"cannot use profile '{name}' in {where}: unknown profile",
            hint="known profiles: none, " + ", ".join(BY_NAME),
            code="unknown-profile",
        )
    return profile
