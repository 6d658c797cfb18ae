"""Keys and credentials for git, with real programs: what works, and what must not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.conftest import World, eventually, toml
from kernel.forge import PASSWORD, Agent, Https, Sshd, key

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from conftest import As

    Done = subprocess.CompletedProcess[str]

pytestmark = [pytest.mark.kernel, pytest.mark.network]

# Clone, commit, push and fetch again: both ways through.
WORK = """
set -e
git clone -q "$1" "$2" 2>&1; cd "$2"
git -c user.name=x -c user.email=x@x commit -q --allow-empty -m second 2>&1
git push -q origin HEAD:main 2>&1; git fetch -q origin 2>&1
git log --format=%s origin/main
"""
SIGN = 'echo hello | ssh-keygen -q -Y sign -n "$1" -f "$2" >/dev/null 2>&1'


# Asks the agent at SSH_AUTH_SOCK for a signature of git's, with the key in a file.
RAW = """
import base64, os, socket, sys
def string(data):
    return len(data).to_bytes(4, "big") + data
blob = base64.b64decode(open(sys.argv[1]).read().split()[1])
data = b"SSHSIG" + string(b"git") + string(b"") + string(b"sha512") + string(bytes(64))
message = bytes([13]) + string(blob) + string(data) + bytes(4)
line = socket.socket(socket.AF_UNIX)
line.settimeout(60)
line.connect(os.environ["SSH_AUTH_SOCK"])
line.sendall(string(message))
print(line.recv(5, socket.MSG_WAITALL)[4])
"""


class Forge:
    """A world whose user has an agent with two keys, a helper, and servers to log in to."""

    def __init__(self, world: World, server: As) -> None:
        self.world = world
        self.agent = Agent(world)
        self.work, self.other = key(world, "work"), key(world, "other")
        self.agent.add(self.work)
        self.agent.add(self.other)
        self.sshd = Sshd(server)
        self.sshd.authorize(self.work)
        self.https = Https(server)
        world.write("~/.ssh/known_hosts", f"{self.sshd.known()}private.example ssh-ed25519 AAAA\n")
        world.write("ca.pem", self.https.certificate)
        host = f"localhost:{self.https.port}"
        world.write(
            "~/.stored",
            f"https://alice:{PASSWORD}@{host}\nhttps://alice:elsewhere@other.example\n",
            mode=0o600,
        )
        self.gitconfig()

    def gitconfig(self, more: str = "") -> None:
        self.world.write(
            "~/.gitconfig",
            f'[credential]\n\thelper = "store --file {self.world.home}/.stored"\n{more}',
        )

    def config(self, auth: str = "both", **more: Any) -> None:
        hosts = [f"localhost:{self.sshd.port}", f"localhost:{self.https.port}"]
        git = {"auth": auth, "keys": ["~/.ssh/work.pub"], "hosts": hosts, **more}
        self.world.global_config(toml({"git": git}))

    def env(self) -> dict[str, str | None]:
        return {
            "SSH_AUTH_SOCK": self.agent.socket,
            "GIT_SSL_CAINFO": str(self.world.project / "ca.pem"),
        }

    def sh(self, script: str, *args: str, flags: tuple[str, ...] = ()) -> Done:
        return self.world.sandbox(*flags, "sh", "-c", script, "sh", *args, env=self.env())

    def outside(self, script: str, *args: str) -> Done:
        return self.world.outside("sh", "-c", script, "sh", *args, env=self.env())

    def python(self, code: str, *args: str, flags: tuple[str, ...] = ()) -> Done:
        command = ("/usr/bin/python3", "-I", "-c", code, *args)
        return self.world.sandbox(*flags, *command, env=self.env())

    def end(self) -> None:
        self.sshd.end()
        self.https.end()
        self.agent.end()


@pytest.fixture
def forge(world: World, user: As) -> Iterator[Forge]:
    found = Forge(world, user)
    yield found
    found.end()


def test_fetch_and_push_work_over_ssh_and_https(forge: Forge) -> None:
    forge.config()
    report = forge.world.path("~/report.json")
    for name, url in (("ssh", forge.sshd.url), ("https", forge.https.url)):
        done = forge.sh(WORK, url, name, flags=("--report", str(report)))
        assert done.stdout.split("\n")[:2] == ["second", "first"], done.stdout + done.stderr
        events = json.loads(report.read_text())["git"]["events"]
        if name == "ssh":
            # clone, push and fetch: a line each, in the report and in the log.
            assert [e["what"] for e in events] == ["signed"] * 3, events
            assert f"to [localhost]:{forge.sshd.port}" in events[0]["purpose"]
            assert events[0]["comment"] == "work@test"
            assert "signed: a login as" in done.stderr
            assert ", 3 times" in done.stderr
            log = (forge.world.state / "audit" / "git.jsonl").read_text()
            assert len(log.splitlines()) == 3
        else:
            assert {e["what"] for e in events} == {"handed-in"}
            assert PASSWORD not in report.read_text() + done.stderr


def test_both_work_through_the_proxy_of_an_allow_list(forge: Forge) -> None:
    forge.config()
    allow = tuple(f"--allow=localhost:{s.port}" for s in (forge.sshd, forge.https))
    for name, url in (("ssh", forge.sshd.url), ("https", forge.https.url)):
        done = forge.sh(WORK, url, name, flags=allow)
        assert done.stdout.split("\n")[:2] == ["second", "first"], done.stdout + done.stderr
        assert "is not let through" not in done.stderr
    closed = forge.sh("true", flags=allow[:1])
    assert "https to 'localhost' is not let through by network = allow" in closed.stderr


def test_commits_are_signed_by_a_key_that_stays_outside(forge: Forge) -> None:
    forge.config("ssh-agent")
    forge.gitconfig(
        "[gpg]\n\tformat = ssh\n[commit]\n\tgpgsign = true\n"
        "[user]\n\tname = x\n\temail = x@x\n\tsigningKey = ~/.ssh/work\n"
    )
    script = "git init -q . && git commit -q --allow-empty -m signed && ls -A ~/.ssh"
    # Without any network: the agent is asked through the socket.
    done = forge.sh(script, flags=("--network=off",))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["known_hosts", "work.pub"]
    assert "a signature of git's" in done.stderr
    assert "no host can be reached; commits can be signed" in done.stderr
    public = forge.work.with_name("work.pub").read_text()
    signers = forge.world.write("~/signers", f"x@x {public}")
    checked = forge.outside(f"git -c gpg.ssh.allowedSignersFile={signers} verify-commit HEAD 2>&1")
    assert checked.returncode == 0, checked.stdout
    # A key that is not named is not asked for: commits work, unsigned, and that is said.
    forge.config("ssh-agent", keys=["other@test"])
    plain = forge.sh("git commit -q --allow-empty -m plain", flags=("--network=off",))
    assert plain.returncode == 0, plain.stderr
    assert "commits are not signed" in plain.stderr


def test_cannot_see_or_use_other_keys(forge: Forge) -> None:
    forge.config("ssh-agent")
    assert "work@test" in forge.agent.listed()
    assert "other@test" in forge.agent.listed()
    public = {name: forge.world.path(f"~/.ssh/{name}.pub") for name in ("work", "other")}
    for name, path in public.items():
        forge.world.write(f"{name}.pub", path.read_text())
        # The control: the agent itself signs with both.
        assert forge.outside(SIGN, "git", f"{name}.pub").returncode == 0
        assert forge.outside(SIGN, "file", f"{name}.pub").returncode == 0
    # ssh-keygen asks only for keys that are listed; an attacker does not.
    forge.world.write("raw.py", RAW)
    raw = "/usr/bin/python3 -I raw.py"
    assert forge.outside(f"{raw} work.pub; {raw} other.pub").stdout == "14\n14\n"
    script = f"ssh-add -l; {raw} work.pub; {raw} other.pub; sign() {{ {SIGN}; }}; "
    done = forge.sh(
        f"{script} sign git work.pub; echo $?; sign file work.pub; echo $?; cat ~/.ssh/*"
    )
    lines = done.stdout.splitlines()
    assert lines[0].endswith("work@test (ED25519)")
    assert lines[1:5] == ["14", "5", "0", "255"], done.stdout
    assert "other@test" not in done.stdout
    assert "PRIVATE" not in done.stdout
    assert "private.example" not in done.stdout
    assert f"localhost]:{forge.sshd.port}" in done.stdout
    assert "which is none of git.keys" in done.stderr
    assert "for something else than git" in done.stderr


def test_cannot_change_the_agent(forge: Forge) -> None:
    forge.config("ssh-agent")
    before = forge.agent.listed()
    attack = (
        "ssh-keygen -q -t ed25519 -N '' -C planted -f planted; chmod 600 planted; ssh-add planted; "
        "ssh-add -d work.pub; ssh-add -D; printf 'a\\na\\n' | SSH_ASKPASS_REQUIRE=force "
        "SSH_ASKPASS=/bin/true ssh-add -x; true"
    )
    forge.world.write("work.pub", forge.world.path("~/.ssh/work.pub").read_text())
    done = forge.sh(attack)
    assert forge.agent.listed() == before, done.stderr
    for words in ("add a key", "remove a key", "remove all keys"):
        assert f"refused: {words}" in done.stderr
    # The control: the agent itself does all that.
    forge.outside("ssh-add planted; ssh-add -d work.pub")
    after = forge.agent.listed()
    assert "planted" in after
    assert "work@test" not in after


def test_cannot_log_in_to_another_host(forge: Forge, user: As) -> None:
    second = Sshd(user)
    try:
        second.authorize(forge.work)
        known = forge.world.path("~/.ssh/known_hosts")
        known.write_text(known.read_text() + second.known())
        # All ssh needs to know is given: only the agent's filter is in the way.
        forge.world.write("known", second.known())
        script = (
            "GIT_SSH_COMMAND='ssh -F /dev/null -o UserKnownHostsFile=$PWD/known "
            "-o BatchMode=yes' git ls-remote $1 2>&1"
        ).replace("$PWD", str(forge.world.project))
        forge.config("ssh-agent")
        done = forge.sh(script, second.url)
        assert done.returncode != 0
        assert "agent refused operation" in done.stdout
        assert "to none of git.hosts" in done.stderr
        # The control: the same, with the host named.
        forge.config("ssh-agent", hosts=[f"localhost:{second.port}"])
        named = forge.sh(script, second.url)
        assert "refs/heads/main" in named.stdout, named.stdout + named.stderr
    finally:
        second.end()


ASK = """
import socket, sys
def ask(text):
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(60)
    line.connect("/run/agent-sandbox/git-auth.sock")
    line.sendall(text.encode())
    line.shutdown(socket.SHUT_WR)
    got = b""
    while part := line.recv(4096):
        got += part
    return got.decode()
host = sys.argv[1]
head = "action=get\\ntimeout=900\\n"
for text in (
    f"{head}protocol=https\\nhost={host}\\n",
    f"{head}protocol=https\\nhost=other.example\\n",
    f"{head}protocol=https\\nhost={host}\\nhost=other.example\\n",
    f"{head}protocol=https\\nhost=other.example\\nhost={host}\\n",
    f"{head}protocol=https\\nhost={host}\\rhost=other.example\\n",
    f"{head}protocol=https\\nhost={host}\\nurl=https://other.example\\n",
    f"{head}protocol=https\\nhost={host}\\nusername=x\\x00\\nhost=other.example\\n",
    f"{head}protocol=https\\nhost={host}@other.example\\n",
    f"{head}protocol=https\\nhost=other.example/{host}\\n",
    f"{head}protocol=https\\nhost={host}%0ahost=other.example\\n",
    f"{head}protocol=http\\nhost={host}\\n",
    f"{head}protocol=https\\nhost=\\nhost={host}\\n",
):
    print(repr(ask(text)))
"""


def test_cannot_get_a_credential_for_another_host(forge: Forge) -> None:
    forge.config("helper")
    host = f"localhost:{forge.https.port}"
    done = forge.python(ASK, host)
    lines = done.stdout.splitlines()
    assert lines[0] == repr(f"username=alice\npassword={PASSWORD}\n"), done.stderr
    assert lines[1:] == [repr("")] * 11, done.stdout
    assert "a credential for other.example: it is none of git.hosts" in done.stderr
    # The control: git outside has one for that host.
    fill = "printf 'protocol=https\\nhost=other.example\\n\\n' | git credential fill"
    assert "password=elsewhere" in forge.outside(fill).stdout
    # By git itself, with a path in the address; and nothing is stored or erased.
    script = (
        "printf 'protocol=https\\nhost=%s\\npath=../x\\n\\n' $1 | git credential fill; "
        "printf 'protocol=https\\nhost=%s\\nusername=alice\\npassword=new\\n\\n' $1 | "
        "git credential approve; "
        "printf 'protocol=https\\nhost=%s\\n\\n' $1 | git credential reject"
    )
    stored = forge.world.path("~/.stored").read_text()
    asked = forge.sh(script, host)
    assert f"password={PASSWORD}" in asked.stdout
    assert forge.world.path("~/.stored").read_text() == stored


def test_cannot_choose_what_runs_outside(forge: Forge) -> None:
    # A host without a stored credential: then git goes on to the next helper.
    forge.config("helper", hosts=["empty.example", f"localhost:{forge.https.port}"])
    world, mark = forge.world, forge.world.home / "pwned"
    world.outside("git", "init", "-q", ".")
    plant = f"!touch {mark}; echo username=a; echo password=b; :"
    world.outside("git", "config", "credential.helper", plant)
    program = f'#!/bin/sh\ntouch {mark}\nexec /usr/bin/git "$@"\n'
    world.write("bin/git", program, mode=0o755)
    world.write("bin/git-credential-store", program, mode=0o755)
    path = f"{world.project}/bin:{os.environ['PATH']}"
    fill = "printf 'protocol=https\\nhost=%s\\n\\n' $1 | git credential fill"
    for more in ({"PATH": path}, {"GIT_DIR": str(world.project / ".git")}):
        env = {**forge.env(), **more, "GIT_TERMINAL_PROMPT": "0"}
        for host in (f"localhost:{forge.https.port}", "empty.example"):
            done = world.sandbox("sh", "-c", fill, "sh", host, env=env)
            assert (PASSWORD in done.stdout) == (host != "empty.example"), done.stderr
            assert not mark.exists()
        # The control: git outside, in the project, runs what lies there.
        world.outside("sh", "-c", fill, "sh", "empty.example", env=env)
        assert mark.exists()
        mark.unlink()


EVIL = "#!/bin/sh\ntouch {mark}\necho username=a\necho password=planted\n"
FILL = "printf 'protocol=https\\nhost=%s\\n\\n' $1 | git credential fill"


def test_cannot_swap_a_link_on_path(forge: Forge) -> None:
    """One run leaves a link to the system's programs, the next puts its own there."""
    forge.config("helper")
    world, mark = forge.world, forge.world.home / "pwned"
    world.write("evil", EVIL.format(mark=mark), mode=0o755)
    swap = "rm bin && mkdir bin && cp evil bin/git && "
    host = f"localhost:{forge.https.port}"
    for through in (world.project / "bin", world.home / "way"):
        assert forge.sh("rm -rf bin; ln -s /usr/bin bin").returncode == 0
        if not through.is_symlink():
            world.link(through, world.project / "bin")
        env = {**forge.env(), "PATH": f"{through}:{os.environ['PATH']}"}
        ask = f"{swap} export PATH=/usr/bin:/bin; {FILL}"
        done = world.sandbox("sh", "-c", ask, "sh", host, env=env)
        assert f"password={PASSWORD}" in done.stdout, done.stdout + done.stderr
        assert not mark.exists()
        # The control: with that PATH, git outside is theirs.
        world.outside("sh", "-c", FILL, "sh", host, env=env)
        assert mark.exists()
        mark.unlink()


DECIDING = {
    "configuration": ("~/.gitconfig", "helper", "git's configuration"),
    "helper": ("~/bin/git-credential-mine", "helper", "a helper"),
    "named helper": ("~/opt/mine", "helper", "a helper"),
    "known_hosts": ("~/.ssh/known_hosts", "ssh-agent", "known_hosts"),
    "key": ("~/.ssh/work.pub", "ssh-agent", "a public key"),
}


@pytest.mark.parametrize("what", DECIDING)
def test_cannot_lead_elsewhere_what_decides(forge: Forge, what: str) -> None:
    """The user's link leads through the project. Control: through another directory it works, and
    whoever swaps the link in the project has swapped the file.
    """
    name, auth, said = DECIDING[what]
    world = forge.world
    world.write("~/bin/git-credential-mine", "#!/bin/sh\n:\n", mode=0o755)
    world.write("~/opt/mine", "#!/bin/sh\n:\n", mode=0o755)
    forge.gitconfig(f"[credential]\n\thelper = mine\n\thelper = {world.home}/opt/mine\n")
    forge.config(auth)
    path, real = world.path(name), world.path("~/kept/real")
    world.mkdir("~/kept")
    path.rename(real)
    env = {**forge.env(), "PATH": f"{world.home}/bin:{os.environ['PATH']}"}
    for place, good in (("~/kept/link", True), (world.project / "link", False)):
        link = world.link(place, real)
        path.unlink(missing_ok=True)
        world.link(name, link)
        done = world.sandbox("true", env=env)
        assert (done.returncode == 0) == good, done.stderr
        assert good or f"({said}), leads through '{world.project}'" in done.stderr, done.stderr
    link.unlink()
    world.link(link, world.write("planted", "planted"))
    assert path.read_text() == "planted"


SPELLINGS = {
    "an argument": ("helper = /usr/bin/python3 {project}/h.py", {}),
    "a variable": ("helper = \"!/usr/bin/env X={project}/h.py sh -c 'python3 $X'\"", {}),
    "quotes": ("helper = \"!python3 '{project}'/h.py\"", {}),
    "a second include": ("[include]\n\tpath = {home}/one", {}),
    "the system's": ("", {"GIT_CONFIG_SYSTEM": "{home}/one"}),
    "for one host": (
        '[credential "https://empty.example"]\n\thelper = !python3 {project}/h.py', {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", SPELLINGS)
def test_cannot_be_the_helper_by_any_spelling(forge: Forge, how: str) -> None:
    """What lies in the project is not run. Control: git outside runs it."""
    forge.config("helper", hosts=["empty.example"])
    world, mark = forge.world, forge.world.home / "pwned"
    text, variables = SPELLINGS[how]
    names = {"project": world.project, "home": world.home}
    world.write("h.py", f"open({str(mark)!r}, 'w')\nprint('username=a\\npassword=b')\n")
    world.write("~/one", f"[include]\n\tpath = {world.home}/two\n")
    world.write("~/two", f"[credential]\n\thelper = !python3 {world.project}/h.py\n")
    forge.gitconfig(f"{text.format(**names)}\n")
    more = {name: value.format(**names) for name, value in variables.items()}
    env = {**forge.env(), **more, "GIT_TERMINAL_PROMPT": "0"}
    done = world.sandbox("sh", "-c", FILL, "sh", "empty.example", env=env)
    assert done.returncode == 125, done.stderr
    assert "(a helper), lies where the command can write" in done.stderr
    assert not mark.exists()
    world.outside("sh", "-c", f"cd / && {FILL}", "sh", "empty.example", env=env)
    assert mark.exists()


def test_a_name_of_another_user_is_refused(forge: Forge) -> None:
    forge.config("helper")
    forge.gitconfig("\thelper = ~root/helper\n")
    done = forge.sh("true")
    assert done.returncode == 125
    assert "'~root/helper' (a helper) does not say where it is" in done.stderr


def test_what_decides_must_not_be_writable_inside(forge: Forge) -> None:
    forge.config("ssh-agent", keys=[str(forge.world.project / "work.pub")])
    forge.world.write("work.pub", forge.world.path("~/.ssh/work.pub").read_text())
    done = forge.sh("true")
    assert "a public key" in done.stderr
    assert "lies where the command can write" in done.stderr
    forge.config("ssh-agent")
    assert forge.sh("true").returncode == 0
    inside = forge.world.sandbox("--rw", "~/.ssh", "true", env=forge.env())
    assert inside.returncode == 125, inside.stderr


def test_a_project_cannot_ask_for_it(forge: Forge) -> None:
    forge.config("none")
    forge.world.project_config('[git]\nauth = "ssh-agent"\n')
    done = forge.sh("true")
    assert done.returncode == 125
    assert 'git.auth = "ssh-agent"' in done.stderr
    forge.world.project_config('[git]\nkeys = ["other@test"]\n')
    assert "belongs in your own policy file" in forge.sh("true").stderr
    # To ask for less is no question of trust.
    forge.config()
    forge.world.project_config('[git]\nauth = "none"\n')
    assert forge.sh('test -z "$SSH_AUTH_SOCK"').returncode == 0


def test_the_library_says_what_was_signed(forge: Forge) -> None:
    forge.world.write("work.pub", forge.world.path("~/.ssh/work.pub").read_text())
    code = (
        "import sys; from agent_sandbox import Policy, Sandbox\n"
        "policy = Policy(git_auth='ssh-agent', git_keys=['work@test'], git_hosts=['example.com'])\n"
        "result = Sandbox(policy).run(['sh', '-c', sys.argv[1], 'sh', 'git', 'work.pub'])\n"
        "print(result.code, [(e.what, e.comment) for e in result.git.events])\n"
    )
    env = {name: value for name, value in forge.env().items() if value is not None}
    done = forge.world.python(code, SIGN, env=env)
    assert done.stdout == "0 [('signed', 'work@test')]\n", done.stdout + done.stderr


def test_what_was_promised_when_a_key_was_added_is_kept(forge: Forge, user: As) -> None:
    """`ssh-add -h`: the agent itself keeps a key to its host, because it learns of the session."""
    second = Sshd(user)
    try:
        for sshd in (forge.sshd, second):
            sshd.authorize(forge.other)
        known = forge.world.path("~/.ssh/known_hosts")
        known.write_text(known.read_text() + second.known())
        forge.outside("ssh-add -q -D")
        host = f"[localhost]:{forge.sshd.port}"
        added = forge.outside('ssh-add -q -H "$1" -h "$2" "$3"', str(known), host, str(forge.other))
        assert added.returncode == 0, added.stderr
        forge.config("ssh-agent", keys=["other@test"], hosts=["*"])
        done = forge.sh("git ls-remote $1", forge.sshd.url)
        assert "refs/heads/main" in done.stdout, done.stderr
        assert 'git.hosts = "*"' in done.stderr
        refused = forge.sh("git ls-remote $1", second.url)
        assert refused.returncode != 0
        # The control: without a promise, and with "*", it may go anywhere.
        forge.outside('ssh-add -q "$1"', str(forge.other))
        anywhere = forge.sh("git ls-remote $1", second.url)
        assert "refs/heads/main" in anywhere.stdout, anywhere.stderr
    finally:
        second.end()


def test_without_the_process_nobody_answers(forge: Forge) -> None:
    forge.config("ssh-agent")
    script = "ssh-add -l >/dev/null; echo $?; read line; ssh-add -l 2>/dev/null; echo $?"
    process = forge.world.start(
        "sh", "-c", script, env=forge.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        (found,) = [pid for pid in children(process.pid) if "gitauth/main.py" in line_of(pid)]
        os.kill(found, signal.SIGKILL)
        assert eventually(lambda: not line_of(found), 30)
        out, err = process.communicate("\n", timeout=60)
    assert out == "2\n"
    assert "ended before the command did" in err


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def line_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def test_it_works_with_the_real_home_shown(forge: Forge) -> None:
    forge.config("ssh-agent")
    done = forge.sh("ls -A ~/.ssh; git ls-remote $1", forge.sshd.url, flags=("--home=host",))
    assert done.stdout.splitlines()[0].endswith("HEAD"), done.stdout + done.stderr
