"""One round: a server comes back, keeps its word, works, and is killed again."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

from chaos import rounds
from service.chaos.ground import Ground, pause
from service.chaos.load import Clerk, Hand
from service.chaos.memory import Check, Memory, audit_lines, missing_lines

AGENTS = ("ann", "ben", "cid")
# Under load; while it starts; while it drains.
LOAD, START, DRAIN = "load", "start", "drain"
STAGES = (LOAD, LOAD, LOAD, START, DRAIN)
# The longest work of a round, and the longest drain before the kill.
WORK_SECONDS, DRAIN_SECONDS = 1.2, 0.7
# How often it is looked who outlives the server, before the next one starts.
PATIENT = 0.7
DRAIN_FLAGS = ("--drain-seconds", "3")


class Chaos:
    """Rounds on one ground, and what they found."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.problems: list[str] = []
        self.kills: Counter[str] = Counter()
        self.admin = Memory("boss", ground.token("boss", "--scope", "admin"))
        self.agents = [Memory(name, ground.token(name)) for name in AGENTS]
        begun = time.monotonic()
        ground.begin(*DRAIN_FLAGS)
        ground.ready()
        # How long a start takes here and now; kills are spread over it.
        self.start_seconds = time.monotonic() - begun
        self._look("the beginning", random.Random(rounds.SEED))

    def round(self, number: int) -> None:
        """The server runs before and after."""
        dice = random.Random(f"{rounds.SEED} {self.ground.identity.uid} {number}")
        stage = dice.choice(STAGES)
        where = f"seed {rounds.SEED} round {number}, killed in {stage}"
        self._work(dice, stage)
        self.kills[stage] += 1
        # Some restart it at once, as an init system does: the old one's helpers may still be there.
        if stage == START or dice.random() < PATIENT:
            self._note(where, self.ground.survivors())
        self.ground.begin(*DRAIN_FLAGS)
        if stage == START:
            for _ in range(dice.choice((1, 2))):
                pause(dice.uniform(0, self.start_seconds))
                self.ground.kill()
                self._note(where, self.ground.survivors())
                self.ground.begin(*DRAIN_FLAGS)
        self.ground.ready()
        self._look(where, dice)

    def _work(self, dice: random.Random, stage: str) -> None:
        """Clients at work, and the kill."""
        hands = [Hand(self.ground, memory, random.Random(dice.random())) for memory in self.agents]
        hands.append(Clerk(self.ground, self.admin, random.Random(dice.random())))
        for hand in hands:
            hand.start()
        pause(dice.uniform(0, WORK_SECONDS))
        if stage == DRAIN:
            self.ground.process.send_signal(signal.SIGTERM)
            pause(dice.uniform(0, DRAIN_SECONDS))
        self.ground.kill()
        for hand in hands:
            hand.join()

    def _note(self, where: str, found: list[str]) -> None:
        self.problems += [f"{where}: {what}" for what in found]

    def _look(self, where: str, dice: random.Random) -> None:
        """Everything is as somebody was told, and nothing else is there."""
        lines = audit_lines(self.ground)
        for memory in (*self.agents, self.admin):
            found = missing_lines(lines, memory)
            memory.lines = []
            with self.ground.client(memory.token) as client:
                if memory is not self.admin:
                    Check(memory, client, dice).everything()
                else:
                    found += self._tokens()
                    found += self.ground.orphans(client)
            self._note(where, [*found, *memory.problems])
            memory.problems.clear()
        verified = self.ground.ctl("audit", "verify")
        if verified.returncode:
            self._note(where, [f"audit verify: {verified.stdout}{verified.stderr}"])
        self._note(where, self.ground.faults())

    def _tokens(self) -> list[str]:
        wrong = []
        for token, name in list(self.admin.tokens.items())[-3:]:
            if self._status(token) != 200:
                wrong.append(f"token {name} is not known")
        if any(self._status(token) != 401 for token in self.admin.revoked[-3:]):
            wrong.append("a revoked token lives again")
        return wrong

    def _status(self, token: str) -> int:
        with self.ground.client(token) as client:
            return client.get("/v1/whoami").status_code
