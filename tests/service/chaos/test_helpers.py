"""Whatever of its helpers is killed: the service says so, goes on, and leaks nothing."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter

import httpx
import pytest

from chaos import processes, rounds
from conftest import IS_ROOT
from kernel.conftest import eventually
from service.chaos.ground import Ground, everything, pause
from service.chaos.killing import AGENTS
from service.chaos.load import Hand
from service.chaos.memory import Check, Memory

pytestmark = [pytest.mark.chaos, pytest.mark.kernel]

EACH = -(-rounds.RUNS // (2 if IS_ROOT else 1))
# Beyond the roles of `processes`: what starts keepers, a keeper or gate, a proxy.
SERVER, KEEPER, PROXY = "keeper server", "keeper or gate", "proxy"
BURIED_SECONDS = 30.0
ROLES = {SERVER, KEEPER, processes.OUTER, processes.INIT, processes.COMMAND}


def role(pid: int, server: int) -> str:
    found = processes.role(pid, server)
    line = processes.read(pid, "cmdline")
    if found != processes.HELPER:
        return found
    if b"keeper_server.py" in line:
        known = processes.stat(pid)
        return SERVER if known is not None and known[1] == server else KEEPER
    # Forked, and not executed yet; to kill that is to kill bwrap.
    return PROXY if b"egress.py" in line else processes.OUTER


def strike(ground: Ground, dice: random.Random) -> str:
    """Kill one helper, each role that is there now as likely as any other."""
    server = ground.process.pid
    by_role: dict[str, list[int]] = {}
    for pid in processes.descendants(server):
        by_role.setdefault(role(pid, server), []).append(pid)
    if not by_role:
        return "nobody"
    chosen = dice.choice(sorted(by_role))
    try:
        os.kill(dice.choice(by_role[chosen]), signal.SIGKILL)
    except ProcessLookupError:
        return "nobody"
    return chosen


def end_all(client: httpx.Client) -> None:
    for one in everything(client, "/v1/execs", state="Running"):
        ended = client.post(f"/v1/execs/{one['id']}/kill")
        assert ended.status_code == 200, ended.text
        assert ended.json()["state"] != "Running"


def runs(client: httpx.Client) -> bool:
    return client.post("/v1/run", json={"command": "true"}).status_code == 200


def test_helpers_may_die_at_any_moment(ground: Ground) -> None:
    dice = random.Random(f"{rounds.SEED} helpers {ground.identity.uid}")
    memories = [Memory(name, ground.token(name)) for name in AGENTS]
    admin = ground.token("boss", "--scope", "admin")
    ground.begin()
    ground.ready()
    with ground.client(admin) as boss:
        assert boss.post("/v1/run", json={"command": "true"}).json()["exitCode"] == 0
        ground.orphans(boss)
    before = ground.descriptors()
    hands = [Hand(ground, memory, random.Random(dice.random()), killed=True) for memory in memories]
    for hand in hands:
        hand.start()
    victims: Counter[str] = Counter()
    for _ in range(EACH):
        pause(dice.uniform(0, 0.15))
        victims[strike(ground, dice)] += 1
    for hand in hands:
        hand.join()
    print(f"\n{ground.identity.name}: {dict(victims)}")
    problems = ground.faults()
    for memory in memories:
        with ground.client(memory.token) as client:
            end_all(client)
            # It goes on as if nothing had been.
            again = client.post("/v1/run", json={"command": "echo fine"})
            assert (again.status_code, again.json()["stdout"]) == (200, "fine\n"), again.text
            Check(memory, client, dice).everything()
        problems += memory.problems
    with ground.client(admin) as boss:
        problems += ground.orphans(boss)
        # Whose parent was killed is buried with later commands.
        eventually(lambda: runs(boss) and not ground.zombies(), BURIED_SECONDS)
    assert not problems, "\n".join(problems)
    # What starts keepers stays; nothing of a sandbox does, and nobody is left unburied.
    only = {SERVER}
    server = ground.process.pid
    eventually(lambda: {role(p, server) for p in processes.descendants(server)} <= only)
    left = [p for p in processes.descendants(server) if role(p, server) != SERVER]
    assert not left, [processes.shown(pid) for pid in left]
    assert not ground.zombies()
    assert eventually(lambda: ground.descriptors() <= before + 2), ground.descriptors() - before
    assert ground.stop() == 0, ground.said()
    assert not ground.survivors()
    # A control: each kind of helper was there to be killed.
    assert set(victims) >= ROLES or EACH < 60
