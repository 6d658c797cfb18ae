"""Git's configuration: what git reads in a file, we read too, or it could be hidden from us."""

from __future__ import annotations

import subprocess

from hypothesis import strategies as st

from agent_sandbox.policy import gitconfig

from .bound import fuzz
from .mutation import mutated

Listed = list[tuple[str, str | None]]

DOCUMENTS = (
    '[core]\n\thooksPath = .husky\n\tsshCommand = "ssh -i x"\n[include]\n\tpath = ../shared\n',
    '[includeIf "gitdir:~/work/"] path = ~/.work ; c\n',
    '[alias]\n\tx = !f() { \\\n echo \\"#\\"; }; f\n[http "https://h/"] a=b # c\n',
    '[filter "l\\"f\\\\s"]\r\n\tclean = git-lfs clean -- %f\r\n\trequired\r\n',
    '\ufeff[user]\nname = Ann\n[url "https://me:t@h/"]\n\tinsteadOf = https://h/\n',
    '[a.b.C]d = "x\\ty\\n"\n',
    "[core]\nfsmonitor = x\n[credential]\nhelper = store\n[tag]\ngpgsign\n[gpg]\nprogram = a b  \n",
)
PIECES = (
    "\0", "\r", "\r\n", "\t", " ", "\\\n", "\\\r\n", "\\", '"', '""', "#", ";", "=", "[", "]", ".",
    "[core]", '[core "', "[core.", "[]", '[""]', '[core ""]', "[core.]", "hooksPath", "path = x",
    "hookspath\0", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\ufeff", "é", "\n", "\n\n", "a-b=1",
    '[include\r"x"]', "\\n", "\\b", "\\x",
)  # fmt: skip

NAMES = st.sampled_from(("core", "CORE", "include", "includeIf", "alias", "a.b", "a.", "", "x-1"))
INNER = st.sampled_from(('"x"', '""', '"a.B"', '"q\\"\\\\"', '"hooksPath\0"', '"é\r"', '"#;]"'))
HEADERS = st.one_of(
    st.builds("[{}]".format, NAMES),
    st.builds(
        "[{}{}{}]".format, NAMES, st.sampled_from((" ", "\t", "\r", " \t\r ")), INNER
    ),
)  # fmt: skip
VALUES = st.lists(
    st.sampled_from(
        ("a", "b c", " ", "\t", "\r", '"', '""', '" "', "\\\n", "\\\r\n", "\\n", "\\t", '\\"',
         "\\\\", "#", ";", "!x", "/p", "~", "\0", "é", "\x0b", "\u2028", "=", "[", "]")
    ),
    max_size=6,
).map("".join)  # fmt: skip
KEYS = st.sampled_from(("hooksPath", "path", "p-1", "B", "hooksPath ", "path\t", "x\r"))
LINES = st.one_of(
    HEADERS,
    st.builds("{}={}".format, KEYS, VALUES),
    st.builds("{}= {}".format, KEYS, VALUES),
    KEYS,
    st.sampled_from(("", "# c \\", "; c", " ", "\r", "\t")),
)
ENDS = st.sampled_from(("\n", "\r\n", "\n\n", "\r", " ", ""))
FILES = st.lists(st.tuples(LINES, ENDS), max_size=8).map(
    lambda parts: "".join(line + end for line, end in parts)
)


def by_git(text: str) -> Listed | None:
    """What git reads, or None when it refuses the file."""
    done = subprocess.run(
        ["git", "config", "--no-includes", "--list", "-z", "-f", "-"],
        input=text.encode("utf-8", "surrogateescape"), capture_output=True, check=False,
        env={"PATH": "/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent"},
    )  # fmt: skip
    if done.returncode:
        return None
    items = done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    pairs = (item.partition("\n") for item in items)
    # `[] a` is `.a` to git, and `a` in no section is `a`: neither is anything that git knows.
    return [(name.removeprefix("."), plain(v) if newline else None) for name, newline, v in pairs]


def by_us(parsed: list[gitconfig.Entry]) -> Listed:
    """The same from our own reading."""
    found: Listed = []
    for entry in parsed:
        inner = "" if entry.subsection is None else f"{entry.subsection}."
        section = f"{entry.section}." if entry.section else ""
        found.append((f"{section}{inner}{entry.key}", None if entry.bare else plain(entry.value)))
    return found


def plain(value: str) -> str:
    """Git before 2.45 makes a space of every blank between words."""
    return value.replace("\t", " ").replace("\r", " ")


def agree(text: str) -> None:
    """Git and we read the same, and git reads in the cleaned copy all but the secrets."""
    listed = by_git(text)
    parsed = gitconfig.entries(text)
    copy = gitconfig.cleaned(text)
    if listed is None:
        return
    assert by_us(parsed) == listed
    shown = [
        entry for entry in parsed
        if entry.section and not gitconfig._is_secret(entry, signing=False)
        and gitconfig._is_key(entry.key)
    ]  # fmt: skip
    assert by_git(copy) == by_us(shown)


@fuzz(250, text=FILES)
def test_git_and_we_read_the_same_files(text: str) -> None:
    agree(text)


@fuzz(250, text=mutated(DOCUMENTS, PIECES))
def test_git_and_we_read_changed_files_alike(text: str) -> None:
    agree(text)


@fuzz(300, text=st.text(max_size=40))
def test_any_text_is_read_without_an_error(text: str) -> None:
    gitconfig.includes(gitconfig.entries(text))
    gitconfig.cleaned(text)
