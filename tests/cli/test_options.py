"""The command line of agent-sandbox."""

from __future__ import annotations

import pytest

from agent_sandbox.cli import options
from agent_sandbox.errors import SandboxError, UsageError
from agent_sandbox.policy import settings
from agent_sandbox.policy.model import FLAGS


def values(*arguments: str) -> dict[str, object]:
    """The settings that some flags make."""
    return {k: s.value for k, s in options.parse([*arguments, "cmd"]).values.items()}


FLAG_VALUES: list[tuple[list[str], dict[str, object]]] = [
    (["--network"], {"network": "on"}),
    (["--network=on"], {"network": "on"}),
    (["--network=off"], {"network": "off"}),
    (["--network=true"], {"network": "on"}),
    (["--network=false"], {"network": "off"}),
    (["--network=1"], {"network": "on"}),
    (["--network=0"], {"network": "off"}),
    (["--network=off", "--network"], {"network": "on"}),
    (["--network=allow"], {"network": "allow"}),
    (["--network=public"], {"network": "public"}),
    (["--network=learn"], {"network": "learn"}),
    (["--allow", "a.example"], {"allow": ("a.example",)}),
    (["--allow", "a.example", "--allow=*.b:81"], {"allow": ("a.example", "*.b:81")}),
    (["--deny=localhost", "--deny", "*:25"], {"deny": ("localhost", "*:25")}),
    (["--publish", "8080", "--publish=[::1]:1:2"], {"publish": ("8080", "[::1]:1:2")}),
    (["--docker"], {"docker": "on"}),
    (["--docker=off"], {"docker": "off"}),
    (["--docker=no"], {"docker": "off"}),
    (["--home=host"], {"home": "host"}),
    (["--home", "ephemeral"], {"home": "ephemeral"}),
    (["--profile", "claude"], {"profile": "claude"}),
    (["--ro", "a"], {"filesystem.ro": ("a",)}),
    (["--ro", "a", "--ro=b"], {"filesystem.ro": ("a", "b")}),
    (["--rw=a,b"], {"filesystem.rw": ("a,b",)}),
    (["--exclude=.e*", "--ro", "x"], {"filesystem.exclude": (".e*",), "filesystem.ro": ("x",)}),
    (["--exclude=a=b"], {"filesystem.exclude": ("a=b",)}),
    (["--ro", "-x"], {"filesystem.ro": ("-x",)}),
    (["--env", "A"], {"env.keep": ("A",)}),
    (["--env", "A=1"], {"env.set": {"A": "1"}}),
    (["--env=A=b=c"], {"env.set": {"A": "b=c"}}),
    (["--env", "A="], {"env.set": {"A": ""}}),
    (["--env", "A", "--env", "B", "--env", "C=1"], {"env.keep": ("A", "B"), "env.set": {"C": "1"}}),
    (["--env", "A=1", "--env", "A=2"], {"env.set": {"A": "2"}}),
    (["--timeout", "10m"], {"limits.timeout": 600.0}),
    (["--timeout=90"], {"limits.timeout": 90.0}),
    (["--memory=4G"], {"limits.memory": 4 << 30}),
    (["--pids", "64"], {"limits.pids": 64}),
    (["--cpu-time", "1h"], {"limits.cpu-time": 3600.0}),
    (["--network=off", "--docker=off", "-C", "d"], {"network": "off", "docker": "off"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "expected"), FLAG_VALUES, ids=[" ".join(f[0]) for f in FLAG_VALUES]
)
def test_flags_become_settings(arguments: list[str], expected: dict[str, object]) -> None:
    """Repeatable flags collect, others keep the last; values are those of the settings table."""
    assert values(*arguments) == expected


def test_settings_know_their_flag() -> None:
    """For --debug and errors."""
    parsed = options.parse(["--network=off", "--ro", "x", "--env", "A", "c"])
    assert {k: str(s.source) for k, s in parsed.values.items()} == {
        "network": "flag --network", "filesystem.ro": "flag --ro", "env.keep": "flag --env",
    }  # fmt: skip
    assert {s.source.layer for s in parsed.values.values()} == {FLAGS}


COMMANDS: list[tuple[list[str], tuple[str, ...]]] = [
    ([], ()),
    (["ls"], ("ls",)),
    (["ls", "-h", "--version"], ("ls", "-h", "--version")),
    (["--network=off", "ls", "--network=on"], ("ls", "--network=on")),
    (["--network", "false"], ("false",)),
    (["--docker", "true", "x"], ("true", "x")),
    (["--", "--help"], ("--help",)),
    (["--debug", "--", "-x", "--", "y"], ("-x", "--", "y")),
    (["echo", "a b", "$VAR", "$(x)", "`y`", ""], ("echo", "a b", "$VAR", "$(x)", "`y`", "")),
    (["-"], ("-",)),
    (["--"], ()),
    ([""], ("",)),
    (["--ro", "x", "cat"], ("cat",)),
    (["-C", "d", "pwd"], ("pwd",)),
]


@pytest.mark.parametrize(("arguments", "command"), COMMANDS, ids=[" ".join(c[0]) for c in COMMANDS])
def test_flags_end_at_the_first_word_that_is_none(
    arguments: list[str], command: tuple[str, ...]
) -> None:
    """Everything after goes to the command untouched; booleans take only `=`."""
    assert options.parse(arguments).command == command


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (["-C", "d"], "cwd", "d"),
        (["-Cd"], "cwd", "d"),
        (["--cwd=d"], "cwd", "d"),
        (["--cwd", "d"], "cwd", "d"),
        (["-c", "f"], "config", "f"),
        (["-c=f"], "config", "f"),
        (["--config", "f"], "config", "f"),
        (["--report", "r.json"], "report", "r.json"),
        ([], "cwd", None),
        ([], "config", None),
    ],
)
def test_flags_that_steer_the_command_itself(
    arguments: list[str], field: str, expected: str | None
) -> None:
    """Long, short and attached forms."""
    assert getattr(options.parse([*arguments, "cmd"]), field) == expected


@pytest.mark.parametrize(
    ("word", "switch"),
    [
        ("--dry-run", "--dry-run"), ("--debug", "--debug"), ("--check", "--check"),
        ("--help", "--help"), ("-h", "--help"), ("--version", "--version"), ("-v", "--version"),
        ("--keep-workspace", "--keep-workspace"),
    ],
)  # fmt: skip
def test_switches_have_one_name(word: str, switch: str) -> None:
    """Short forms are the same switch."""
    assert options.parse([word]).switches == {switch}


@pytest.mark.parametrize(
    "word",
    ["--unknown", "--allows", "--denied=x", "--review", "--cmds", "--command=x", "-x", "-hv",
     "--netwrok=off", "--Network", "---", "-1", "--no-network"],
)  # fmt: skip
def test_unknown_flags_are_errors_that_name_them(word: str) -> None:
    """No flag parses and does nothing."""
    with pytest.raises(UsageError) as caught:
        options.parse([word, "cmd"])
    assert f"unknown flag: {word.partition('=')[0]}" in caught.value.message
    assert "--help" in caught.value.hint
    assert caught.value.exit_code == 125


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("--network=filtered", "filtered"), ("--network=maybe", "maybe"),
        ("--allow=https://x", "https://x"), ("--deny=a:0", "a:0"), ("--publish=a", "a"),
        ("--docker=filter", "filter"), ("--docker=2", "2"), ("--home=tmp", "tmp"),
        ("--home=true", "true"), ("--timeout=soon", "soon"), ("--timeout=-1", "-1"),
        ("--memory=lots", "lots"), ("--pids=0", "0"), ("--pids=1.5", "1.5"),
        ("--cpu-time=0", "0"), ("--profile=a/b", "a/b"), ("--env==x", ""),
    ],
)  # fmt: skip
def test_unknown_values_are_errors_that_name_flag_and_value(word: str, value: str) -> None:
    """Values of later capabilities included."""
    with pytest.raises(SandboxError) as caught:
        options.parse([word, "cmd"])
    assert word.partition("=")[0] in caught.value.message
    assert value in caught.value.message
    assert caught.value.exit_code == 125


VALUED = [f for f in options.TABLE if f.takes in (options.VALUE, options.REPEAT)]


@pytest.mark.parametrize("flag", VALUED, ids=lambda f: f.name)
def test_a_missing_value_is_an_error_that_names_the_flag(flag: options.Flag) -> None:
    """At the end of the line, and after `=`."""
    for arguments in ([flag.name], [f"{flag.name}=", "cmd"]):
        with pytest.raises(UsageError) as caught:
            options.parse(arguments)
        assert flag.name in caught.value.message


@pytest.mark.parametrize("word", ["--dry-run=1", "--help=x", "--debug="])
def test_a_switch_takes_no_value(word: str) -> None:
    """`--dry-run=false` must not be taken for a dry run."""
    with pytest.raises(UsageError):
        options.parse([word])


@pytest.mark.parametrize("level", ["--ro", "--rw", "--exclude"])
def test_an_empty_path_is_an_error(level: str) -> None:
    """It would mean the project."""
    with pytest.raises(SandboxError):
        options.parse([level, "", "cmd"])


def test_help_fits_a_screen() -> None:
    """24 to 50 lines of at most 100 columns."""
    lines = options.help_text().splitlines()
    assert 24 <= len(lines) <= 50
    assert max(len(line) for line in lines) <= 100


@pytest.mark.parametrize("flag", options.TABLE, ids=lambda f: f.name)
def test_help_lists_every_flag_with_its_help(flag: options.Flag) -> None:
    """From the same table as the parser."""
    named = [x.replace(",", " ").replace("[", " ") for x in options.help_text().splitlines()]
    said = flag.help.replace(",", " ")
    (line,) = [x for x in named if flag.name in x.split() and x.endswith(said)]
    assert flag.short in line
    assert flag.metavar.replace("[", " ") in line


def test_help_names_what_a_newcomer_needs() -> None:
    """Usage, examples, the escape hatch; no flag of a later capability."""
    text = options.help_text()
    for word in (
        "Usage: agent-sandbox",
        "filesystem sandbox",
        "Flags:",
        "Examples:",
        "AGENT_SANDBOX=false",
        "-c, --config",
    ):
        assert word in text
    for word in ("--review",):
        assert word not in text


def test_every_setting_with_a_flag_is_on_the_command_line() -> None:
    """One table."""
    assert {r.flag for r in settings.ROWS if r.flag} <= set(options.BY_NAME)


def test_names_are_unique() -> None:
    """Long and short."""
    names = [f.name for f in options.TABLE] + [f.short for f in options.TABLE if f.short]
    assert len(names) == len(set(names))
