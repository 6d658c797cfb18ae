"""Git configuration as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent_sandbox.policy import gitconfig


def git_list(path: Path) -> dict[str, list[str]]:
    """What real git reads from a file; fails when git calls it malformed."""
    done = subprocess.run(
        ["git", "config", "-f", str(path), "--list", "-z"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for item in done.stdout.split("\0"):
        key, equals, value = item.partition("\n")
        if key:
            found.setdefault(key, []).append(value if equals else "(bare)")
    return found


def shown(text: str) -> str:
    """What the sandbox gets to read."""
    return gitconfig.cleaned(text)


SAMPLE = """\
[user]
    name = Ann
    email = ann@example.org   ; comment
[core]
    editor = "vi -n" # other
    Excludesfile = ~/.ignore
[alias]
    lg = log \\
        --graph
[includeIf "gitdir:~/work/"]
    path = ~/.work
[include]
    path = extra.inc
    path = "/etc/with space"
"""


def test_entries_agree_with_git(tmp_path: Path) -> None:
    """Names and values are what git itself reads."""
    file = tmp_path / "config"
    file.write_text(SAMPLE)
    ours: dict[str, list[str]] = {}
    for e in gitconfig.entries(SAMPLE):
        name = ".".join(p for p in (e.section, e.subsection, e.key) if p)
        ours.setdefault(name, []).append(e.value)
    assert ours == git_list(file)


def test_includes_are_found_in_order() -> None:
    """Conditional ones too: the sandbox may meet the condition."""
    assert gitconfig.includes(gitconfig.entries(SAMPLE)) == [
        "~/.work", "extra.inc", "/etc/with space",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[core]\nhooksPath = .husky\n", ".husky"),
        ("[CORE]\nHOOKSPATH=.husky", ".husky"),
        ("[core] hooksPath = .husky", ".husky"),
        ("[core]\nhooksPath = a\nhooksPath = b\n", "b"),
        ('[core "x"]\nhooksPath = a\n', None),
        ("[other]\nhooksPath = a\n", None),
        ('[core]\nhooksPath = "a b"\n', "a b"),
        ("[core]\n# hooksPath = a\n", None),
    ],
)
def test_value_of_takes_the_last_value_without_subsection(text: str, expected: str | None) -> None:
    """As git does."""
    assert gitconfig.value_of(gitconfig.entries(text), "core", "hookspath") == expected


MEANINGS = {
    "sample": SAMPLE,
    "empty": "",
    "ssh": '[remote "o"]\nurl = ssh://git@host/x\nurl = git@host:x\n',
    "bare-key": "[core]\n\tbare\n\tfileMode = false\n",
    "empty-value": "[core]\n\tpager =\n",
    "quotes": '[a]\n\tb = "x # y" ; z\n\tc = a"b c"d\n\te = "\\"q\\""\n',
    "escapes": "[a]\n\tb = x\\ty\\nz\\\\w\n",
    "spaces": '[a]\n\tb = "  lead and trail  "\n',
    "subsection-escapes": '[a "q\\"u\\\\o]te"]\n\tb = 1\n',
    "subsection-case": '[Remote "UpPer"]\n\tURL = Path\n',
    "dotted-subsection": "[branch.main]\n\tremote = o\n",
    "carriage-returns": "[user]\r\n\tname = Ann\r\n",
    "byte-order-mark": "\ufeff[user]\n\tname = Ann\n",
    "no-final-newline": "[user]\nname = Ann",
    "same-line": "[user] name = Ann\n[core] pager = less\n",
    "repeated": "[a]\nb = 1\nb = 2\n[c]\nd = 1\n[a]\nb = 3\n",
    "unicode": "[user]\n\tname = Zoë \u2028 \f x\n",
    "hash-in-alias": '[alias]\n\tx = "!f() { echo \\"#\\"; }; f"\n',
    "comment-with-backslash": "[a]\n\tb = 1 # x \\\n\tc = 2\n",
    "continued-in-quotes": '[a]\n\tb = "x\\\n  y"\n',
    "insteadof": '[url "git@h:"]\n\tinsteadOf = https://h/\n',
}


@pytest.mark.parametrize("text", MEANINGS.values(), ids=MEANINGS)
def test_what_is_no_credential_keeps_its_meaning(text: str, tmp_path: Path) -> None:
    """Real git reads the same names and values from the copy as from the file."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(text, newline="")
    after.write_text(shown(text), newline="")
    assert git_list(after) == git_list(before)


KEEP = "[user]\n\tname = Ann\n"
# Everything here holds the word S3CRET where a credential would stand.
CREDENTIALS = {
    "extraheader": '[http "https://h/"]\n\textraheader = AUTHORIZATION: basic S3CRET\n',
    "extraheader-case": "[HTTP]\n\tExtraHeader = x S3CRET\n",
    "same-line": "[http] extraheader = S3CRET\n",
    "same-line-bracket": '[http "https://[::1]/"] extraheader = S3CRET\n',
    "old-subsection": "[http.h]\n\textraheader = S3CRET\n",
    "helper": "[credential]\n\thelper = !echo password=S3CRET\n",
    "helper-url": '[credential "https://h"]\n\thelper = store --file S3CRET\n\tusername = me\n',
    "helper-old": "[credential.h]\n\thelper = S3CRET\n",
    "url-value": '[remote "o"]\n\turl = https://me:S3CRET@h/x.git\n',
    "url-token": '[remote "o"]\n\turl = https://S3CRET@h/x.git\n',
    "url-quoted": '[remote "o"]\n\turl = "https://me:S3CRET@h/x.git"\n',
    "url-header": '[url "https://S3CRET@h/"]\n\tinsteadOf = https://h/\n',
    "url-header-pair": '[url "https://me:S3CRET@h/"]\n\tinsteadOf = a:\n\tpushInsteadOf = x:\n',
    "url-header-same-line": '[url "https://S3CRET@h/"] insteadOf = https://h/\n',
    "url-header-empty": '[url "https://S3CRET@h/"]\n',
    "proxy": "[http]\n\tproxy = http://me:S3CRET@proxy:3128\n",
    "proxy-without-scheme": "[http]\n\tproxy = me:S3CRET@proxy:3128\n",
    "second-url": "[alias]\n\tx = !curl https://a/ https://me:S3CRET@b/\n",
    "ssh-password": '[remote "o"]\n\turl = ssh://me:S3CRET@h/x\n',
    "token-key": "[github]\n\ttoken = S3CRET\n",
    "oauth-key": "[github]\n\toauth-token = S3CRET\n",
    "unknown-secret-key": "[tool]\n\tmyApiKey = S3CRET\n",
    "smtp": "[sendemail]\n\tsmtpPass = S3CRET\n",
    "imap": "[imap]\n\tpass = S3CRET\n",
    "cookies": "[http]\n\tcookieFile = S3CRET\n",
    "continued": "[http]\n\textraheader = a \\\n\t\tS3CRET\n",
    "continued-twice": "[http]\n\textraheader = a \\\n\tb \\\n\tS3CRET\n",
    "continued-bracket": "[http]\n\textraheader = a \\\n[S3CRET] x\n",
    "after-comment-with-backslash": "[user]\n\temail = x # note \\\n\tpassword = S3CRET\n",
    "after-escaped-backslash": "[tool]\n\tdir = C:\\\\\n\ttoken = S3CRET\n",
    "byte-order-mark": "\ufeff[http]\n\textraheader = S3CRET\n",
    "form-feed": "[http]\n\textraheader = a\fxS3CRET\n",
    "line-separator": "[http]\n\textraheader = a\u2028xS3CRET\n",
    "carriage-returns": "[http]\r\n\textraheader = S3CRET\r\n",
    "comment": "# was: https://me:S3CRET@h/x\n",
    "trailing-comment": "[user]\n\temail = x ; https://me:S3CRET@h/x\n",
    "no-final-newline": "[github]\n\ttoken = S3CRET",
    "no-spaces": "[github]\ntoken=S3CRET\n",
}


@pytest.mark.parametrize("text", CREDENTIALS.values(), ids=CREDENTIALS)
def test_cannot_read_a_credential_in_any_spelling(text: str, tmp_path: Path) -> None:
    """The copy has no credential, git still reads it, and what surrounds it is untouched."""
    whole = text + ("" if text.endswith("\n") else "\n") + KEEP
    before = tmp_path / "before"
    before.write_text(whole, newline="")
    assert git_list(before)["user.name"] == ["Ann"]  # a control: the spelling is valid for git
    cleaned = shown(whole)
    assert "S3CRET" not in cleaned
    after = tmp_path / "after"
    after.write_text(cleaned, newline="")
    assert git_list(after)["user.name"] == ["Ann"]


@pytest.mark.parametrize("text", CREDENTIALS.values(), ids=CREDENTIALS)
def test_cannot_read_a_credential_at_the_end_of_a_file(text: str) -> None:
    """Position makes no difference."""
    assert "S3CRET" not in shown(KEEP + text.removeprefix("\ufeff"))


@pytest.mark.parametrize(
    "key", ["commit.gpgsign", "tag.gpgsign", "tag.forceSignAnnotated", "push.gpgSign"]
)
def test_signing_is_switched_off_because_its_keys_are_outside(key: str, tmp_path: Path) -> None:
    """With it on, every commit inside would fail."""
    section, name = key.split(".")
    after = tmp_path / "after"
    after.write_text(shown(f"[{section}]\n\t{name} = true\n{KEEP}"))
    assert git_list(after) == {"user.name": ["Ann"]}


def test_what_follows_a_removed_section_stays_in_its_own(tmp_path: Path) -> None:
    """No key moves into another section."""
    after = tmp_path / "after"
    after.write_text(
        shown('[url "https://t@h/"]\n\tinsteadOf = a:\n[core] pager = less\n\teditor = vi\n' + KEEP)
    )
    assert git_list(after) == {
        "core.pager": ["less"], "core.editor": ["vi"], "user.name": ["Ann"],
    }  # fmt: skip


def test_a_key_after_a_cut_header_line_keeps_its_section(tmp_path: Path) -> None:
    """The header stays when its own line held the credential."""
    after = tmp_path / "after"
    after.write_text(shown("[http] extraheader = x\n\tpostBuffer = 9\n"))
    assert git_list(after) == {"http.postbuffer": ["9"]}


@pytest.mark.parametrize("line", ["[broken", '[a "b', "= x", "\\", '"', "[]", '[""]', "k"])
def test_unknown_lines_do_not_stop_the_parser(line: str) -> None:
    """And do not hide a credential after them."""
    assert "S3CRET" not in shown(f"{line}\n[github]\ntoken = S3CRET\n")
