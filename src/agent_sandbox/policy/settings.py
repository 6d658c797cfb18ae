"""The settings table: one row per key, the single source for decoding, flags, help and docs.

A row says what a value may be, how layers combine, and what a project's own file may do with it.
"""

from __future__ import annotations

from ..record import Record

# Kinds of values.
CHOICE = "choice"
NAME = "name"
PATHS = "paths"
HOSTS = "hosts"
PORTS = "ports"
IMAGES = "images"
PRESETS = "presets"
NAMES = "names"
TABLE = "table"
SIZE = "size"
COUNT = "count"
DURATION = "duration"
FILE = "file"
SECRETS = "secrets"
BUDGETS = "budgets"
COMMANDS = "commands"
GIT_KEYS = "git-keys"
GIT_HOSTS = "git-hosts"
PROFILES = "profiles"

# What a repeatable flag collects.
LISTS = (PATHS, HOSTS, PORTS, IMAGES, COMMANDS, GIT_KEYS, GIT_HOSTS)

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
        key="profiles", kind=PROFILES,
        help="agent profiles of your own, or more for ours; in your own file only",
    ),
    Row(
        key="network", kind=CHOICE, flag="--network", default="on",
        choices=("off", "allow", "public", "learn", "on"), metavar="on|off|allow|public|learn",
        boolean=True, help="the host's network, none, or what a proxy lets through",
    ),
    Row(
        key="allow", kind=HOSTS, flag="--allow", metavar="HOST[:PORT]",
        help="a host to let through; implies --network=allow",
    ),
    Row(
        key="deny", kind=HOSTS, flag="--deny", metavar="HOST[:PORT]",
        help="a host to refuse, whatever allows it",
    ),
    Row(
        key="publish", kind=PORTS, flag="--publish", metavar="[ADDR:]PORT[:PORT]",
        help="lead a port of this machine to a server inside",
    ),
    Row(
        key="network.ca", kind=FILE,
        help="more certificates that hosts may be signed by; in your own file only",
    ),
    Row(
        key="secret", kind=SECRETS,
        help="values that stay outside, put into a header by the proxy; in your own file only",
    ),
    Row(key="budget", kind=BUDGETS, help="how much may go to a host in one run"),
    Row(
        key="docker", kind=CHOICE, flag="--docker", default="off",
        choices=("off", "filtered", "on"), metavar="on|off|filtered", boolean=True,
        help="the container engine's socket (on equals root on the host)",
    ),
    Row(
        key="docker.images", kind=IMAGES, flag="--docker-image", metavar="GLOB",
        help="an image that containers may be made of, with --docker=filtered",
    ),
    Row(
        key="docker.registries", kind=IMAGES,
        help="registries, or parts of them, from which such images may be pulled",
    ),
    Row(
        key="docker.keep", kind=CHOICE, flag="--docker-keep", default="off",
        choices=("off", "on"), boolean=True,
        help="do not remove what the run has made in the engine",
    ),
    Row(
        key="docker.mode", kind=CHOICE, default="enforce", choices=("enforce", "warn"),
        help="'warn' logs what would be refused and lets it through: unsafe",
    ),
    Row(
        key="docker.read-only", kind=CHOICE, default="off", choices=("on", "off"), boolean=True,
        help="only look at what the run has in the engine",
    ),
    Row(key="docker.containers", kind=COUNT, default=16, help="containers at a time"),
    Row(key="docker.memory", kind=SIZE, default=2 << 30, help="memory of each container"),
    Row(key="docker.cpus", kind=COUNT, default=2, help="processors of each container"),
    Row(key="docker.pids", kind=COUNT, default=512, help="processes in each container"),
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
    Row(
        key="commands", kind=COMMANDS, flag="--cmd", metavar="NAME=RULE",
        help="block a command (false), run a script in its place, or '@git'",
    ),
    Row(
        key="git.auth", kind=CHOICE, flag="--git-auth", default="none",
        choices=("none", "ssh-agent", "helper", "both"),
        metavar="none|ssh-agent|helper|both",
        help="how git logs in; no private key gets inside",
    ),
    Row(
        key="git.keys", kind=GIT_KEYS, flag="--git-key", metavar="KEY",
        help="a key it may use: fingerprint, comment or ~/.ssh/NAME.pub",
    ),
    Row(
        key="git.hosts", kind=GIT_HOSTS, flag="--git-host", metavar="HOST[:PORT]",
        help="a host that git may log in to",
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
SECTIONS: tuple[str, ...] = ("filesystem", "git", "env", "limits")
# Keys that are a word, or a table in which that word has this name.
WORD_OR_TABLE = {"docker": "access", "network": "mode"}
# Only in the user's own file: they make us read files and run programs outside.
USER_ONLY = frozenset(("network.ca", "secret", "profiles", "git.keys", "git.hosts"))
