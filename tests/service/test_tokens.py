"""Tokens: who has one is let in, nobody else is, and no secret is kept."""

from __future__ import annotations

import hmac
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import HostError, PolicyError, SandboxError, UsageError
from agent_sandbox.service import store_address, tokens_files
from agent_sandbox.service import tokens as module
from agent_sandbox.service.state import State
from agent_sandbox.service.store import Store
from agent_sandbox.service.store_postgres import PgStore
from agent_sandbox.service.tokens import DUMMY, Tokens
from agent_sandbox.service.values import ADMIN, DEFAULT_SCOPES, EXEC

OUTSIDE = "0123456789abcdef" * 4


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(state_store: State) -> State:
    """Of either kind."""
    return state_store


def beside_of(store: State) -> State:
    """Another process's view of the same state, as `sandboxctl token` has it."""
    database = store.database if isinstance(store, PgStore) else None
    return store_address.open_state(store.data, database, own=False)


@pytest.fixture
def tokens(store: State, clock: Clock) -> Tokens:
    return Tokens(store, clock)


# --- who is let in


def test_a_token_stands_for_its_agent(tokens: Tokens) -> None:
    token, info = tokens.new(
        "worker-1", scopes=[EXEC], images=["python:*"], templates=["small"],
        quotas={"max_memory": 1 << 30}, uid=1000,
    )  # fmt: skip
    assert re.fullmatch(r"sbx_[a-z2-7]{8}_[A-Za-z0-9_-]{43}", token)
    agent = tokens.check(token)
    assert agent is not None
    assert (agent.name, agent.key) == ("worker-1", token[:12])
    assert agent.scopes == {EXEC}
    assert (agent.images, agent.templates) == (("python:*",), ("small",))
    assert agent.quotas == {"max_memory": 1 << 30}
    assert not agent.is_admin
    assert info.key == token[:12]


def test_the_usual_scopes_are_not_those_of_an_admin(tokens: Tokens) -> None:
    token, _ = tokens.new("worker")
    agent = tokens.check(token)
    assert agent is not None
    assert agent.scopes == set(DEFAULT_SCOPES)
    assert ADMIN not in agent.scopes


def test_two_tokens_are_not_alike(tokens: Tokens) -> None:
    made = [tokens.new(f"w{number}")[0] for number in range(50)]
    assert len({token[:12] for token in made}) == len({token[13:] for token in made}) == 50


def forgeries(token: str) -> dict[str, str]:
    head, secret = token[:13], token[13:]
    flipped = "B" if secret[0] == "A" else "A"
    return {
        "empty": "", "prefix": "sbx_", "id alone": token[:12], "no secret": head,
        "first character": head + flipped + secret[1:],
        "last character": token[:-1] + ("B" if token[-1] == "A" else "A"),
        "truncated": token[:-1], "longer": token + "A", "twice": token * 2,
        "upper case": token.upper(), "space before": " " + token, "newline": token + "\n",
        "zero byte": token + "\0", "other secret": head + "A" * 43,
        "unknown id": "sbx_aaaaaaaa_" + secret, "swapped": secret + head,
        "not ASCII": token[:-1] + "é", "half a character": token[:-1] + "\ud800",
        "hash of it": module._hash(token).hex(), "long": "A" * 100_000,
        "SQL": "sbx_aaaaaaaa_' OR 1=1 --", "dummy": DUMMY.decode(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", forgeries("sbx_abcdefgh_" + "A" * 43))
def test_cannot_come_in_with_a_forged_token(tokens: Tokens, kind: str) -> None:
    token, _ = tokens.new("worker")
    forged = forgeries(token)[kind]
    assert forged != token
    assert tokens.check(forged) is None
    # The control.
    assert tokens.check(token) is not None


@given(st.text(max_size=80) | st.from_regex(r"sbx_[a-z2-7]{8}_[A-Za-z0-9_-]{43}", fullmatch=True))
def test_no_text_is_a_token_by_chance_and_none_is_an_error(text: str) -> None:
    assert known().check(text) is None


_known: list[Tokens] = []


def known() -> Tokens:
    """One store for many examples."""
    import tempfile

    if not _known:
        _known.append(Tokens(Store(tempfile.mkdtemp())))
        _known[0].new("worker")
    return _known[0]


def test_cannot_come_in_with_the_secret_of_another_agent(tokens: Tokens) -> None:
    first, _ = tokens.new("first")
    second, _ = tokens.new("second")
    assert tokens.check(first[:13] + second[13:]) is None
    assert tokens.check(second[:13] + first[13:]) is None


def test_an_expired_token_is_dead_to_the_moment(tokens: Tokens, clock: Clock) -> None:
    token, _ = tokens.new("worker", expires=clock.now + 60, uid=7)
    clock.now += 59.9
    assert tokens.check(token) is not None
    assert tokens.by_uid(7) is not None
    assert tokens.any()
    clock.now += 0.1
    assert tokens.check(token) is None
    assert tokens.by_uid(7) is None
    assert not tokens.any()


@pytest.mark.parametrize("by", ["name", "id", "key", "token"])
def test_a_revoked_token_is_dead_at_once(tokens: Tokens, by: str) -> None:
    token, info = tokens.new("worker", uid=7)
    other, _ = tokens.new("other")
    named = {"name": "worker", "id": info.id, "key": info.key, "token": token}[by]
    assert [one.id for one in tokens.revoke(named)] == [info.id]
    assert tokens.check(token) is None
    assert tokens.by_uid(7) is None
    assert tokens.check(other) is not None
    with pytest.raises(UsageError):
        tokens.revoke(named)


def test_a_running_service_sees_what_is_done_beside_it(store: State, tokens: Tokens) -> None:
    beside = beside_of(store)
    token, _ = Tokens(beside).new("worker")
    assert tokens.check(token) is not None
    Tokens(beside).revoke("worker")
    assert tokens.check(token) is None
    beside.close()


def test_unknown_ids_wrong_secrets_and_dead_tokens_take_the_same_path(
    tokens: Tokens, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comparison each, of 32 bytes with 32 bytes, in constant time."""
    seen: list[tuple[int, int]] = []

    def compare(kept: bytes, given: bytes) -> bool:
        seen.append((len(kept), len(given)))
        return hmac.compare_digest(kept, given)

    class Recorder:
        compare_digest = staticmethod(compare)

    good, _ = tokens.new("good")
    revoked, _ = tokens.new("revoked")
    tokens.revoke("revoked")
    expired, _ = tokens.new("expired", expires=clock.now + 1)
    clock.now += 2
    monkeypatch.setattr(module, "hmac", Recorder)
    cases = {
        "good": good, "revoked": revoked, "expired": expired,
        "wrong secret": good[:13] + "A" * 43, "unknown id": "sbx_aaaaaaaa_" + "A" * 43,
        "no token": "x", "empty": "", "long": "x" * 10_000,
    }  # fmt: skip
    for name, token in cases.items():
        seen.clear()
        assert (tokens.check(token) is not None) == (name == "good")
        assert seen == [(32, 32)], name


def test_the_path_does_not_depend_on_the_comparison_alone(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown id is nobody, even if the dummy were to fit."""

    class Always:
        compare_digest = staticmethod(lambda _kept, _given: True)

    monkeypatch.setattr(module, "hmac", Always)
    assert tokens.check("sbx_aaaaaaaa_" + "A" * 43) is None


# --- what is kept


def test_no_secret_is_in_the_database_or_what_is_shown(store: State, tokens: Tokens) -> None:
    token, info = tokens.new("worker")
    rotated, _ = tokens.rotate("worker", grace=60)
    tokens.adopt({"outside": OUTSIDE})
    shown = repr(info) + repr(tokens.list()) + repr(tokens.check(token)) + repr(tokens.check("x"))
    store.tidy()
    kept = repr(store.rows("SELECT * FROM tokens")).encode()
    if isinstance(store, Store):
        kept = b"".join(path.read_bytes() for path in Path(store.data).iterdir())
    for secret in (token[13:], rotated[13:], OUTSIDE):
        assert secret not in shown
        assert secret.encode() not in kept
    # The control: the public part is there.
    assert token[4:12].encode() in kept
    assert module._hash(token).hex() not in shown


def test_a_revoked_token_leaves_no_hash(store: State, tokens: Tokens) -> None:
    token, _ = tokens.new("worker")
    tokens.revoke("worker")
    kept = store.rows("SELECT hash FROM tokens")
    assert kept == [(DUMMY,)]
    assert module._hash(token) != DUMMY


# --- names, scopes, uids


@pytest.mark.parametrize(
    "name", ["", "owner", "sbx_x", "-x", ".x", "a/b", "a b", "a" * 64, "é", "a\n", "x\0", "../x"]
)
def test_names_that_would_mislead_are_refused(tokens: Tokens, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        tokens.new(name)
    assert caught.value.code == "bad-token-name"
    assert tokens.list() == ()


def test_unknown_scopes_are_refused(tokens: Tokens) -> None:
    with pytest.raises(UsageError, match="no scope 'root'"):
        tokens.new("worker", scopes=[EXEC, "root"])


def test_a_name_and_a_uid_are_taken_once(tokens: Tokens, clock: Clock) -> None:
    tokens.new("worker", uid=7, expires=clock.now + 10)
    with pytest.raises(PolicyError) as caught:
        tokens.new("worker")
    assert caught.value.code == "token-taken"
    with pytest.raises(PolicyError, match="uid 7"):
        tokens.new("other", uid=7)
    clock.now += 11
    tokens.new("worker", uid=7)


def test_a_uid_stands_for_its_agent(tokens: Tokens) -> None:
    tokens.new("worker", uid=7)
    agent = tokens.by_uid(7)
    assert agent is not None
    assert (agent.name, agent.key, agent.uid) == ("worker", "uid:7", 7)
    assert tokens.by_uid(8) is None


# --- rotation


def test_rotation_ends_the_old_secret(tokens: Tokens, clock: Clock) -> None:
    old, _ = tokens.new("worker", scopes=[EXEC], quotas={"max_pids": 5}, uid=7,
                        expires=clock.now + 100)  # fmt: skip
    clock.now += 50
    new, info = tokens.rotate("worker")
    assert tokens.check(old) is None
    agent = tokens.check(new)
    assert agent is not None
    assert (agent.name, set(agent.scopes)) == ("worker", {EXEC})
    assert agent.quotas == {"max_pids": 5}
    assert tokens.by_uid(7) is not None
    # It lives as long as the first was meant to.
    assert info.expires == clock.now + 100


def test_a_grace_lets_the_old_secret_live_on_for_so_long(tokens: Tokens, clock: Clock) -> None:
    old, _ = tokens.new("worker", uid=7)
    new, info = tokens.rotate("worker", grace=60)
    assert tokens.check(old) is not None
    assert tokens.check(new) is not None
    assert info.expires is None
    clock.now += 61
    assert tokens.check(old) is None
    assert tokens.check(new) is not None
    assert tokens.by_uid(7) is not None


def test_a_grace_never_prolongs(tokens: Tokens, clock: Clock) -> None:
    old, _ = tokens.new("worker", expires=clock.now + 10)
    tokens.rotate("worker", grace=3600)
    clock.now += 11
    assert tokens.check(old) is None


def test_revoking_a_name_ends_the_one_in_grace_too(tokens: Tokens) -> None:
    old, _ = tokens.new("worker")
    new, _ = tokens.rotate("worker", grace=60)
    assert len(tokens.revoke("worker")) == 2
    assert tokens.check(old) is tokens.check(new) is None


def test_unknown_names_cannot_be_rotated(tokens: Tokens) -> None:
    with pytest.raises(UsageError) as caught:
        tokens.rotate("nobody")
    assert caught.value.code == "no-token"


def test_an_error_does_not_repeat_a_token(tokens: Tokens) -> None:
    token, _ = tokens.new("worker")
    tokens.revoke("worker")
    with pytest.raises(UsageError) as caught:
        tokens.revoke(token)
    assert token[13:] not in caught.value.message


# --- tokens from files


def test_tokens_from_files_come_and_go_with_them(tokens: Tokens) -> None:
    assert [what for what, _ in tokens.adopt({"worker": OUTSIDE})] == ["new"]
    agent = tokens.check(OUTSIDE)
    assert agent is not None
    assert agent.name == "worker"
    assert agent.scopes == set(DEFAULT_SCOPES)
    # The same again changes nothing.
    assert tokens.adopt({"worker": OUTSIDE}) == ()
    # Another token in the file.
    assert [what for what, _ in tokens.adopt({"worker": OUTSIDE[::-1]})] == ["revoked", "new"]
    assert tokens.check(OUTSIDE) is None
    assert tokens.check(OUTSIDE[::-1]) is not None
    # The file is gone, and comes back.
    assert [what for what, _ in tokens.adopt({})] == ["revoked"]
    assert tokens.check(OUTSIDE[::-1]) is None
    assert [what for what, _ in tokens.adopt({"worker": OUTSIDE[::-1]})] == ["new"]
    assert tokens.check(OUTSIDE[::-1]) is not None


def test_cannot_bring_back_a_revoked_token_by_its_file(tokens: Tokens) -> None:
    """It was revoked because it leaked; the file is still mounted."""
    tokens.adopt({"worker": OUTSIDE})
    tokens.revoke("worker")
    for _ in range(2):
        assert [what for what, _ in tokens.adopt({"worker": OUTSIDE})] == ["refused"]
        assert tokens.check(OUTSIDE) is None
    # Another token in the file works.
    assert [what for what, _ in tokens.adopt({"worker": OUTSIDE[::-1]})] == ["new"]


def test_files_do_not_touch_tokens_of_the_command_line(tokens: Tokens) -> None:
    token, _ = tokens.new("mine")
    tokens.adopt({"worker": OUTSIDE})
    tokens.adopt({})
    assert tokens.check(token) is not None
    with pytest.raises(PolicyError):
        tokens.adopt({"mine": OUTSIDE})
    with pytest.raises(PolicyError, match="same token"):
        tokens.adopt({"a": OUTSIDE, "b": OUTSIDE})


def test_a_token_of_a_file_is_not_rotated(tokens: Tokens) -> None:
    tokens.adopt({"worker": OUTSIDE})
    with pytest.raises(PolicyError) as caught:
        tokens.rotate("worker")
    assert caught.value.code == "token-from-file"


def test_a_renamed_file_renames_its_agent(tokens: Tokens) -> None:
    tokens.adopt({"old": OUTSIDE})
    tokens.adopt({"new": OUTSIDE})
    agent = tokens.check(OUTSIDE)
    assert agent is not None
    assert agent.name == "new"


@pytest.mark.parametrize(
    ("file", "agent"),
    [("worker", "worker"), ("worker.token", "worker"), ("worker_token", "worker"),
     ("a.b.token", "a.b"), ("_token", "_token"), ("worker-1-sandbox-token", "worker-1"),
     ("a_token-sandbox-token", "a_token"), ("-sandbox-token", "-sandbox-token")],
)  # fmt: skip
def test_the_name_of_a_file_is_the_agents(file: str, agent: str) -> None:
    assert tokens_files.agent_name(file) == agent


def test_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "worker-1.token").write_text(OUTSIDE + "\n")
    # As Kubernetes mounts secrets.
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "b").write_text(OUTSIDE[::-1])
    (tmp_path / "b").symlink_to("..2026/b")
    assert tokens_files.read(str(tmp_path)) == {"worker-1": OUTSIDE, "b": OUTSIDE[::-1]}


@pytest.mark.parametrize(
    "content", ["", "short", "x" * 31, "x" * 257, "a b" * 20, "pass word!" * 5, "é" * 40]
)
def test_a_file_without_a_good_token_is_refused_without_showing_it(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "worker").write_text(content)
    with pytest.raises(HostError) as caught:
        tokens_files.read(str(tmp_path))
    assert "worker" in caught.value.message
    assert not content or content not in json.dumps([caught.value.message, caught.value.hint])


def test_a_file_that_cannot_be_read_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root without capabilities meets one of another user; root here reads all."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "worker").write_text(OUTSIDE)
    monkeypatch.setattr(tokens_files.os, "open", refuse)
    with pytest.raises(HostError) as caught:
        tokens_files.read(str(tmp_path))
    assert "644" in (caught.value.hint or "")


def test_files_that_mislead_are_refused(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(SandboxError) as caught:
            tokens_files.read(str(tmp_path))
        return caught.value.message

    (tmp_path / "worker").write_text(OUTSIDE)
    (tmp_path / "worker.token").write_text(OUTSIDE[::-1])
    assert "too" in refused()
    (tmp_path / "worker.token").unlink()
    (tmp_path / "worker").chmod(0o666)
    assert "others can change it" in refused()
    (tmp_path / "worker").chmod(0o444)
    assert tokens_files.read(str(tmp_path)) == {"worker": OUTSIDE}
    (tmp_path / "dir").mkdir()
    assert "regular" in refused()
