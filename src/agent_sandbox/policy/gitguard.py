"""`@git`: a program for /bin/sh that stands before git and refuses what loses work. Pure text.

It reads a command line as git does: git's own words for the options of a command
(`--git-completion-helper-all`), git's own parser (`git rev-parse --parseopt`), git's own settings
for aliases. A shell, because one is on every machine and starts in a millisecond; what cannot lose
anything is handed over before the rest is even read. A guard rail: whoever wants around it gets
around it. What must hold is held by mounts.
"""

from __future__ import annotations

from . import gitguard_rules
from .model import README

# Commands that lose nothing, whatever their options. An alias cannot take the name of one.
HARMLESS = """
    add annotate archive bisect--helper blame bugreport bundle cat-file check-attr
    check-ignore check-mailmap check-ref-format checkout--worker cherry cherry-pick clone column
    commit-graph commit-tree count-objects credential credential-cache credential-cache--daemon
    credential-store describe diagnose diff diff-files diff-index diff-pairs diff-tree difftool
    fast-export fetch-pack fmt-merge-msg for-each-ref format-patch fsck fsck-objects
    fsmonitor--daemon get-tar-commit-id grep hash-object help hook index-pack init init-db
    interpret-trailers last-modified log ls-files ls-remote ls-tree mailinfo mailsplit maintenance
    merge-base merge-file merge-index merge-ours merge-recursive merge-recursive-ours
    merge-recursive-theirs merge-subtree merge-tree mktag mktree multi-pack-index name-rev notes
    pack-objects pack-redundant pack-refs patch-id pickaxe prune-packed range-diff receive-pack
    remote remote-ext remote-fd replace rerere rev-list rev-parse revert shortlog show show-branch
    show-index show-ref sparse-checkout stage status stripspace unpack-file
    unpack-objects update-index update-server-info upload-archive upload-archive--writer
    upload-pack var verify-commit verify-pack verify-tag version whatchanged write-tree
""".split()

# Options before the command. One that is not here may take the next word with it: then nobody can
# tell what the command is.
WITH_VALUE = (
    "-C", "--git-dir", "--work-tree", "--namespace", "--super-prefix", "--attr-source",
    "--shallow-file",
)  # fmt: skip
SETTINGS = ("-c", "--config-env")
ALONE = (
    "-p", "--paginate", "-P", "--no-pager", "--bare", "--no-replace-objects", "--no-lazy-fetch",
    "--no-optional-locks", "--no-advice", "--literal-pathspecs", "--no-literal-pathspecs",
    "--glob-pathspecs", "--noglob-pathspecs", "--icase-pathspecs", "--exec-path=*",
    "--git-dir=*", "--work-tree=*", "--namespace=*", "--super-prefix=*", "--attr-source=*",
)  # fmt: skip
# Git answers these itself and stops.
ANSWERS = (
    "-h", "--help", "-v", "--version", "--exec-path", "--html-path", "--man-path", "--info-path",
    "--list-cmds=*",
)  # fmt: skip

FIRST = r"""
# Called as git-checkout, or as git by git: its own directory comes first on PATH there.
case ${0##*/} in git-?*) set -- "${0##*/git-}" "$@" ;; esac
inner=
case $0 in */git-core/*) inner=${AGENT_SANDBOX_GIT_INNER-} ;; esac
[ "$inner" = all ] && exec "$AGENT_SANDBOX_REAL" "$@"
AGENT_SANDBOX_GIT_INNER=all
case ${1-}:${2-} in
bisect--helper:*) AGENT_SANDBOX_GIT_INNER=user ;;
esac
export AGENT_SANDBOX_GIT_INNER

value=
for word do
    if [ "$value" ]; then value=; continue; fi
    case $word in
    @WITH_VALUE@|@SETTINGS@) value=1 ;;
    @ALONE@|--config-env=*) ;;
    @HARMLESS@) exec "$AGENT_SANDBOX_REAL" "$@" ;;
    *) break ;;
    esac
done
"""

TOOLS = r"""
# Words stay words.
set -f

refuse() {
    printf "agent-sandbox: 'git %s' is blocked in this sandbox: %s\n" "$1" "$2" >&2
    printf 'hint: %s\n' "$3" >&2
    printf 'hint: only your user can run it, outside, or with --cmd git=true; see @README@\n' >&2
    exit 126
}

# $1 as a word of the shell, in $quoted; all arguments, in $list.
quote() {
    quoted= left=$1
    while :; do
        case $left in *\'*) ;; *) break ;; esac
        quoted="$quoted${left%%\'*}'\\''"
        left=${left#*\'}
    done
    quoted="'$quoted$left'"
}
quote_all() {
    list=
    for item do quote "$item"; list="$list $quoted"; done
}

# Ask git, in the repository and with the settings of the call.
ask() {
    quote_all "$@"
    eval "\"\$AGENT_SANDBOX_REAL\" $globals $list" 2>/dev/null
}
run() { eval "exec \"\$AGENT_SANDBOX_REAL\" $original"; }

# Split an alias as git does (split_cmdline in alias.c) into words of the shell, in $list.
split() {
    text=$1 list= word= open= begun=
    while [ "$text" ]; do
        char=${text%"${text#?}"}
        text=${text#?}
        case $open$char in
        [[:space:]])
            [ "$begun" ] && { quote "$word"; list="$list $quoted"; }
            word= begun= ;;
        \'|\") open=$char begun=1 ;;
        \'\'|\"\") open= ;;
        \\|\"\\)
            [ "$text" ] || return 1
            char=${text%"${text#?}"}
            text=${text#?} word=$word$char begun=1 ;;
        *) word=$word$char begun=1 ;;
        esac
    done
    [ "$open" ] && return 1
    [ "$begun" ] && { quote "$word"; list="$list $quoted"; }
    return 0
}

# Parse arguments as git does. $1: the short options of the command; the long ones tells git.
# Sets $on, the names that hold; $given, with values; $rest, the other words.
options() {
    shorts=$1 spec= known=' '
    shift
    longs=$(ask $command --git-completion-helper-all)
    case $? in
    0) ;;
    # Not in a repository: git says so itself.
    128) run ;;
    *) refuse "$command" 'this git does not tell its options' 'git 2.30 or newer does' ;;
    esac
    for option in $shorts; do
        name=${option#*,}
        name=${name%[=?]}
        known="$known$name ${name#no-} "
        spec="$spec$option x
"
    done
    for option in $longs; do
        name=${option#--}
        name=${name%=}
        # `--no-x` is understood where `--x` is.
        case $option in --|--no-*) continue ;; esac
        case $known in *" $name "*) continue ;; esac
        case $option in *=) name=$name= ;; *) name=$name\? ;; esac
        spec="$spec$name x
"
    done
    parsed=$("$AGENT_SANDBOX_REAL" rev-parse --parseopt --stuck-long --keep-dashdash $stop -- "$@" \
        2>/dev/null <<EOF
git $command
--
$spec
EOF
    ) || case $parsed in
    # -h was among them.
    cat*) run ;;
    *) refuse "$command" 'nobody can tell what these options mean' "see 'git $command -h'" ;;
    esac
    eval "collect ${parsed#set -- }"
}
collect() {
    on=' ' given='
'
    while [ "$1" != -- ]; do
        case $1 in
        --*) name=${1%%=*} name=${name#--} ;;
        *) name=${1#-} name=${name%"${name#?}"} ;;
        esac
        case $name in no-*) other=${name#no-} ;; *) other=no-$name ;; esac
        case $on in *" $other "*) on="${on%% "$other" *} ${on#* "$other" }" ;; esac
        on="$on$name "
        given="$given${1#--}
"
        shift
    done
    shift
    quote_all "$@"
    rest=$list
}
has() {
    for name do
        case $on in *" $name "*) return 0 ;; esac
    done
    return 1
}

# Settings of the call, not of a file, that switch a safety off.
settings() {
    [ "$configured${GIT_CONFIG_COUNT-}${GIT_CONFIG_PARAMETERS-}" ] || return 0
    found=$(ask config --show-scope --get-regexp '@UNSAFE@')
    while read -r scope name value; do
        case $scope:$name=$value in
        command:help.autocorrect=0) ;;
        command:*) refuse "-c $name=$value" 'it switches a safety off' 'leave it as it is' ;;
        esac
    done <<EOF
$found
EOF
}
"""

LAST = r"""
quote_all "$@"
original=$list globals= configured= depth=0
while :; do
    while :; do
        # Nothing but options: git shows its help.
        [ $# -gt 0 ] || run
        quote "$1"
        case $1 in
        @WITH_VALUE@|@SETTINGS@)
            [ $# -gt 1 ] || run
            case $1 in @SETTINGS@) configured=1 ;; esac
            globals="$globals $quoted"
            quote "$2"
            globals="$globals $quoted"
            shift 2 ;;
        --config-env=*) configured=1 globals="$globals $quoted"; shift ;;
        @ALONE@) globals="$globals $quoted"; shift ;;
        @ANSWERS@) run ;;
        -*) refuse "$1" 'nobody can tell what comes after this option' 'leave it out' ;;
        *) break ;;
        esac
    done
    command=$1
    shift
    [ "${1-}" = --help ] && run
    case $command in @HARMLESS@) run ;; esac
    settings
    judge "$@"
    # None of git's own that can lose something: a program of somebody else, or an alias.
    alias=$(ask config --get "alias.$command") ||
        alias=$(ask config --get "alias.$command.command") || break
    case $alias in
    !*) AGENT_SANDBOX_GIT_INNER=user; run ;;
    esac
    depth=$((depth + 1))
    [ $depth -lt 20 ] && split "$alias" ||
        refuse "$command" 'its alias cannot be followed' 'name the command itself'
    eval "set -- $list \"\$@\""
done
# A name that git would correct is not one that was judged.
eval "exec \"\$AGENT_SANDBOX_REAL\" -c help.autocorrect=0 $original"
"""


def program() -> str:
    """The guard, without its first lines, which name the real git."""
    text = FIRST + TOOLS + gitguard_rules.RULES + LAST
    tables = {
        "WITH_VALUE": WITH_VALUE, "SETTINGS": SETTINGS, "ALONE": ALONE, "ANSWERS": ANSWERS,
        "HARMLESS": HARMLESS,
    }  # fmt: skip
    for name, words in tables.items():
        text = text.replace(f"@{name}@", "|".join(words))
    text = text.replace("@UNSAFE@", gitguard_rules.UNSAFE)
    return text.replace("@README@", README)
