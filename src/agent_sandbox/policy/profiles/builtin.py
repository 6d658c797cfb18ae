"""The built-in profiles. Pure data; loaded only for a command that has one, and for docs."""

from __future__ import annotations

from . import COPY, MERGE, PRIVATE, RO, RW, Profile, State


def _under(root: str, mode: str, *names: str) -> tuple[State, ...]:
    return tuple(State(path=f"{root}/{name}", mode=mode) for name in names)


# How each agent's own sandbox, which cannot be made inside ours, is switched off.
_NESTED = "no namespace can be made inside: an agent's own sandbox must be off, ours is around it"

PROFILES: tuple[Profile, ...] = (
    Profile(
        name="claude", commands=("claude",),
        state=(
            State(path="~/.claude", mode=PRIVATE),
            State(
                path="~/.claude/.claude.json", mode=MERGE, keys="claude", outside="~/.claude.json"
            ),
            State(path="~/.claude/.credentials.json", mode=MERGE, keys="claude-login"),
            # Transcripts and memory of this project; those of others are not shown.
            State(path="~/.claude/projects/{claude-project}", mode=RW),
            # Everything else in there stays inside. The host would run or source much of it:
            # shell-snapshots, session-env, plugins, .config.json, ide.
            *_under(
                "~/.claude", RO,
                "settings.json", "settings.local.json", "CLAUDE.md", "agents", "commands", "hooks",
                "plugins", "skills", "output-styles", "rules", "workflows", "keybindings.json",
                "scripts", "statusline.sh", "statusline-command.sh", "statusline.py",
                "statusline.js", "themes",
            ),
        ),
        moved=(("CLAUDE_CONFIG_DIR", "~/.claude"),),
        # With it .claude.json and its lock lie in the directory, where a rename works.
        set_env=(("CLAUDE_CONFIG_DIR", "~/.claude"), ("DISABLE_AUTOUPDATER", "1")),
        # Claude Code refuses --dangerously-skip-permissions to uid 0 otherwise.
        root_env=(("IS_SANDBOX", "1"),),
        env=(
            "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL",
            "ANTHROPIC_CUSTOM_HEADERS", "CLAUDE_CODE_OAUTH_TOKEN",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_MAX_OUTPUT_TOKENS", "MAX_THINKING_TOKENS",
            "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY",
        ),
        hosts=(
            "api.anthropic.com", "claude.ai", "platform.claude.com", "console.anthropic.com",
            "mcp-proxy.anthropic.com", "downloads.claude.ai",
        ),
        tmp=("/tmp/claude-UID", "/tmp/cc-socks", "/tmp/claude-*-cwd"),
        notes=(
            _NESTED + ": leave 'sandbox.enabled' out of settings.json, or set it to false",
            "with it on, it says 'Sandbox disabled', and that commands run without it; ours holds",
            "--dangerously-skip-permissions works, as root too (IS_SANDBOX is set then)",
            "history of prompts, to-dos, plans, file history and shell snapshots stay inside",
        ),
    ),
    Profile(
        name="codex", commands=("codex",),
        state=(
            State(path="~/.codex", mode=PRIVATE),
            State(path="~/.codex/auth.json", mode=MERGE, keys="codex-login"),
            # Copied: codex writes down there which directories it trusts, and asks again if not.
            State(path="~/.codex/config.toml", mode=COPY),
            State(path="~/.codex/sessions", mode=RW),
            State(path="~/.codex/archived_sessions", mode=RW),
            *_under(
                "~/.codex", RO,
                "AGENTS.md", "AGENTS.override.md", "prompts", "rules", "hooks.json", "hooks",
                "agents", "plugins", "managed_config.toml", "requirements.toml",
                # One by one: codex puts its own beside them, and complains when it cannot.
                "skills/*",
            ),
            State(path="~/.agents/skills", mode=RO),
        ),
        moved=(("CODEX_HOME", "~/.codex"),),
        env=(
            "OPENAI_API_KEY", "CODEX_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORGANIZATION",
            "OPENAI_PROJECT", "CODEX_CA_CERTIFICATE", "AZURE_OPENAI_API_KEY",
        ),
        hosts=(
            "api.openai.com", "chatgpt.com", "ab.chatgpt.com", "auth.openai.com",
        ),
        tmp=(),
        notes=(
            _NESTED + ": codex --sandbox danger-full-access (codex exec: "
            "--dangerously-bypass-approvals-and-sandbox), or sandbox_mode = "
            '"danger-full-access" in config.toml',
            "with it on, each command fails: 'bwrap: No permissions to create new namespace'",
            "it clones github.com/openai/plugins at the start, and goes on without when refused",
            "databases, logs and history stay inside; sessions are shared with the host",
        ),
    ),
    Profile(
        name="opencode", commands=("opencode",),
        state=(
            State(path="~/.local/share/opencode", mode=PRIVATE),
            State(path="~/.local/state/opencode", mode=PRIVATE),
            State(path="~/.cache/opencode", mode=PRIVATE),
            State(path="~/.config/opencode", mode=PRIVATE),
            State(path="~/.local/share/opencode/auth.json", mode=MERGE, keys="opencode-login"),
            *_under(
                "~/.config/opencode", RO,
                "opencode.json", "opencode.jsonc", "config.json", "tui.json", "tui.jsonc",
                "AGENTS.md", "plugin", "plugins", "command", "commands", "agent", "agents",
                "skill", "skills", "mode", "modes", "tool", "tools", "themes",
            ),
        ),
        moved=(
            ("XDG_DATA_HOME", "~/.local/share"), ("XDG_STATE_HOME", "~/.local/state"),
            ("XDG_CACHE_HOME", "~/.cache"), ("XDG_CONFIG_HOME", "~/.config"),
        ),
        env=(
            "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL",
            "OPENROUTER_API_KEY", "GEMINI_API_KEY", "GOOGLE_GENERATIVE_AI_API_KEY",
            "GROQ_API_KEY", "MISTRAL_API_KEY", "XAI_API_KEY", "DEEPSEEK_API_KEY",
            "OPENCODE_API_KEY", "OPENCODE_PERMISSION", "OPENCODE_CONFIG_CONTENT",
            "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_PURE",
        ),
        set_env=(("OPENCODE_DISABLE_AUTOUPDATE", "1"),),
        hosts=(
            "opencode.ai", "*.opencode.ai", "registry.npmjs.org", "api.anthropic.com",
            "api.openai.com", "openrouter.ai",
        ),
        tmp=("/tmp/opencode", "/tmp/.*.node"),
        notes=(
            "it has no sandbox of its own; its permission prompts stay as they are",
            "sessions lie in a database that stays inside, one for each project",
            "a login by 'wellknown' stays inside: such a host could name programs to run",
        ),
    ),
    Profile(
        name="gemini", commands=("gemini",),
        state=(
            State(path="~/.gemini", mode=PRIVATE),
            State(path="~/.gemini/oauth_creds.json", mode=MERGE, keys="gemini-login"),
            State(path="~/.gemini/google_accounts.json", mode=MERGE, keys="gemini-accounts"),
            # Copied: it writes the chosen login and theme there.
            State(path="~/.gemini/settings.json", mode=COPY),
            State(path="~/.gemini/installation_id", mode=COPY),
            *_under(
                "~/.gemini", RO, "GEMINI.md", "commands", "extensions", "skills", "agents",
                "policies",
            ),
        ),
        moved=(("GEMINI_CLI_HOME", "~"),),
        env=(
            "GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GEMINI_MODEL",
            "GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_LOCATION", "GOOGLE_GENAI_USE_VERTEXAI",
            "GOOGLE_GENAI_USE_GCA",
        ),
        set_env=(("GEMINI_SANDBOX", "false"),),
        hosts=(
            "generativelanguage.googleapis.com", "cloudcode-pa.googleapis.com",
            "oauth2.googleapis.com", "accounts.google.com", "www.googleapis.com",
        ),
        tmp=("/tmp/gemini-shell-*",),
        notes=(
            _NESTED + ": GEMINI_SANDBOX=false is set, which wins over settings.json",
            "~/.env and ~/.gemini/.env of the host are not shown: pass variables with --env",
        ),
    ),
    Profile(
        name="qwen", commands=("qwen",),
        state=(
            State(path="~/.qwen", mode=PRIVATE),
            State(path="~/.qwen/oauth_creds.json", mode=MERGE, keys="qwen-login"),
            State(path="~/.qwen/settings.json", mode=COPY),
            State(path="~/.qwen/installation_id", mode=COPY),
            *_under(
                "~/.qwen", RO, "QWEN.md", "AGENTS.md", "commands", "extensions", "skills", "agents",
            ),
        ),
        moved=(("QWEN_HOME", "~/.qwen"),),
        env=(
            "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "DASHSCOPE_API_KEY",
            "QWEN_MODEL", "BAILIAN_CODING_PLAN_API_KEY",
        ),
        set_env=(
            ("QWEN_SANDBOX", "false"), ("GEMINI_SANDBOX", "false"),
            # It warns of --yolo without a sandbox: there is one.
            ("QWEN_CODE_SUPPRESS_YOLO_WARNING", "1"),
        ),
        hosts=(
            "chat.qwen.ai", "portal.qwen.ai", "dashscope.aliyuncs.com",
            "dashscope-intl.aliyuncs.com", "coding.dashscope.aliyuncs.com",
            "coding-intl.dashscope.aliyuncs.com",
        ),
        tmp=(),
        notes=(
            _NESTED + ": QWEN_SANDBOX=false is set, which wins over settings.json",
            "it asks for systemd-inhibit on D-Bus, which is not there, and goes on without",
        ),
    ),
    Profile(
        name="pi", commands=("pi",),
        state=(
            State(path="~/.pi/agent", mode=PRIVATE),
            State(path="~/.pi/agent/auth.json", mode=MERGE, keys="pi-login"),
            State(path="~/.pi/agent/sessions/{pi-project}", mode=RW),
            # Copied: it writes the chosen model and theme there.
            State(path="~/.pi/agent/settings.json", mode=COPY),
            *_under(
                "~/.pi/agent", RO,
                "models.json", "extensions", "skills", "prompts", "themes", "tools", "agents",
                "AGENTS.md", "SYSTEM.md", "APPEND_SYSTEM.md", "keybindings.json", "git", "npm",
            ),
        ),
        moved=(("PI_CODING_AGENT_DIR", "~/.pi/agent"),),
        env=(
            "ANTHROPIC_API_KEY", "ANTHROPIC_OAUTH_TOKEN", "OPENAI_API_KEY", "GEMINI_API_KEY",
            "GROQ_API_KEY", "XAI_API_KEY", "OPENROUTER_API_KEY", "MISTRAL_API_KEY",
            "CEREBRAS_API_KEY", "PI_SKIP_VERSION_CHECK", "PI_OFFLINE",
        ),
        hosts=(
            "api.anthropic.com", "api.openai.com", "generativelanguage.googleapis.com",
            "openrouter.ai", "pi.dev", "console.anthropic.com", "auth.openai.com", "chatgpt.com",
        ),
        tmp=(),
        notes=(
            "it has no sandbox of its own",
            "a login whose key is a command ('!…') stays inside: the host would run it",
            "rg and fd, which it downloads to ~/.pi/agent/bin, stay inside",
        ),
    ),
    Profile(
        name="copilot", commands=("copilot",),
        state=(
            State(path="~/.copilot", mode=PRIVATE),
            State(path="~/.cache/copilot", mode=PRIVATE),
            State(path="~/.cache/Microsoft/DeveloperTools", mode=PRIVATE),
            State(path="~/.copilot/config.json", mode=MERGE, keys="copilot-login"),
            State(path="~/.copilot/settings.json", mode=COPY),
            *_under(
                "~/.copilot", RO,
                "mcp-config.json", "agents", "skills", "hooks", "copilot-instructions.md",
                "instructions", "lsp-config.json", "installed-plugins",
            ),
        ),
        moved=(
            ("COPILOT_HOME", "~/.copilot"), ("COPILOT_CACHE_HOME", "~/.cache/copilot"),
            ("XDG_CACHE_HOME", "~/.cache"),
        ),
        env=(
            "COPILOT_GITHUB_TOKEN", "COPILOT_MODEL",
            "COPILOT_PROVIDER_BASE_URL", "COPILOT_PROVIDER_TYPE", "COPILOT_PROVIDER_API_KEY",
            "COPILOT_OFFLINE",
        ),
        set_env=(("COPILOT_AUTO_UPDATE", "false"),),
        hosts=(
            "github.com", "api.github.com", "api.githubcopilot.com", "*.githubcopilot.com",
            "copilot-proxy.githubusercontent.com",
        ),
        tmp=(),
        notes=(
            _NESTED + ": it tries bwrap, slirp4netns and unshare at the start and goes on without",
            "it unpacks itself to ~/.cache/copilot (190 MB), once for each project",
            "GH_TOKEN does not pass: it may do more than Copilot needs; use COPILOT_GITHUB_TOKEN",
        ),
    ),
    Profile(
        name="aider", commands=("aider",),
        state=(
            State(path="~/.aider", mode=PRIVATE),
            State(path="~/.aider.conf.yml", mode=RO),
            State(path="~/.aider.model.settings.yml", mode=RO),
            State(path="~/.aider.model.metadata.json", mode=RO),
        ),
        env=(
            "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_API_BASE", "OPENROUTER_API_KEY",
            "GEMINI_API_KEY", "DEEPSEEK_API_KEY", "AIDER_MODEL", "LITELLM_LOCAL_MODEL_COST_MAP",
        ),
        set_env=(("AIDER_ANALYTICS_DISABLE", "true"), ("AIDER_CHECK_UPDATE", "false")),
        hosts=(
            "api.anthropic.com", "api.openai.com", "openrouter.ai",
            "generativelanguage.googleapis.com", "raw.githubusercontent.com",
        ),
        tmp=(),
        notes=(
            "it has no sandbox of its own; it writes .aider.* and .gitignore in the project",
            "~/.env of the host is not shown: pass variables with --env",
        ),
    ),
)  # fmt: skip
