"""The bundle needs nothing of the image that it runs in."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.pod import bundle, inner, terms
from agent_sandbox.service.backend import pod_env
from agent_sandbox.service.backend.pod_link import PodLink
from conftest import As

from .ground import Pod, play, sh

pytestmark = pytest.mark.kernel
MOST = 40 << 20


def alone(runner: As, built: Path, *argv: str, more: tuple[str, ...] = ()) -> Any:
    """Run something where there is the bundle, /proc, /dev and nothing else."""
    options = ["--unshare-user", "--unshare-pid", "--proc", "/proc", "--dev", "/dev"]
    options += ["--ro-bind", str(built), terms.ROOT, *more, "--remount-ro", "/"]
    return runner.run(["bwrap", *options, "--", *argv], cwd="/")


def test_every_program_runs_in_an_empty_image(runner: As, built: Path) -> None:
    python = [*inner.Bundle().program("python3"), "-I", "-S", "-c"]
    modules = ", ".join(bundle.MODULES)
    done = alone(runner, built, *python, f"import {modules}; print('all')")
    assert (done.stdout, done.stderr) == ("all\n", "")
    for name, word in (("openssl", "version"), ("bwrap", "--version"), ("setsid", "--version")):
        done = alone(runner, built, *inner.Bundle().program(name), word)
        assert done.returncode == 0, done.stderr


def test_the_bundle_is_small_and_only_files(built: Path) -> None:
    entries = list(built.rglob("*"))
    assert not any(one.is_symlink() for one in entries)
    assert sum(one.stat().st_size for one in entries if one.is_file()) < MOST
    assert not list(built.rglob("*.py"))


def test_a_bundle_is_made_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(bundle.Unfit):
        bundle.make(str(tmp_path))
    assert bundle.main([]) == 2


def test_it_installs_itself_into_a_volume(runner: As, built: Path) -> None:
    target = runner.project()
    done = alone(
        runner, built, *pod_env.INSTALL, "/target", more=("--bind", str(target), "/target")
    )
    assert done.stderr == ""
    shown = {p.relative_to(built): p.stat().st_mode for p in built.rglob("*") if p.is_file()}
    copied = {p.relative_to(target): p.stat().st_mode for p in target.rglob("*") if p.is_file()}
    assert copied == shown
    assert all((target / name).read_bytes() == (built / name).read_bytes() for name in shown)


def test_the_agent_can_be_reached_through_standard_streams(rooted: Pod) -> None:
    """As through the engine's exec, in the pod. What is carried cannot be read on the way."""
    pod = rooted
    known = pod.fingerprint()
    bridges: list[subprocess.Popen[str]] = []

    async def dial() -> socket.socket:
        ours, theirs = socket.socketpair()
        env = {"AGENT_SANDBOX_PORT": str(pod.port)}
        bridges.append(
            pod.popen("env", *(f"{k}={v}" for k, v in env.items()), *pod_env.CONNECT,
                      stdin=theirs, stdout=theirs)
        )  # fmt: skip
        theirs.close()
        ours.setblocking(False)
        return ours

    async def scene() -> None:
        link = PodLink(dial, known, pod.identity)
        try:
            assert (await link.hello()).version == terms.VERSION
            await pod.claimed()
            assert await sh(link, "echo through") == "through\n"
        finally:
            await link.close()
        for bridge in bridges:
            assert await asyncio.to_thread(bridge.wait, 30) == 0

    play(scene())
