"""Clients that ask for everything at random, and remember what they were told."""

from __future__ import annotations

import io
import random
import tarfile
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from service.chaos.ground import Ground
from service.chaos.memory import COUNTER, Box, Memory, Stream, events

MOST_BOXES = 5
# Refusals of a service that is busy or on its way out.
LATER = (429, 503)
# Appends to the counter as one write(2), so that a kill leaves all of a line or nothing.
COUNT = f'echo "$0" >> {COUNTER}; echo "$0"'
FOLLOW = 'for i in 1 2 3 4; do echo "$0 $i"; sleep 0.05; done'
# What leaves processes behind when nobody ends them: in the background, in another session.
LEAVE = "setsid sleep 1000 & sleep 1000 & echo begun; sleep 1000"


class Hand:
    """One client of one agent. It works until the service is gone, or it is told to stop."""

    def __init__(
        self, ground: Ground, memory: Memory, dice: random.Random, *, killed: bool = False
    ) -> None:
        """`killed`: somebody ends commands beside us."""
        self.memory = memory
        self.dice = dice
        self.killed = killed
        self.client = ground.client(memory.token)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._acts: tuple[Callable[[], None], ...] = (
            self.create, self.create, self.count, self.count, self.count, self.put, self.put,
            self.slow_put, self.unpack, self.leave, self.brief, self.follow, self.run, self.run,
            self.run, self.delete, self.absent,
        )  # fmt: skip

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self.client.close()
        if self._thread.is_alive():
            self.memory.wrong("a client waits for ever")

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self.dice.choice(self._acts)()
            except httpx.TransportError:
                return
            except Exception as error:  # noqa: BLE001 - told by the test
                self.memory.wrong(f"a client failed: {error!r}")
                return

    def _word(self) -> str:
        return f"w{self.dice.randrange(10**12)}"

    def _box(self) -> Box | None:
        living = self.memory.living()
        return self.dice.choice(living) if living else None

    def _accepted(self, answer: httpx.Response, status: int, what: str) -> bool:
        """Whether it was done; refusals must be of the known kind."""
        if answer.status_code == status:
            self.memory.done[what] += 1
            return True
        if answer.status_code in LATER and "retry-after" in answer.headers:
            self.memory.done[f"{what} refused"] += 1
            time.sleep(0.01)
        else:
            self.memory.wrong(what, answer)
        return False

    # --- acts

    def create(self) -> None:
        if len(self.memory.living()) >= MOST_BOXES:
            return
        word = self._word()
        body: dict[str, object] = {
            "metadata": {"word": word}, "files": [{"path": "given", "content": word}],
        }  # fmt: skip
        if self.dice.random() < 0.15:
            body["network"] = {"mode": "allow", "allowOut": ["a.example"]}
        self.memory.creating[word] = body
        answer = self.client.post("/v1/sandboxes", json=body, headers={"Idempotency-Key": word})
        del self.memory.creating[word]
        if self._accepted(answer, 201, "create"):
            self.memory.note(answer, "sandbox.create")
            box = Box(answer.json())
            box.contents["given"] = {word.encode()}
            self.memory.boxes.append(box)

    def count(self) -> None:
        if (box := self._box()) is None:
            return
        word = self._word()
        box.perhaps.append(word)
        answer = self._exec(box, {"cmd": ["sh", "-c", COUNT, word]})
        if self._accepted(answer, 200, "exec"):
            self.memory.note(answer, "exec.start", "exec.end")
            found = answer.json()
            self.memory.ended[found["id"]] = found
            if found["stdout"] == f"{word}\n" and found["exitCode"] == 0:
                box.counted.append(word)
            elif not (found["error"] or (self.killed and found["signal"])):
                # A drain that has come to its end ends commands, and says so.
                self.memory.wrong("a command went wrong", answer)

    def _exec(self, box: Box, body: dict[str, object]) -> httpx.Response:
        return self.client.post(f"/v1/sandboxes/{box.id}/exec", json=body)

    def leave(self) -> None:
        self._background(LEAVE)

    def brief(self) -> None:
        self._background("sleep 0.05; echo done")

    def _background(self, script: str) -> None:
        if (box := self._box()) is None:
            return
        answer = self._exec(box, {"command": script, "background": True})
        if self._accepted(answer, 202, "background"):
            self.memory.note(answer, "exec.start")
            self.memory.begun.append(answer.json()["id"])

    def run(self) -> None:
        word = self._word()
        script = "sleep 0.$(($$ % 5)); cat /proc/sys/kernel/random/uuid"
        body: dict[str, object] = {"cmd": ["sh", "-c", script, word]}
        self.memory.running[word] = body
        answer = self.client.post("/v1/run", json=body, headers={"Idempotency-Key": word})
        del self.memory.running[word]
        if self._accepted(answer, 200, "run"):
            self.memory.note(answer, "exec.start", "exec.end")
            self.memory.runs[word] = body, answer.json()

    def put(self) -> None:
        self._put(lambda data: data, self.dice.randbytes(self.dice.choice((0, 10, 10_000))))

    def slow_put(self) -> None:
        """So large that a kill comes in the middle of it."""

        def parts(data: bytes) -> Iterator[bytes]:
            for start in range(0, len(data), 1 << 16):
                yield data[start : start + (1 << 16)]
                time.sleep(0.01)

        self._put(parts, self.dice.randbytes(1 << 20))

    def _put(self, shape: Callable[[bytes], bytes | Iterator[bytes]], data: bytes) -> None:
        if (box := self._box()) is None:
            return
        path = self.dice.choice(("one", "two", "below/three", "/home/agent/four"))
        allowed = box.contents.setdefault(path, {None})
        allowed.add(data)
        answer = self.client.put(box.files, params={"path": path}, content=shape(data))
        if self._accepted(answer, 200, "put"):
            self.memory.note(answer, "file.put")
            box.contents[path] = {data}

    def unpack(self) -> None:
        if (box := self._box()) is None:
            return
        data = self.dice.randbytes(100_000)
        for name in ("t1", "t2"):
            box.contents.setdefault(f"tree/{name}", {None}).add(data)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name in ("t1", "t2"):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        answer = self.client.put(
            f"/v1/sandboxes/{box.id}/archive", params={"path": "tree"}, content=archive.getvalue(),
            headers={"content-type": "application/x-tar"},
        )  # fmt: skip
        if self._accepted(answer, 200, "unpack"):
            self.memory.note(answer, "file.unpack")
            box.contents.update({f"tree/{name}": {data} for name in ("t1", "t2")})

    def follow(self) -> None:
        if (box := self._box()) is None:
            return
        stream = Stream(self._word())
        body = {"cmd": ["sh", "-c", FOLLOW, stream.word]}
        path, accept = f"/v1/sandboxes/{box.id}/exec", {"accept": "text/event-stream"}
        with self.client.stream("POST", path, json=body, headers=accept) as answer:
            if answer.status_code != 200:
                answer.read()
            if not self._accepted(answer, 200, "follow"):
                return
            self.memory.note(answer, "exec.start")
            for name, offset, value in events(answer):
                if name == "start":
                    stream.id = value["id"]
                    self.memory.streams.append(stream)
                elif name == "stdout":
                    stream.pieces[offset] = value["data"]
                elif name == "exit":
                    stream.exit = value
        if stream.exit is None:
            self.memory.wrong("a stream ended in order without an end of its command")

    def delete(self) -> None:
        if (box := self._box()) is None or self.dice.random() < 0.5:
            return
        box.gone = None
        answer = self.client.delete(f"/v1/sandboxes/{box.id}")
        if self._accepted(answer, 204, "delete"):
            self.memory.note(answer, "sandbox.delete")
            box.gone = True
        else:
            box.gone = False

    def absent(self) -> None:
        """A refusal has its line, too."""
        answer = self.client.get("/v1/sandboxes/sbx-" + "a" * 26)
        if self._accepted(answer, 404, "absent"):
            self.memory.note(answer, "sandbox.get")


class Clerk(Hand):
    """An admin, who makes and revokes tokens."""

    def __init__(self, ground: Ground, memory: Memory, dice: random.Random) -> None:
        super().__init__(ground, memory, dice)
        self._acts = (self.make, self.make, self.revoke)

    def make(self) -> None:
        name = self._word()
        answer = self.client.post("/v1/tokens", json={"name": name})
        if self._accepted(answer, 201, "token"):
            self.memory.note(answer, "token.new")
            self.memory.tokens[answer.json()["token"]] = name
        time.sleep(0.05)

    def revoke(self) -> None:
        if not self.memory.tokens:
            return
        token, name = self.dice.choice(list(self.memory.tokens.items()))
        del self.memory.tokens[token]
        answer = self.client.delete(f"/v1/tokens/{name}")
        if self._accepted(answer, 204, "revoke"):
            self.memory.note(answer, "token.revoke")
            self.memory.revoked.append(token)
