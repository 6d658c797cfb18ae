"""A home with secrets, a project with a bug, a model, and bystanders that must not be reached.

As root everything happens in the tests' own internet (kernel/internet.py): what an agent sends to
its vendor goes nowhere. The agents themselves run as an unprivileged user.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from conftest import IS_ROOT, PATH, As
from kernel.conftest import World
from kernel.internet import Internet

from . import script
from .roster import KEY, Agent

ON, ALLOW, BASE_URL = "on", "allow", "base-url"
MODES = (ON, ALLOW, BASE_URL)
# Ports of the machine's loopback: the model, and somebody else's service.
MODEL, OTHER = 18080, 18081
# Where a secret's base URL leads inside; and the host that has the secret.
INSIDE = "http://127.0.0.1:3129"
SITE = "site.example"
HOST_KEY = "KEY_OF_THE_HOST"
# What the agent may take on a slow and busy machine.
SECONDS = 300.0
CALC = "def add(a, b):\n    return a - b\n"
TESTS = """\
import unittest
from calc import add

class Add(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
"""
BASHRC = "# mine\n"
IDENTITY = "[user]\n\tname = Tester\n\temail = tester@example.org\n"

Done = subprocess.CompletedProcess[str]


class Ground:
    """Where programs are started: in namespaces of our own as root, else right here."""

    def __init__(self, base: Path, prefix: Path) -> None:
        self.base = base
        # Where the agents are installed.
        self.prefix = prefix
        self.net = Internet(base, ports="22,80") if IS_ROOT else None
        self._children: list[subprocess.Popen[str]] = []

    def serve(self, *argv: str, far: bool = False) -> None:
        """Start a server that says `ready`, on this machine's side or on the other."""
        python = os.path.realpath(sys.executable)
        if self.net is not None:
            pid = self.net.site if far else self.net.host
            self.net._start("nsenter", "-t", str(pid), "-n", python, "-I", *argv)
            return
        child = subprocess.Popen([python, "-I", *argv], stdout=subprocess.PIPE, text=True)
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"

    def argv(self, world: World, argv: Sequence[str]) -> list[str]:
        """The command line that runs a program in the project as the user."""
        return list(argv) if self.net is None else self.net.enter(world, *argv)

    def end(self) -> None:
        """End the servers."""
        if self.net is not None:
            self.net.end()
        for child in self._children:
            child.kill()
            child.communicate()


class Models:
    """The scripted model on the loopback, the same far away with TLS, and a bystander."""

    def __init__(self, ground: Ground) -> None:
        self.steps = ground.base / "steps.json"
        self.log = ground.base / "model.log"
        self.other = ground.base / "other.log"
        self.steps.write_text("[]")
        program = str(Path(__file__).with_name("model.py"))
        for port, log in ((MODEL, self.log), (OTHER, self.other)):
            log.touch()
            ground.serve(program, "127.0.0.1", str(port), str(self.steps), str(log))
        if ground.net is not None:
            certificate = str(ground.net.certificate)
            at = (program, "0.0.0.0", "443", str(self.steps), str(self.log), certificate)
            ground.serve(*at, far=True)

    def requests(self, since: int = 0) -> list[dict[str, str]]:
        """What was asked, from a position of the log on."""
        return [json.loads(line) for line in self.log.read_text()[since:].splitlines()]


class Engine:
    """Somebody who listens where container engines have their sockets, and counts who calls."""

    def __init__(self, user: As) -> None:
        self.calls = 0
        self._user = user
        self._servers: list[socketserver.ThreadingUnixStreamServer] = []
        # Of an engine without root. A user who is logged in has that directory already.
        self._run = Path(f"/run/user/{user.uid}")
        self._made = IS_ROOT and not self._run.exists()
        if self._made:
            user.directory(self._run)
            self.listen(self._run / "docker.sock")

    def listen(self, path: Path) -> Path:
        """At one more place."""
        engine = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                engine.calls += 1
                self.rfile.readline()
                self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\nOK")

        server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        os.chown(path, self._user.uid, -1)
        path.chmod(0o660)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._servers.append(server)
        return path

    def end(self) -> None:
        """Close the sockets."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        if self._made:
            shutil.rmtree(self._run, ignore_errors=True)


class Stage:
    """One agent in one home, for several runs."""

    def __init__(
        self, agent: Agent, world: World, ground: Ground, models: Models, engine: Engine
    ) -> None:
        self.agent, self.world, self.ground, self.models = agent, world, ground, models
        self.engine = engine
        self.notes = world.project / "notes.md"
        self._seeded = False
        world.link("~/.npm-global", ground.prefix)
        world.write("~/.ssh/id_ed25519", script.SSH_KEY + "\n", mode=0o600)
        world.write("~/.aws/credentials", script.AWS_KEY + "\n", mode=0o600)
        world.write("~/.bashrc", BASHRC)
        world.write("~/.gitconfig", IDENTITY)
        world.write("calc.py", CALC)
        world.write("test_calc.py", TESTS)
        world.write(".gitignore", "__pycache__/\nloot/\n")
        for words in ("init -q -b main", "add .", "commit -q -m First"):
            self.must("git", *words.split())
        if agent.no_gitconfig:
            world.write(".git/config", (world.project / ".git/config").read_text() + IDENTITY)
        self.socket = engine.listen(world.mkdir("~/.docker/run") / "docker.sock")

    def must(self, *argv: str) -> str:
        """A program outside, which must succeed."""
        done = self.world.outside(*argv)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def prepare(self, mode: str) -> tuple[list[str], dict[str, str]]:
        """The agent's settings for a mode; the flags of agent-sandbox and the environment."""
        agent, world = self.agent, self.world
        steps = script.steps(agent.plants, OTHER, str(self.notes), patch=agent.patch)
        self.models.steps.write_text(json.dumps(steps))
        local = f"http://127.0.0.1:{MODEL}"
        url = INSIDE if mode == BASE_URL else local
        for path, text in agent.files(url).items():
            if not self._seeded:
                world.write(path, text)
        self._seeded = True
        env = {
            "PATH": f"{world.home}/.npm-global/bin:{PATH}",
            script.TOKEN_VARIABLE: script.TOKEN,
            "DOCKER_HOST": f"unix://{self.socket}",
            **agent.env(url),
        }
        flags: list[str] = []
        config = world.home / ".config" / "agent-sandbox" / "config.toml"
        if mode == BASE_URL:
            env.pop(agent.base_url, None)
            env.pop(agent.key)
            env[HOST_KEY] = KEY
            world.global_config(self._secret())
            flags = ["--allow", SITE]
        elif config.exists():
            config.unlink()
        if mode == ALLOW:
            flags = ["--allow", f"localhost:{MODEL}"]
        return flags, env

    def _secret(self) -> str:
        agent, net = self.agent, self.ground.net
        assert net is not None
        path = f'base-path = "{agent.base_path}"\n' if agent.base_path else ""
        return (
            f'[network]\nmode = "allow"\nca = "{net.base}/public.pem"\n'
            f'[[secret]]\nname = "model"\nhost = "{SITE}"\nheader = "{agent.header}"\n'
            f'variable = "{agent.key}"\nenv = "{HOST_KEY}"\nbase-url = "{agent.base_url}"\n{path}'
        )

    def run(self, argv: Sequence[str], env: Mapping[str, str]) -> Done:
        """Run a program in the project as the user, to its end."""
        world = self.world
        process = subprocess.Popen(
            self.ground.argv(world, argv), cwd=world.project,
            env=world.runner.environ(world.env(dict(env))),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True, umask=0o022,
        )  # fmt: skip
        with process:
            try:
                out, err = process.communicate(timeout=SECONDS)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def sandboxed(self, mode: str) -> Done:
        """The agent in a sandbox."""
        flags, env = self.prepare(mode)
        return self.run(self.world.argv(*flags, *self.agent.argv), env)

    def bare(self) -> Done:
        """The agent without one: the control."""
        _, env = self.prepare(ON)
        return self.run(self.agent.argv, env)
