"""What a run's changes to control files mean: forbidden, worth a look, or only to be named. Pure.

Loaded only when something has changed.
"""

from __future__ import annotations

from . import gitconfig, gitcontrol, paths
from .triggers import (
    ANYWHERE,
    BARE,
    CLEANED,
    EVERYTHING,
    FORBIDDEN,
    GIT,
    GIT_DIRECTORIES,
    GIT_FILES,
    HOOKS,
    INCLUDED,
    INFO,
    LISTED,
    LOGS,
    MAX_MODULES,
    MODULES,
    NOTABLE,
    QUARANTINED,
    RESTORED,
    TABLE,
    TODO,
    WORKSPACE_SUFFIX,
    WORKTREES,
    Finding,
    Snapshot,
    is_critical,
    is_git,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .gitconfig import Entry
    from .triggers import Item

IS_FILE, IS_LINK, TYPE_BITS = 0o100000, 0o120000, 0o170000
WORKSPACE = (NOTABLE, "VS Code")
# Parts of a package.json that somebody runs.
SCRIPTS = ("scripts", "simple-git-hooks", "gitHooks", "husky", "lint-staged")
# How many names a finding spells out.
SHOWN = 6
ORDER = (FORBIDDEN, NOTABLE, LISTED)
# Bytes of configurations that are read for one comparison.
MAX_JUDGED = 1 << 22
# Lists of steps that a rebase, a cherry-pick or a revert has before it.
STEPS = ("git-rebase-todo", "todo")
# Files that git itself rewrites at each step of an operation that was begun. Any other, such as the
# strategy, which names a program, is as it was at its beginning.
REWRITTEN = frozenset(
    {
        *STEPS, "git-rebase-todo.backup", "done", "msgnum", "end", "message", "message-fixup",
        "message-squash", "author-script", "stopped-sha", "patch", "amend", "rewritten-list",
        "rewritten-pending", "current-fixups", "next", "final-commit", "abort-safety", "info",
        "msg", "msg-clean", "original-commit", "dirtyindex", "head", "refs-to-reset",
        "update-refs",
    }
)  # fmt: skip


def compare(before: Snapshot, after: Snapshot, changed: Iterable[str]) -> tuple[Finding, ...]:
    """What the changed paths mean, the gravest first."""
    judge = _Judge(before, after)
    found = [finding for path in changed if (finding := judge.path(path)) is not None]
    found += judge.new_repositories()
    found += judge.begun()
    found += judge.crowded()
    if not after.complete:
        what = "too many directories or control files: not all were compared"
        found.append(Finding(path="", severity=NOTABLE, who="", what=what))
    return tuple(sorted(found, key=lambda f: (ORDER.index(f.severity), f.path)))


class _Judge:
    """Judges one path after the other."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self._before = before
        self._after = after
        self._begun = _operations(before)
        # Bytes of configurations that were read, and the user's settings that may move.
        self._spent = 0
        self._portable: list[list[Entry]] | None = None
        # Hooks that the user had, by name: a moved or copied repository brings them along.
        self._own_hooks = {
            (_name(path), before.text(path))
            for path, item in before.items.items()
            if item[0] == HOOKS and before.text(path) is not None
        }

    def path(self, path: str) -> Finding | None:
        """What one changed path means; None when nothing."""
        item = self._after.items.get(path)
        if item is None:
            return self._gone(path)
        finding = _way(item[0], _name(path))(self, path, item)
        if finding is None and self._is_shared(path, item):
            what = "has a second name, under which it could be changed unseen"
            finding = self._forbidden(path, what, instead=self._after.text(path))
        if finding is None or self._before.complete or path in self._before.items:
            return finding
        # It may have been there already: it stays.
        severity = NOTABLE if finding.severity == FORBIDDEN else finding.severity
        return finding.replace(severity=severity, instead=None)

    def _is_shared(self, path: str, item: Item) -> bool:
        """Whether a file of git's has got another name, in a place that is not watched perhaps."""
        was = self._before.items.get(path)
        names = item[1][8]
        return (
            is_critical(item[0], path)
            and _kind(item) == IS_FILE
            and names > (was[1][8] if was is not None else 1)
        )

    def new_repositories(self) -> list[Finding]:
        """Repositories that were not there before."""
        return [
            Finding(path=path, severity=LISTED, who="git", what="a new repository")
            for path in self._after.repositories
            if path not in self._before.repositories and self._is_main(path)
        ]

    def begun(self) -> list[Finding]:
        """Rebases and the like that were not there before: one word of the user's carries them on.

        Their strategy is the name of a program, and their steps may hold commands.
        """
        found = []
        for path in sorted(_operations(self._after) - self._begun):
            texts = (self._after.text(f"{path}/{name}") for name in STEPS)
            run = [command for text in texts for command in gitcontrol.commands(text)]
            what = "begun, and '--continue' would act on what it says"
            what += f"; it would run: {_some(run)}" if run else ""
            found.append(Finding(path=path, severity=NOTABLE, who="git", what=what))
        return found

    def crowded(self) -> list[Finding]:
        """So many submodules or worktrees that the next sandbox starts slowly, or not at all."""
        found = []
        for home, names in sorted(self._after.crowds.items()):
            new = set(names).difference(self._before.crowds.get(home, ()))
            if new:
                what = (
                    f"{len(names)} directories, and with more than {MAX_MODULES} the next sandbox "
                    f"may not start: remove these {len(new)} new ones: {_some(new)}"
                )
                found.append(Finding(path=home, severity=NOTABLE, who="git", what=what))
        return found

    def _is_main(self, path: str) -> bool:
        above = path.split("/")[:-1]
        return ".git" not in above and f"{'/'.join(above[:-1])}" not in self._after.repositories

    def _forbidden(self, path: str, what: str, *, instead: bytes | None = None) -> Finding:
        """A finding that puts back what was there, or else `instead`."""
        like = self._after.items[path]
        was = self._before.items.get(path)
        remedy = QUARANTINED if instead is None else CLEANED
        if instead is None and was is not None and _kind(was) in (IS_FILE, IS_LINK):
            instead, like = self._before.text(path), was
            remedy = QUARANTINED if instead is None else RESTORED
        return Finding(
            path=path, severity=FORBIDDEN, who="git", what=what, remedy=remedy, instead=instead,
            mode=like[1][0], owner=like[1][6:8], judged=self._after.items[path][1][1:3],
        )  # fmt: skip

    def _gone(self, path: str) -> Finding | None:
        """A hook that no longer runs may have guarded something."""
        context = self._before.items[path][0]
        name = path.rpartition("/hooks/")[0]
        if context == HOOKS and name in self._after.repositories:
            return Finding(path=path, severity=NOTABLE, who="git", what="a hook was removed")
        return None

    def closed(self, path: str, item: Item) -> Finding:
        """A directory that cannot be listed. By name, git enters it all the same."""
        what = "cannot be looked into"
        if item[0] in (HOOKS, WORKTREES, MODULES) and item[1][0] & 0o111:
            return self._forbidden(path, f"{what}, and git may find something there")
        return Finding(path=path, severity=NOTABLE, who="", what=what)

    def hook(self, path: str, _item: Item) -> Finding | None:
        known = (_name(path), self._after.text(path)) in self._own_hooks
        if known and path not in self._before.items:
            return None
        return self._forbidden(path, "a hook that git would run")

    def link(self, path: str, item: Item) -> Finding | None:
        if _kind(item) != IS_LINK:
            return None
        return self._forbidden(path, "a link through which git would write or read elsewhere")

    def pointer(self, path: str, item: Item) -> Finding | None:
        """A `.git` that is no directory."""
        if _kind(item) == IS_LINK:
            return self._forbidden(path, "a link in place of a repository")
        text = self._after.text
        if text(path) is not None:
            written = gitcontrol.first_line(text(path))
            if not written.startswith(gitcontrol.POINTER):
                return None
            if gitcontrol.points_back(path, self._sparing, self._after.repositories):
                return None
        return self._forbidden(path, "git would use a repository that does not point back to it")

    def attributes(self, path: str, item: Item) -> Finding | None:
        new = gitcontrol.drivers(self._after.text(path))
        new -= gitcontrol.drivers(self._before.text(path))
        if _kind(item) != IS_FILE or self._after.text(path) is None:
            return self._forbidden(path, "attributes that cannot be read")
        return self._forbidden(path, f"git would run: {_some(new)}") if new else None

    def todo(self, path: str, _item: Item) -> Finding | None:
        """A file of an operation that was begun before the run."""
        name = _name(path)
        if paths.parent(path) not in self._begun:
            # Named as a whole.
            return None
        if name not in REWRITTEN:
            what = "changes how a rebase, or what else was begun, goes on"
            return Finding(path=path, severity=NOTABLE, who="git", what=what)
        if name not in STEPS:
            return None
        known = gitcontrol.commands(self._before.text(path))
        new = [c for c in gitcontrol.commands(self._after.text(path)) if c not in known]
        if not new:
            return None
        what = f"a rebase would run: {_some(new)}"
        return Finding(path=path, severity=NOTABLE, who="git", what=what)

    def git_file(self, path: str, item: Item) -> Finding | None:
        name = _name(path)
        if _kind(item) != IS_FILE or self._after.text(path) is None:
            return self._forbidden(path, "not a plain file that can be read")
        if name == "gitdir" and item[0] != INCLUDED:
            # Only names a worktree; one that leads nowhere runs nothing.
            changed = path in self._before.items
            return self._forbidden(path, "names another worktree than before") if changed else None
        if name == "commondir" and item[0] != INCLUDED:
            if gitcontrol.is_common(path, self._after.text, self._after.repositories):
                return None
            return self._forbidden(path, "git would read configuration and hooks elsewhere")
        return self._config(path)

    def _config(self, path: str) -> Finding | None:
        known = self._known(path)
        data = self._after.text(path) or b""
        parsed = gitcontrol.parse(data) if self._affords(data) else None
        if parsed is None:
            return self._forbidden(path, "too large, or written in a way that cannot be judged")
        odd = [entry for entry in parsed if not self._is_harmless(path, entry)]
        own = [entry for entry in known or () if not self._is_harmless(path, entry)]
        if gitcontrol.keeps_order(odd, own) or (known is None and self._is_brought_along(odd)):
            return self._addresses(path, parsed, known)
        own_ones = set(own)
        new = [gitcontrol.name(entry) for entry in odd if entry not in own_ones]
        what = f"git would obey: {_some(new or ['settings in another order'])}"
        if known is not None:
            return self._forbidden(path, what)
        odd_ones = set(odd)
        kept = [entry for entry in parsed if entry not in odd_ones]
        return self._forbidden(path, what, instead=gitcontrol.rendered(kept))

    def _is_brought_along(self, odd: list[Entry]) -> bool:
        """Whether settings are the user's own, from a repository that was moved or copied."""
        if self._portable is None:
            configs = [
                self._before.text(path) or b""
                for path, item in self._before.items.items()
                if is_git(item[0]) and _name(path) in ("config", "config.worktree")
            ]
            parsed = [gitconfig.entries(_text(data)) for data in configs if self._affords(data)]
            self._portable = [[e for e in every if gitcontrol.is_portable(e)] for every in parsed]
        return any(gitcontrol.keeps_order(odd, own) for own in self._portable)

    def _affords(self, data: bytes) -> bool:
        """Whether there is time to read one more configuration: it takes a second a megabyte.

        Whoever makes the end of a run take for ever has somebody kill it before it has acted.
        """
        self._spent += len(data)
        return self._spent <= MAX_JUDGED

    def _sparing(self, path: str) -> bytes | None:
        """The text of a file; none of a configuration that there is no time to read."""
        data = self._after.text(path)
        return None if _name(path) == "config" and not self._affords(data or b"") else data

    def _known(self, path: str) -> list[Entry] | None:
        """The settings that a repository had; None for a new one, or one in another's place."""
        home = paths.parent(path)
        then, now = (s.repositories.get(home) for s in (self._before, self._after))
        text = self._before.text(path) if path in self._before.items else None
        if text is None or (then is not None and then != now) or not self._affords(text):
            return None
        return gitconfig.entries(_text(text))

    def _is_harmless(self, path: str, entry: Entry) -> bool:
        if gitcontrol.is_worktree(entry):
            home = paths.parent(path)
            return gitcontrol.is_own_worktree(home, entry.value, self._after.text)
        return gitcontrol.is_harmless(entry)

    def _addresses(
        self, path: str, parsed: list[Entry], known: list[Entry] | None
    ) -> Finding | None:
        """A remote of an existing repository that now lies elsewhere is worth a look."""
        if known is None:
            return None
        old, before = {gitcontrol.name(e) for e in known}, set(known)
        new = [
            gitcontrol.name(e)
            for e in parsed
            if e.key in gitcontrol.ADDRESSES and e not in before and gitcontrol.name(e) in old
        ]
        if not new:
            return None
        return Finding(path=path, severity=NOTABLE, who="git", what=f"changed: {_some(new)}")

    def other(self, path: str, item: Item) -> Finding | None:
        """A file of the table."""
        rule = _rule(path, item)
        was, now = self._before.text(path), self._after.text(path)
        new = path not in self._before.items
        # What says nothing does nothing; another run's placeholder is a socket, or such a file.
        if rule is None or _kind(item) not in (IS_FILE, IS_LINK) or now in (b"", b"{}\n"):
            return None
        name, what = _name(path), "new" if new else "changed"
        if _kind(item) == IS_LINK:
            what = "a new link" if new else "a changed link"
        elif name == ".gitattributes":
            drivers = gitcontrol.drivers(now) - gitcontrol.drivers(was)
            what = f"names {_some(drivers)}" if drivers else ""
        elif name == "package.json" and now is not None:
            scripts = changed_scripts(was, now)
            what = f"scripts: {_some(scripts)}" if scripts else ""
        elif name == "pyvenv.cfg" and not new:
            what = ""
        return Finding(path=path, severity=rule[0], who=rule[1], what=what) if what else None


BY_CONTEXT: dict[str, Callable[[_Judge, str, Item], Finding | None]] = {
    HOOKS: _Judge.hook, WORKTREES: _Judge.link, MODULES: _Judge.link, LOGS: _Judge.link,
    INFO: _Judge.attributes, TODO: _Judge.todo, INCLUDED: _Judge.git_file,
}  # fmt: skip


def _operations(snapshot: Snapshot) -> set[str]:
    """The directories of operations that were begun."""
    return {paths.parent(path) for path, item in snapshot.items.items() if _plain(item[0]) == TODO}


def _way(context: str, name: str) -> Callable[[_Judge, str, Item], Finding | None]:
    """How a path is judged."""
    if not name:
        return _Judge.closed
    if context in BY_CONTEXT:
        return BY_CONTEXT[context]
    if name == ".git":
        return _Judge.pointer
    if is_git(context) and name in GIT_FILES:
        return _Judge.git_file
    if context == GIT or (is_git(context) and name in GIT_DIRECTORIES):
        return _Judge.link
    return _Judge.other


def _rule(path: str, item: Item) -> tuple[str, str] | None:
    """Who acts on a file."""
    name = _name(path)
    here = TABLE.get(item[0].removesuffix(BARE), {})
    rule = here.get(name) or here.get(EVERYTHING) or TABLE[ANYWHERE].get(name)
    if rule is None and name in TABLE and _kind(item) == IS_LINK:
        # In the place of a directory that would count.
        rule = next(iter(TABLE[name].values()), None)
    return WORKSPACE if rule is None and name.endswith(WORKSPACE_SUFFIX) else rule


def changed_scripts(was: bytes | None, now: bytes) -> list[str]:
    """The names of scripts in a package.json that are new or say something else."""
    old, new = _scripts(was or b"{}"), _scripts(now)
    if new is None:
        return ["(cannot be parsed)"]
    return sorted(name for name, text in new.items() if (old or {}).get(name) != text)


def _scripts(data: bytes) -> dict[str, object] | None:
    import json

    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return {}
    found: dict[str, object] = {}
    for part in SCRIPTS:
        value = parsed.get(part)
        if part == "scripts" and isinstance(value, dict):
            found.update(value)
        elif part in parsed and part != "scripts":
            found[part] = value
    return found


def _some(names: Iterable[str]) -> str:
    """A few names of many."""
    every = sorted(set(names))
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(name[:80] for name in every[:SHOWN]) + more


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _plain(context: str) -> str:
    return context.removesuffix(BARE)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _kind(item: Item) -> int:
    return item[1][0] & TYPE_BITS
