"""What `git.auth` makes of a policy: keys, hosts, known hosts, variables. Tables of values."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.host.gitauth import _read_by_git, _variables
from agent_sandbox.host.trails import follow, search_path
from agent_sandbox.policy import gitauth, gitconfig, knownhosts, merge, publickeys
from agent_sandbox.policy.decode import decode
from agent_sandbox.policy.gitauth import GitAuth, Outside, split_host
from agent_sandbox.policy.model import FLAGS, GLOBAL, PROJECT, HostFacts, Layer, Match, Policy
from agent_sandbox.policy.network import Egress, parse
from agent_sandbox.policy.publickeys import PublicKey, key_name
from agent_sandbox.policy.trails import Way, mentioned, sound
from agent_sandbox.sandbox import gitlog

if TYPE_CHECKING:
    from pathlib import Path

LINE = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== me@home"


def layer(rank: int = GLOBAL, **git: Any) -> Layer:
    return decode({"git": git}, rank=rank, file="config.toml")


def policy(**git: Any) -> Policy:
    return merge.merge([layer(**git)], project="/p", home="/h", command="x", env={})


def facts(outside: Outside | None, env: dict[str, str] | None = None) -> HostFacts:
    here = Match(path="/p", real="/p", kind="dir")
    return HostFacts(
        uid=1, gid=1, user="me", home=Match(path="/h", real="/h", kind="dir"), cwd=here,
        env=env or {}, state_dir="/s", system=(), path_dirs=(), matches={}, resolver=None,
        engine_sockets=(), docker_socket=None, docker_wanted="", git=None, git_config=(),
        root_secrets=(), git_auth=outside,
    )  # fmt: skip


def build(
    outside: Outside, egress: Egress | None = None, env: dict[str, str] | None = None, **git: Any
) -> tuple[GitAuth | None, list[str]]:
    notices: list[str] = []
    found = gitauth.build(policy(**git), facts(outside, env), ["/p"], egress, notices)
    return found, notices


READY = Outside(agent="/agent", names=(("comment", "me"),), known_hosts=("/h/.ssh/known_hosts",))


# --- what people write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("github.com", ("github.com", 0)),
        ("GitHub.com.", ("github.com", 0)),
        ("git.example.com:2222", ("git.example.com", 2222)),
        ("127.0.0.1:22", ("127.0.0.1", 22)),
        ("[::1]:22", ("::1", 22)),
        ("[::1]", ("::1", 0)),
    ],
)
def test_a_host_has_one_spelling(text: str, expected: tuple[str, int]) -> None:
    assert split_host(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "https://github.com", "git@github.com", "github.com/me", "*.github.com", "a b", "a\nb",
        "github.com:", "github.com:0", "github.com:65536", "github.com:22:22", "github.com:x",
        "github.com:٢٢", "[::1", "[::1]x", "[github.com]:22", "0x7f.1", "127.1", "a%0ab", "a\0",
    ],
)  # fmt: skip
def test_what_is_not_exactly_a_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        split_host(text)
    with pytest.raises(PolicyError):
        layer(hosts=[text])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("~/.ssh/work.pub", "file"),
        ("/keys/work.pub", "file"),
        (publickeys.fingerprint(b"x"), "fingerprint"),
        ("me@laptop", "comment"),
        ("My work key", "comment"),
    ],
)
def test_a_key_is_named_in_three_ways(text: str, kind: str) -> None:
    assert key_name(text).kind == kind
    assert layer(keys=[text]).values["git.keys"].value == (text,)


@pytest.mark.parametrize("text", ["SHA256:short", "sha256:" + "a" * 43, "MD5:aa:bb", " x", "a\nb"])
def test_what_cannot_be_a_key_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match=r"git\.keys"):
        layer(keys=[text])


def test_a_key_counts_by_fingerprint_and_comment_alone() -> None:
    key = PublicKey(blob=b"blob", comment="me")
    assert publickeys.is_named(key, frozenset({("comment", "me")}))
    assert publickeys.is_named(key, frozenset({("fingerprint", key.fingerprint)}))
    assert not publickeys.is_named(key, frozenset({("comment", "you"), ("fingerprint", "me")}))
    # A key without a comment is nobody's.
    assert not publickeys.is_named(PublicKey(blob=b"x"), frozenset({("comment", "")}))


@pytest.mark.parametrize(
    "text",
    [
        "", "ssh-ed25519", "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIA==", "ssh-ed25519 !!!!",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk=\n",
    ],
)  # fmt: skip
def test_only_a_public_key_is_one(text: str) -> None:
    assert publickeys.parse_line(text) is None


def test_a_public_key_is_read_and_written() -> None:
    key = publickeys.parse_line(LINE)
    assert key is not None
    assert (key.kind, key.comment, key.line()) == ("ssh-ed25519", "me@home", LINE + "\n")


# --- who may ask


def test_a_project_may_not_ask_for_it() -> None:
    for wanted, below, asks in (
        ("ssh-agent", "none", True), ("helper", "ssh-agent", True), ("ssh-agent", "helper", True),
        ("ssh-agent", "both", True), ("none", "both", False), ("helper", "helper", False),
    ):  # fmt: skip
        found = merge.widenings(layer(PROJECT, auth=wanted), [layer(auth=below)])
        assert bool(found) == asks, (wanted, below)
    for key in ("keys", "hosts"):
        with pytest.raises(PolicyError, match="belongs in your own policy file"):
            layer(PROJECT, **{key: ["x"]})


def test_nobody_asked_is_nothing() -> None:
    assert gitauth.build(policy(), facts(None), [], None, []) is None
    assert policy(auth="none").git_auth is None


def test_a_flag_without_effect_is_said() -> None:
    named = layer(keys=["me"]).values["git.keys"]
    moved = named.replace(source=named.source.replace(layer=FLAGS))
    notices: list[str] = []
    gitauth.build(policy().replace(git_keys=(moved,)), facts(None), [], None, notices)
    assert "has no effect" in notices[0]


@pytest.mark.parametrize(
    ("outside", "git", "problem"),
    [
        (READY, {"auth": "ssh-agent", "hosts": ["a.example"]}, "no key is named"),
        (READY, {"auth": "ssh-agent", "keys": ["me"]}, "no host is named"),
        (READY, {"auth": "helper"}, "no host is named"),
        (READY, {"auth": "helper", "hosts": ["*"]}, "hosts by name"),
        (Outside(), {"auth": "ssh-agent", "keys": ["me"], "hosts": ["a.example"]}, "no ssh-agent"),
    ],
)
def test_what_is_missing_stops_the_start(
    outside: Outside, git: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PolicyError, match=problem) as caught:
        build(outside, **git)
    assert caught.value.code == "git-auth"


def way(path: str, *steps: str) -> Way:
    """A way that ends at its last step."""
    passed = steps or (path,)
    return Way(path=path, real=passed[-1], steps=passed)


@pytest.mark.parametrize(
    ("change", "auth", "refused"),
    [
        ({"deciding": (("known_hosts", way("/p/known")),)}, "ssh-agent", True),
        ({"deciding": (("known_hosts", way("/q/known")),)}, "ssh-agent", False),
        # A link on the way, and a directory that was passed and left again.
        ({"deciding": (("x", way("/h/known", "/h/known", "/p/link", "/q/x")),)}, "helper", True),
        ({"deciding": (("x", way("/h/known", "/h/known", "/r/link", "/q/x")),)}, "helper", False),
        ({"programs": (("/usr/bin", way("/usr/bin/git", "/p/link", "/q/x")),)}, "helper", True),
        ({"programs": (("/usr/bin", way("/usr/bin/git")),)}, "helper", False),
        # Taken off PATH, it has no say. Without a helper, none has.
        ({"programs": (("/p/bin", way("/p/bin/git")),)}, "helper", False),
        ({"programs": (("/usr/bin", way("/usr/bin/git", "/p/x")),)}, "ssh-agent", False),
        ({"variables": (("HOME", way("/p/home")),)}, "helper", True),
    ],
)  # fmt: skip
def test_what_a_sandbox_can_write_decides_nothing(
    change: dict[str, object], auth: str, *, refused: bool
) -> None:
    outcome: Any = pytest.raises(PolicyError, match="can write") if refused else nullcontext()
    outside = READY.replace(path=(way("/usr/bin"), way("/p/bin")), **change)
    with outcome:
        build(outside, env={"HOME": "/h"}, auth=auth, keys=["me"], hosts=["a.example"])


def test_the_helper_outside_gets_a_list_of_variables() -> None:
    caller = {
        "HOME": "/h", "PYTHONPATH": "/p", "GIT_DIR": "/p/.git", "GIT_ASKPASS": "/p/ask",
        "LD_PRELOAD": "/p/x.so", "GIT_CONFIG_PARAMETERS": "x", "SSH_ASKPASS": "/p/ask",
        "GIT_EXEC_PATH": "/p", "LC_ALL": "C", "GNUPGHOME": "/link", "GH_CONFIG_DIR": "/h/gh",
    }  # fmt: skip
    outside = READY.replace(
        path=(
            way("/p/bin"), way("/link", "/link", "/p/x"), way("/p/out", "/p/out", "/usr/bin"),
            way("/bin", "/bin", "/usr/bin"), way("/usr/bin"), way("/a:b"),
        ),
        variables=(("GNUPGHOME", way("/link", "/link", "/p/x")), ("GH_CONFIG_DIR", way("/h/gh"))),
    )  # fmt: skip
    found, notices = build(outside, env=caller, auth="helper", hosts=["a.example"])
    assert found is not None
    # What a link leads to is on PATH, never the link.
    assert found.env == {
        "HOME": "/h", "LC_ALL": "C", "PATH": "/usr/bin", "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "", "GIT_DIR": "/dev/null", "GH_CONFIG_DIR": "/h/gh",
    }  # fmt: skip
    assert notices == ["git.auth: the helper gets no GNUPGHOME: the command can write there"]


def test_a_host_that_cannot_be_reached_is_said() -> None:
    egress = Egress(mode="allow", allow=(parse("a.example:22", "x"),))
    wanted: dict[str, Any] = {"auth": "both", "keys": ["me"], "hosts": ["a.example"]}
    notices: list[str] = []
    made = policy(**wanted)
    for mode, expected in (
        (
            "allow",
            [
                (
                    "git.auth: https to 'a.example' is not let through by network = allow; "
                    "allow it with --allow a.example:443"
                )
            ],
        ),
        ("off", ["git.auth: network = off, so no host can be reached; commits can be signed"]),
        ("on", []),
    ):  # fmt: skip
        notices.clear()
        network = made.network.replace(value=mode)
        gitauth.build(
            made.replace(network=network), facts(READY), [], egress if mode == "allow" else None,
            notices,
        )  # fmt: skip
        assert notices == expected


def test_variables_lead_to_the_socket_and_leave_the_users_own() -> None:
    found, _ = build(READY, auth="both", keys=["me"], hosts=["a.example"])
    assert found is not None
    env = {"GIT_CONFIG_COUNT": "1", "GIT_SSH_COMMAND": "mine", "SSH_AUTH_SOCK": "/outside"}
    gitauth.put_in(env, {}, found)
    assert env["SSH_AUTH_SOCK"] == gitauth.INSIDE
    assert env["GIT_SSH_COMMAND"] == "mine"
    assert env["GIT_CONFIG_COUNT"] == "3"
    assert env["GIT_CONFIG_VALUE_1"] == ""
    assert env["GIT_CONFIG_VALUE_2"] == f"cache --socket {gitauth.INSIDE}"
    assert [m.dest for m in gitauth.mounts(found, "why")] == [
        gitauth.INSIDE, gitauth.SSH_CONFIG, gitauth.KNOWN_HOSTS,
    ]  # fmt: skip


def test_signing_stays_where_it_works_but_for_other_programs() -> None:
    text = '[commit]\n\tgpgsign = true\n[gpg "ssh"]\n\tprogram = /opt/sign\n[gpg]\n\tformat = ssh\n'
    assert "gpgsign" not in gitconfig.cleaned(text)
    kept = gitconfig.cleaned(text, signing=True)
    assert "gpgsign" in kept
    assert "/opt/sign" not in kept


# --- known_hosts


def hashed(name: str) -> str:
    salt = b"0123456789abcdef0123"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("patterns", "name", "expected"),
    [
        ("github.com", "github.com", True),
        ("GitHub.com", "github.com", True),
        ("github.com,140.82.1.1", "140.82.1.1", True),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com,!evil.example.com", "evil.example.com", False),
        ("!evil.example.com,*", "evil.example.com", False),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("[git.example]:2222", "[git.example]:2222", True),
        ("git.example", "[git.example]:2222", False),
        ("[a-z].example", "b.example", False),
        ("*", "x", True),
        ("a*b*c", "aXbYbZc", True),
        ("a*b*c", "aXbYbZ", False),
        (hashed("github.com"), "github.com", True),
        (hashed("github.com"), "gitlab.com", False),
        ("|1|x|y", "github.com", False),
        ("", "github.com", False),
    ],
)
def test_patterns_are_read_as_ssh_does(patterns: str, name: str, expected: bool) -> None:
    assert knownhosts.matches(patterns, name) == expected


def test_keys_of_a_host() -> None:
    one, two, three = (base64.b64encode(text).decode() for text in (b"one!", b"two!", b"three!"))
    text = (
        f"# comment\n\na.example ssh-ed25519 {one} a comment\n{hashed('a.example')} ssh-rsa {two}\n"
        f"b.example ssh-rsa {three}\n@cert-authority a.example ssh-rsa {three}\n"
        f"@revoked * ssh-rsa {two}\nbroken\na.example ssh-rsa\na.example ssh-rsa ###\n"
    )
    assert knownhosts.keys_of(text, "a.example") == {b"one!"}
    assert knownhosts.keys_of(text, "c.example") == frozenset()
    shown = knownhosts.only(text, ["a.example"])
    assert "b.example" not in shown
    assert knownhosts.keys_of(shown, "a.example") == {b"one!"}
    # Of all hosts, too, only lines about hosts: the file may be something else.
    everybody = knownhosts.only(f"{text}-----BEGIN OPENSSH PRIVATE KEY-----\nsecret\n", None)
    assert "b.example" in everybody
    assert "secret" not in everybody
    assert "PRIVATE" not in everybody
    assert knownhosts.spelled("a", 22) == "a"
    assert knownhosts.spelled("a", 23) == "[a]:23"


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200), st.text(alphabet="ab.*?![]:,|", max_size=20))
def test_no_text_upsets_the_reader_of_known_hosts(text: str, name: str) -> None:
    # What is shown inside says nothing about the host that it did not say before.
    assert knownhosts.keys_of(knownhosts.only(text, [name]), name) >= knownhosts.keys_of(text, name)
    knownhosts.matches(name, "ab.ab")
    publickeys.parse_line(text)


# --- lines at the end


def test_the_lines_at_the_end_are_few() -> None:
    events = [
        {
            "time": 1.0,
            "what": "signed",
            "purpose": f"a login as '{n}' to a",
            "key": "K",
            "comment": "c",
        }
        for n in range(50)
    ]
    events += [{"time": 1.0, "what": "refused", "why": f"{n}"} for n in range(50)]
    events += [{"time": 1.0, "what": "handed-in", "purpose": "a credential"}] * 2
    counts = {"signed": 50, "refused": 90, "handed-in": 2}
    found = gitlog.parse(json.dumps({"events": events, "counts": counts}).encode())
    said = gitlog.notes(found)
    assert len(said) == 26
    assert said[0] == "git.auth: signed: a login as '0' to a with 'c' (K)"
    assert said[-1].startswith("git.auth: 117 more")
    assert gitlog.notes(found.replace(events=found.events[-2:], counts={"handed-in": 2})) == (
        "git.auth: handed in: a credential, 2 times",
    )
    assert gitlog.parse(b"{") == gitlog.parse(b"") == gitlog.GitLog()


# --- what the machine has


@pytest.mark.parametrize(
    "line",
    [
        "/opt/p/h.py", "/usr/bin/python3 /opt/p/h.py", "!/usr/bin/env X=/opt/p/h.py sh -c 'x'",
        "!~/../opt/p/h.py get", '!f() { sh "$ROOT/p/h.py"; }; f', "!sh ${ROOT}/p/h.py",
        '!sh "$ROOT"/p/h.py', "!python3 -I/opt/p/h.py", "!a;/opt/p/h.py", "!PATH=/x:/opt/p/h.py y",
        "!cat</opt/p/h.py", "!sh opt/p/h.py", "!sh -c 'x=`/opt/p/h.py`'",
        "store --file=/opt/p/h.py", "!/opt\\/p/h.py", "!'/opt'/p/h.py",
    ],
)  # fmt: skip
def test_every_path_in_a_helper_is_seen(line: str) -> None:
    seen = {follow(path).real for path in mentioned(line, "/h", {"ROOT": "/opt"})}
    assert "/opt/p/h.py" in seen
    assert "/opt/p/h.py" not in set(mentioned(line.replace("p/h", "q/h"), "/h", {"ROOT": "/opt"}))


def test_names_with_blanks_and_of_other_users_are_seen() -> None:
    assert "/opt/my p/h.py" in set(mentioned("!sh '/opt/my p/h.py' get", "/h", {}))
    assert "/opt/my p/h.py" in set(mentioned("!sh /opt/my\\ p/h.py get", "/h", {}))
    assert "~you/h.py" in set(mentioned("!sh ~you/h.py", "/h", {}))
    assert set(mentioned("osxkeychain", "/h", {})) == set()
    # No path begins within a name.
    assert "/p/x" not in set(mentioned("/opt/p/x", "/h", {}))


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab/~$ {}\"'\\;=-.", max_size=60))
def test_no_text_upsets_the_reader_of_helpers(text: str) -> None:
    for path in mentioned(text, "/h", {"HOME": "/h", "a": "/b"}):
        assert path[0] in "/~"


def test_what_git_lists_is_split_and_named() -> None:
    said = (
        "file:/etc/gitconfig\0credential.helper\nmine --x\0"
        "file:/h/.gitconfig\0include.path\nmore\0file:/h/.gitconfig\0includeif.x.y.path\n~/most\0"
        "file:/h/more\0credential.https://a.helper\n!~you/x\0command line:\0user.name\n/p/no\0"
        "file:rel/x\0alias.credential-mine\n!/opt/a\0file:/h/more\0core.bare\0"
    )
    rows = gitauth.listed(said)
    assert rows[-1] == ("file:/h/more", "core.bare", "")
    named = set(gitauth.named_by_git(rows, {"HOME": "/h", "PATH": "/usr/bin:/b"}))
    config = {path for what, path in named if what == "git's configuration"}
    assert config == {"/etc/gitconfig", "/h/.gitconfig", "/h/more", "/h/most", "/rel/x"}
    helpers = {path for what, path in named if what == "a helper"}
    assert {"/usr/bin/git-credential-mine", "/b/git-credential-mine", "~you/x", "/opt/a"} <= helpers
    assert "/p/no" not in helpers


def test_places_where_git_would_look_decide_before_there_is_a_file() -> None:
    env = {"XDG_CONFIG_HOME": "/p/.config", "GIT_CONFIG_GLOBAL": "/p/global"}
    text = "[include]\n\tpath = more\n[include]\n\tpath = ~/most\n"
    found = {way.real for way in _read_by_git({"/h/.gitconfig": text}, "/h", env)}
    assert found == {
        "/h/.gitconfig", "/p/.config/git/config", "/p/global", "/h/more", "/h/most",
    }  # fmt: skip


def test_a_way_has_every_place_on_it(tmp_path: Path) -> None:
    top = tmp_path.resolve()
    (top / "p" / "dir").mkdir(parents=True)
    (top / "q").mkdir()
    (top / "q" / "end").touch()
    (top / "p" / "link").symlink_to("../q")
    (top / "one").symlink_to("p/link/end")
    (top / "two").symlink_to(f"{top}/p/dir/../../q/end")
    (top / "loop").symlink_to("loop")
    for name, passed in (("one", "p/link"), ("two", "p/dir")):
        found = follow(f"{top}/{name}")
        assert found.real == f"{top}/q/end"
        assert f"{top}/{passed}" in found.steps
    # Nothing is there, and it would be made behind the link.
    assert follow(f"{top}/p/link/a/b").real == f"{top}/q/a/b"
    assert f"{top}/loop" in follow(f"{top}/loop").steps


def test_cannot_have_a_link_on_path(tmp_path: Path) -> None:
    """What is in the project is dropped, wherever it leads. Control: elsewhere it is resolved."""
    top = tmp_path.resolve()
    for name in ("p", "q"):
        (top / name).mkdir()
        (top / name / "bin").symlink_to("/usr/bin")
    path = search_path({"PATH": f"{top}/p/bin:relative::{top}/q/bin"})
    assert sound(path, lambda step: step.startswith(f"{top}/p")) == (follow("/usr/bin").real,)
    assert sound(path[:1], lambda step: step.startswith(f"{top}/p")) == ()


def test_paths_in_variables_are_seen() -> None:
    env = {"GNUPGHOME": "/p/gpg", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/p/bus", "EDITOR": "/p/e"}
    found = {(name, way.path) for name, way in _variables(env, "/h")}
    assert ("GNUPGHOME", "/p/gpg") in found
    assert ("DBUS_SESSION_BUS_ADDRESS", "/p/bus") in found
    assert "EDITOR" not in dict(found)
