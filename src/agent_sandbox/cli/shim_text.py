"""What a shim says, and the lines that put the shims first on PATH. Pure.

A shim looks for the program at each call, so an upgrade, a new version manager or a removed program
needs nothing from us. It is a script without forks: it costs a millisecond.
"""

from __future__ import annotations

from ..policy.model import MARKER

# Marks a directory of shims: whoever looks for the real program passes it by, also through a link.
SIGN = ".agent-sandbox-shims"
# The second line of a shim.
TITLE = "# agent-sandbox shim: "
# How often a shim may lead to a shim. Agents that start agents nest; a wrapper that calls itself
# by name does not end.
MOST_DEPTH = 16
BEGIN, END = "# >>> agent-sandbox shims >>>", "# <<< agent-sandbox shims <<<"

LAUNCHER = """\
#!/bin/sh
{title}{name}
# Made by 'sandboxctl shim install'. Runs the next {name} on PATH in a sandbox;
# AGENT_SANDBOX=false {name} runs it without one.
name={name}
sandbox={sandbox}

fail() {{
    printf '%s\\n' "agent-sandbox: error: $1" "hint: $2" >&2
    exit "$3"
}}

depth=${{AGENT_SANDBOX_SHIM:-0}}
case $depth in *[!0-9]* | ????*) depth=0 ;; esac
[ "$depth" -lt {most} ] ||
    fail "the shim of $name leads to itself" "see 'sandboxctl shim status'" 125
AGENT_SANDBOX_SHIM=$((depth + 1))
export AGENT_SANDBOX_SHIM

# Only absolute directories: what '.' holds belongs to the project.
real=
IFS=:
set -f
for dir in $PATH; do
    case $dir in /*) ;; *) continue ;; esac
    [ -f "$dir/$name" ] && [ -x "$dir/$name" ] || continue
    [ -e "$dir/{sign}" ] || [ "$dir/$name" -ef "$0" ] || {{ real=$dir/$name && break; }}
done
unset IFS
set +f
[ -n "$real" ] ||
    fail "cannot find a $name on PATH besides its shim" \\
        "install it, or: sandboxctl shim remove $name" 127

[ -e {marker} ] && exec "$real" "$@"
case ${{AGENT_SANDBOX-}} in
[Ff][Aa][Ll][Ss][Ee] | 0 | [Oo][Ff][Ff] | [Nn][Oo])
    echo 'agent-sandbox: notice: AGENT_SANDBOX is off: running without a sandbox' >&2
    exec "$real" "$@"
    ;;
esac
[ -x "$sandbox" ] || sandbox=$(command -v agent-sandbox)
case $sandbox in
/*) exec "$sandbox" -- "$real" "$@" ;;
esac
fail 'cannot find agent-sandbox, and nothing runs without it' \\
    "install it and run: sandboxctl shim install $name; or AGENT_SANDBOX=false $name" 125
"""

# Each moves the directory to the front, whatever the lines before it did.
LINES = {
    "bash": 'PATH=":$PATH:"; PATH={dir}"${{PATH//:{dir}:/:}}"; export PATH="${{PATH%:}}"',
    "zsh": "path=({dir} ${{path:#{dir}}}); export PATH",
    "fish": "fish_add_path --global --move --path {dir}",
}  # fmt: skip


def quoted(text: str) -> str:
    """One word for a POSIX shell; fish reads it the same, unless it ends with a backslash."""
    return "'" + text.replace("'", "'\\''") + "'"


def launcher(name: str, sandbox: str) -> str:
    """The script."""
    return LAUNCHER.format(
        title=TITLE, name=name, sandbox=quoted(sandbox), most=MOST_DEPTH, sign=SIGN, marker=MARKER
    )


def is_name(text: str) -> bool:
    """Whether a command of that name can have a shim: it stands unquoted in a script."""
    plain = text.isascii() and all(c.isalnum() or c in "._+-" for c in text)
    return plain and text[:1] not in ("", ".", "-") and text not in OURS


# Their shims would lead to themselves.
OURS = ("agent-sandbox", "sandboxctl", "bwrap", "sh", "env")


def is_shim(data: bytes) -> bool:
    """Whether a file's beginning is that of a shim."""
    return data.startswith(b"#!/bin/sh\n" + TITLE.encode())


def line(shell: str, directory: str) -> str:
    """The line for a shell's start-up file."""
    return LINES[shell].format(dir=quoted(directory))


def block(shell: str, directory: str) -> str:
    """The line between marks, by which it is found again."""
    return f"{BEGIN}\n{line(shell, directory)}\n{END}\n"


def without_block(text: str) -> str:
    """A start-up file as it was before; unchanged where an end is missing."""
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    return before + after if begin and end else text


def with_block(text: str, block: str) -> str:
    """A start-up file with the lines at its end: what comes last decides."""
    bare = without_block(text)
    return f"{bare}{'' if not bare or bare.endswith(chr(10)) else chr(10)}{block}"
