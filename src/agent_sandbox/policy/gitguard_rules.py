"""What `@git` refuses, command by command, and what to do instead. For /bin/sh; see `gitguard`.

Each refusal has a control in the tests that shows what plain git loses. `judge` ends the program,
or returns for a command that is not git's own.
"""

from __future__ import annotations

# Settings that switch off hooks, the question before `clean`, the way back, or git's caution with
# what others have pushed; and the one that makes git run another command than the one named.
UNSAFE = (
    r"^(core\.(hookspath|logallrefupdates)|clean\.requireforce|gc\..*(expire|expireunreachable)"
    r"|remote\..*\.(push|mirror)|help\.autocorrect)$"
)

RULES = r"""
uncommitted='it throws away changes that are not committed'
stash="'git stash push [-- PATH...]' does it and keeps them; 'git stash apply' brings them back"
hooks='it leaves out the checks that the project has set up'
fix='run it without, and mend what the check finds; ask your user if the check is wrong'
commits='commits that only this name leads to are lost'
another='leave it, or give the new one another name'
forced='it can throw away what others have pushed'
lease="fetch, rebase or merge, and push again; 'git push --force-with-lease' checks first"
objects='it removes objects that a mistake could still be mended with'
later="leave it to 'git gc', which keeps what is younger than two weeks"

is_commit() {
    case $1 in -|*...*) return 0 ;; esac
    ask rev-parse --quiet --verify "$1^{commit}" >/dev/null
}

# Whether the words after `checkout` name files: `[TREE] [--] PATH…`, as git reads it.
names_files() {
    case $# in
    0) return 1 ;;
    1)
        [ "$1" != -- ] && ! has b orphan detach && ! is_commit "$1" && [ "$(ask ls-files -- "$1")" ]
        return ;;
    2) [ "$2" != -- ]; return ;;
    esac
}

# Forced, or pruning, where the other side of a refspec is a name of ours.
overwrites_own() {
    for spec do
        case $spec in
        *:refs/remotes/*|*:) ;;
        +*:*) return 0 ;;
        *:*) has force prune && return 0 ;;
        esac
    done
    return 1
}
forces() {
    for spec do
        case $spec in +*|:?*) return 0 ;; esac
    done
    return 1
}
is_one() { [ $# -eq 1 ]; }
is_input() { [ $# -eq 0 ] || [ "$1" = - ]; }
# A name that leads to commits of its own becomes another name for something else.
hides_branch() {
    [ $# -eq 2 ] && [ "$1" != HEAD ] && ask rev-parse --quiet --verify "$1" >/dev/null
}
# Moving $1 to $2 leaves something behind.
leaves_behind() {
    old=$(ask rev-parse --quiet --verify "$1^{commit}") || return 1
    ! ask merge-base --is-ancestor "$old" "$2"
}

judge() {
    stop=
    case $command in
    checkout)
        options 'b= B= l q,quiet m,merge d,detach t,track? f,force 2,ours 3,theirs p,patch
            U,unified=' "$@"
        has force && refuse 'checkout --force' "$uncommitted" "$stash"
        has B && refuse 'checkout -B' "$commits" "'git checkout -b NEW-NAME' makes another branch"
        has patch pathspec-from-file && refuse 'checkout PATH' "$uncommitted" "$stash"
        eval "names_files $rest" && refuse 'checkout PATH' "$uncommitted" "$stash"
        run ;;
    switch)
        options 'c,create= C,force-create= q,quiet m,merge d,detach t,track? f,force' "$@"
        has force discard-changes && refuse 'switch --discard-changes' "$uncommitted" "$stash"
        has force-create &&
            refuse 'switch -C' "$commits" "'git switch -c NEW-NAME' makes another branch"
        run ;;
    restore)
        options 's,source= S,staged W,worktree q,quiet m,merge 2,ours 3,theirs p,patch
            U,unified=' "$@"
        has staged && ! has worktree && run
        refuse restore "$uncommitted" \
            "$stash; 'git restore --staged' takes out of the index only" ;;
    reset)
        options 'q,quiet p,patch N,intent-to-add z U,unified=' "$@"
        has hard && refuse 'reset --hard' "$uncommitted" \
            "$stash; 'git reset --keep COMMIT' moves the branch and keeps them"
        has merge && refuse 'reset --merge' "$uncommitted" \
            "$stash; 'git merge --abort' ends a merge"
        run ;;
    clean)
        options 'q,quiet n,dry-run f,force i,interactive d e,exclude= x X' "$@"
        has dry-run && run
        ! has force interactive && [ "$(ask config --bool clean.requireForce)" != false ] && run
        refuse 'clean --force' 'it removes files that git cannot bring back' \
            "'git clean -n' lists them; remove by name what you made yourself, or 'git stash -u'" ;;
    commit)
        options 'q,quiet v,verbose F,file= m,message= c,reedit-message= C,reuse-message=
            s,signoff t,template= e,edit S,gpg-sign? a,all i,include p,patch o,only n,no-verify
            z,null u,untracked-files? U,unified=' "$@"
        has no-verify && [ "$inner" != rebase ] && refuse 'commit --no-verify' "$hooks" "$fix"
        run ;;
    merge)
        options 'n e,edit s,strategy= X,strategy-option= m,message= F,file= v,verbose q,quiet
            S,gpg-sign?' "$@"
        has no-verify && refuse 'merge --no-verify' "$hooks" "$fix"
        run ;;
    am)
        options 'i,interactive b,binary 3,3way q,quiet s,signoff u,utf8 k,keep m,message-id
            c,scissors C= p= r,resolved S,gpg-sign? n,no-verify' "$@"
        has no-verify && refuse 'am --no-verify' "$hooks" "$fix"
        run ;;
    rebase)
        options 'q,quiet v,verbose n,no-stat C= f,force-rebase m,merge i,interactive S,gpg-sign?
            x,exec= r,rebase-merges? s,strategy= X,strategy-option=' "$@"
        has no-verify && refuse 'rebase --no-verify' "$hooks" "$fix"
        has exec && AGENT_SANDBOX_GIT_INNER=rebase
        run ;;
    branch)
        options 'v,verbose q,quiet t,track? u,set-upstream-to= r,remotes a,all d,delete D m,move M
            c,copy C l,list f,force i,ignore-case' "$@"
        has D && refuse 'branch -D' "$commits" "'git branch -d' removes what is merged"
        has M C force && refuse 'branch --force' "$commits" "$another"
        run ;;
    tag)
        options 'l,list n? d,delete v,verify a,annotate m,message= F,file= e,edit s,sign
            u,local-user= f,force i,ignore-case' "$@"
        has delete force && refuse 'tag --delete|--force' "$commits" "$another"
        run ;;
    push)
        options 'v,verbose q,quiet d,delete n,dry-run f,force u,set-upstream o,push-option=
            4,ipv4 6,ipv6' "$@"
        has no-verify && refuse 'push --no-verify' "$hooks" "$fix"
        has dry-run && run
        has force && refuse 'push --force' "$forced" "$lease"
        has mirror prune && refuse 'push --mirror|--prune' "$forced" 'push single branches'
        has delete && refuse 'push --delete' "$forced" 'ask your user to delete it'
        eval "forces $rest" && refuse 'push +REF or :REF' "$forced" "$lease"
        run ;;
    send-pack)
        options 'v,verbose q,quiet n,dry-run f,force' "$@"
        has dry-run && run
        has force mirror stdin && refuse 'send-pack --force' "$forced" "$lease"
        eval "forces $rest" && refuse 'send-pack +REF' "$forced" "$lease"
        run ;;
    fetch|pull)
        case $command in
        fetch) options 'v,verbose q,quiet a,append f,force m,multiple t,tags n j,jobs= p,prune
            P,prune-tags k,keep u,update-head-ok o,server-option= 4,ipv4 6,ipv6' "$@" ;;
        pull) options 'v,verbose q,quiet r,rebase? n s,strategy= X,strategy-option= S,gpg-sign?
            a,append f,force t,tags p,prune j,jobs? k,keep o,server-option= 4,ipv4 6,ipv6' "$@" ;;
        esac
        has no-verify && refuse 'pull --no-verify' "$hooks" "$fix"
        has dry-run && run
        has prune-tags && refuse "$command --prune-tags" 'tags that only you have are lost' \
            'fetch without it'
        { has force && has tags; } && refuse "$command --force --tags" "$commits" 'fetch without it'
        eval "overwrites_own $rest" && refuse "$command +REF:REF" "$commits" \
            "fetch without ':REF'; FETCH_HEAD is what came"
        run ;;
    rm)
        options 'n,dry-run q,quiet f,force r' "$@"
        has force && ! has cached dry-run && refuse 'rm --force' "$uncommitted" \
            "$stash; 'git rm --cached' keeps the file"
        run ;;
    mv)
        options 'v,verbose n,dry-run f,force k' "$@"
        has force && ! has dry-run &&
            refuse 'mv --force' 'the file with that name is lost' "$another"
        run ;;
    stash)
        case ${1-} in
        drop|clear) refuse "stash $1" 'what was put away is lost' 'leave the entry where it is' ;;
        pop) refuse 'stash pop' 'the entry is removed, and what was staged with it' \
            "'git stash apply --index' does the same and keeps the entry" ;;
        esac
        run ;;
    worktree)
        case ${1-} in remove|add|prune) ;; *) run ;; esac
        command="worktree $1"
        shift
        options 'n,dry-run v,verbose f,force b= B= d,detach q,quiet' "$@"
        has dry-run && run
        case $command in
        *add) has B && refuse 'worktree add -B' "$commits" "$another" ;;
        *remove) has force && refuse 'worktree remove --force' "$uncommitted" \
            "commit there first; 'git worktree remove' takes a clean one" ;;
        *) refuse 'worktree prune' 'trees that this sandbox does not show look gone, and are not' \
            'leave it to your user' ;;
        esac
        run ;;
    submodule)
        for word do
            case $word in
            --quiet|-q|--cached) ;;
            foreach) AGENT_SANDBOX_GIT_INNER=user; run ;;
            update|deinit) deeper=$word ;;
            -f|--force) [ "${deeper-}" ] && refuse "submodule $deeper --force" "$uncommitted" \
                'commit or stash in the submodule first, and leave --force out' ;;
            esac
        done
        run ;;
    submodule--helper)
        case " $* " in *' foreach '*) AGENT_SANDBOX_GIT_INNER=user ;; esac
        run ;;
    bisect)
        [ "${1-}" = run ] && AGENT_SANDBOX_GIT_INNER=user
        run ;;
    for-each-repo) AGENT_SANDBOX_GIT_INNER=user; run ;;
    reflog)
        case ${1-} in expire|delete|drop) ;; *) run ;; esac
        command="reflog $1"
        shift
        options 'n,dry-run' "$@"
        has dry-run && run
        refuse "$command" 'the way back to earlier commits is lost' "$later" ;;
    gc)
        options 'q,quiet' "$@"
        case $given in
        *'
prune=never
'*) ;;
        *'
prune='*) refuse 'gc --prune=DATE' "$objects" "'git gc' keeps what is younger than two weeks" ;;
        esac
        run ;;
    prune)
        options 'n,dry-run v,verbose' "$@"
        has dry-run && run
        refuse prune "$objects" "$later" ;;
    repack)
        options 'a A d f F n q,quiet l,local b,write-bitmap-index i,delta-islands
            k,keep-unreachable g,geometric= m,write-midx' "$@"
        has unpack-unreachable cruft-expiration && refuse 'repack --unpack-unreachable=DATE' \
            "$objects" "$later"
        has a && has d && ! has A keep-unreachable cruft &&
            refuse 'repack -a -d' "$objects" "'git repack -A -d' keeps them"
        run ;;
    read-tree)
        options 'v,verbose m u i n,dry-run q,quiet' "$@"
        has dry-run && run
        has reset && refuse 'read-tree --reset' "$uncommitted" \
            "'git read-tree -m -u OLD NEW' stops where something would be lost"
        has u && has m && eval "is_one $rest" && refuse 'read-tree -m -u TREE' "$uncommitted" \
            "'git read-tree -m -u OLD NEW' stops where something would be lost"
        run ;;
    apply)
        options 'p= N,intent-to-add 3,3way z C= R,reverse v,verbose q,quiet U,unified=' "$@"
        has reverse && ! has cached check stat numstat summary && eval "is_input $rest" &&
            refuse 'apply --reverse' 'what it takes back is kept nowhere' \
            "write the patch to a file first: 'git diff >FILE; git apply -R FILE'"
        run ;;
    symbolic-ref)
        options 'q,quiet d,delete m=' "$@"
        eval "hides_branch $rest" && refuse 'symbolic-ref NAME REF' "$commits" "$another"
        run ;;
    checkout-index)
        options 'a,all f,force q,quiet n,no-create u,index z' "$@"
        has force && refuse 'checkout-index --force' "$uncommitted" \
            "without it, files that are there stay; 'git archive' writes elsewhere"
        run ;;
    update-ref)
        options 'm= d z 0,batch-updates' "$@"
        has d stdin && refuse 'update-ref -d|--stdin' "$commits" \
            "'git branch -d' removes what is merged"
        eval "leaves_behind $rest" && refuse 'update-ref' "$commits" "$another"
        run ;;
    fast-import)
        for word do
            [ "$word" = --force ] && refuse 'fast-import --force' "$commits" "$another"
        done
        run ;;
    filter-branch)
        for word do
            case $word in -f|--force) refuse 'filter-branch --force' \
                'the backup of the last time (refs/original) is lost' 'ask your user' ;; esac
        done
        run ;;
    config)
        stop=--stop-at-non-option
        options 'f,file= l,list e,edit t,type= z,null' "$@"
        changes_hooks() {
            case ${1-} in
            set|unset) shift ;;
            *) has unset unset-all remove-section rename-section || [ $# -gt 1 ] || return 1 ;;
            esac
            for word do
                case $word in
                [cC][oO][rR][eE].[hH][oO][oO][kK][sS][pP][aA][tT][hH]|core) return 0 ;;
                esac
            done
            return 1
        }
        has get get-all get-regexp list || { eval "changes_hooks $rest" &&
            refuse 'config core.hooksPath' "$hooks" 'leave it as it is'; }
        run ;;
    esac
}
"""
