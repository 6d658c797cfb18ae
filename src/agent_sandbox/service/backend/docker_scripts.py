"""What runs inside a container besides the command: shell scripts, for any POSIX `/bin/sh`. Pure.

An image without `/bin/sh` cannot be a sandbox. The engine can start a process in a container, but
not end one, so a command runs below two processes of ours:

    sh WRAPPER          the engine's child: its parent is outside, so the kernel says PPid 0
    └ docker-init -s    a subreaper: whatever the command leaves behind becomes its child
      └ COMMAND

From inside, every process thus hangs below a process with PPid 0 (a live execution) or below
process 1 (left over from one that has ended). No process can choose its parent, so this tells
executions apart without trusting anything that the command says or clears.

Builtins only, but for the scripts of files: PATH belongs to the agent. What a command with the
same user can do to its own wrapper (kill it, trace it) buys it nothing but disorder in its own
sandbox: what is left is killed after the next execution, and with the sandbox.
"""

from __future__ import annotations

INIT = "/sbin/docker-init"
SHELL = "/bin/sh"
READY = "ready"

# The container's own process. The service holds its input: when the service dies, however it dies,
# the input ends, this ends, and the kernel ends all that runs in the container.
KEEP = f"echo {READY}; read -r _"

# $o: how often the kernel has killed for memory (cgroup v2, then v1).
_OOM = """oom() { o=0
for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
[ -r $f ] && while read -r k v; do [ "$k" = oom_kill ] && o=$v; done <$f; done; }
"""

# top PID: $t is the process with PPid 0 that it hangs below, or 1, or nothing if it is gone.
# The file `status` and not `stat`: only there a newline in a process's name is written as \n.
_TOP = """top() { t=$1
while :; do p=
{ while read -r k v; do [ "$k" = PPid: ] && { p=$v; break; }; done; } 2>/dev/null </proc/$t/status
case $p in '') t=; return;; 0) return;; 1) t=1; return;; esac
t=$p; done; }
"""

# sweep TOP: kill what hangs below TOP or below 1, until nothing is left. The process that keeps
# the container has another user, and cannot be killed from here.
_SWEEP = """sweep() { n=0
while [ $n -lt 64 ]; do n=$((n+1)); hit=
for d in /proc/[0-9]*; do q=${d##*/}
[ $q = 1 ] || [ $q = $$ ] && continue
top $q
case $t in 1|$1) kill -9 $q 2>/dev/null && hit=1;; esac; done
[ "$hit" ] || return 0; done; return 1; }
"""

# $1 a token that nobody can guess, $2 the directory, then the command. It says "TOKEN PID OOMS"
# when it becomes the command, or "TOKEN !WHY" when it cannot.
_INNER = (
    _OOM
    + """m=$1
cd -- "$2" 2>/dev/null || { echo "$m !cwd" >&2; exit 126; }
shift 2
e=
case $1 in
*/*) [ -f "$1" ] && [ -x "$1" ] || { [ -e "$1" ] && e=126 || e=127; };;
*) command -v -- "$1" >/dev/null 2>&1 || e=127;;
esac
[ "$e" ] && { echo "$m !$e" >&2; exit $e; }
oom
echo "$m $$ $o" >&2
exec "$@"
"""
)

# At the end it says "TOKEN CODE OOMS" and the times of its children; but nothing if what the
# command has left resists. When only process 1, the one that keeps the container and this are left,
# there is nothing to sweep.
WRAPPER = (
    _OOM
    + _TOP
    + _SWEEP
    + f"""i=$1; m=$2; shift
{INIT} -s -- {SHELL} -c "$i" sh "$@"
c=$?
set -- /proc/[0-9]*
[ $# -le 3 ] || sweep 1 || exit $c
oom
echo "$m $c $o" >&2
times >&2
exit $c
"""
)

# kill(-1) reaches all processes of this user at one instant: no fork escapes it. Only a process
# that kills this one first does; so each of these two ends with 0 only if it has come to its end.
KILL_ALL = "kill -9 -1 2>/dev/null; exit 0"
# $1: a process of the execution that has to end.
KILL_ONE = _TOP + _SWEEP + 'top "$1"; sweep "${t:-1}"\n'
# $1 a number, $2 a process.
SIGNAL = 'kill -"$1" "$2"'


def wrapped(token: str, cwd: str, argv: tuple[str, ...]) -> list[str]:
    """The command of an execution."""
    return [SHELL, "-c", WRAPPER, "sh", _INNER, token, cwd, *argv]


def script(text: str, *words: str) -> list[str]:
    """One of the others."""
    return [SHELL, "-c", text, "sh", *words]


# --- files, as the sandbox's own user: the kernel decides what it may. `stat -c` is GNU's and
# busybox's.

_STAT = "stat -c '%f %s %Y %n' -- "
ENTRY = f'{_STAT}"$1" && {{ [ ! -h "$1" ] || readlink -n -- "$1"; }}'
# $1 the directory, $2 the name in it for the time being, $3 the name, $4 the mode. The name is
# given to a complete file, or not at all. $5 the size in bytes: input that broke off is no file.
WRITE = f"""mkdir -p -- "$1" && cd -- "$1" || exit 3
[ -d "$3" ] && [ ! -h "$3" ] && exit 4
umask 077
cat >"./$2" && [ "$(wc -c <"./$2")" -eq "$5" ] && chmod "$4" "./$2" &&
mv -f -- "./$2" "./$3" && {_STAT}"$1/$3" && exit 0
rm -f -- "./$2"; exit 5
"""
MAKE = f'mkdir -p -- "$1" && {_STAT}"$1"'
# $2: "all" for a full directory.
DELETE = """[ -e "$1" ] || [ -h "$1" ] || exit 3
[ -d "$1" ] && [ ! -h "$1" ] && {
[ "$2" = all ] && exec rm -rf -- "$1"
rmdir -- "$1" && exit 0; exit 4; }
exec rm -f -- "$1"
"""
# $1 the directory, $2 the depth, $3 the most. Links follow behind an empty line: name, then target.
LIST = f"""[ -d "$1" ] || exit 3
find "$1" -mindepth 1 -maxdepth "$2" -exec {_STAT}{{}} + | head -n "$3" || exit 5
echo
find "$1" -mindepth 1 -maxdepth "$2" -type l | head -n "$3" | while read -r l; do
echo "$l"; readlink -- "$l" || echo; done
"""
