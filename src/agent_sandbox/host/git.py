"""Reads git's layout around a project, and the user's git configuration. Believes no link blindly.

A `.git` file may be forged by a sandbox, so it widens nothing unless the repository that it names
points back to it: a worktree through `<git dir>/gitdir`, a submodule through `core.worktree`.
"""

from __future__ import annotations

import os

from ..errors import PolicyError
from ..policy import gitconfig, paths
from ..policy.model import FILE, ConfigFile, GitLayout
from .locate import check_open

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..policy.model import Match
    from .facts import Place
    from .locate import Locator

# Files and directories in a git directory that make git execute something or look elsewhere.
ATTRIBUTES = "info/attributes"
CONTROL_FILES = ("config", "config.worktree", "commondir", "gitdir", ATTRIBUTES)
CONTROL_DIRS = ("hooks",)
MAX_BYTES = 1 << 20
MAX_MODULES = 256
# Directories that are entered in search of them.
MAX_ENTERED = 4096
# How many of those in use an error names.
SHOWN_MODULES = 20


def layout(at: Place, *, strict: bool, hooks_path: str | None = None) -> GitLayout | None:
    """The repository that holds the project, or None. `hooks_path`: what the user's config says."""
    top = _top(at)
    if top is None:
        return None
    dot = f"{top}/.git"
    if os.path.isdir(dot) and not os.path.islink(dot):
        git_dir = common = dot
        if os.path.lexists(f"{dot}/commondir"):
            raise PolicyError(
                f"cannot trust '{dot}': it has a 'commondir' file, which makes git read "
                "configuration and hooks from another place",
                hint=f"a plain repository has none: look at '{dot}/commondir' and remove it",
                code="git-commondir",
            )
    else:
        linked = _linked(dot, top)
        if linked is None:
            return None
        git_dir, common = linked
    if paths.within(at.home.real, common):
        return None
    control = _control(git_dir, common, dot)
    absent = [path for path in _wanted_hooks(common) if not os.path.lexists(path)]
    hooks, missing = _hooks_path(git_dir, common, top, hooks_path)
    included, wanted = _included(common, top)
    if strict:
        control += _strict(git_dir, common)
    return GitLayout(
        top=top,
        git_dir=git_dir,
        common_dir=common,
        linked=git_dir != dot,
        control=tuple(dict.fromkeys([*control, *included, *hooks])),
        absent=tuple(dict.fromkeys([*absent, *missing])),
        absent_files=tuple(dict.fromkeys([*_absent_files(git_dir, common), *wanted])),
        exclude=_read(f"{common}/info/exclude") if _is_real(f"{common}/info/exclude") else None,
    )


def _top(at: Place) -> str | None:
    """The nearest directory upwards with a `.git` of our own, never the home or above it."""
    here = at.real
    while True:
        if paths.within(at.home.real, here):
            return None
        try:
            owner = os.lstat(f"{here}/.git").st_uid
        except OSError:
            if here == "/":
                return None
            here = paths.parent(here)
            continue
        # git itself refuses repositories of other users (safe.directory): one above the project
        # widens nothing. In the project it is protected whoever owns it.
        return here if owner in (at.uid, 0) or here == at.real else None


def _read(path: str) -> str | None:
    """A small text file, without following a link at its end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, MAX_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return None
    finally:
        os.close(fd)


def _linked(dot: str, top: str) -> tuple[str, str] | None:
    """The git directory and common directory behind a `.git` file, checked in both directions."""
    text = _read(dot)
    if text is None or not text.startswith("gitdir:"):
        raise _forged(dot, "it is neither a directory nor a 'gitdir:' file")
    named = text[len("gitdir:") :].strip()
    git_dir = _directory(named, top)
    if git_dir is None:
        raise _forged(dot, f"its git directory '{named}' does not exist")
    back = _read(f"{git_dir}/gitdir")
    if back is not None:
        common = _directory((_read(f"{git_dir}/commondir") or "").strip(), git_dir)
        points_back = os.path.realpath(os.path.join(git_dir, back.strip())) == dot
        if not points_back or common is None or paths.parent(git_dir) != f"{common}/worktrees":
            raise _forged(dot, f"'{git_dir}' does not point back to it")
        return git_dir, common
    parsed = gitconfig.entries(_read(f"{git_dir}/config") or "")
    worktree = gitconfig.value_of(parsed, "core", "worktree")
    if worktree and os.path.realpath(os.path.join(git_dir, worktree)) == top:
        return git_dir, git_dir
    raise _forged(dot, f"'{git_dir}' does not point back to it")


def _forged(dot: str, why: str) -> PolicyError:
    return PolicyError(
        f"cannot trust '{dot}': {why}",
        hint="a sandbox could have written it; run 'git worktree repair' or 'git submodule "
        "absorbgitdirs' if it is yours, or leave git out with the preset !@git",
        code="git-link",
    )


def _directory(named: str, base: str) -> str | None:
    if not named:
        return None
    path = os.path.realpath(named if named.startswith("/") else f"{base}/{named}")
    return path if os.path.isdir(path) else None


def _git_dirs(git_dir: str, common: str) -> list[str]:
    """The repository's git directories: the common one, ours, and those of its worktrees."""
    worktrees = [f"{common}/worktrees/{name}" for name in _names(f"{common}/worktrees")]
    return list(dict.fromkeys((common, git_dir, *worktrees)))


def _control(git_dir: str, common: str, dot: str) -> list[str]:
    """Existing control files; directories end in '/'.

    Everything listed is real: a bind would follow a planted link to somewhere else.
    """
    modules = _modules(common)
    found: list[str] = []
    for home in (*_git_dirs(git_dir, common), *modules):
        if os.path.isdir(home) and not os.access(home, os.R_OK | os.X_OK):
            check_open(home + "/.")
        files = [f"{home}/{name}" for name in CONTROL_FILES]
        found += [path for path in files if os.path.isfile(path) and _is_real(path)]
        directories = [f"{home}/{name}" for name in CONTROL_DIRS]
        found += [path + "/" for path in directories if os.path.isdir(path) and _is_real(path)]
    for path in (f"{home}/{name}" for home in (common, *modules) for name in ("config", "hooks")):
        if os.path.islink(path):
            raise PolicyError(
                f"cannot protect '{path}': it is a link, and links can be replaced from inside",
                hint="put the file itself there, or leave git out with the preset !@git",
                code="git-link",
            )
    if git_dir != dot:
        found.append(dot)
    return found + _pointers(common, modules, paths.parent(dot))


def _pointers(common: str, modules: list[str], top: str) -> list[str]:
    """`.git` files below the top that lead to a worktree's or a submodule's git directory."""
    named = []
    for name in _names(f"{common}/worktrees"):
        back = (_read(f"{common}/worktrees/{name}/gitdir") or "").strip()
        named.append(os.path.join(f"{common}/worktrees/{name}", back) if back else "")
    for module in modules:
        parsed = gitconfig.entries(_read(f"{module}/config") or "")
        tree = gitconfig.value_of(parsed, "core", "worktree")
        named.append(os.path.join(module, tree, ".git") if tree else "")
    plain = [os.path.realpath(os.path.dirname(path)) + "/.git" for path in named if path]
    return [p for p in plain if paths.below(p, top) and os.path.isfile(p) and _is_real(p)]


def _wanted_hooks(common: str) -> list[str]:
    return [f"{home}/{name}" for home in (common, *_modules(common)) for name in CONTROL_DIRS]


def _absent_files(git_dir: str, common: str) -> list[str]:
    """Files that git would act on if they were there.

    `config.worktree` only counts with extensions.worktreeConfig, attributes in any case.
    """
    attributes = []
    if os.path.isdir(f"{common}/info") and _is_real(f"{common}/info"):
        attributes = [p for p in (f"{common}/{ATTRIBUTES}",) if not os.path.lexists(p)]
    parsed = gitconfig.entries(_read(f"{common}/config") or "")
    switch = gitconfig.value_of(parsed, "extensions", "worktreeconfig")
    if switch is None or switch.lower() in ("false", "no", "off", "0"):
        return attributes
    wanted = [f"{home}/config.worktree" for home in _git_dirs(git_dir, common) if _is_real(home)]
    return attributes + [path for path in wanted if not os.path.lexists(path)]


def _included(common: str, top: str) -> tuple[list[str], list[str]]:
    """Files of the work tree that the repository's configuration includes: there, and missing."""
    there: list[str] = []
    missing: list[str] = []
    todo = [f"{common}/config"]
    seen: set[str] = set()
    while todo and len(seen) < MAX_MODULES:
        file = todo.pop()
        seen.add(file)
        for named in gitconfig.includes(gitconfig.entries(_read(file) or "")):
            path = paths.normalise(os.path.join(paths.parent(file), named))
            if named.startswith("~") or not paths.below(path, top) or path in seen:
                continue
            if os.path.isfile(path) and _is_real(path):
                there.append(path)
                todo.append(path)
            elif not os.path.lexists(path) and os.path.isdir(paths.parent(path)):
                missing.append(path)
            else:
                raise _forged(path, "git's configuration includes it, and it is no plain file")
    return there, missing


def _is_real(path: str) -> bool:
    """Whether no component of a path is a link."""
    return os.path.realpath(path) == path


def _hooks_path(
    git_dir: str, common: str, top: str, of_user: str | None
) -> tuple[list[str], list[str]]:
    """The directory of core.hooksPath in the repository (husky and the like), or what misses."""
    named = of_user
    for file in (f"{common}/config", f"{common}/config.worktree", f"{git_dir}/config.worktree"):
        parsed = gitconfig.entries(_read(file) or "")
        named = gitconfig.value_of(parsed, "core", "hookspath") or named
    if not named or named.startswith("~"):
        return [], []
    written = paths.normalise(named if named.startswith("/") else f"{top}/{named}")
    path = os.path.realpath(written)
    if paths.below(written, top) and path != written:
        raise PolicyError(
            f"cannot protect core.hooksPath '{named}': the way there leads through a link",
            hint="name the directory itself, or leave git out with the preset !@git",
            code="git-link",
        )
    if not paths.below(path, top) or paths.within(path, common):
        return [], []
    if os.path.isdir(path):
        return [path + "/"], []
    missing = [p for p in (path, *paths.parents(path)) if not os.path.lexists(p)]
    return [], sorted(missing)


def user_hooks_path(configs: Iterable[ConfigFile]) -> str | None:
    """core.hooksPath of the user's own configuration, which every repository obeys."""
    found = None
    for config in configs:
        parsed = gitconfig.entries(config.cleaned or "")
        found = gitconfig.value_of(parsed, "core", "hookspath") or found
    return found


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except PermissionError:
        check_open(directory + "/.")
        return []
    except OSError:
        return []


def _modules(common: str) -> list[str]:
    """The git directories of submodules, nested ones too."""
    found: list[str] = []
    todo = [f"{common}/modules"]
    entered = 0
    while todo:
        entered += 1
        if len(found) > MAX_MODULES or entered > MAX_ENTERED:
            raise _too_many(f"{common}/modules", found)
        directory = todo.pop()
        for name in _names(directory):
            path = f"{directory}/{name}"
            if not os.path.isdir(path) or not _is_real(path):
                continue
            if os.path.isfile(f"{path}/HEAD"):
                found.append(path)
                todo.append(f"{path}/modules")
            else:
                todo.append(path)
    return found


def _too_many(place: str, found: list[str]) -> PolicyError:
    """More submodules than can be protected: names those that a work tree uses."""
    used = sorted(path[len(place) + 1 :] for path in _used(place))
    what = f"more than {MAX_MODULES}" if len(found) > MAX_MODULES else "too many directories"
    if len(used) > SHOWN_MODULES:
        hint = "remove those that are not yours"
    elif used:
        hint = f"look into '{place}', and remove all but {', '.join(repr(u) for u in used)}"
    else:
        hint = f"no work tree uses anything in it: look into '{place}', and remove it"
    return PolicyError(
        f"cannot protect the submodules in '{place}': {what}",
        hint=f"{hint}; or leave git out with the preset !@git",
        code="git-modules",
    )


def _used(place: str) -> list[str]:
    """Git directories below a place that a `.git` file in the work tree around it leads to."""
    top = paths.parent(paths.parent(place))
    found = []
    for entry in gitconfig.entries(_read(f"{top}/.gitmodules") or ""):
        if (entry.section, entry.key) != ("submodule", "path"):
            continue
        tree = paths.normalise(f"{top}/{entry.value}")
        text = _read(f"{tree}/.git") or ""
        named = _directory(text[len("gitdir:") :].strip(), tree) if text[:7] == "gitdir:" else None
        if named is not None and paths.below(named, place):
            found.append(named)
    return found


def _strict(git_dir: str, common: str) -> list[str]:
    """References other than the current branch. The directory stays open for lock files."""
    head = (_read(f"{git_dir}/HEAD") or "").strip()
    current = head[len("ref:") :].strip() if head.startswith("ref:") else ""
    found = [f"{common}/{name}" for name in ("packed-refs",) if os.path.isfile(f"{common}/{name}")]
    if os.path.isdir(f"{common}/refs/tags"):
        found.append(f"{common}/refs/tags/")
    todo = [f"{common}/refs/heads"]
    while todo:
        directory = todo.pop()
        for name in _names(directory):
            path = f"{directory}/{name}"
            if os.path.islink(path):
                continue
            if os.path.isdir(path):
                todo.append(path)
            elif path != f"{common}/{current}" and not name.endswith(".lock"):
                found.append(path)
    return found


def user_config(
    home: Match, env: Mapping[str, str], locator: Locator, project: str
) -> tuple[ConfigFile, ...]:
    """The user's git configuration with everything that it includes, credentials taken out.

    Paths are where git will look inside: XDG_CONFIG_HOME and GIT_CONFIG_GLOBAL are not passed, so
    what they name is shown at the default place.
    """
    inside = home.real
    xdg = env.get("XDG_CONFIG_HOME", "") or f"{inside}/.config"
    main = env.get("GIT_CONFIG_GLOBAL", "") or f"{inside}/.gitconfig"
    todo = [(f"{inside}/.gitconfig", main), (f"{inside}/.config/git/config", f"{xdg}/git/config")]
    patterns = [(f"{inside}/.config/git/{n}", f"{xdg}/git/{n}") for n in ("ignore", "attributes")]
    found: dict[str, ConfigFile] = {}
    while todo and len(found) < MAX_MODULES:
        path, source = todo.pop(0)
        match = locator.find(source)
        if path in found or match is None or match.kind != FILE:
            continue
        text = _read_config(match.real)
        parsed = gitconfig.entries(text)
        found[path] = ConfigFile(
            path=path, real=match.real, cleaned=gitconfig.cleaned(text), links=match.links
        )
        if paths.within(match.real, project):
            # The sandbox may have written it: it names nothing that would then be shown.
            continue
        included = [_config_path(n, paths.parent(path), home) for n in gitconfig.includes(parsed)]
        todo += [(name, name) for name in included]
        for key in ("excludesfile", "attributesfile"):
            named = gitconfig.value_of(parsed, "core", key)
            if named:
                patterns.append((_config_path(named, inside, home),) * 2)
    for path, source in patterns:
        match = locator.find(source)
        if path not in found and match is not None and match.kind == FILE:
            found[path] = ConfigFile(path=path, real=match.real, links=match.links)
    return tuple(found.values())


def _config_path(named: str, base: str, home: Match) -> str:
    if named == "~" or named.startswith("~/"):
        return paths.normalise(home.real + named[1:])
    joined = named if named.startswith("/") else f"{base}/{named}"
    if paths.within(joined, home.path):
        joined = home.real + joined[len(home.path) :]
    return paths.normalise(joined)


def _read_config(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
