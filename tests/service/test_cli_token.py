"""`sandboxctl token`: prints a token once, and works while the service runs."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest
from tests.conftest import As

from agent_sandbox.cli import completion, ctl
from agent_sandbox.cli import token as verb
from agent_sandbox.service.audit import verify
from agent_sandbox.service.store import Store
from agent_sandbox.service.tokens import Tokens

TOKEN = re.compile(r"sbx_[a-z2-7]{8}_[A-Za-z0-9_-]{43}\n")


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = ctl.main(["token", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def trail(data: Path) -> list[dict[str, object]]:
    text = (data / "audit" / "audit-000001.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_token_is_alone_on_standard_output(runner: As) -> None:
    """For `TOKEN=$(sandboxctl token new worker)`, as root and as a user."""
    data = runner.project() / "data"
    done = runner.sandboxctl("token", "new", "worker-1", "--data", data)
    assert done.returncode == 0, done.stderr
    assert TOKEN.fullmatch(done.stdout)
    key, secret = done.stdout[:12], done.stdout.strip()[13:]
    assert key in done.stderr
    assert "worker-1" in done.stderr
    assert secret not in done.stderr
    for path in (data, *data.rglob("*")):
        status = path.lstat()
        assert stat.S_IMODE(status.st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert status.st_uid == runner.uid
        assert path.is_dir() or secret.encode() not in path.read_bytes()
    listed = runner.sandboxctl("token", "list", "--json", "--data", data).stdout
    assert key in listed
    assert secret not in listed


def test_a_users_default_is_below_its_state_directory(user: As) -> None:
    state = user.project()
    done = user.sandboxctl("token", "new", "w", env={"XDG_STATE_HOME": str(state)})
    assert done.returncode == 0, done.stderr
    assert (state / "agent-sandbox" / "service" / "state.db").exists()
    elsewhere = user.project() / "x"
    done = user.sandboxctl("token", "new", "w", env={"SANDBOX_DATA": str(elsewhere)})
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "state.db").exists()


def test_what_is_asked_for_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    code, out, err = run(
        capsys, "new", "worker", "--scope", "exec", "--scope=files", "--image", "python:*,node:*",
        "--image", "alpine", "--template", "small", "--quota", "MAX_MEMORY=1G", "--quota",
        "max_pids=9", "--expires", "30d", "--uid", "1234", "--data", data,
    )  # fmt: skip
    assert code == 0, err
    store = Store(str(data))
    agent = Tokens(store).check(out.strip())
    info = Tokens(store).list()[0]
    store.close()
    assert agent is not None
    assert agent.scopes == {"exec", "files"}
    assert agent.images == ("python:*", "node:*", "alpine")
    assert agent.templates == ("small",)
    assert agent.quotas == {"max_memory": 1 << 30, "max_pids": 9}
    assert agent.uid == 1234
    assert info.expires is not None
    assert info.expires - info.created == pytest.approx(30 * 86400, abs=5)


def test_it_works_while_the_service_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(tmp_path / "data"))
    tokens = Tokens(store)
    _, out, _ = run(capsys, "new", "worker", "--data", tmp_path / "data")
    assert tokens.check(out.strip()) is not None
    _, again, _ = run(capsys, "rotate", "worker", "--grace", "1h", "--data", tmp_path / "data")
    assert tokens.check(out.strip()) is not None
    assert tokens.check(again.strip()) is not None
    run(capsys, "rotate", "worker", "--data", tmp_path / "data")
    assert tokens.check(out.strip()) is tokens.check(again.strip()) is None
    code, out, err = run(capsys, "revoke", "worker", "--data", tmp_path / "data")
    assert (code, out) == (0, "")
    assert "is revoked" in err
    assert not tokens.any()
    store.close()


def test_each_change_is_in_the_audit_trail_without_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    secrets = [
        run(capsys, *words, "--data", data)[1].strip()
        for words in (("new", "worker"), ("rotate", "worker"), ("revoke", "worker"))
    ]
    found = trail(data)
    assert [record["action"] for record in found] == ["token.new", "token.rotate", "token.revoke"]
    assert all(record["actor"]["agent"] == "owner" for record in found)  # type: ignore[index]
    assert found[0]["target"] == {"type": "token", "id": secrets[0][:12]}
    for secret in secrets[:2]:
        assert secret[13:] not in json.dumps(found)
    assert verify.verify(str(data / "audit")) == ()


def test_no_token_without_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written down is not done: the token that was made is dead."""
    data = tmp_path / "data"

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verb.Work, "note", broken)
    with pytest.raises(OSError, match="No space"):
        run(capsys, "new", "worker", "--data", data)
    assert capsys.readouterr().out == ""
    store = Store(str(data))
    assert not Tokens(store).any()
    store.close()


def test_tokens_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    _, token, _ = run(capsys, "new", "worker", "--expires", "1d", "--data", data)
    run(capsys, "new", "boss", "--scope", "admin", "--data", data)
    run(capsys, "revoke", "boss", "--data", data)
    code, out, _ = run(capsys, "list", "--data", data)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["ID", "NAME", "STATE", "SCOPES", "EXPIRES"]
    assert rows[1][:4] == [token[:12], "worker", "live", "sandbox:create,exec,files"]
    assert rows[2][1:] == ["boss", "revoked", "admin", "never"]
    _, out, _ = run(capsys, "list", "--json", "--data", data)
    found = json.loads(out)
    assert found["version"] == 1
    assert [one["state"] for one in found["tokens"]] == ["live", "revoked"]
    assert found["tokens"][0]["expiresAt"].endswith("Z")


@pytest.mark.parametrize(
    "words",
    [
        (), ("new",), ("new", "a", "b"), ("list", "x"), ("burn", "x"), ("new", "a", "--scope"),
        ("new", "a", "--scope", "root"), ("new", "a", "--quota", "MAX_MEMORY"),
        ("new", "a", "--quota", "MAX_SANDBOXES=1"), ("new", "a", "--quota", "X=1"),
        ("new", "a", "--expires", "soon"), ("new", "a", "--uid", "root"), ("new", "a", "--uid=-1"),
        ("new", "a", "--admin"), ("new", "owner"), ("new", "../a"), ("new", "a", "--image", "é"),
        ("revoke", "nobody"), ("rotate", "nobody"), ("list",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_mistakes_are_told_and_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    data = tmp_path / "data"
    code, out, err = run(capsys, *words, "--data", data)
    assert code == 125
    assert out == ""
    assert err.startswith("sandboxctl: error: ")
    if data.exists():
        store = Store(str(data))
        assert Tokens(store).list() == ()
        store.close()


def test_a_name_is_taken_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "new", "a", "--data", tmp_path / "data")
    code, out, err = run(capsys, "new", "a", "--data", tmp_path / "data")
    assert (code, out) == (125, "")
    assert "sandboxctl token rotate a" in err


@pytest.mark.parametrize("name", ["token", "audit"])
def test_the_verbs_are_completed_as_they_are(name: str) -> None:
    from agent_sandbox.cli import audit

    module = {"token": verb, "audit": audit}[name]
    actions, flags = completion.ACTIONS[name]
    assert set(actions) == set(module.ACTIONS)
    known = {
        flag for action in module.ACTIONS.values() for flag in (*action.switches, *action.values)
    }
    assert set(flags) == {flag for flag in known if flag.startswith("--")} | {"--data"}
    usage = next(one.usage + one.help for one in ctl.VERBS if one.name == name)
    for word in (*actions, *flags):
        assert word in usage or word == "--output"
