"""The filter in front of an ssh-agent, and the helper's questions: strict readers, as tables.

The attacks with real programs are in tests/kernel/test_git_auth.py.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.policy.publickeys import PublicKey, encoded, fingerprint
from agent_sandbox.proxy.gitauth import journal as journals
from agent_sandbox.proxy.gitauth import lines, messages, signed
from agent_sandbox.proxy.gitauth.agent import (
    Denied,
    Rules,
    Session,
    Upstream,
    host_of,
    may_login,
    read_hosts,
)
from agent_sandbox.proxy.gitauth.filling import Filler
from agent_sandbox.proxy.gitauth.journal import Journal
from agent_sandbox.proxy.gitauth.messages import Bind, Malformed, Sign, string

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORK = PublicKey(blob=string(b"ssh-ed25519") + b"work", comment="work")
OTHER = PublicKey(blob=string(b"ssh-ed25519") + b"other", comment="other")
HOST_KEY = b"the key of the host"
SESSION = bytes(32)
HASH = string(b"sha512") + string(bytes(64))


def login(
    session: bytes = SESSION, *, kind: int = 50, user: bytes = b"git",
    service: bytes = b"ssh-connection", method: bytes = b"publickey", with_signature: int = 1,
    blob: bytes = WORK.blob, end: bytes = b"",
) -> bytes:  # fmt: skip
    """What ssh wants signed to log in."""
    fields = string(user) + string(service) + string(method) + bytes([with_signature])
    return string(session) + bytes([kind]) + fields + string(b"ssh-ed25519") + string(blob) + end


GIT = b"SSHSIG" + string(b"git") + string(b"") + HASH
BOUND = login(method=b"publickey-hostbound-v00@openssh.com", end=string(HOST_KEY))


# --- messages


def test_messages_are_written_as_they_were_read() -> None:
    asked = Sign(blob=b"b", data=b"d", flags=2)
    assert messages.sign_request(messages.signing(asked)) == asked
    bind = Bind(host_key=b"k", session=b"s", signature=b"g", forwarding=True)
    assert messages.bind_request(messages.binding(bind)) == bind
    assert messages.identities(messages.listed((WORK, OTHER))) == (WORK, OTHER)
    assert messages.signature(bytes([14]) + string(b"x")) == bytes([14]) + string(b"x")


GOOD_SIGN = messages.signing(Sign(blob=b"b", data=b"d", flags=0))
GOOD_BIND = messages.binding(Bind(host_key=b"k", session=b"s", signature=b"g", forwarding=False))


@pytest.mark.parametrize(
    "message",
    [
        GOOD_SIGN + b"x", GOOD_SIGN[:-1], bytes([13]), bytes([13]) + b"\xff" * 8,
        messages.signing(Sign(blob=b"", data=b"", flags=1)),
        messages.signing(Sign(blob=b"", data=b"", flags=0x80000000)),
        b"\x11" + GOOD_SIGN[1:],
    ],
)  # fmt: skip
def test_a_malformed_request_for_a_signature_is_refused(message: bytes) -> None:
    with pytest.raises(Malformed):
        messages.sign_request(message)


@pytest.mark.parametrize(
    "message",
    [
        GOOD_BIND + b"\0", GOOD_BIND[:-1], GOOD_BIND[:-1] + b"\2", bytes([27]) + string(b"query"),
        bytes([27]), GOOD_BIND.replace(b"session-bind", b"session-bond"),
    ],
)  # fmt: skip
def test_another_extension_is_refused(message: bytes) -> None:
    with pytest.raises(Malformed):
        messages.bind_request(message)


@pytest.mark.parametrize(
    "message",
    [
        b"", b"\5", bytes([12]) + (1).to_bytes(4), bytes([12]) + b"\xff\xff\xff\xff",
        messages.listed((WORK,)) + b"x", bytes([12]) + (2).to_bytes(4) + string(b"a") + string(b""),
    ],
)  # fmt: skip
def test_a_malformed_answer_is_refused(message: bytes) -> None:
    with pytest.raises(Malformed):
        messages.identities(message)
    with pytest.raises(Malformed):
        messages.signature(message)


# --- what is signed


def test_logins_and_signatures_of_git_are_known() -> None:
    assert signed.read(login(), WORK.blob) == signed.Login(session=SESSION, user="git")
    assert signed.read(BOUND, WORK.blob) == signed.Login(
        session=SESSION, user="git", host_key=HOST_KEY
    )
    assert signed.read(GIT, WORK.blob) == signed.GitSignature()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"anything", b"SSHSIG", GIT + b"x", GIT[:-1], GIT[1:],
        b"SSHSIG" + string(b"file") + string(b"") + HASH,
        b"SSHSIG" + string(b"git\0") + string(b"") + HASH,
        b"SSHSIG" + string(b"git") + string(b"reserved") + HASH,
        b"SSHSIG" + string(b"git") + string(b"") + string(b"sha1") + string(bytes(20)),
        b"SSHSIG" + string(b"git") + string(b"") + string(b"sha512") + string(bytes(32)),
        login(end=b"x"), login(kind=51), login(session=b""), login(session=bytes(31)),
        login(service=b"ssh-userauth"), login(method=b"hostbased"), login(with_signature=0),
        login(with_signature=2), login(blob=OTHER.blob), login(user=b"a\nb"),
        login(user=b"x" * 300), login(method=b"publickey-hostbound-v00@openssh.com"),
    ],
)  # fmt: skip
def test_anything_else_is_not_signed(data: bytes) -> None:
    with pytest.raises(Malformed):
        signed.read(data, WORK.blob)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_upset_the_readers(data: bytes) -> None:
    for read in (
        messages.identities, messages.sign_request, messages.signature, messages.bind_request,
    ):  # fmt: skip
        try:
            read(data)
        except Malformed:
            pass
    try:
        signed.read(data, WORK.blob)
    except Malformed:
        pass


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([GIT, login(), BOUND]), st.integers(0, 400), st.binary(max_size=4))
def test_a_changed_text_is_itself_or_refused(data: bytes, at: int, put: bytes) -> None:
    changed = data[:at] + put + data[at + len(put) :]
    try:
        found = signed.read(changed, WORK.blob)
    except Malformed:
        return
    # What is still a login is one with this key; nothing turns into the other kind.
    assert isinstance(found, signed.GitSignature) == changed.startswith(b"SSHSIG")


# --- whom a login is for

KNOWN = f"git.example ssh-ed25519 {encoded(HOST_KEY)}\n"
RULES = Rules(
    names=frozenset({("comment", "work")}), hosts=("git.example",), any_host=False,
    known_hosts=("/known",),
)  # fmt: skip
BIND = Bind(host_key=HOST_KEY, session=SESSION, signature=b"signed", forwarding=False)
LOGIN = signed.Login(session=SESSION, user="git")


def known(_: str) -> str:
    return KNOWN


def test_a_login_is_for_the_host_that_the_connection_is_bound_to() -> None:
    assert may_login(RULES, LOGIN, BIND, known) == "git.example"
    assert may_login(RULES, LOGIN.replace(host_key=HOST_KEY), BIND, known) == "git.example"
    assert host_of(RULES, b"another", known) == ""


@pytest.mark.parametrize(
    ("wanted", "bound", "rules", "why"),
    [
        (LOGIN, None, RULES, "which host"),
        (LOGIN, BIND.replace(host_key=b"another"), RULES, "none of git.hosts"),
        (LOGIN, BIND, RULES.replace(hosts=("other.example",)), "none of git.hosts"),
        (LOGIN.replace(session=bytes(20)), BIND, RULES, "another session"),
        (LOGIN.replace(host_key=b"another"), BIND, RULES, "another host"),
        (LOGIN.replace(session=bytes(20)), BIND, RULES.replace(any_host=True), "another session"),
    ],
)
def test_cannot_log_in_elsewhere(
    wanted: signed.Login, bound: Bind | None, rules: Rules, why: str
) -> None:
    with pytest.raises(Denied, match=why):
        may_login(rules, wanted, bound, known)


@pytest.mark.parametrize("order", [("user", "system"), ("system", "user")])
def test_cannot_use_a_key_that_another_file_revokes(order: tuple[str, ...]) -> None:
    """Control: without the line it is the host's."""
    texts = {"user": KNOWN, "system": f"@revoked * ssh-ed25519 {encoded(HOST_KEY)}\n"}
    rules = RULES.replace(known_hosts=order)
    assert host_of(rules, HOST_KEY, texts.__getitem__) == ""
    assert host_of(rules, HOST_KEY, {**texts, "system": ""}.__getitem__) == "git.example"


def test_a_link_in_the_place_of_known_hosts_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(KNOWN)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_hosts(str(tmp_path / "link")) == ""
    assert read_hosts(str(tmp_path / "real")) == KNOWN


def test_any_host_needs_no_binding() -> None:
    assert may_login(RULES.replace(any_host=True), LOGIN, None, known) == "some host"


# --- one connection


class Told(Upstream):
    """An agent that has two keys, signs everything, and remembers what it was asked."""

    def __init__(self, *, binds: bool = True, careless: bool = False) -> None:
        super().__init__("")
        self.asked: list[bytes] = []
        self._binds = binds
        self._careless = careless

    def another(self) -> Told:
        return Told(binds=self._binds, careless=self._careless)

    async def ask(self, message: bytes) -> bytes:
        self.asked.append(message)
        if message[0] == messages.EXTENSION:
            good = self._careless or messages.bind_request(message).signature == BIND.signature
            return messages.ACCEPTED if self._binds and good else messages.REFUSAL
        if message[0] == messages.SIGN_REQUEST:
            return bytes([14]) + string(b"signature")
        return messages.listed((WORK, OTHER))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Journal]:
    found = Journal(str(tmp_path / "audit" / "git.jsonl"), "run")
    yield found
    found.close()


def answers(agent: Told, log: Journal, *asked: bytes, rules: Rules = RULES) -> list[int]:
    """The kinds of the answers on one connection."""
    session = Session(rules, agent, log)

    async def ask() -> list[int]:
        return [(await session.answer(message))[0] for message in asked]

    return asyncio.run(ask())


def sign(key: PublicKey = WORK, data: bytes = GIT) -> bytes:
    return messages.signing(Sign(blob=key.blob, data=data, flags=0))


def refusals(log: Journal) -> list[str]:
    events = log.report()["events"]
    assert isinstance(events, list)
    return [event["why"] for event in events if event["what"] == "refused"]


def test_only_named_keys_are_shown(log: Journal) -> None:
    session = Session(RULES, Told(), log)
    told = asyncio.run(session.answer(bytes([messages.REQUEST_IDENTITIES])))
    assert messages.identities(told) == (WORK,)


def test_each_signature_has_a_line(log: Journal, tmp_path: Path) -> None:
    assert answers(Told(), log, sign(), sign()) == [14, 14]
    text = (tmp_path / "audit" / "git.jsonl").read_text()
    assert text.count('"what":"signed"') == 2
    assert fingerprint(WORK.blob) in text
    assert stat.S_IMODE(os.stat(tmp_path / "audit" / "git.jsonl").st_mode) == 0o600


def test_cannot_sign_with_another_key(log: Journal) -> None:
    agent = Told()
    assert answers(agent, log, sign(OTHER), sign(PublicKey(blob=b"unknown"))) == [5, 5]
    assert not [m for m in agent.asked if m[0] == messages.SIGN_REQUEST]
    assert "none of git.keys" in refusals(log)[0]


@pytest.mark.parametrize(
    "kind", [k for k in range(256) if k not in (messages.REQUEST_IDENTITIES, messages.SIGN_REQUEST)]
)
def test_nothing_else_reaches_the_agent(kind: int, log: Journal) -> None:
    agent = Told()
    assert answers(agent, log, bytes([kind]), bytes([kind]) + GOOD_SIGN[1:]) == [5, 5]
    assert agent.asked == []
    assert len(refusals(log)) == 2


def test_a_list_is_asked_for_by_one_byte(log: Journal) -> None:
    assert answers(Told(), log, bytes([11, 0])) == [5]


def test_a_login_needs_its_session(log: Journal, tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(KNOWN)
    rules = RULES.replace(known_hosts=(str(path),))
    bind = messages.binding(BIND)
    assert answers(Told(), log, bind, sign(data=login()), rules=rules) == [6, 14]
    # The control: the same login without it, and with an agent that does not take it.
    assert answers(Told(), log, sign(data=login()), rules=rules) == [5]
    assert answers(Told(binds=False), log, bind, sign(data=login()), rules=rules) == [5, 5]
    # One connection is for one session.
    assert answers(Told(), log, bind, bind, rules=rules) == [6, 5]


def test_cannot_bind_where_the_agent_checks_no_signature(log: Journal, tmp_path: Path) -> None:
    """One that takes any extension proves nothing about the host. Control: one that looks."""
    path = tmp_path / "known_hosts"
    path.write_text(KNOWN)
    rules = RULES.replace(known_hosts=(str(path),))
    asked = (messages.binding(BIND), sign(data=login()))
    careless = Told(careless=True)
    assert answers(careless, log, *asked, rules=rules) == [5, 5]
    assert not [m for m in careless.asked if m[0] in (messages.SIGN_REQUEST, messages.EXTENSION)]
    assert "does not check the host's signature" in refusals(log)[0]
    assert answers(Told(), log, *asked, rules=rules) == [6, 14]


@pytest.mark.parametrize("signature", [b"", b"\0", b"\xff", b"abc"])
def test_a_spoilt_signature_is_another_one(signature: bytes) -> None:
    asked = BIND.replace(signature=signature)
    assert messages.spoilt(asked).signature != signature
    assert messages.spoilt(asked).replace(signature=signature) == asked


def test_cannot_forward_the_agent(log: Journal) -> None:
    agent = Told()
    session = Session(RULES, agent, log)
    asked = messages.binding(BIND.replace(forwarding=True))
    assert asyncio.run(session.answer(asked)) == messages.REFUSAL
    assert session.over
    assert agent.asked == []


def test_what_cannot_be_logged_is_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Journal(str(tmp_path / "file" / "x" / "y"), "run")
    assert broken.is_whole
    (tmp_path / "plain").write_text("")
    closed = Journal(str(tmp_path / "plain" / "x"), "run")
    assert answers(Told(), closed, sign()) == [5]
    monkeypatch.setattr(journals, "MAX_GRANTS", 1)
    assert answers(Told(), broken, sign(), sign()) == [14, 5]
    broken.close()


def test_what_is_shown_cannot_steer_a_terminal(log: Journal) -> None:
    log.note("refused", why="\x1b[31m\nx")
    assert refusals(log) == ["?[31m?x"]


def test_an_agent_that_is_gone_is_a_refusal(log: Journal, tmp_path: Path) -> None:
    session = Session(RULES, Upstream(str(tmp_path / "none")), log)
    assert asyncio.run(session.answer(bytes([11]))) == messages.REFUSAL
    assert "does not answer" in refusals(log)[0]


# --- git's questions

HEAD = "action=get\ntimeout=900\n"


def question(text: str) -> lines.Question:
    return lines.question((HEAD + text).encode("utf-8", "surrogateescape"))


def test_a_question_is_read_and_asked_anew() -> None:
    asked = question("protocol=https\nhost=Git.Example:444\npath=../x\nusername=me\nwwwauth[]=a\n")
    assert asked == lines.Question(action="get", host="git.example", port=444, username="me")
    assert lines.outside(asked) == b"protocol=https\nhost=git.example:444\nusername=me\n\n"
    assert lines.question(b"action=store\ntimeout=1\npassword=x\n").action == "store"
    assert question("protocol=https\nhost=[::1]:444\n").authority == "[::1]:444"


@pytest.mark.parametrize(
    "text",
    [
        "", "protocol=http\nhost=a\n", "protocol=https\n", "protocol=https\nhost=\n",
        "host=a\n", "protocol=https\nhost=a\nhost=b\n", "protocol=https\nprotocol=http\nhost=a\n",
        "protocol=https\nhost=a\rhost=b\n", "protocol=https\nhost=a\0\n", "protocol=https\nhost=a",
        "protocol=https\nhost=a\nurl=https://b\n", "protocol=https\nhost=u@a\n",
        "protocol=https\nhost=a/b\n", "protocol=https\nhost=a%0ab\n", "protocol=https\nhost=a b\n",
        "protocol=https\nhost=a\nusername=x\x85host=b\n",
        "protocol=https\nhost=a\nusername=x\u2028\n",
        "protocol=https\nhost=a\nusername=x\nusername=y\n", "protocol=https\nhost=a\n\nhost=b\n",
        "protocol=https\nhost=a\nnonsense\n", "protocol=https\nhost=a\n=x\n",
        "protocol=https\nhost=a\nusername=x\udcff\n", "protocol=https\nhost=a:99999\n",
        "protocol=https\nhost=a\naction=get\n", "protocol=https\nhost=a\nx=" + "y" * 20000 + "\n",
    ],
)  # fmt: skip
def test_an_odd_question_is_refused(text: str) -> None:
    with pytest.raises(lines.Refused):
        question(text)


@pytest.mark.parametrize("name", ["", "me", "me@example.com", "x-token-auth", "a.b_c+1"])
def test_a_users_name_is_asked_for(name: str) -> None:
    assert question(f"protocol=https\nhost=a\nusername={name}\n").username == name


@pytest.mark.parametrize(
    "name",
    ["-x", "--file=x", "a/b", "../x", "a..b", ".", ".ssh", "a b", "a;b", "a$b", "a`b", "a\\b", "ä",
     "a=b", "a*", "a\tb", "a:b", "~a"],
)  # fmt: skip
def test_a_users_name_cannot_be_an_option_or_a_path(name: str) -> None:
    with pytest.raises(lines.Refused, match=r"name|control"):
        question(f"protocol=https\nhost=a\nusername={name}\n")


@pytest.mark.parametrize("data", [b"", b"action=get\n", b"action=exit\ntimeout=1\n", b"a\n", b"\0"])
def test_what_is_no_question_is_refused(data: bytes) -> None:
    with pytest.raises(lines.Refused):
        lines.question(data)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["protocol", "host", "username", "url", "path", "x"]),
            st.text(alphabet="ab.:@/%=\n\r\0\x85\u2028 https[]", max_size=12) | st.just("https"),
        ),
        max_size=5,
    )
)
def test_what_is_asked_outside_is_two_or_three_lines(pairs: list[tuple[str, str]]) -> None:
    try:
        asked = question("".join(f"{key}={value}\n" for key, value in pairs))
    except lines.Refused:
        return
    told = lines.outside(asked).decode().split("\n")
    names = [line.partition("=")[0] for line in told[:-2]]
    assert names == ["protocol", "host", "username"][: len(names)]
    assert len(names) >= 2
    assert told[-2:] == ["", ""]
    assert told[0] == "protocol=https"
    assert not set(told[1].removeprefix("host=")) & set("/@%?# ")


ASKED = lines.Question(action="get", host="git.example")


def test_an_answer_has_a_name_and_a_password_alone() -> None:
    said = b"protocol=https\nhost=git.example\nusername=u\npassword=p\noauth_refresh_token=t\n"
    assert lines.answer(said, ASKED) == b"username=u\npassword=p\n"


@pytest.mark.parametrize(
    "said",
    [
        b"", b"protocol=https\nhost=other.example\nusername=u\npassword=p\n",
        b"protocol=https\nhost=git.example\nusername=u\n", b"username=u\npassword=p\n",
        b"protocol=https\nhost=git.example\nusername=u\npassword=\x01\n",
    ],
)  # fmt: skip
def test_an_odd_answer_is_not_handed_in(said: bytes) -> None:
    with pytest.raises(lines.Refused):
        lines.answer(said, ASKED)


@pytest.mark.parametrize(
    ("asked", "hosts", "good"),
    [
        (("git.example", 443), {("git.example", 0)}, True),
        (("git.example", 443), {("git.example", 443)}, True),
        (("git.example", 444), {("git.example", 444)}, True),
        (("git.example", 444), {("git.example", 0)}, False),
        (("git.example", 443), {("git.example", 444)}, False),
        (("a.git.example", 443), {("git.example", 0)}, False),
        (("git.example", 443), set(), False),
    ],
)
def test_only_named_hosts_are_asked_for(
    asked: tuple[str, int], hosts: set[tuple[str, int]], *, good: bool
) -> None:
    filler = Filler({}, frozenset(hosts))
    wanted = lines.Question(action="get", host=asked[0], port=asked[1])
    try:
        filler.check(wanted)
    except lines.Refused:
        assert not good
    else:
        assert good


def test_a_helper_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "git"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    program.chmod(0o755)
    monkeypatch.setattr("agent_sandbox.proxy.gitauth.filling.FILL_SECONDS", 0.5)
    filler = Filler({"PATH": str(tmp_path)}, frozenset({("git.example", 0)}))
    with pytest.raises(lines.Refused, match="too long"):
        asyncio.run(filler.fill(ASKED))
