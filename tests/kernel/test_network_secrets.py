"""Secrets that stay outside, end to end: the server gets the value, and nobody inside does."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.policy.credentials import CA_VARIABLES
from conftest import must_work
from kernel.conftest import World, end_group, eventually

if TYPE_CHECKING:
    from kernel.internet import Internet

pytestmark = [pytest.mark.kernel, pytest.mark.network]

REAL = "sk-ant-api03-RealRealReal0123456789RealRealReal"
MARK = "marker-in-the-environment-0123456789"
CURL = "curl -sS -m 10 "


def digest(text: str) -> str:
    """What the server says about a header."""
    return hashlib.sha256(text.encode()).hexdigest()


def config(net: Internet, *secrets: str, more: str = "") -> str:
    """The user's file: the test's servers are trusted, as a company's own would be."""
    head = f'{more}\n[network]\nmode = "allow"\nca = "{net.base}/public.pem"\n'
    return head + "".join(f"[[secret]]\n{text}\n" for text in secrets)


def secret(name: str = "site", host: str = "site.example", more: str = "") -> str:
    """An entry; its value is in a file."""
    return (
        f'name = "{name}"\nhost = "{host}"\nheader = "x-api-key"\nvariable = "{name.upper()}_KEY"\n'
        + (more or 'file = "~/.secrets/key"')
    )


BASED = 'file = "~/.secrets/key"\nbase-url = "SITE_URL"'
ALLOW = ("--allow", "site.example", "--allow", "other.example", "--allow", "www.site.example")


@pytest.fixture
def keeper(world: World) -> World:
    """A world with a value in a file, and the library that makes certificates."""
    world.write("~/.secrets/key", REAL + "\n", mode=0o600)
    give_library(world)
    return world


def give_library(world: World) -> None:
    """Put the library of the tests' own interpreter where an installer would: beside the package."""
    cryptography = pytest.importorskip("cryptography")
    place = Path(cryptography.__file__).parents[1]
    for name in ("cryptography", "cffi", *(p.name for p in place.glob("_cffi_backend*.so"))):
        target = world.runner.source / name
        if target.exists():
            continue
        if (place / name).is_dir():
            shutil.copytree(place / name, target)
        else:
            shutil.copy(place / name, target)


# --- it works


def test_a_base_url_leads_to_the_host_with_the_value(net: Internet, keeper: World) -> None:
    """Plain HTTP inside, TLS outside; the server's certificate is checked."""
    keeper.global_config(config(net, secret(more=BASED + '\nbase-path = "/"')))
    script = f'echo $SITE_URL; {CURL} -H "x-api-key: $SITE_KEY" "${{SITE_URL}}key"; {CURL} "${{SITE_URL}}x"'
    done = net.sh(keeper, script, *ALLOW)
    where, key, page = done.stdout.splitlines()
    assert where == "http://127.0.0.1:3129/", done.stderr
    assert key == digest(REAL)
    assert page.startswith("site.example at ")
    assert done.stderr == ""


CLIENTS = {
    "curl": CURL + '-H "x-api-key: $SITE_KEY" https://site.example/key',
    "curl without proxy variables": 'env -u HTTPS_PROXY -u https_proxy -u ALL_PROXY -u all_proxy curl -sS -m 10 -H "x-api-key: $SITE_KEY" https://site.example/key',
    "python": 'python3 -c "import os, urllib.request as u; print(u.urlopen(u.Request(\'https://site.example/key\', headers={\'x-api-key\': os.environ[\'SITE_KEY\']})).read().decode())"',
    "node": "node -e \"fetch('https://site.example/key', {headers: {'x-api-key': process.env.SITE_KEY}}).then(r => r.text()).then(console.log)\"",
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_need_no_setting_for_an_opened_host(
    net: Internet, keeper: World, client: str
) -> None:
    """The variables name the run's own certificates."""
    if client == "node":
        must_work(shutil.which("node", path="/usr/bin:/usr/local/bin"), "needs node")
    keeper.global_config(config(net, secret()))
    done = net.sh(keeper, CLIENTS[client], *ALLOW)
    assert done.stdout.strip() == digest(REAL), done.stderr


@pytest.mark.parametrize("kind", ["env", "file", "command"])
def test_a_value_comes_from_the_environment_a_file_or_a_program(
    net: Internet, keeper: World, kind: str
) -> None:
    """All are read outside."""
    origin = {
        "env": 'env = "HOST_KEY"', "file": 'file = "~/.secrets/key"',
        "command": f'command = ["cat", "{keeper.home}/.secrets/key"]',
    }[kind]  # fmt: skip
    keeper.global_config(config(net, secret(more=origin + '\nbase-url = "SITE_URL"')))
    script = f'{CURL} -H "x-api-key: $SITE_KEY" $SITE_URL/key; echo "[$HOST_KEY]"'
    argv = ["env", f"HOST_KEY={REAL}", *keeper.argv(*ALLOW, "sh", "-c", script)]
    done = net.run(keeper, *argv)
    assert done.stdout.splitlines() == [digest(REAL), "[]"], done.stderr


def test_a_password_of_git_or_curl_is_replaced_too(net: Internet, keeper: World) -> None:
    """Basic authentication is base64; the value is put inside."""
    entry = secret().replace("x-api-key", "Authorization")
    keeper.global_config(config(net, entry))
    done = net.sh(keeper, f"{CURL} -u me:$SITE_KEY https://site.example/key", *ALLOW)
    assert done.stdout.strip() == digest("Basic " + b64encode(f"me:{REAL}".encode()).decode())


def test_a_library_gives_secrets_too(net: Internet, keeper: World) -> None:
    """With the user's own policy files, as the command line reads them."""
    keeper.global_config(config(net, secret()))
    code = (
        "import agent_sandbox as a\n"
        "p = a.Policy(config=True, allow=['site.example'])\n"
        "r = a.Sandbox(p).run(['sh', '-c', 'curl -sS -m 10 -H \"x-api-key: $SITE_KEY\" https://site.example/key'])\n"
        "print(r.stdout.strip(), r.stderr)"
    )
    python = keeper.runner.python
    done = net.run(keeper, "env", f"PYTHONPATH={keeper.runner.source}", python, "-c", code)
    assert done.stdout.split() == [digest(REAL)], done.stderr


# --- and nobody inside has it


SEARCH = r"""
import os, sys
# Given backwards: the search must not find its own arguments.
wanted, found, looked = [w[::-1].encode() for w in sys.argv[1:]] + [os.environ["SITE_KEY"].encode()], set(), 0
def look(path):
    global looked
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 22)
    except OSError:
        return
    looked += 1
    found.update((w.decode(), path) for w in wanted if w in data)
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "comm", "status", "maps", "mountinfo"):
        look(f"/proc/{pid}/{name}")
    for fd in (os.listdir(f"/proc/{pid}/fd") if os.access(f"/proc/{pid}/fd", os.R_OK) else ()):
        try:
            if os.path.isfile(f"/proc/{pid}/fd/{fd}"): look(f"/proc/{pid}/fd/{fd}")
        except OSError: pass
for top in ("/home", "/root", "/srv", "/tmp", "/var/tmp", "/run", "/etc", os.getcwd(), os.environ["HOME"]):
    for folder, _, names in os.walk(top):
        for name in names:
            path = f"{folder}/{name}"
            if os.path.isfile(path): look(path)
print(looked); print(sorted({w for w, _ in found}))
"""


@pytest.mark.parametrize("kind", ["file", "env"])
def test_cannot_find_the_value_inside(net: Internet, keeper: World, kind: str) -> None:
    """Environment, /proc, every file that is shown, with the home and the secret's own place shown."""
    origin = 'env = "HOST_KEY"' if kind == "env" else ""
    entries = (secret(more=origin), secret("based", "www.site.example", (origin or 'file = "~/.secrets/key"') + '\nbase-url = "B_URL"'))  # fmt: skip
    keep = '[env]\nkeep = ["HOST_KEY", "SITE_KEY", "BASED_KEY"]\n'
    keeper.global_config(config(net, *entries) + keep + f'set = {{MARK = "{MARK}"}}\n')
    # After the value was used, in case somebody keeps it then.
    script = f'{CURL} -H "x-api-key: $SITE_KEY" https://site.example/key; python3 search.py {REAL[::-1]} {MARK[::-1]}'
    keeper.write("search.py", SEARCH)
    flags = ("--ro", str(keeper.home), "--ro", str(keeper.home / ".secrets"), *ALLOW)
    given = (f"HOST_KEY={REAL}", f"SITE_KEY={REAL}") if kind == "env" else ("HOST_KEY=x",)
    if kind == "env":
        (keeper.home / ".secrets" / "key").unlink()
    done = net.run(keeper, "env", *given, *keeper.argv(*flags, "sh", "-c", script))
    key, looked, found = done.stdout.splitlines()
    assert key == digest(REAL), done.stderr
    assert int(looked) > 50
    # Control: what is in the environment is found, and so is the placeholder.
    assert MARK in found
    assert "sk-ant-api03-" in found
    assert REAL not in found, done.stdout
    # And without the entries, the same search finds the value in the same places.
    keeper.global_config(keep)
    script = f"SITE_KEY=${{SITE_KEY:-x}} python3 search.py {REAL[::-1]}"
    argv = keeper.argv("--network=public", *flags[:4], "sh", "-c", script)
    assert REAL in net.run(keeper, "env", *given, *argv).stdout


def test_cannot_find_the_value_in_what_is_left_behind(net: Internet, keeper: World) -> None:
    """Messages, report, debug output, state directory, arguments and variables of our processes."""
    keeper.global_config(config(net, secret()) + f'[env]\nset = {{MARK = "{MARK}"}}\n')
    report = keeper.home / "report.json"
    flags = ("--debug", "--report", str(report), "--keep-workspace", *ALLOW)
    script = f'{CURL} -H "x-api-key: $SITE_KEY" https://site.example/key; {CURL} -H "x-api-key: $SITE_KEY" https://other.example/key; echo ready; read line; env > seen'
    process = net.popen(keeper, *keeper.argv(*flags, "sh", "-c", script))
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip()]
        while lines[-1] != "ready":
            lines.append(process.stdout.readline().strip())
        assert lines[0] == digest(REAL)
        seen = processes()
        out, err = process.communicate("go\n", timeout=30)
    finally:
        end_group(process)
    files = [p for top in (keeper.state, report, keeper.project) for p in [top, *top.rglob("*")] if p.is_file()]  # fmt: skip
    texts = {str(p): p.read_bytes() for p in files}
    everything = {**texts, **seen, "stdout": out.encode(), "stderr": err.encode()}
    assert [name for name, data in everything.items() if REAL.encode() in data] == []
    # Control: the same places do hold what is not secret.
    assert MARK.encode() in texts[str(keeper.project / "seen")]
    assert any(b"site.example" in data for name, data in texts.items() if name == str(report))
    assert any(b"proxy/egress.py" in data for data in seen.values())
    assert b"secret site" in everything["stderr"]


def processes() -> dict[str, bytes]:
    """Arguments and variables of every process, as root sees them."""
    found = {}
    for pid in (p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()):
        for name in ("cmdline", "environ"):
            try:
                found[f"/proc/{pid}/{name}"] = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
    return found


def test_cannot_get_the_value_sent_to_another_host(net: Internet, keeper: World) -> None:
    """The same server under other names: it gets the placeholder. Control: its own name."""
    keeper.global_config(config(net, secret()))
    ask = CURL + '-k -H "x-api-key: $SITE_KEY" '
    script = (
        f"{ask} https://other.example/key; {ask} https://www.site.example/key; "
        f"{ask} http://site.example/key; {ask} --connect-to site.example:443:other.example:443 https://site.example/key; "
        f'{ask} -H "Host: other.example" https://site.example/key; {ask} https://site.example/key; printf %s $SITE_KEY'
    )
    done = net.sh(keeper, script, *ALLOW)
    *answers, right, placeholder = done.stdout.splitlines()
    assert right == digest(REAL), done.stderr
    assert digest(REAL) not in answers
    assert answers[:3] == [digest(placeholder)] * 3


def test_cannot_have_the_value_of_a_host_with_a_forged_certificate(
    net: Internet, keeper: World
) -> None:
    """Without `network.ca` the server at that address cannot prove its name. Control: with it."""
    ask = f'{CURL} -w " %{{http_code}}" -H "x-api-key: $SITE_KEY" $SITE_URL/key'
    entry = secret(more=BASED)
    keeper.global_config(config(net, entry).replace(f'ca = "{net.base}/public.pem"', ""))
    done = net.sh(keeper, ask, *ALLOW)
    assert done.stdout.endswith(" 502")
    assert "certificate does not hold" in done.stdout
    keeper.global_config(config(net, entry))
    assert net.sh(keeper, ask, *ALLOW).stdout.split() == [digest(REAL), "200"]


# --- who may ask for it


def test_cannot_name_a_secret_in_a_projects_file_even_a_trusted_one(keeper: World) -> None:
    """It would make us read a file, or run a program, of its choice. Control: the user's own."""
    text = "[[secret]]\n" + secret(more='command = ["touch", "ran"]')
    keeper.project_config(text)
    assert "user-only" in keeper.ctl("trust").stderr or keeper.ctl("trust").returncode != 0
    done = keeper.sandbox("--network=public", "true")
    assert done.returncode == 125
    assert "belongs in your own policy file" in done.stderr
    (keeper.project / ".agent-sandbox.toml").unlink()
    keeper.global_config(text)
    assert "cannot read secret" in keeper.sandbox("--network=public", "true").stderr


def test_a_secret_is_not_read_where_its_host_cannot_be_reached(keeper: World) -> None:
    """No program runs, and nothing is set. Control: with the host allowed it does run."""
    proof = keeper.home / "ran"
    command = f'command = ["sh", "-c", "echo {REAL}; touch {proof}"]\nbase-url = "SITE_URL"'
    keeper.global_config("[[secret]]\n" + secret(more=command))
    for flags in (("--network=off",), ("--allow", "other.example"), ("--network=on",)):
        done = keeper.sh('echo "[$SITE_KEY]"', *flags)
        assert done.stdout == "[]\n", done.stderr
        assert not proof.exists()
    done = keeper.sh('echo "[$SITE_KEY]"', "--allow", "site.example")
    assert re.fullmatch(r"\[sk-ant-api03-\w{30,}\]\n", done.stdout), done.stderr
    assert proof.exists()


def test_the_callers_value_stays_outside_without_a_proxy_too(keeper: World) -> None:
    """Network on: the variable is not passed, and that is said. Control: no secret, and it is."""
    keep = '[env]\nkeep = ["SITE_KEY"]\n'
    keeper.global_config("[[secret]]\n" + secret(more='env = "SITE_KEY"') + "\n" + keep)
    done = keeper.sh('echo "[$SITE_KEY]"', env={"SITE_KEY": REAL})
    assert done.stdout == "[]\n"
    assert "the command gets no SITE_KEY" in done.stderr
    keeper.global_config(keep)
    assert keeper.sh('echo "[$SITE_KEY]"', env={"SITE_KEY": REAL}).stdout == f"[{REAL}]\n"


def test_a_value_in_the_commands_arguments_stops_the_start(keeper: World) -> None:
    """A shell has put it there; the command would have it."""
    keeper.global_config("[[secret]]\n" + secret(more=BASED))
    done = keeper.sandbox("--allow", "site.example", "echo", f"Bearer {REAL}")
    assert done.returncode == 125
    assert "the command's arguments hold it" in done.stderr
    assert REAL not in done.stderr


def test_cannot_plant_the_program_that_prints_a_value(keeper: World) -> None:
    """A program of that name in the project comes first on PATH, and is not run. Control: it would."""
    proof = keeper.home / "planted"
    keeper.write("bin/get-key", f"#!/bin/sh\ntouch {proof}\necho {REAL}\n", mode=0o755)
    path = f"{keeper.project}/bin:{os.environ['PATH']}"
    keeper.global_config("[[secret]]\n" + secret(more='command = ["get-key"]\nbase-url = "U"'))
    done = keeper.sandbox("--allow", "site.example", "true", env={"PATH": path})
    assert done.returncode == 125
    assert "cannot read secret 'site'" in done.stderr
    assert not proof.exists()
    assert keeper.outside("sh", "-c", "get-key", env={"PATH": path}).returncode == 0
    assert proof.exists()


@pytest.mark.parametrize("value", ["short", "two\nlines-of-text", "", "ünïcödë-ünïcödë"])
def test_a_value_that_fits_no_header_stops_the_start_unseen(keeper: World, value: str) -> None:
    """And is not repeated."""
    keeper.write("~/.secrets/key", value, mode=0o600)
    keeper.global_config("[[secret]]\n" + secret(more=BASED))
    done = keeper.sandbox("--allow", "site.example", "true")
    assert done.returncode == 125
    assert "cannot read secret 'site'" in done.stderr
    assert not value or value not in done.stderr


def test_certificates_are_there_only_for_opened_hosts(keeper: World) -> None:
    """A base URL changes no client's certificates."""
    script = "env; ls /run/agent-sandbox"
    keeper.global_config("[[secret]]\n" + secret(more=BASED))
    plain = keeper.sh(script, "--allow", "site.example").stdout
    keeper.global_config("[[secret]]\n" + secret())
    opened = keeper.sh(script, "--allow", "site.example").stdout
    assert "ca.pem" not in plain
    for name in CA_VARIABLES:
        assert f"{name}=/run/agent-sandbox/ca.pem\n" in opened
    done = keeper.sh("echo x > /run/agent-sandbox/ca.pem; rm /run/agent-sandbox/ca.pem", "--allow", "site.example")  # fmt: skip
    assert done.stderr.count("Read-only file system") == 2, done.stderr


def test_the_authority_is_another_one_in_every_run(keeper: World) -> None:
    """What one run has seen is of no use for the next."""
    keeper.global_config("[[secret]]\n" + secret())
    script = "head -c 900 /run/agent-sandbox/ca.pem; echo; echo $SITE_KEY"
    seen = [keeper.sh(script, "--allow", "site.example").stdout for _ in range(2)]
    first, second = (text.splitlines() for text in seen)
    assert first[0] == second[0] == "-----BEGIN CERTIFICATE-----"
    assert first[1:-1] != second[1:-1]
    assert first[-1] != second[-1]


def test_nothing_of_the_key_is_in_the_workspace(keeper: World) -> None:
    """The proxy alone has it: what lies on disk meanwhile is certificates."""
    keeper.global_config("[[secret]]\n" + secret())
    process = keeper.start("--allow", "site.example", "sh", "-c", "echo ready; read line", stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert eventually(keeper.workspaces)
        files = [p for p in keeper.state.rglob("*") if p.is_file()]
        # A mask is closed for everybody but root, and has nothing in it.
        texts = [p.read_bytes() for p in files if p.stat().st_mode & 0o400]
    finally:
        end_group(process)
    assert any(b"BEGIN CERTIFICATE" in text for text in texts)
    assert not any(b"PRIVATE KEY" in text for text in texts)
    assert not any(REAL.encode() in text for text in texts)
    assert json.dumps(REAL).encode() not in b"".join(texts)
