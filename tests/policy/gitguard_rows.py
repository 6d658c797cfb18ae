"""What `@git` refuses and lets through: command lines, what they lose or do, and what comes before.

Scripts speak of the scene in `gitlab`: f is changed, g staged, u unknown to git.
"""

from __future__ import annotations

import shlex

# What is lost, as a script that says so.
F = "! grep -q mine f"
G = "! grep -q staged g"
U = "! test -e u"
SIDE = "! git for-each-ref --contains $(cat ../side) refs/heads | grep -q ."
ONLY = "! git for-each-ref --contains $(cat ../only) refs/tags/only | grep -q ."
THEIRS = (
    "! git -C ../origin.git for-each-ref --contains $(cat ../theirs) refs/heads/main | grep -q ."
)
OLD = "! git -C ../origin.git for-each-ref --contains $(cat ../old) refs/heads | grep -q ."
STASH = "! git rev-parse -q --verify refs/stash"
CHECK = "git log -1 --format=%s | grep -qx unchecked"
REFLOG = 'test -z "$(git reflog main)"'
OBJECT = "! git cat-file -e $(cat ../object)"

# Hooks that say no.
HOOK = (
    "mkdir .git/hooks; for h in pre-commit pre-merge-commit pre-push pre-rebase; do"
    " printf '#!/bin/sh\nexit 1\n' >.git/hooks/$h; chmod +x .git/hooks/$h; done;"
)
CLEAN = "git stash -q -u;"
CONFLICT = (
    "git stash -q -u; git checkout -q -b left; echo left >f; git commit -qam left;"
    " git checkout -q main; echo right >f; git commit -qam right; git merge left;"
    " echo mine >f;"
)
BOTH = (
    "git stash -q -u; git checkout -q -b left; echo left >k; git commit -qam left;"
    " git checkout -q main; echo v2 >k;"
)
ALIASES = (
    "git config alias.x 'reset --hard'; git config alias.y x;"
    """ git config alias.Q 'checkout  "--" '\\''f'\\';"""
    " git config alias.s '!git checkout --';"
    " git config alias.b '!f() { git restore \"$@\"; }; f';"
    " git config alias.g '-c core.pager=cat checkout';"
)
PATCH = "--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n one\n+mine\n"
LOOSE = "echo lost | git hash-object -w --stdin >../object;"
PACKED = (
    "git checkout -q --detach; echo x >x; git add x; git commit -qm x;"
    " git rev-parse HEAD >../object; git repack -q -a; git prune-packed; git checkout -q main;"
    " git reflog expire --expire=now --all; git update-ref -d ORIG_HEAD;"
)
OTHER = "git worktree add -q ../other base; echo mine >>../other/f;"
AWAY = (
    "git worktree add -q --detach ../other base; cd ../other; git commit -q --allow-empty -m away;"
    " git rev-parse HEAD >../object; cd ../work; mv ../other ../hidden;"
)
SUB = (
    CLEAN + "git clone -q --bare ../work ../sub.git; git submodule --quiet add ../sub.git sub;"
    " git commit -qm sub; echo mine >>sub/f;"
)
SUB_F = "! grep -q mine sub/f"

# name: arguments, what is lost, what comes before, standard input.
REFUSED: dict[str, tuple[list[str], str, str, str]] = {
    line: (shlex.split(line), lost, before, text)
    for lost, before, text, group in (
        (F, "", "", (
            "checkout -- .", "checkout .", "checkout f", "checkout f g", "checkout HEAD f",
            "checkout HEAD -- f", "checkout -f", "checkout -qf side", "checkout --forc side",
            "checkout --ours f", "checkout --no-overlay HEAD .", "checkout :/",
            "restore f", "restore .", "restore -s HEAD f", "restore -SW f", "restore --sour=HEAD f",
            "restore --staged --worktree f",
            "switch --discard-changes side", "switch -f side", "switch --disc side",
            "reset --hard", "reset --har", "reset -q HEAD --hard", "reset --hard base",
            "read-tree --reset -u HEAD", "checkout-index -f -a", "checkout-index -fa",
            "checkout-index --force f", "rm -f f", "rm -qrf .", "mv -f g f",
            "--no-pager -p checkout .", "-C . checkout .", "-C ../work reset --hard",
            "--git-dir .git --work-tree . reset --hard", "--git-dir=.git reset --hard",
            "--shallow-file /dev/null checkout .", "--literal-pathspecs checkout f",
            "-c user.name=x checkout f", "-c 'alias.z=reset --hard' z",
            "-c 'alias.z=!git reset --hard' z", "-c help.autocorrect=immediate resset --hard",
        )),
        (F, "echo f >../list;", "", (
            "checkout --pathspec-from-file=../list", "restore --pathspec-from-file ../list",
        )),
        (F, "", "y\ny\ny\n", ("checkout -p", "checkout --patch HEAD", "restore -p")),
        (F, ALIASES, "", (
            "x", "y", "q", "X", "s f", "b f", "g f",
        )),
        (F, CONFLICT, "", ("checkout -m f", "checkout --conflict=diff3 f")),
        (G, "git update-index -q --refresh;", "", (
            "read-tree -m -u HEAD", "read-tree -um main",
            "reset --merge", "restore -W -S g", "checkout HEAD g", "reset --merge HEAD",
        )),
        (U, "", "", ("clean -f", "clean -fd", "clean -d -f", "clean --force", "clean --forc",
            "clean -xf", "clean -fe foo", "-c clean.requireForce=false clean",
            "clean -n --no-dry-run -f",
        )),
        (U, "git config clean.requireForce false;", "", ("clean", "clean -d")),
        (U, "", "c\nq\n", ("clean -i",)),
        (CHECK, HOOK, "", (
            "commit --no-verify -m unchecked", "commit -nm unchecked", "commit -qnm unchecked",
            "commit -anm unchecked", "commit --no-veri -m unchecked",
            "-c core.hooksPath=/dev/null commit -m unchecked",
            "-c CORE.hookspath=/dev/null commit -m unchecked",
            "--config-env core.hooksPath=NO_HOOKS commit -m unchecked",
            "--config-env=core.hooksPath=NO_HOOKS commit -m unchecked",
        )),
        (CHECK, HOOK + CLEAN, "", ("merge --no-verify --no-ff -m unchecked side",)),
        ("git log -1 --format=%p | grep -q ' '", HOOK + CLEAN, "", (
            "pull -q --no-verify --no-rebase --no-ff . side",
        )),
        ("git merge-base --is-ancestor main~ HEAD && test $(git rev-parse HEAD) != $(cat ../side)",
            CLEAN + "git checkout -q side;" + HOOK, "", ("rebase --no-verify main",)),
        ("git -C ../origin.git rev-parse -q --verify fresh", HOOK, "",
            ("push --no-verify origin main:fresh",)),
        ("git config core.hooksPath", "", "", (
            "config core.hooksPath /dev/null", "config --local Core.HooksPath /dev/null",
            "config --add core.hookspath /dev/null",
        )),
        ("! git config core.hooksPath", "git config core.hooksPath .husky;", "", (
            "config --unset core.hooksPath", "config --remove-section core",
        )),
        (STASH, "", "", ("stash drop", "stash clear", "stash drop -q stash@{0}")),
        (STASH + " && ! git show :k | grep -q v1", CLEAN + "git stash drop -q;", "",
            ("stash pop",)),
        (SIDE, "", "", (
            "branch -D side", "branch -d -f side", "branch --delete --force side",
            "branch -df side",
            "branch -f side main", "branch -M merged side", "branch -C merged side",
            "branch --forc side main", "checkout -B side", "switch -C side",
            "switch --force-c side",
            "update-ref -d refs/heads/side", "update-ref refs/heads/side main",
            "update-ref refs/heads/side 0000000000000000000000000000000000000000",
            "fetch . +main:side", "fetch -f . main:side", "pull . +base:side",
            "worktree add -B side ../new main",
        )),
        ("test $(git rev-parse side) != $(cat ../side)", "", "", (
            "symbolic-ref refs/heads/side refs/heads/main",
        )),
        (F, "", PATCH, ("apply -R", "apply --rev -v", "apply -R -")),
        (SIDE, "", "delete refs/heads/side\n", ("update-ref --stdin",)),
        (SIDE, "", "reset refs/heads/side\nfrom refs/heads/main\n\n",
            ("fast-import --force --quiet",)),
        (SIDE, CLEAN, "", ("fetch -u -p origin refs/heads/*:refs/heads/*",)),
        (ONLY, "", "", ("tag -d only", "tag --delete only", "tag -f only main",
            "fetch -p -P origin",
            "fetch --prune --prune-tags origin")),
        ("test $(git rev-parse both) != $(cat ../only)", "", "", ("fetch -f --tags origin",)),
        (THEIRS, "", "", (
            "push --force origin main", "push -f origin main", "push -fu origin main",
            "push origin +main", "push --force-with-lease -f origin main",
            "push --mirror origin", "push origin +HEAD:refs/heads/main",
            "-c remote.origin.push=+main push origin", "send-pack --force ../origin.git main",
            "send-pack ../origin.git +main",
        )),
        (OLD, "", "", (
            "push origin :old", "push -d origin old", "push --delete origin old",
            "push --prune origin refs/heads/side:refs/heads/side refs/heads/*:refs/heads/*",
        )),
        ("! grep -q mine ../other/f", OTHER, "", (
            "worktree remove --force ../other", "worktree remove -f ../other",
        )),
        ("! git -C .git/worktrees/other rev-parse -q --verify HEAD", AWAY, "", ("worktree prune",)),
        (REFLOG, "", "", (
            "reflog expire --expire=now --all", "reflog expire --expire=now main",
        )),
        ("! git reflog main | grep -q second", "", "", ("reflog delete main@{0}",)),
        (OBJECT, LOOSE, "", ("gc --prune=now", "gc --prune=all -q", "prune", "prune --expire=now",
            "-c gc.pruneExpire=now gc")),
        (OBJECT, PACKED, "", ("repack -ad", "repack -a -d -q",
            "repack -A -d --unpack-unreachable=now")),
        (SUB_F, SUB, "", (
            "submodule update --force", "submodule update -f sub", "submodule deinit -f sub",
            "submodule --quiet deinit --force sub", "submodule foreach 'git checkout .'",
            "submodule foreach git checkout .",
            "submodule --quiet foreach --recursive 'git reset --hard'",
        )),
        (U, "git stash -q; git checkout -q side;", "", ("rebase -x 'git clean -f' main",)),
        (U, "git stash -q; git bisect start main base;", "", ("bisect run git clean -f",)),
        (F, "git config x.repo $PWD;", "", ("for-each-repo --config=x.repo reset --hard",)),
        ("test $(git rev-parse refs/original/refs/heads/side) != $(cat ../original)",
            CLEAN + "git filter-branch --msg-filter 'sed s/side/other/' side;"
            " git rev-parse refs/original/refs/heads/side >../original;", "", (
            "filter-branch -f --msg-filter 'sed s/other/third/' side",)),
    )
    for line in group
}  # fmt: skip


# Arguments, what must hold afterwards, what comes before. Nothing of f, g, u may be lost.
KEPT = "grep -q mine f && grep -q staged g && test -e u"
AHEAD = "git stash -q; git rebase -q origin/main; git stash apply -q --index;"
PASSES = HOOK.replace("exit 1", "exit 0")
ALLOWED: dict[str, tuple[list[str], str, str]] = {
    line: (shlex.split(line), holds, before)
    for holds, before, group in (
        (KEPT, "", (
            "status", "log --oneline -p", "diff HEAD", "show", "blame f", "add .", "ls-files",
            "rev-parse HEAD", "branch", "branch -vv", "remote -v", "stash list", "stash show -p",
            "tag", "reflog", "worktree list", "config -l", "config user.name", "help -a", "version",
            "--version", "--exec-path", "reset -h", "checkout --help", "-C .. -C work status",
            "--no-pager -c color.ui=never log -1", "clean -n", "clean -nf", "clean --dry-run -fdx",
            "checkout", "checkout --", "checkout main --", "checkout -q HEAD", "reset g f",
            "restore --staged g", "restore -S .", "reset", "reset --mixed", "reset --soft HEAD~1",
            "rm --cached -f f", "rm -n -f f", "push --dry-run -f origin main", "gc", "gc --auto",
            "gc --no-prune", "gc --prune=never", "repack -A -d", "repack -a -d -k", "prune -n",
            "reflog expire --dry-run --expire=now --all", "read-tree HEAD",
            "apply --stat -R /dev/null",
            "worktree prune -n", "fetch", "fetch -p origin", "fetch origin main", "fetch --all -q",
            "fetch origin +refs/heads/*:refs/remotes/origin/*", "fetch origin main:fresh",
            "config core.hooksPath", "config --get core.hooksPath", "checkout-index -a",
            "-c alias.st=status st -s", "-c core.pager=cat log -1", "update-ref refs/heads/x main",
            "update-ref refs/heads/merged main", "fast-import --quiet", "submodule status",
            "read-tree -m -u HEAD side",
            "symbolic-ref HEAD", "symbolic-ref HEAD refs/heads/main",
            "symbolic-ref refs/x refs/heads/side",
            "switch --orphan n", "submodule update", "-c 'alias.o=!git status' o",
            "filter-branch -h",
        )),
        (KEPT + " && git rev-parse -q --verify refs/heads/n", "", (
            "checkout -b n", "switch -c n", "branch n", "branch -m side n", "checkout -q -b n side",
            "branch -c side n",
        )),
        (KEPT + " && test $(git symbolic-ref HEAD) = refs/heads/n", "", ("checkout --orphan n",)),
        (KEPT + " && git symbolic-ref HEAD | grep -q side", "", (
            "checkout side", "switch side", "checkout -q side --", "switch --no-guess -q side",
        )),
        (KEPT + " && git symbolic-ref HEAD | grep -q side",
            "git checkout -q side; git checkout -q main;", ("checkout -", "switch -")),
        (KEPT + " && git symbolic-ref HEAD | grep -q theirs", AHEAD, (
            "checkout theirs", "switch theirs",
        )),
        (KEPT + " && ! git rev-parse -q --verify refs/heads/merged", "", (
            "branch -d merged", "branch --delete merged",
        )),
        ("grep -q mine f && git log -1 --format=%s | grep -qx -e notes -e -n", PASSES, (
            "commit -mnotes", "commit -m -n", "commit -am notes", "commit -qm notes --no-edit",
            "commit --message=notes --no-verify --verify", "-c user.name=x commit -m notes",
        )),
        ("git stash show -p stash@{0} | grep -q mine && ! grep -q mine f", "", (
            "stash", "stash push", "stash -u", "stash push -- f", "stash save -q x", "stash -k",
        )),
        ("git rev-parse -q --verify stash@{0} && grep -q mine f", CLEAN, (
            "stash apply", "stash apply --index", "stash branch n",
        )),
        ("test -e s && git log -1 --format=%p | grep -q ' '", CLEAN, (
            "merge --no-edit side", "merge -q --no-ff -m x side", "pull --no-rebase . side",
        )),
        ("git merge-base --is-ancestor main HEAD && test -e s", CLEAN + "git checkout -q side;",
            ("rebase main", "rebase -q --autostash main", "rebase -x true main",
            "rebase -x 'git status' main", "pull --rebase . main")),
        ("git merge-base --is-ancestor main HEAD && git log -1 --format=%s | grep -q side",
            CLEAN + "git checkout -q side; git commit --allow-empty -qm 'fixup! side';"
            "git config rebase.autosquash true;",
            ("rebase -q -i -x 'git status' main",)),
        # Git stops where something is staged, and keeps both sides of a conflict.
        ("grep -q v2 k", BOTH, (
            "checkout -m left", "switch -m left", "switch --conflict=merge left",
        )),
        ("! grep -q mine f && grep mine ../patch", "git diff >../patch;", ("apply -R ../patch",)),
        ("test -e s", CLEAN, ("cherry-pick side",)),
        ("test ! -e t", CLEAN, ("revert --no-edit HEAD", "rm t", "mv t t2", "reset --keep base")),
        ("git -C ../origin.git rev-parse -q --verify n", "", (
            "push origin main:n", "push -u origin main:n", "push origin HEAD:refs/heads/n",
            "push --force-with-lease origin main:n", "push --force-with-lease=n origin main:n",
            "push -q origin side:n", "push --set-up origin main:n",
        )),
        ("test ! -e ../other", "git worktree add -q ../other base;", ("worktree remove ../other",)),
        ("test -e ../new/f", "", ("worktree add ../new side", "worktree add -b n ../new")),
        ("git symbolic-ref -q HEAD >/dev/null || test -e f", CLEAN
            + "git bisect start main base;", ("bisect run true", "bisect run git status")),
        ("test $(git rev-parse refs/heads/side) != $(cat ../side)", CLEAN,
            ("filter-branch --msg-filter 'sed s/side/x/' side",)),
        ("grep -q mine sub/f", SUB, ("submodule update", "submodule foreach 'git status'",
            "submodule foreach git stash list")),
        ("! grep -q mine sub/f && git -C sub stash show -p | grep -q mine", SUB,
            ("submodule foreach 'git stash'",)),
    )
    for line in group
}  # fmt: skip
