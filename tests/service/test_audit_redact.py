"""What the audit trail must not learn."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.service.audit import Audit, redact

from .audit_trails import AGENT, logs

S = "hunter2-S3cr3t"
X = redact.HIDDEN
TOKEN = "sbx_abcdefgh_" + "Aa1-_" * 8 + "xyz"
KEY = "AKIA" + "IOSFODNN7EXAMPLE"
LONG = "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5"

# Command, and what stays of it.
COMMANDS: tuple[tuple[list[str], list[str]], ...] = (
    (["tool", "--password", S], ["tool", "--password", X]),
    (["tool", f"--password={S}"], ["tool", f"--password={X}"]),
    (["tool", "-password", S], ["tool", "-password", X]),
    (["tool", "--db-passwd", S, "next"], ["tool", "--db-passwd", X, "next"]),
    (["tool", "--api-key", S], ["tool", "--api-key", X]),
    (["tool", "--apiKey", S], ["tool", "--apiKey", X]),
    (["tool", "--client_secret", S], ["tool", "--client_secret", X]),
    (["tool", "--token", "", S], ["tool", "--token", "", X]),
    (["env", f"GITHUB_TOKEN={S}", "gh"], ["env", f"GITHUB_TOKEN={X}", "gh"]),
    (["env", f"PGPASSWORD={S}"], ["env", f"PGPASSWORD={X}"]),
    (["env", f"MYSQL_PWD={S}"], ["env", f"MYSQL_PWD={X}"]),
    (["env", f"AWS_SECRET_ACCESS_KEY={S}"], ["env", f"AWS_SECRET_ACCESS_KEY={X}"]),
    (["docker", "run", "-e", f"DB_PASSWORD={S}", "-p", "80:80", "x"],
     ["docker", "run", "-e", f"DB_PASSWORD={X}", "-p", "80:80", "x"]),
    (["docker", "login", "-u", "me", "-p", S], ["docker", "login", "-u", "me", "-p", X]),
    (["mysql", "-uroot", f"-p{S}", "db"], ["mysql", "-uroot", f"-p{X}", "db"]),
    (["/usr/bin/mysql", f"-p{S}"], ["/usr/bin/mysql", f"-p{X}"]),
    (["sudo", "sshpass", "-p", S, "ssh", "h"], ["sudo", "sshpass", "-p", X, "ssh", "h"]),
    (["curl", "-u", f"me:{S}", "https://h/"], ["curl", "-u", X, "https://h/"]),
    (["curl", "-H", f"Authorization: Bearer {S}"], ["curl", "-H", f"Authorization: {X}"]),
    (["curl", "-H", f"X-API-Key: {S}"], ["curl", "-H", f"X-API-Key: {X}"]),
    (["curl", "-H", f"Cookie: a={S}; b={S}"], ["curl", "-H", f"Cookie: {X}"]),
    (["curl", f"https://h/?token={S}&page=2"], ["curl", f"https://h/?token={X}&page=2"]),
    (["curl", f"https://me:{S}@h/x"], ["curl", f"https://{X}@h/x"]),
    (["git", "clone", f"https://{LONG}@github.com/a/b"],
     ["git", "clone", f"https://{X}@github.com/a/b"]),
    (["psql", f"postgresql://u:{S}@h:5432/db"], ["psql", f"postgresql://{X}@h:5432/db"]),
    (["redis-cli", "-a", S, "ping"], ["redis-cli", "-a", X, "ping"]),
    (["openssl", "enc", "-k", S], ["openssl", "enc", "-k", X]),
    (["x", TOKEN], ["x", f"sbx_abcdefgh_{X}"]),
    (["x", KEY], ["x", X]),
    (["x", "ghp_" + "a1B2" * 9], ["x", X]),
    (["x", "github_pat_" + "a1B2" * 9], ["x", X]),
    (["x", "glpat-" + "a1B2" * 5], ["x", X]),
    (["x", "xoxb-" + "123456789012-abc"], ["x", X]),
    (["x", "sk-ant-api03-" + "a1B2" * 9], ["x", X]),
    (["x", "sk_live_" + "a1B2" * 6], ["x", X]),
    (["x", "AIza" + "a1B2" * 8 + "abc"], ["x", X]),
    (["x", "npm_" + "a1B2" * 9], ["x", X]),
    (["x", "pypi-AgEIcHlwaS5vcmc" + "a1B2" * 4], ["x", X]),
    (["x", "hf_" + "a1B2" * 8], ["x", X]),
    (["x", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln"], ["x", X]),
    (["x", "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----"], ["x", X]),
    (["sh", "-c", f"curl -u me:{S} https://h; export TOKEN='{S} {S}'"],
     ["sh", "-c", f"curl -u {X} https://h; export TOKEN={X}"]),
    (["sh", "-c", f"mysql -p{S} < x"], ["sh", "-c", f"mysql -p{X} < x"]),
    (["sh", "-c", f'tool --password "{S} {S}" next'], ["sh", "-c", f"tool --password {X} next"]),
    (["sh", "-c", f"echo '{{\"password\": \"{S}\", \"user\": \"me\"}}'"],
     ["sh", "-c", f"echo '{{\"password\": {X}, \"user\": \"me\"}}'"]),
    (["x", f"session={LONG}"], ["x", f"session={X}"]),
    (["x", f"signing key: {LONG}"], ["x", f"signing key: {X}"]),
)  # fmt: skip
# What must stay, or the trail would be of no use.
PLAIN: tuple[list[str], ...] = (
    ["python3", "-c", "print(1)"], ["git", "commit", "--author", "Me", "-m", "add tokenizer"],
    ["ls", "-la", "/workspace/src"], ["llm", "--max-tokens", "100"],
    ["docker", "run", "-p", "80:80"],
    ["pip", "install", "requests==2.31"], ["curl", "https://example.com/a?b=c"],
    ["make", "-j4", "KEY=value"], ["ssh-keygen", "-t", "ed25519"], ["mkdir", "-p", "a/b"],
    ["git", "clone", "ssh://git@host/x"], ["sort", "--key=2"], ["cp", "-p", "a", "b"],
    ["python", "-m", "pytest", "-p", "no:cacheprovider"], ["true"], [],
)  # fmt: skip


@pytest.mark.parametrize(("command", "stays"), COMMANDS, ids=lambda value: " ".join(value)[:40])
def test_secrets_in_commands_are_hidden(command: list[str], stays: list[str]) -> None:
    assert redact.argv(command) == stays


@pytest.mark.parametrize(("command", "stays"), COMMANDS, ids=lambda value: " ".join(value)[:40])
def test_what_is_hidden_stays_hidden(command: list[str], stays: list[str]) -> None:
    """Twice is as good as once, and a shell's string as good as words."""
    assert redact.argv(stays) == stays
    assert S not in redact.text(" ".join(command))
    assert S not in redact.text("sh -c " + " ".join(command) + " && true")


@pytest.mark.parametrize("command", PLAIN, ids=lambda value: " ".join(value)[:40])
def test_what_is_no_secret_stays(command: list[str]) -> None:
    assert redact.argv(command) == command
    assert redact.text(" ".join(command)) == " ".join(command)


@given(st.text(max_size=300))
def test_any_text_can_be_cleaned(text: str) -> None:
    assert isinstance(redact.text(text), str)
    assert len(redact.argv([text, text])) == 2


@given(st.from_regex(r"sbx_[a-z2-7]{8}_[A-Za-z0-9_-]{43}", fullmatch=True), st.text(max_size=30))
def test_a_token_of_ours_is_never_written(token: str, around: str) -> None:
    for text in (f"{around} {token} {around}", f"'{token}'", f"x={token}", f"{token}{around}"):
        assert token[13:] not in redact.text(text)
        assert token[13:] not in str(redact.argv(["x", text]))
        assert token[13:] not in str(redact.request({"a": {"b": [1, text]}, "c": text}))


def test_contents_and_values_of_variables_are_left_out() -> None:
    found = redact.request({
        "cmd": ["x"], "env": {"B": S, "A": S}, "stdin": S, "files": [{"path": "a", "content": S}],
        "body": S, "headers": {"x": S}, "token": S, "clientSecret": S, "contentBase64": S,
        "nested": {"env": [f"A={S}"], "data": S, "ok": 1}, "status": 200,
    })  # fmt: skip
    assert found == {
        "cmd": ["x"], "env": ["A", "B"], "status": 200,
        "nested": {"env": ["A"], "ok": 1, "redacted": ["data", "env"]},
        "redacted": ["body", "clientSecret", "contentBase64", "env", "files", "headers", "stdin",
                     "token"],
    }  # fmt: skip


def test_a_cut_leaves_no_half_of_a_secret() -> None:
    """A secret that lies across the end of what is kept."""
    for at in range(redact.MOST_TEXT - 120, redact.MOST_TEXT + 5):
        for secret in (TOKEN, f"password='{S * 10}'", f"Authorization: Bearer {LONG}"):
            text = redact.text("x" * at + " " + secret + " y" * 2000)
            assert S not in text
            assert LONG not in text
            assert TOKEN[13:25] not in text
            assert len(text) < redact.MOST_TEXT + 100


def test_long_commands_are_cut_with_a_note() -> None:
    found = redact.argv(["x"] * 1000)
    assert found[-1] == "[744 more words]"
    assert len(redact.argv(["y" * 10**6] * 5)) <= 5
    assert redact.text("z" * 5000).endswith("[5000 characters]")


HOSTILE = (
    "token", "a", "x-", "sk-", "eyJ-", "-----BEGIN ", "password=", "--password ", "a://b:", "a://",
    "key=", "key", "Bearer ", "'\"", "x-a-key: ", "sbx_", "SG.", " ", "= ", "token\t", "-p ",
    "mysql -p ", 'token"', "http://a:b@", "token ", "keykey:", "--token--", "\\", "secret='",
)  # fmt: skip


@pytest.mark.parametrize("part", HOSTILE)
def test_no_text_takes_long(part: str) -> None:
    """Agents choose it, and the service waits: twice the text may cost twice the time, not more."""

    def cost(size: int) -> float:
        text = (part * size)[:size]
        best = 1.0
        for _ in range(3):
            start = time.process_time()
            redact._clean(text)
            best = min(best, time.process_time() - start)
        return best

    assert cost(redact.MOST_TEXT + redact.MARGIN) < 0.05
    assert cost(80_000) < 0.002 + 40 * cost(10_000)


def test_no_secret_reaches_the_file(tmp_path: Path) -> None:
    """By any argument of a line."""
    audit = Audit(str(tmp_path / "audit"))
    text = f"--password {S} {TOKEN}"
    audit.write(
        AGENT, "exec.start", target=text, reason=text, request_id="req_1",
        request={"cmd": ["x", "--password", S, TOKEN], "command": text, "path": f"/x?token={S}",
                 "env": {"A": S}, "stdin": S},
        result={"error": text}, rule="x",
    )  # fmt: skip
    kept = logs(tmp_path / "audit")[0].read_text()
    assert S not in kept
    assert TOKEN[13:] not in kept
    # The control: the rest is there.
    assert "sbx_abcdefgh" in kept
    assert "req_1" in kept
