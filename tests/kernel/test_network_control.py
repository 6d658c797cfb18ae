"""Rules of a running sandbox, budgets, and the list that a run has learned: end to end."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from kernel.conftest import World, end_group
from kernel.internet import BARE, CURL, LOCAL_PORT, PRIVATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.internet import Internet

pytestmark = [pytest.mark.kernel, pytest.mark.network]

# Runs one command per line that it reads, and says when it is through.
SHELL = 'echo ready; while read -r line; do eval "$line" 2>&1; echo done; done'


# Sends a part of a request, and waits for whatever comes.
WAITING = """
import socket
s = socket.create_connection(("site.example", 80))
s.sendall(b"POST / HTTP/1.1\\r\\nHost: site.example\\r\\nContent-Length: 9\\r\\n\\r\\nabc")
s.settimeout(20)
print("up", flush=True)
try:
    print("closed" if not s.recv(99) else "answered")
except ConnectionResetError:
    print("closed")
"""


class Inside:
    """A shell in a running sandbox."""

    def __init__(self, net: Internet, world: World, *flags: str, project: str = "") -> None:
        argv = world.argv(
            "--timeout=60", *flags, *(("-C", project) if project else ()), "sh", "-c", SHELL
        )
        self.process = net.popen(world, *argv)
        assert self._line() == "ready", self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, command: str) -> str:
        """What a command prints."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        lines = []
        while (line := self._line()) != "done":
            assert line or self.process.poll() is None
            lines.append(line)
        return "\n".join(lines)

    def end(self) -> str:
        """End the run; its messages."""
        _, err = self.process.communicate(timeout=30)
        return err


@pytest.fixture
def inside(net: Internet, world: World) -> Iterator[Inside]:
    """A running sandbox that may reach one host."""
    shell = Inside(net, world, "--allow", "site.example")
    yield shell
    end_group(shell.process)


def ctl(world: World, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = world.ctl("net", *words)
    assert done.returncode == code, done.stderr
    return done


def listed(world: World, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ctl(world, *words, "--json").stdout)
    return found


GET = f"{CURL} http://{{}}/"


def test_a_rule_reaches_connections_from_then_on(world: World, inside: Inside) -> None:
    """Allow, deny, allow again; no restart."""
    assert "refused" in inside.do(GET.format("other.example"))
    ctl(world, "allow", "other.example", "both.example:8080")
    assert inside.do(GET.format("other.example")).startswith("other.example at ")
    # A port from 1024 on is taken before the answer comes.
    assert inside.do(GET.format("both.example:8080")).startswith("both.example:8080 at ")
    ctl(world, "deny", "other.example")
    assert "denied by 'other.example' (sandboxctl net)" in inside.do(GET.format("other.example"))
    ctl(world, "allow", "other.example")
    assert inside.do(GET.format("other.example")).startswith("other.example at ")


def test_denying_a_host_closes_what_is_open(world: World, inside: Inside) -> None:
    """A request that is half sent."""
    world.write("wait.py", WAITING)
    inside.do(f"{BARE} python3 wait.py > out 2>&1 & while ! grep -q up out; do sleep 0.02; done")
    # Control: it is up, and stays so while other hosts are denied.
    ctl(world, "deny", "other.example")
    assert inside.do("cat out") == "up"
    ctl(world, "deny", "site.example")
    assert inside.do("wait; cat out").split() == ["up", "closed"]


def test_a_list_shows_rules_and_hosts_with_counts(world: World, inside: Inside) -> None:
    """For people and for programs."""
    inside.do(
        f"{GET.format('site.example')}; {GET.format('site.example')}; {GET.format('other.example')}"
    )
    found = listed(world, "list")
    assert found["version"] == 1
    assert found["project"] == str(world.project)
    assert found["mode"] == "allow"
    assert found["allow"] == [["site.example", "flag --allow"]]
    hosts = {(h["host"], h["port"]): h for h in found["hosts"]}
    assert hosts["site.example", 80]["count"] == 2
    assert hosts["site.example", 80]["received"] > 100
    assert not hosts["other.example", 80]["allowed"]
    text = ctl(world).stdout
    assert "site.example:80  allowed 2 times" in text
    assert "other.example:80  refused 1 times" in text


def test_cannot_add_what_is_no_rule(world: World, inside: Inside) -> None:
    """An error with a hint, and nothing has changed."""
    before = listed(world)["allow"]
    done = ctl(world, "allow", "good.example", "https://bad.example/", code=125)
    assert "it is a URL" in done.stderr
    assert "hint:" in done.stderr
    assert listed(world)["allow"] == before


def test_the_run_that_is_meant_is_found(net: Internet, world: World, inside: Inside) -> None:
    """By project, by name; two of one project need a name, and are listed."""
    elsewhere = world.mkdir("~/work/elsewhere")
    ctl(world, "list")
    other = Inside(net, world, "--network=public", project=str(elsewhere))
    third = None
    try:
        assert listed(world)["project"] == str(world.project)
        done = world.ctl("net", "list", cwd=world.home)
        assert done.returncode != 0
        assert str(elsewhere) in done.stderr
        assert str(world.project) in done.stderr
        name = json.loads(world.ctl("net", "--json", cwd=elsewhere).stdout)["run"]
        assert listed(world, "--run", name)["project"] == str(elsewhere)
        assert listed(world, f"--run={name[:8]}")["mode"] == "public"
        assert "no run is called 'zzz'" in world.ctl("net", "--run", "zzz").stderr
        third = Inside(net, world, "--network=public")
        assert "--run ID" in world.ctl("net", "list").stderr
    finally:
        for one in (other, third):
            if one is not None:
                end_group(one.process)


@pytest.mark.parametrize(
    "words", [["allow"], ["list", "x"], ["drop", "x"], ["--run"], ["allow", "--x"]]
)
def test_wrong_words_are_an_error(world: World, words: list[str]) -> None:
    assert "net takes" in world.ctl("net", *words).stderr


def test_without_a_run_there_is_nothing_to_show(world: World) -> None:
    assert "no running sandbox" in world.ctl("net", "list").stderr


def test_cannot_change_rules_from_inside(world: World, inside: Inside) -> None:
    """The socket is not there, whatever is shown. Control: outside it is."""
    (name,) = world.workspaces()
    ctl(world)
    assert (world.state / "run" / name / "control").is_socket()
    assert (
        inside.do(f"ls -d {world.state} 2>/dev/null; find / -name control -type s 2>/dev/null")
        == ""
    )


# --- budgets


def test_requests_over_budget_are_refused_and_reported(net: Internet, world: World) -> None:
    """The third of two; other hosts go on."""
    world.global_config('[[budget]]\nhost = "site.example"\nrequests = 2\n')
    ask = f"{CURL} -o /dev/null -w '%{{http_code}} ' http://site.example/; "
    script = f"{ask * 3} {CURL} http://site.example/; {CURL} http://other.example/"
    report = world.home / "report.json"
    done = net.sh(world, script, "--network=public", "--report", str(report))
    codes, _, rest = done.stdout.partition("agent-sandbox")
    assert codes.split() == ["200", "200", "403"]
    assert "the budget of 2 requests for site.example is used up" in rest
    assert "other.example at " in rest
    (refused,) = [h for h in json.loads(report.read_text())["network"] if not h["allowed"]]
    assert refused["rule"] == "budget site.example"
    assert refused["count"] == 2
    notice = done.stderr.splitlines()[-1]
    assert "1 host refused: site.example:80" in notice
    assert "--allow" not in notice


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_cannot_upload_more_than_a_budget(net: Internet, world: World, scheme: str) -> None:
    """Cut off in the middle; said at the end. Control: as much goes through without it."""
    script = (
        "head -c 3000000 /dev/zero > up; "
        f"{CURL} -k --data-binary @up {scheme}://site.example/ | wc -c"
    )
    world.global_config('[[budget]]\nhost = "*.example"\nupload = "1M"\n')
    report = world.home / "report.json"
    done = net.sh(world, script, "--network=public", "--report", str(report))
    assert int(done.stdout) < 3000000
    sent = [h["sent"] for h in json.loads(report.read_text())["network"]]
    assert sum(sent) <= 1 << 20
    assert "1 host refused: site.example:" in done.stderr
    world.global_config("")
    assert net.sh(world, script, "--network=public").stdout == "3000000\n"


def test_cannot_get_round_a_budget_with_many_connections(net: Internet, world: World) -> None:
    """Fifty at once count as fifty."""
    world.global_config('[[budget]]\nhost = "site.example"\nrequests = 10\n')
    one = f"{CURL} -o /dev/null -w '%{{http_code}}\\n' http://site.example/ & "
    done = net.sh(world, one * 50 + "wait", "--network=public")
    assert done.stdout.split().count("200") == 10, done.stdout
    assert done.stdout.split().count("403") == 40


def test_cannot_raise_a_budget_from_a_projects_file(net: Internet, world: World) -> None:
    """It adds its own; both hold. Control: a smaller one of the project's does tighten."""
    world.global_config('[[budget]]\nhost = "site.example"\nrequests = 2\n')
    ask = f"{CURL} -o /dev/null -w '%{{http_code}} ' http://site.example/; " * 3
    for mine, codes in ((500, ["200", "200", "403"]), (1, ["200", "403", "403"])):
        world.project_config(f'[[budget]]\nhost = "site.example"\nrequests = {mine}\n')
        assert net.sh(world, ask, "--network=public").stdout.split() == codes


# --- learn


def test_the_learned_list_suffices_and_is_the_smallest(net: Internet, world: World) -> None:
    """Flags, policy file and report agree; a run with them does the same, and nothing around it."""
    script = (
        f"{CURL} http://site.example/; {CURL} -k https://both.example/; {CURL} http://inner.example:8080/; "
        f"{CURL} http://127.0.0.1:{LOCAL_PORT}/; {CURL} http://{PRIVATE}/; {CURL} -o /dev/null http://nowhere.example/ || true"
    )
    given = ("--allow", "inner.example:8080", "--allow", f"{PRIVATE}:8080", "--allow", PRIVATE, "--allow", f"localhost:{LOCAL_PORT}")  # fmt: skip
    report = world.home / "report.json"
    done = net.sh(world, script, "--network=learn", *given, "--report", str(report))
    assert len(done.stdout.splitlines()) == 5, done.stderr
    learned = json.loads(report.read_text())["learned"]
    assert learned == sorted([
        "site.example:80", "both.example:443", "inner.example:8080", f"{PRIVATE}:8080",
        f"localhost:{LOCAL_PORT}", f"{PRIVATE}:80",
    ])  # fmt: skip
    lines = done.stderr.splitlines()
    (line,) = [x for x in lines if "would have sufficed" in x]
    policy = "\n".join(
        lines[lines.index("agent-sandbox: notice: the same in a policy file:") + 1 :]
    )
    assert tomllib.loads(policy) == {"network": "allow", "allow": learned}
    flags = shlex.split(line.partition("sufficed: ")[2])
    assert net.sh(world, script, *flags).stdout == done.stdout
    world.global_config(policy)
    assert net.sh(world, script).stdout == done.stdout
    # The smallest: without any one of them something is missing.
    for rule in learned:
        rest = [f for other in learned if other != rule for f in ("--allow", other)]
        world.global_config("")
        assert net.sh(world, script, "--network=allow", *rest).stdout != done.stdout, rule
