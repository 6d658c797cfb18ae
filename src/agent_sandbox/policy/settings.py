"""The settings table: one row per key, the single source for decoding, flags, help and docs.

A row says what a value may be, how layers combine, and what a project's own file may do with it.
"""

from __future__ import annotations

from ..record import Record

# Kinds of values.
CHOICE = "choice"
NAME = "name"
PATHS = "paths"
PRESETS = "presets"
NAMES = "names"
TABLE = "table"
SIZE = "size"
COUNT = "count"
DURATION = "duration"

BOOLEAN_WORDS = {
    "1": "on", "true": "on", "yes": "on", "on": "on",
    "0": "off", "false": "off", "no": "off", "off": "off",
}  # fmt: skip


class Row(Record):
    """One setting."""

    key: str
    kind: str
    help: str
    flag: str = ""
    default: object = None
    # For CHOICE: from the tightest to the widest, so that "may only tighten" is a comparison.
    choices: tuple[str, ...] = ()
    # CHOICE rows where true/false and a bare flag mean on/off.
    boolean: bool = False
    metavar: str = ""


ROWS: tuple[Row, ...] = (
    Row(
        key="profile", kind=NAME, flag="--profile", metavar="NAME",
        help="agent profile; default: by the command's name, 'none' for none",
    ),
    Row(
        key="network", kind=CHOICE, flag="--network", default="on", choices=("off", "on"),
        boolean=True, help="share the host's network, or have none",
    ),
    Row(
        key="docker", kind=CHOICE, flag="--docker", default="off", choices=("off", "on"),
        boolean=True, help="the container engine's socket (on equals root on the host)",
    ),
    Row(
        key="home", kind=CHOICE, flag="--home", default="private",
        choices=("ephemeral", "private", "host"), help="what $HOME is inside",
    ),
    Row(
        key="seccomp", kind=CHOICE, flag="--seccomp", default="default",
        choices=("strict", "default", "off"), help="which system calls the command may make",
    ),
    Row(
        key="filesystem.presets", kind=PRESETS, default=("@all",),
        help="rule sets to add (@name) or remove (!@name)",
    ),
    Row(
        key="filesystem.ro", kind=PATHS, flag="--ro", metavar="PATH",
        help="show PATH read-only",
    ),
    Row(
        key="filesystem.rw", kind=PATHS, flag="--rw", metavar="PATH",
        help="make PATH writable",
    ),
    Row(
        key="filesystem.exclude", kind=PATHS, flag="--exclude", metavar="PATH",
        help="hide PATH",
    ),
    Row(key="env.keep", kind=NAMES, help="variables of the caller to pass"),
    Row(key="env.set", kind=TABLE, help="variables to set"),
    Row(
        key="limits.timeout", kind=DURATION, flag="--timeout", metavar="TIME",
        help="end the command after TIME (90, 10m, 2h)",
    ),
    Row(
        key="limits.memory", kind=SIZE, flag="--memory", metavar="SIZE",
        help="memory for all processes together (512M, 4G)",
    ),
    Row(
        key="limits.pids", kind=COUNT, flag="--pids", metavar="N", default=4096,
        help="processes and threads at a time, or 'none'",
    ),
    Row(
        key="limits.tmp-size", kind=SIZE, flag="--tmp-size", metavar="SIZE", default=8 << 30,
        help="what the private /tmp may hold (512M, 20G), or 'none'",
    ),
    Row(
        key="limits.cpu-time", kind=DURATION, flag="--cpu-time", metavar="TIME",
        help="processor time for all processes together",
    ),
)  # fmt: skip

# The value of a limit that is lifted: larger than any other.
NO_LIMIT = 1 << 62

BY_KEY: dict[str, Row] = {row.key: row for row in ROWS}
SECTIONS: tuple[str, ...] = ("filesystem", "env", "limits")
