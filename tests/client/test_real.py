"""Both clients against a real server."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.client import (
    ApiError,
    CommandFailed,
    NotConfigured,
    Unreachable,
)
from conftest import As
from kernel.conftest import eventually
from service.conftest import Serve, Team

from .conftest import Connect, Cutter

pytestmark = [pytest.mark.kernel, pytest.mark.network]
Cut = Callable[[str, Callable[[int, int], bool]], Cutter]


@pytest.fixture
def client(one: Team, connect: Connect) -> Any:
    return connect(one.served.url, one.tokens["a"])


@pytest.fixture
def box(client: Any) -> Any:
    with client.sandboxes.create(metadata={"test": "client"}) as made:
        yield made


# --- commands


def test_a_command_in_a_sandbox_of_its_own(client: Any) -> None:
    result = client.run("cat; pwd; echo oh >&2; exit 3", input=b"in\xff\n", env={"A": "b"})
    assert (result.code, result.out, result.stderr) == (3, b"in\xff\n/workspace\n", "oh\n")
    assert result.duration > 0
    assert not result.ok
    assert [one.id for one in client.sandboxes.list() if one.id == result.sandbox_id] == []


def test_a_sandbox_keeps_its_files_between_commands(client: Any, box: Any) -> None:
    box.exec(["sh", "-c", "echo $A > file"], env={"A": "kept"}, check=True)
    assert box.exec("cat /workspace/file").stdout == "kept\n"
    assert [one.state for one in box.executions()] == ["Exited", "Exited"]
    assert box.refresh().state == "Running"
    assert {"memory", "disk"} <= set(box.usage())


def test_ends_are_told_apart(box: Any) -> None:
    slow = box.exec("sleep 30", timeout=0.5)
    assert (slow.timed_out, slow.ok) == (True, False)
    assert box.exec("kill -9 $$").code == 137
    assert box.exec(["no-such-program"]).code == 127
    with pytest.raises(CommandFailed) as caught:
        box.exec("echo why >&2; exit 4", check=True)
    assert (caught.value.result.code, caught.value.exit_code) == (4, 4)
    assert "why" in caught.value.hint


def test_output_comes_while_the_command_runs(box: Any) -> None:
    seen: list[tuple[str, bytes]] = []
    # It goes on only after its first line has been seen.
    with box.stream("echo one; read x; echo two; echo three >&2", keep_input=True) as stream:
        for event in stream:
            seen.append((event.kind, event.data))
            if event.data == b"one\n":
                stream.execution.write(b"go\n", eof=True)
    kinds = [kind for kind, _ in seen]
    assert kinds[0] == "start"
    assert kinds[-1] == "exit"
    assert sorted(data for _, data in seen if data) == [b"one\n", b"three\n", b"two\n"]
    assert stream.result.code == 0


def test_a_command_that_nobody_waits_for(client: Any, box: Any) -> None:
    started = box.start("trap 'echo caught; exit 5' TERM; echo begun; while :; do sleep 0.05; done")
    for event in started.follow():
        if event.data == b"begun\n":
            started.signal("SIGTERM")
    result = client.execution(started.id).wait()
    assert (result.code, result.stdout) == (5, "begun\ncaught\n")
    assert b"".join(event.data for event in started.logs()) == b"begun\ncaught\n"
    assert started.status().stdout == "begun\ncaught\n"
    endless = box.start("sleep 1000")
    assert endless.status().running
    assert endless.kill().code == 137
    assert not endless.status().running


def test_much_output_comes_as_it_was(box: Any) -> None:
    result = box.exec("seq 1 300000")
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 300_001))
    assert not result.truncated
    logged = b"".join(e.data for e in box._client.execution(result.id).logs())
    assert logged == result.out


def test_a_terminal(box: Any) -> None:
    started = box.start("stty size; read line; stty size; echo got $line; exit 6", tty=(7, 33))
    with started.terminal() as terminal:
        out = b""
        while b"7 33\r\n" not in out:
            out += terminal.read()
        terminal.resize(9, 44)
        terminal.write(b"typed\r")
        while (more := terminal.read()) is not None:
            out += more
    assert b"9 44\r\ngot typed\r\n" in out
    assert terminal.result.code == 6


def test_what_a_terminal_cannot_do_is_told(box: Any) -> None:
    started = box.start("sleep 50")
    with started.terminal() as terminal:
        terminal.resize(3, 4)
        while not terminal.problems:
            assert terminal.read() is not None
    assert "no terminal" in terminal.problems[-1]
    started.kill()


# --- sandboxes


def test_a_sandbox_is_found_again(client: Any, box: Any) -> None:
    label = secrets.token_hex(8)
    assert box.set_metadata({"mark": label, "test": None}).metadata == {"mark": label}
    found = list(client.sandboxes.list(metadata={"mark": label}, state="Running"))
    assert [one.id for one in found] == [box.id]
    assert client.sandboxes.get(box.id).info.metadata == {"mark": label}
    before = box.info.expires_at
    assert box.renew(5000).expires_at > before


def test_all_parts_of_a_long_list_come(client: Any) -> None:
    label = secrets.token_hex(8)
    made = [client.sandboxes.create(metadata={"many": label}) for _ in range(7)]
    from agent_sandbox.client import calls

    pages = client.pages(lambda after: calls.sandboxes(None, {"many": label}, after, 3))
    assert [info.id for info in pages] == [one.id for one in made]
    for one in made:
        one.delete()
    made[0].delete()
    assert list(client.sandboxes.list(metadata={"many": label})) == []


def test_what_would_be_refused_is_told_before(client: Any) -> None:
    assert client.check(network="off")["allowed"] is True
    refused = client.check(memory="64T")
    assert (refused["allowed"], refused["refusals"][0]["field"]) == (False, "resources.memory")
    with pytest.raises(ApiError) as caught:
        client.sandboxes.create(memory="64T")
    assert (caught.value.status, caught.value.code) == (422, "LIMIT_EXCEEDED")
    assert caught.value.request_id.startswith("req_")
    assert client.whoami()["agent"] == "agent-a"
    assert client.policy()["limits"]
    assert client.request("GET", "/healthz") == {"status": "ok"}


def test_another_agents_sandbox_is_not_there(one: Team, connect: Connect, box: Any) -> None:
    other = connect(one.served.url, one.tokens["b"])
    acts: tuple[Callable[[], Any], ...] = (
        lambda: other.sandboxes.get(box.id),
        lambda: other.request("POST", f"/v1/sandboxes/{box.id}/exec", {"cmd": ["true"]}),
        lambda: other.execution(box.start("true").id).status(),
    )
    for act in acts:
        with pytest.raises(ApiError) as caught:
            act()
        assert (caught.value.status, caught.value.code) == (404, "NOT_FOUND")
    assert box.id not in [found.id for found in other.sandboxes.list()]


def test_lines_of_the_audit(one: Team, connect: Connect, client: Any) -> None:
    client.run("true")
    admin = connect(one.served.url, one.tokens["admin"])
    lines = list(admin.audit(agent="agent-a", action="exec.start", limit=5))
    assert lines
    assert all(line["actor"]["agent"] == "agent-a" for line in lines)
    with pytest.raises(ApiError, match="SCOPE"):
        list(client.audit())


# --- files


def test_files_in_and_out(box: Any, tmp_path: Path) -> None:
    files = box.files
    data = os.urandom(3_000_000)
    files.write("deep/er/data", data, mode=0o600)
    assert files.read("/workspace/deep/er/data") == data
    files.write("text", "ü\n")
    assert files.read_text("text") == "ü\n"
    assert (files.stat("deep/er/data").size, files.stat("deep/er/data").mode) == (3_000_000, 0o600)
    files.make("empty/dir")
    listed = files.list("/workspace", depth=5)
    names = {(entry.path, entry.kind) for entry in listed.entries}
    assert ("/workspace/empty/dir", "directory") in names
    assert ("/workspace/deep/er/data", "file") in names
    assert not listed.truncated
    files.download("deep/er/data", tmp_path / "data")
    assert (tmp_path / "data").read_bytes() == data
    (tmp_path / "data").chmod(0o755)
    files.upload(tmp_path / "data", "again")
    assert (files.read("again"), files.stat("again").mode) == (data, 0o755)
    files.delete("deep", recursive=True)
    with pytest.raises(ApiError) as caught:
        files.read("deep/er/data")
    assert caught.value.status == 404
    with pytest.raises(ApiError):
        files.download("nothing", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_trees_in_and_out(box: Any, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a").write_text("a")
    (source / "link").symlink_to("sub/a")
    box.files.make("tree")
    box.files.upload_tree(source, "/workspace/tree")
    assert box.exec("cat tree/link; ln -s /etc/passwd tree/evil; mkfifo tree/pipe").stdout == "a"
    found = box.files.download_tree("/workspace/tree", tmp_path / "out")
    assert (tmp_path / "out" / "link").read_text() == "a"
    assert "evil" in found.skipped
    assert not (tmp_path / "out" / "evil").is_symlink()


def test_cannot_read_through_a_link_of_the_sandbox(box: Any) -> None:
    box.exec("ln -s /etc/hostname name; ln -s / root", check=True)
    for path in ("name", "root/etc/hostname", "../../etc/hostname", "/etc/hostname"):
        with pytest.raises(ApiError) as caught:
            box.files.read(path)
        assert caught.value.status < 500


def test_a_refused_upload_is_told(one: Team, connect: Connect, serve: Serve, user: As) -> None:
    served = serve(user, env={"MAX_UPLOAD_BYTES": "1M"})
    client = connect(served.url, served.token("a"))
    with client.sandboxes.create() as made:
        with pytest.raises(ApiError) as caught:
            made.files.write("large", bytes(3_000_000))
        assert caught.value.status == 413


# --- connections that break


def test_cannot_lose_or_double_output_by_cutting_connections(
    one: Team, connect: Connect, cutter: Cut, box: Any
) -> None:
    # The first connection carries the question for the sandbox and the start of the command, too.
    relay = cutter(
        one.served.url, lambda n, sent: n < 12 and sent > (3500 if n == 1 else 900 + n * 97)
    )
    client = connect(relay.url, one.tokens["a"])
    script = (
        "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo line $i; echo err $i >&2; sleep 0.002; done"
    )
    result = client.sandboxes.get(box.id).exec(script, check=True)
    assert result.stdout == "".join(f"line {n}\n" for n in range(1, 401))
    assert result.stderr == "".join(f"err {n}\n" for n in range(1, 401))
    # A control: they did break, within the stream.
    assert relay.broken >= 5
    assert len(list(box.executions())) == 1


def test_a_dropped_answer_of_create_makes_one_sandbox(
    one: Team, connect: Connect, cutter: Cut, client: Any
) -> None:
    label = secrets.token_hex(8)
    relay = cutter(one.served.url, lambda number, _: number <= 2)
    made = connect(relay.url, one.tokens["a"]).sandboxes.create(metadata={"drop": label})
    assert relay.broken == 2
    found = [one.id for one in client.sandboxes.list(metadata={"drop": label})]
    assert found == [made.id]
    made.delete()


def test_without_a_key_the_same_makes_two(
    one: Team, connect: Connect, cutter: Cut, client: Any
) -> None:
    """A control: what the key is for."""
    label = secrets.token_hex(8)
    relay = cutter(one.served.url, lambda number, _: number <= 1)
    careless = connect(relay.url, one.tokens["a"])
    body = {"metadata": {"drop": label}}
    with pytest.raises(Unreachable, match="broke"):
        careless.request("POST", "/v1/sandboxes", body)
    careless.request("POST", "/v1/sandboxes", body)
    found = list(client.sandboxes.list(metadata={"drop": label}))
    assert len(found) == 2
    for one_of_them in found:
        one_of_them.delete()


def test_a_dropped_answer_of_run_runs_once(
    one: Team, connect: Connect, cutter: Cut, client: Any
) -> None:
    mark = secrets.token_hex(8)
    # The head and the first event are lost, too.
    relay = cutter(one.served.url, lambda number, _: number <= 2)
    result = connect(relay.url, one.tokens["a"]).run(["echo", mark])
    assert (result.code, result.stdout) == (0, f"{mark}\n")
    assert relay.broken == 2
    ran = [found for found in client.executions() if mark in found.raw["command"]]
    assert [found.id for found in ran] == [result.id]


def test_a_dropped_answer_of_exec_is_an_error_and_ran_once(
    one: Team, connect: Connect, cutter: Cut, box: Any
) -> None:
    armed = threading.Event()
    relay = cutter(one.served.url, lambda *_: armed.is_set())
    there = connect(relay.url, one.tokens["a"]).sandboxes.get(box.id)
    armed.set()
    with pytest.raises(Unreachable) as caught:
        there.exec("echo x >> /workspace/count")
    assert "before you" in caught.value.hint
    (started,) = box.executions()
    box._client.execution(started.id).wait()
    assert box.files.read_text("count") == "x\n"


# --- other ways in


def test_the_owner_needs_no_token_at_the_socket(team: Team, connect: Connect) -> None:
    if team.served.identity.uid != os.geteuid() and os.geteuid() != 0:
        pytest.skip("another user's socket")
    client = connect(f"unix://{team.served.socket}")
    assert client.whoami()["agent"] == "owner"
    assert client.run("echo hi").stdout == "hi\n"


def test_wrong_and_missing_tokens(one: Team, connect: Connect) -> None:
    wrong = one.tokens["a"][:-5] + "AAAAA"
    with pytest.raises(ApiError) as caught:
        connect(one.served.url, wrong).whoami()
    assert (caught.value.status, "token argument" in caught.value.hint) == (401, True)
    assert wrong not in f"{caught.value!r}{caught.value}{caught.value.hint}"
    with pytest.raises(ApiError) as caught:
        connect(one.served.url).run("true")
    assert (caught.value.status, "SANDBOX_TOKEN" in caught.value.hint) == (401, True)


def test_http_where_https_was_said(one: Team, connect: Connect) -> None:
    with pytest.raises(Unreachable, match="TLS") as caught:
        connect(one.served.url.replace("http:", "https:"), one.tokens["a"], retries=0).whoami()
    assert "is it http?" in caught.value.hint


def authority(directory: Path) -> tuple[Path, Path, Path]:
    """A private authority, and a certificate of it for 127.0.0.1: three PEM files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = dt.datetime.now(dt.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in ("ca", "box")]
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))

    def certificate(which: int) -> x509.Certificate:
        made = (
            x509.CertificateBuilder().subject_name(names[which]).issuer_name(names[0])
            .public_key(keys[which].public_key()).serial_number(which + 1)
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=which == 0, path_length=None), critical=True)
        )  # fmt: skip
        if which:
            made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return made.sign(keys[0], hashes.SHA256())

    pem = serialization.Encoding.PEM
    paths = directory / "ca.pem", directory / "cert.pem", directory / "key.pem"
    paths[0].write_bytes(certificate(0).public_bytes(pem))
    paths[1].write_bytes(certificate(1).public_bytes(pem))
    paths[2].write_bytes(
        keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_tls_with_a_private_authority(serve: Serve, user: As, connect: Connect) -> None:
    place = user.project()
    ca, certificate, key = authority(place)
    user.own(place)
    served = serve(user, "--tls-cert", str(certificate), "--tls-key", str(key))
    token = served.token("a")
    assert served.url.startswith("https://")
    env = {"SANDBOX_API": served.url, "SANDBOX_TOKEN": token, "SANDBOX_CA": str(ca)}
    client = connect(environ=env)
    assert client.run("seq 1 20000").stdout.endswith("\n20000\n")
    with client.sandboxes.create() as made:
        made.files.write("a", bytes(1_000_000))
        assert made.files.read("a") == bytes(1_000_000)
        started = made.start("echo up; read x; exit 2", tty=(5, 5))
        with started.terminal() as terminal:
            out = b""
            while b"up" not in out:
                out += terminal.read()
            terminal.write(b"\r")
            while terminal.read() is not None:
                pass
        assert terminal.result.code == 2
    # A control: without it, nobody is trusted, and the token is not sent.
    with pytest.raises(Unreachable, match="not trusted") as caught:
        connect(served.url, token).whoami()
    assert "SANDBOX_CA" in caught.value.hint
    # Lines of requests before it may come late; there has never been one like it.
    assert not any(line.get("route") == "/v1/whoami" for line in served.log)
    client.whoami()
    assert eventually(lambda: any(line.get("route") == "/v1/whoami" for line in served.log))
    # Nor for another name.
    with pytest.raises(Unreachable, match="not trusted"):
        connect(served.url.replace("127.0.0.1", "localhost"), token, ca_file=str(ca)).whoami()
    with pytest.raises(NotConfigured, match="certificates in"):
        connect(served.url, token, ca_file=str(place / "none.pem"))


def test_one_client_serves_many_threads(one: Team) -> None:
    from agent_sandbox.client import Client

    with Client(one.served.url, one.tokens["a"], environ={}) as client:
        found: dict[int, str] = {}

        def work(number: int) -> None:
            for _ in range(3):
                found[number] = client.run(f"echo {number}").stdout

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == {number: f"{number}\n" for number in range(8)}
