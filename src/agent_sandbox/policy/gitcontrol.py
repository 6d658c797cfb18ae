"""What in a repository's control files would make git run something or look elsewhere. Pure.

A list of what is harmless, not of what is dangerous: git learns new settings that run programs.
"""

from __future__ import annotations

from . import gitconfig, paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from .gitconfig import Entry

    Text = Callable[[str], bytes | None]

# Read character by character: more would take a noticeable time.
MAX_CONFIG = 1 << 18


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Section → keys without subsection. Values are numbers, switches, names and dates.
PLAIN: dict[str, frozenset[str]] = {
    "core": _words(
        "repositoryformatversion filemode bare logallrefupdates ignorecase precomposeunicode "
        "symlinks autocrlf eol safecrlf compression loosecompression bigfilethreshold quotepath "
        "abbrev preloadindex untrackedcache commitgraph multipackindex sparsecheckout "
        "sparsecheckoutcone splitindex trustctime checkstat longpaths whitespace commentchar "
        "deltabasecachelimit fscache hidedotfiles"
    ),
    "extensions": _words(
        "objectformat compatobjectformat refstorage worktreeconfig partialclone preciousobjects "
        "relativeworktrees noop"
    ),
    "user": _words("name email useconfigonly"),
    "author": _words("name email"),
    "committer": _words("name email"),
    "commit": _words("gpgsign verbose status"),
    "tag": _words("gpgsign sort"),
    "branch": _words("autosetupmerge autosetuprebase sort"),
    "submodule": _words("active recurse fetchjobs propagatebranches"),
    "pull": _words("rebase ff"),
    "push": _words("default autosetupremote followtags recursesubmodules"),
    "fetch": _words("prune prunetags parallel recursesubmodules writecommitgraph"),
    "merge": _words("ff conflictstyle renames renamelimit stat"),
    "rebase": _words("autostash autosquash updaterefs stat"),
    "rerere": _words("enabled autoupdate"),
    "diff": _words("renames renamelimit algorithm mnemonicprefix noprefix colormoved submodule"),
    "status": _words("short branch showuntrackedfiles showstash submodulesummary"),
    "log": _words("date decorate follow abbrevcommit"),
    "init": _words("defaultbranch"),
    "clone": _words("defaultremotename"),
    "gc": _words("auto autodetach"),
    "maintenance": _words("auto strategy"),
    "index": _words("version threads sparse"),
    "feature": _words("manyfiles"),
    "i18n": _words("commitencoding logoutputencoding"),
    "worktree": _words("guessremote userelativepaths"),
    "checkout": _words("defaultremote workers guess"),
    "receive": _words("denycurrentbranch denynonfastforwards denydeletes"),
    "http": _words("postbuffer"),
    "lfs": _words("repositoryformatversion"),
}
# Section → keys with a subsection.
NAMED: dict[str, frozenset[str]] = {
    "remote": _words(
        "url pushurl fetch push mirror tagopt prune prunetags promisor partialclonefilter "
        "skipdefaultupdate skipfetchall followremotehead gh-resolved glab-resolved"
    ),
    "branch": _words("remote pushremote merge rebase description vscode-merge-base"),
    "submodule": _words("url active branch ignore update shallow fetchrecursesubmodules path"),
    "lfs": _words("access locksverify"),
}
WHOLE_SECTIONS = _words("advice color")
# Written by `git lfs install`: they run git-lfs as the host has it.
EXACT = frozenset(
    {
        ("filter", "lfs", "clean", "git-lfs clean -- %f"),
        ("filter", "lfs", "smudge", "git-lfs smudge -- %f"),
        ("filter", "lfs", "process", "git-lfs filter-process"),
        ("filter", "lfs", "required", "true"),
    }
)
# These read a file of the work tree, or lead to one.
IN_PLACE = ("worktree", "hookspath", "attributesfile", "excludesfile")
POINTER = "gitdir:"
FREE_TEXT = ("name", "email", "description")
UPDATES = ("checkout", "rebase", "merge", "none")
# An address of another repository: who is pulled from, and pushed to.
ADDRESSES = ("url", "pushurl")
SECTION_CHARACTERS = gitconfig.KEY_CHARACTERS + "."
# Attributes with a driver of these names are git's own and run nothing.
BUILT_IN_DRIVERS = {
    "merge": _words("text binary union"),
    "diff": _words(
        "ada bash bibtex cpp csharp css dts elixir fortran fountain golang html ini java kotlin "
        "markdown matlab objc pascal perl php python r ruby rust scheme tex"
    ),
    "filter": frozenset(),
}


def parse(data: bytes) -> list[Entry] | None:
    """The entries of a configuration, or None when it is written as git itself never writes it.

    Only shapes on which this reader and git's cannot differ are read: one header or one
    assignment a line, no continued lines, no control characters.
    """
    text = data.decode("utf-8", "surrogateescape")
    if len(data) > MAX_CONFIG or any(c < " " and c not in "\t\n" for c in text) or "\x7f" in text:
        return None
    if text.startswith("\ufeff"):
        return None
    inside = False
    for raw in text.split("\n"):
        line = raw.strip(" \t")
        if not line or line[0] in "#;":
            continue
        if line[0] == "[":
            if not _is_header(line):
                return None
            inside = True
        elif not inside or not _is_assignment(line):
            return None
    return gitconfig.entries(text)


def _is_header(line: str) -> bool:
    """`[section]`, `[section.sub]` or `[section "sub"]`, and nothing behind it."""
    if not line.endswith("]"):
        return False
    name, quote, rest = line[1:-1].partition('"')
    name = name.rstrip(" \t")
    if not name or any(c not in SECTION_CHARACTERS for c in name):
        return False
    if not quote:
        return '"' not in rest and line[1:-1] == name
    if not rest.endswith('"') or line[len(name) + 1] not in " \t":
        return False
    at, inner = 0, rest[:-1]
    while at < len(inner):
        if inner[at] == '"' or (inner[at] == "\\" and inner[at + 1 : at + 2] not in ("\\", '"')):
            return False
        at += 2 if inner[at] == "\\" else 1
    return at == len(inner)


def _is_assignment(line: str) -> bool:
    """`key` or `key = value`, with quotes and escapes that end on the line."""
    key, equals, value = line.partition("=")
    key = key.rstrip(" \t")
    if not key or not (key[0].isascii() and key[0].isalpha()):
        return False
    if any(c not in gitconfig.KEY_CHARACTERS for c in key):
        return False
    if not equals:
        return line == key
    quoted = False
    at = 0
    while at < len(value):
        char = value[at]
        if char == "\\":
            if value[at + 1 : at + 2] not in ("\\", '"', "n", "t", "b"):
                return False
            at += 1
        elif char == '"':
            quoted = not quoted
        elif char in "#;" and not quoted:
            return True
        at += 1
    return not quoted


def is_harmless(entry: Entry) -> bool:
    """Whether a setting can be new without making git run a program or leave its directory."""
    value = entry.value
    # `helper::address` runs git-remote-helper, `!command` a shell.
    if value.startswith(("!", "-")) or "\n" in value:
        return False
    if "::" in value and entry.key not in FREE_TEXT:
        return False
    if entry.subsection is None:
        keys = PLAIN.get(entry.section, frozenset())
        return entry.key in keys or entry.section in WHOLE_SECTIONS
    if (entry.section, entry.subsection, entry.key, value) in EXACT:
        return True
    if entry.key not in NAMED.get(entry.section, ()):
        return entry.section in WHOLE_SECTIONS
    return entry.key != "update" or value in UPDATES


def name(entry: Entry) -> str:
    """A setting as git prints it."""
    middle = "" if entry.subsection is None else f"{entry.subsection}."
    return f"{entry.section}.{middle}{entry.key}"


def is_worktree(entry: Entry) -> bool:
    """Whether a setting moves the work tree."""
    return (entry.section, entry.subsection, entry.key) == ("core", None, "worktree")


def is_portable(entry: Entry) -> bool:
    """Whether a user's own setting means the same in another repository: it names no file there."""
    return entry.section not in ("include", "includeif") and entry.key not in IN_PLACE


def keeps_order(found: list[Entry], known: list[Entry]) -> bool:
    """Whether entries occur, in this order, among the known ones."""
    rest = iter(known)
    return all(any(entry == other for other in rest) for entry in found)


def rendered(kept: list[Entry]) -> bytes:
    """A configuration that has these entries and nothing else."""
    lines: list[str] = []
    current: tuple[str, str | None] | None = None
    for entry in kept:
        if (entry.section, entry.subsection) != current:
            current = (entry.section, entry.subsection)
            inner = "" if entry.subsection is None else f' "{_escaped(entry.subsection)}"'
            lines.append(f"[{entry.section}{inner}]")
        value = _escaped(entry.value).replace("\t", "\\t").replace("\b", "\\b")
        lines.append(f"\t{entry.key}" if entry.bare else f'\t{entry.key} = "{value}"')
    return "".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def resolved(base: str, written: str) -> str | None:
    """Where a path leads if no link is on the way; None when that cannot be said from its text.

    After a name that may be a link, `..` could lead anywhere.
    """
    parts = written.split("/")
    up = 0
    while up < len(parts) and parts[up] in ("..", "."):
        up += 1
    if not written or ".." in parts[up:]:
        return None
    return paths.normalise(written if written.startswith("/") else f"{base}/{written}")


def first_line(data: bytes | None) -> str:
    """The text of a file that names a path."""
    return (data or b"").decode("utf-8", "surrogateescape").rstrip("\r\n")


def pointed(path: str, text: Text) -> str | None:
    """The git directory that a `.git` file names."""
    written = first_line(text(path))
    if not written.startswith(POINTER) or "\n" in written:
        return None
    return resolved(paths.parent(path), written[len(POINTER) :].lstrip(" "))


def points_back(path: str, text: Text, repositories: Collection[str]) -> bool:
    """Whether a `.git` file leads to a repository that belongs to it.

    A worktree's git directory names the file, a submodule's the directory in which it lies.
    """
    home = pointed(path, text)
    if home is None or home not in repositories:
        return False
    back = text(f"{home}/gitdir")
    if back is not None:
        common, _, last = paths.parent(home).rpartition("/")
        named = resolved(home, first_line(back))
        return named == path and last == "worktrees" and common in repositories
    tree = gitconfig.value_of(parse(text(f"{home}/config") or b"") or [], "core", "worktree")
    return tree is not None and resolved(home, tree) == paths.parent(path)


def is_own_worktree(home: str, written: str, text: Text) -> bool:
    """Whether `core.worktree` names the directory around a git directory, or one that points to it.

    Anywhere else, a checkout would write files there.
    """
    tree = resolved(home, written)
    if tree is None:
        return False
    return home == f"{tree}/.git" or pointed(f"{tree}/.git", text) == home


def is_common(path: str, text: Text, repositories: Collection[str]) -> bool:
    """Whether a `commondir` file is that of a worktree and names the repository around it."""
    home = paths.parent(path)
    common, _, last = paths.parent(home).rpartition("/")
    named = first_line(text(path))
    return last == "worktrees" and common in repositories and named in ("../..", common)


def drivers(data: bytes | None) -> set[str]:
    """The drivers that attributes name and git may run, such as `filter lfs`."""
    found = set()
    for line in (data or b"").decode("utf-8", "surrogateescape").splitlines():
        for word in line.split():
            kind, equals, driver = word.partition("=")
            if equals and driver not in BUILT_IN_DRIVERS.get(kind, (driver,)):
                found.add(f"{kind} {driver}")
    return found


def commands(data: bytes | None) -> list[str]:
    """What a rebase that was begun would run: its `exec` lines."""
    found = []
    for line in (data or b"").decode("utf-8", "surrogateescape").splitlines():
        word, *rest = line.split(maxsplit=1)[:2] or [""]
        if word in ("exec", "x"):
            found += rest
    return found
