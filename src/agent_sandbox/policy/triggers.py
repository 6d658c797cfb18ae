"""Files that tools outside act on by themselves: where they lie, who acts, how grave that is. Pure.

On the launch path, so only the table and the rules of the walk are here. What a change means is
decided in `delayed`, which is loaded when there is one.
"""

from __future__ import annotations

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    # mode, dev, ino, size, mtime, ctime, uid, gid, number of names; times in nanoseconds.
    Identity = tuple[int, int, int, int, int, int, int, int, int]
    # The context in which a file was found, and its identity.
    Item = tuple[str, Identity]
    Rule = tuple[str, str]

# Put away or put back; named with who would act on it; only named.
FORBIDDEN = "forbidden"
NOTABLE = "notable"
LISTED = "listed"

# What is done about the first kind: moved away, put back as it was, or freed of what is harmful.
QUARANTINED = "quarantined"
RESTORED = "restored"
CLEANED = "cleaned"

# Where a directory lies decides which of its names matter: its context. One that a table below
# opens is called after its directory (".vscode", ".github/workflows").
ANYWHERE = ""
# Below node_modules and the like only git's own files count.
QUIET = "@quiet"
# A git directory.
GIT = "@git"
# Behind another context: such a directory that is a git directory as well.
BARE = "@bare"
HOOKS = "@hooks"
INFO = "@info"
TODO = "@todo"
WORKTREES = "@worktrees"
MODULES = "@modules"
# The record of references: git appends to it, through a link as well.
LOGS = "@logs"
# A file that a repository's configuration includes.
INCLUDED = "@included"

CRITICAL = frozenset({GIT, HOOKS, INFO, WORKTREES, MODULES, LOGS, INCLUDED})

EVERYTHING = "*"
WORKSPACE_SUFFIX = ".code-workspace"
SAMPLE_SUFFIX = ".sample"
# Stands before the text of a link: no file can be mistaken for one.
LINK_MARK = b"\0link\0"

# Control files of a git directory. What lies in its other sub-directories makes git run nothing.
GIT_FILES = frozenset({"config", "config.worktree", "commondir", "gitdir"})
GIT_DIRECTORIES = {
    "hooks": HOOKS, "info": INFO, "worktrees": WORKTREES, "modules": MODULES,
    "rebase-merge": TODO, "rebase-apply": TODO, "sequencer": TODO, "logs": LOGS,
}  # fmt: skip
# Where a directory of an operation that was begun cannot be listed, these are looked for.
TODO_FILES = frozenset(
    {
        "git-rebase-todo",
        "todo",
        "opts",
        "strategy",
        "strategy_opts",
        "apply-opt",
        "head-name",
        "next",
    }
)
# Each git directory of a submodule or a worktree needs its mounts: with more submodules than these
# the next start fails, with many more worktrees, too.
MAX_MODULES = 256
QUIET_DIRECTORIES = ("node_modules", "site-packages")


def _all(who: str, *names: str, severity: str = NOTABLE) -> dict[str, Rule]:
    return dict.fromkeys(names, (severity, who))


# Context → name → who acts on it. "*" means every file below.
TABLE: dict[str, dict[str, Rule]] = {
    ANYWHERE: {
        **_all("git", ".git", ".gitattributes"),
        **_all("direnv", ".envrc"),
        **_all("mise", "mise.toml", ".mise.toml", "mise.local.toml", ".mise.local.toml"),
        **_all("mise or asdf", ".tool-versions"),
        **_all("rustup", "rust-toolchain", "rust-toolchain.toml"),
        **_all("an agent's tool servers", ".mcp.json"),
        **_all("opencode", "opencode.json", "opencode.jsonc"),
        **_all("aider", ".aider.conf.yml"),
        **_all("git lfs", ".lfsconfig"),
        **_all(
            "agent-sandbox", ".agent-sandbox.toml", ".agent-sandbox.json", ".agent-sandbox.jsonc"
        ),
        **_all("VS Code", ".devcontainer.json"),
        **_all("vim", ".exrc", ".vimrc", ".gvimrc", ".lvimrc", ".nvimrc", ".nvim.lua"),
        **_all("emacs", ".dir-locals.el", ".dir-locals-2.el"),
        **_all("a debugger", ".gdbinit", ".lldbinit"),
        **_all("pre-commit", ".pre-commit-config.yaml", ".pre-commit-config.yml"),
        **_all(
            "lefthook", "lefthook.yml", "lefthook.yaml", "lefthook.toml", "lefthook.json",
            ".lefthook.yml", ".lefthook.yaml", "lefthook-local.yml", ".lefthook-local.yml",
        ),
        **_all("git hooks", ".overcommit.yml", ".simple-git-hooks.json", ".simple-git-hooks.cjs"),
        **_all(
            "CI", ".gitlab-ci.yml", ".travis.yml", ".drone.yml", ".woodpecker.yml",
            "azure-pipelines.yml", "bitbucket-pipelines.yml", "Jenkinsfile",
        ),
        **_all("npm", ".npmrc", "package.json"),
        **_all("yarn", ".yarnrc", ".yarnrc.yml"),
        **_all("pnpm", ".pnpmfile.cjs", ".pnpmfile.mjs", "pnpm-workspace.yaml"),
        **_all("bun", "bunfig.toml", ".bunfig.toml"),
        **_all("bazel", ".bazelrc"),
        **_all("python", "pyvenv.cfg"),
        **_all("make", "Makefile", "makefile", "GNUmakefile", severity=LISTED),
        **_all("just", "justfile", "Justfile", ".justfile", severity=LISTED),
        **_all("task", "Taskfile.yml", "Taskfile.yaml", severity=LISTED),
        **_all("ruby", "Rakefile", "Gemfile", ".rubocop.yml", severity=LISTED),
        **_all("cargo", "build.rs", severity=LISTED),
        **_all(
            "gradle", "build.gradle", "build.gradle.kts", "settings.gradle",
            "settings.gradle.kts", severity=LISTED,
        ),
        **_all(
            "a linter", ".eslintrc.js", ".eslintrc.cjs", "eslint.config.js", "eslint.config.mjs",
            "eslint.config.cjs", "eslint.config.ts", ".prettierrc.js", ".prettierrc.cjs",
            "prettier.config.js", "prettier.config.mjs", "prettier.config.cjs", ".pylintrc",
            severity=LISTED,
        ),
        **_all(
            "an agent", "CLAUDE.md", "CLAUDE.local.md", "AGENTS.md", "GEMINI.md", ".cursorrules",
            ".windsurfrules", ".clinerules", severity=LISTED,
        ),
        **_all("git", ".gitmodules", severity=LISTED),
        **_all("nix", "flake.nix", "shell.nix", "devenv.nix", severity=LISTED),
        **_all(
            "docker compose", "compose.yml", "compose.yaml", "docker-compose.yml",
            "docker-compose.yaml", severity=LISTED,
        ),
    },
    QUIET: _all("git", ".git"),
    ".vscode": _all("VS Code", "tasks.json", "launch.json", "settings.json", "mcp.json"),
    ".devcontainer": _all("VS Code", EVERYTHING),
    ".idea": _all("JetBrains IDEs", EVERYTHING),
    ".zed": _all("Zed", "tasks.json", "settings.json", "debug.json"),
    ".fleet": _all("Fleet", "run.json", "settings.json"),
    ".claude": _all("claude", "settings.json", "settings.local.json"),
    **dict.fromkeys(
        (
            ".claude/hooks", ".claude/commands", ".claude/agents", ".claude/skills",
            ".claude/plugins",
        ),
        _all("claude", EVERYTHING),
    ),
    ".codex": _all("codex", EVERYTHING),
    ".agents": _all("an agent", EVERYTHING),
    ".opencode": _all("opencode", EVERYTHING),
    ".cursor": _all("cursor", EVERYTHING),
    ".gemini": _all("gemini", EVERYTHING),
    ".qwen": _all("qwen", EVERYTHING),
    ".continue": _all("continue", EVERYTHING),
    ".husky": _all("git hooks", EVERYTHING),
    ".githooks": _all("git hooks", EVERYTHING),
    ".lefthook": _all("lefthook", EVERYTHING),
    ".github": {},
    **dict.fromkeys(
        (".github/workflows", ".github/actions", ".circleci", ".buildkite", ".woodpecker"),
        _all("CI", EVERYTHING),
    ),
    ".forgejo": {},
    ".forgejo/workflows": _all("CI", EVERYTHING),
    ".gitea": {},
    ".gitea/workflows": _all("CI", EVERYTHING),
    ".hg": _all("mercurial", "hgrc", "hgrc-not-shared", "sharedpath"),
    ".sl": _all("sapling", "config"),
    ".jj": {},
    ".jj/repo": _all("jujutsu", "config.toml"),
    ".mise": _all("mise", EVERYTHING),
    ".config": {},
    ".config/mise": _all("mise", EVERYTHING),
    ".cargo": _all("cargo", "config", "config.toml"),
    ".mvn": _all("maven", EVERYTHING),
    ".bundle": _all("bundler", "config"),
    ".yarn": {},
    ".yarn/releases": _all("yarn", EVERYTHING),
    ".yarn/plugins": _all("yarn", EVERYTHING),
    "gradle": {},
    "gradle/wrapper": _all("gradle", EVERYTHING),
}  # fmt: skip

# A directory of this name opens a context wherever it lies.
_OPENS = {name: name for name in TABLE if name and name[0] != "@" and "/" not in name}
_OPENS.update(dict.fromkeys(QUIET_DIRECTORIES, QUIET))

# HEAD may make a directory a repository. What opens a context counts as a name, too, because it
# could be a link to a directory.
WANTED: dict[str, frozenset[str]] = {
    ANYWHERE: frozenset({*TABLE[ANYWHERE], *_OPENS, "HEAD"}) - {*QUIET_DIRECTORIES},
    QUIET: frozenset({".git", "HEAD"}),
    GIT: GIT_FILES | frozenset(GIT_DIRECTORIES),
    INFO: frozenset({"attributes"}),
    TODO: TODO_FILES,
    LOGS: frozenset(),
}
# Where each name counts.
WHOLE = frozenset(
    {HOOKS, TODO, WORKTREES, MODULES, *(c for c, names in TABLE.items() if EVERYTHING in names)}
)


def wanted(context: str) -> frozenset[str]:
    """The names that matter in a directory."""
    found = WANTED.get(context)
    if found is None:
        plain = context.removesuffix(BARE)
        found = WANTED[plain] if plain in WANTED else WANTED[ANYWHERE].union(TABLE.get(plain, ()))
        if plain != context:
            found |= WANTED[GIT]
        WANTED[context] = found
    return found


def is_whole(context: str) -> bool:
    """Whether every name in a directory matters."""
    return context.removesuffix(BARE) in WHOLE


def is_git(context: str) -> bool:
    """Whether a directory is a git directory."""
    return context == GIT or context.endswith(BARE)


def counts_links(context: str) -> bool:
    """Whether every link in a directory matters: git outside would write through it."""
    return is_git(context) or context == LOGS


def enters(context: str, name: str) -> bool:
    """Whether a sub-directory is looked into. In a git directory only where something acts."""
    if context == GIT:
        return name in GIT_DIRECTORIES
    return context not in (INFO, TODO)


def context_below(context: str, name: str) -> str:
    """The context of a sub-directory."""
    if name == ".git":
        return GIT
    if context == ANYWHERE:
        return _OPENS.get(name, ANYWHERE)
    if is_git(context) and name in GIT_DIRECTORIES:
        return GIT_DIRECTORIES[name]
    context = context.removesuffix(BARE)
    if context in (WORKTREES, LOGS):
        return GIT if context == WORKTREES else LOGS
    inner = f"{context}/{name}"
    if inner in TABLE:
        return inner
    return context if context in WHOLE or context == QUIET else _OPENS.get(name, ANYWHERE)


def is_critical(context: str, path: str) -> bool:
    """Whether git alone acts on it: such files are kept, judged and put back."""
    if context in CRITICAL or path.endswith("/.git"):
        return True
    name = path.rpartition("/")[2]
    return context.endswith(BARE) and (name in GIT_FILES or name in GIT_DIRECTORIES)


class Snapshot(Record):
    """What was there at one moment."""

    # By path. A path that ends in '/' is a directory that cannot be listed.
    items: Mapping[str, Item]
    # Contents, or the text of a link; None: too large, unreadable, or neither file nor link.
    text: Callable[[str], bytes | None]
    # Git directories, with device and inode.
    repositories: Mapping[str, tuple[int, int]]
    # False: there was more than could be looked at.
    complete: bool = True
    # Where git keeps submodules and worktrees: what lies there, if it is more than MAX_MODULES.
    crowds: Mapping[str, Collection[str]] = {}


class Finding(Record):
    """A control file that a run has changed."""

    path: str
    severity: str
    # Who would act on it.
    who: str
    what: str
    # For what is forbidden: what is to be done, and the content to put in its place.
    remedy: str = ""
    instead: bytes | None = None
    # Type, mode and owner of that content.
    mode: int = 0o100644
    owner: tuple[int, int] | None = None
    # Device and inode of what was judged: nothing else is to be moved away.
    judged: tuple[int, int] | None = None
    # What was done about it: the remedy, "reported", or "failed" with the reason.
    action: str = ""
    # The name under which 'sandboxctl quarantine' knows it.
    id: str = ""
