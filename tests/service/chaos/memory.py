"""What clients were told, and whether the service that came back still says so."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from service.chaos.ground import Ground, everything

Answer = dict[str, Any]
LOST, EXITED, FAILED = "Lost", "Exited", "Failed"
ENDS = (LOST, EXITED, FAILED)
COUNTER = "counter"
# Facts of earlier rounds that are looked at again.
SAMPLE = 6


class Box:
    """A sandbox as its client knows it."""

    def __init__(self, told: Answer) -> None:
        self.id = str(told["id"])
        self.told = told
        # By path: what may be there. None: no file.
        self.contents: dict[str, set[bytes | None]] = {}
        # Words that commands were to append to the counter: those that have, and that may have.
        self.counted: list[str] = []
        self.perhaps: list[str] = []
        # False, True, or None for a removal that nobody has confirmed.
        self.gone: bool | None = False

    @property
    def files(self) -> str:
        return f"/v1/sandboxes/{self.id}/files"


class Stream:
    """A command that was followed: what came, with the offset behind each piece."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.id = ""
        self.pieces: dict[int, str] = {}
        self.exit: Answer | None = None


def events(answer: httpx.Response) -> Iterator[tuple[str, int, Answer]]:
    """Server-Sent Events: name, id, data."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], int(fields["id"]), json.loads(fields["data"])
            fields = {}


class Memory:
    """What one agent has sent and what it was told."""

    def __init__(self, name: str, token: str) -> None:
        self.name = name
        self.token = token
        self.boxes: list[Box] = []
        # Requests without an answer, by their key.
        self.creating: dict[str, Answer] = {}
        self.running: dict[str, Answer] = {}
        # Answers to requests with a key, and of commands by their id.
        self.runs: dict[str, tuple[Answer, Answer]] = {}
        self.ended: dict[str, Answer] = {}
        self.begun: list[str] = []
        self.streams: list[Stream] = []
        # (request, action): what the audit must have.
        self.lines: list[tuple[str, str]] = []
        # Tokens that it has made, with their names, and that it has revoked.
        self.tokens: dict[str, str] = {}
        self.revoked: list[str] = []
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()

    def living(self) -> list[Box]:
        return [box for box in self.boxes if box.gone is False]

    def note(self, answer: httpx.Response, *actions: str) -> None:
        """An answer that has come: the audit must have these lines for it."""
        self.lines += [(answer.headers["x-request-id"], action) for action in actions]

    def wrong(self, what: str, answer: httpx.Response | None = None) -> None:
        shown = f": {answer.status_code} {answer.text[:500]}" if answer is not None else ""
        self.problems.append(f"{self.name}: {what}{shown}")


class Check:
    """Compares what one agent remembers with what the service says now."""

    def __init__(self, memory: Memory, client: httpx.Client, dice: random.Random) -> None:
        self.memory = memory
        self.client = client
        self.dice = dice

    def everything(self) -> None:
        memory = self.memory
        self.repeat_creations()
        self.repeat_runs()
        for box in memory.boxes:
            self.box(box)
        memory.boxes = [box for box in memory.boxes if box.gone is False]
        for exec_id in memory.begun:
            self.begun(exec_id)
        memory.begun = []
        for stream in memory.streams:
            self.stream(stream)
        memory.streams = []
        for exec_id in self._sample(list(memory.ended)):
            self.same(memory.ended[exec_id])
        self.lists()

    def _sample(self, all_of_them: list[str]) -> list[str]:
        """The newest, and some of the older."""
        new, old = all_of_them[-SAMPLE * 2 :], all_of_them[: -SAMPLE * 2]
        return new + self.dice.sample(old, min(SAMPLE, len(old)))

    def get(self, where: str, /, **query: str) -> httpx.Response:
        return self.client.get(where, params=query)

    # --- keys

    def repeat_creations(self) -> None:
        """A creation that was not answered is done once, whether or not it was done before."""
        for word, body in self.memory.creating.items():
            answers = [self._post("/v1/sandboxes", body, word) for _ in range(2)]
            if any(answer.status_code != 201 for answer in answers):
                self.memory.wrong(f"creation {word} cannot be repeated", answers[0])
                continue
            first, second = (answer.json() for answer in answers)
            found = everything(self.client, "/v1/sandboxes", metadata=f"word={word}")
            if not first["id"] == second["id"] == found[0]["id"] or len(found) != 1:
                self.memory.wrong(f"creation {word} was done more than once: {found}")
            self.memory.note(answers[0], "sandbox.create")
            box = Box(second)
            box.contents["given"] = {word.encode()}
            self.memory.boxes.append(box)
        self.memory.creating = {}

    def repeat_runs(self) -> None:
        memory = self.memory
        for word, body in memory.running.items():
            first = self._post("/v1/run", body, word)
            second = self._post("/v1/run", body, word)
            if (first.status_code, second.status_code) != (200, 200):
                memory.wrong(f"run {word} cannot be repeated", first)
            elif first.json() != second.json() or first.json()["state"] not in ENDS:
                memory.wrong(f"run {word} is done again: {first.text} {second.text}")
            else:
                memory.runs[word] = body, first.json()
        memory.running = {}
        for word in self._sample(list(memory.runs)):
            body, told = memory.runs[word]
            again = self._post("/v1/run", body, word)
            if again.status_code != 200 or again.json() != told:
                memory.wrong(f"run {word} was told {told}", again)
            other = self._post("/v1/run", {**body, "timeout": 7}, word)
            if other.status_code != 409:
                memory.wrong(f"the key {word} serves another request", other)

    def _post(self, path: str, body: Answer, key: str) -> httpx.Response:
        return self.client.post(path, json=body, headers={"Idempotency-Key": key})

    # --- sandboxes and their files

    def box(self, box: Box) -> None:
        answer = self.get(f"/v1/sandboxes/{box.id}")
        if box.gone is None:
            box.gone = answer.status_code == 404
        if box.gone:
            if answer.status_code != 404:
                self.memory.wrong(f"removed sandbox {box.id} is there", answer)
            return
        if answer.status_code != 200:
            self.memory.wrong(f"sandbox {box.id} is lost", answer)
            box.gone = True
            return
        now = answer.json()
        for field in ("id", "state", "owner", "metadata", "expiresAt", "resources", "network"):
            if now[field] != box.told[field]:
                self.memory.wrong(f"{field} of sandbox {box.id} was {box.told[field]}", answer)
        for path, allowed in box.contents.items():
            self.file(box, path, allowed)
        self.counter(box)

    def file(self, box: Box, path: str, allowed: set[bytes | None]) -> None:
        answer = self.get(box.files, path=path)
        found = {200: answer.content, 404: None}.get(answer.status_code, b"?")
        if found not in allowed:
            self.memory.wrong(f"file {path} of {box.id}, of {len(allowed)} states in none", answer)
        box.contents[path] = {found}

    def counter(self, box: Box) -> None:
        """Every command has run once, and those without an answer at most once."""
        answer = self.get(box.files, path=COUNTER)
        words = answer.text.split() if answer.status_code == 200 else []
        times = Counter(words)
        lost = [word for word in box.counted if times[word] != 1]
        more = [word for word in times if word not in {*box.counted, *box.perhaps}]
        twice = [word for word in times if times[word] > 1]
        if lost or more or twice:
            self.memory.wrong(f"counter of {box.id}: lost {lost}, unknown {more}, twice {twice}")
        box.counted, box.perhaps = words, []

    # --- commands

    def same(self, told: Answer) -> None:
        answer = self.get(f"/v1/execs/{told['id']}")
        if answer.status_code != 200 or answer.json() != told:
            self.memory.wrong(f"execution was told as {told}", answer)

    def begun(self, exec_id: str) -> None:
        """It was said to run: it has ended, one way or another."""
        answer = self.get(f"/v1/execs/{exec_id}")
        if answer.status_code != 200 or answer.json()["state"] not in ENDS:
            self.memory.wrong(f"command {exec_id} began", answer)
            return
        self.memory.ended[exec_id] = answer.json()
        self.memory.done[answer.json()["state"]] += 1

    def stream(self, stream: Stream) -> None:
        answer = self.get(f"/v1/execs/{stream.id}")
        if answer.status_code != 200 or answer.json()["state"] not in ENDS:
            self.memory.wrong(f"followed command {stream.id}", answer)
            return
        now, seen = answer.json(), "".join(stream.pieces.values())
        if stream.exit is not None:
            view = {name: value for name, value in now.items() if name in stream.exit}
            if view != stream.exit or now["stdout"] != seen:
                self.memory.wrong(f"{stream.id} was told as {stream.exit} with {seen!r}", answer)
        else:
            self.rest(stream, now["stdout"], seen)
        self.memory.ended[stream.id] = now

    def rest(self, stream: Stream, said: str, seen: str) -> None:
        """A broken stream goes on where it was. The last second may be lost with the server."""
        last = {"Last-Event-ID": str(max(stream.pieces, default=0))}
        path = f"/v1/execs/{stream.id}/events"
        with self.client.stream("GET", path, headers=last) as answer:
            if answer.status_code != 200:
                answer.read()
                self.memory.wrong(f"{stream.id} cannot be followed on from {last}", answer)
                return
            found = list(events(answer))
        more = "".join(value["data"] for name, _, value in found if name == "stdout")
        whole = said == seen + more or (not more and seen.startswith(said))
        if not whole or found[-1][0] != "exit":
            self.memory.wrong(f"{stream.id} has said {seen!r}, and goes on with {found}")

    def lists(self) -> None:
        """Nothing runs, and nothing is there that nobody has asked for."""
        if running := everything(self.client, "/v1/execs", state="Running"):
            self.memory.wrong(f"runs after a kill: {running}")
        known = {box.id for box in self.memory.boxes}
        there = {box["id"] for box in everything(self.client, "/v1/sandboxes")}
        if there != known:
            self.memory.wrong(f"sandboxes {there - known} are new, {known - there} are lost")


def audit_lines(ground: Ground) -> list[Answer]:
    """All lines of the audit."""
    files = sorted(Path(ground.data, "audit").glob("audit-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def missing_lines(lines: list[Answer], memory: Memory) -> list[str]:
    """What the agent was told without a line about it; keys whose command has begun twice."""
    have = {(line.get("requestId"), line["action"]) for line in lines}
    lost = [f"no line {action} of {request}" for request, action in memory.lines
            if (request, action) not in have]  # fmt: skip
    starts = Counter(
        word
        for line in lines
        if line["action"] == "exec.start" and "cmd" in line.get("request", {})
        for word in line["request"]["cmd"]
        if word in memory.runs
    )
    twice = [f"run {word} has {starts[word]} starts" for word in memory.runs if starts[word] != 1]
    return lost + twice
