"""Reading the machine, and trying each layer on it."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from agent_sandbox.host import kernel
from agent_sandbox.launch import bwrap, landlock, seccomp
from agent_sandbox.policy.diagnosis import LANDLOCK, LAYERS, SECCOMP, START, Probes
from conftest import As, must_work

BWRAP = shutil.which("bwrap") or ""
# BPF_RET_K SECCOMP_RET_ALLOW: a filter that forbids nothing.
ALLOW_ALL = bytes.fromhex("0600000000 00ff7f".replace(" ", ""))
# Tries everything under another identity, and prints what came out.
EVERYTHING = """
import json, os, sys
from agent_sandbox.cli.doctor import examine
probes = examine(sys.argv[1])
plain = {f: getattr(probes, f) for f in probes.__fields__ if f != "attempts"}
print(json.dumps([plain, [[a.layer, a.ok, a.error] for a in probes.attempts]]))
"""


def read(path: str | None, **env: str) -> Probes:
    """Probe this machine for the launcher's own needs."""
    return kernel.probe(
        path,
        required=bwrap.REQUIRED_OPTIONS,
        machines=seccomp.MACHINES,
        landlock_abi=landlock.abi(),
        env={"HOME": os.environ.get("HOME", "/root"), **env},
    )


def script(directory: Path, text: str) -> str:
    """A program that stands in for bwrap."""
    path = directory / "bwrap"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.kernel
def test_each_layer_holds_for_each_identity(runner: As) -> None:
    """On a machine that can run sandboxes, as root and as a user."""
    env = {"PYTHONPATH": str(runner.source)}
    done = runner.run([runner.python, "-c", EVERYTHING, BWRAP], env=env)
    assert done.returncode == 0, done.stderr
    plain, attempts = json.loads(done.stdout)
    assert [a for a in attempts if not a[1]] == []
    tried = {layer for layer, _, _ in attempts}
    wanted = set(LAYERS) - {START}
    assert tried == (wanted if plain["landlock_abi"] >= landlock.SCOPE_ABI else wanted - {LANDLOCK})
    assert plain["uid"] == runner.uid
    assert plain["bwrap_missing"] == []
    assert plain["bwrap_error"] == plain["bwrap_privileged"] == ""
    assert plain["state_dir"].startswith(str(runner.home))
    assert plain["state_error"] == ""
    assert not plain["nested"]


@pytest.mark.kernel
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file and no open descriptor."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(os.listdir("/proc/self/fd"))
    read(BWRAP)
    kernel.try_layers(BWRAP, filter_bytes=seccomp.build(os.uname().machine), restrict=None)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.kernel
def test_a_filter_without_effect_is_noticed() -> None:
    """The control: the trial fails where the protection is missing."""
    attempts = kernel.try_layers(BWRAP, filter_bytes=ALLOW_ALL, restrict=None)
    (found,) = [a for a in attempts if a.layer == SECCOMP]
    assert not found.ok
    assert found.error == "TIOCSTI was not filtered"


def test_a_landlock_without_effect_is_noticed() -> None:
    """The control: an unscoped process reaches the abstract socket."""
    found = kernel.try_landlock(lambda _: True)
    assert not found.ok
    assert "was reached" in found.error


def test_landlock_that_refuses_is_reported() -> None:
    """As the reason that the kernel gives."""

    def refuse(_: str) -> bool:
        raise PermissionError(1, "Operation not permitted")

    assert kernel.try_landlock(refuse).error == "Landlock: operation not permitted"
    assert kernel.try_landlock(lambda _: False).error == "Landlock has no scopes here"


@pytest.mark.kernel
def test_the_hole_of_old_versions_is_tried_and_not_guessed() -> None:
    """Bwrap before 0.12 follows the link unless its distribution mended it."""
    found = read(BWRAP)
    assert found.bwrap_version
    assert found.oldroot_hole in ((True, False) if found.bwrap_version < (0, 12) else (False,))


def test_what_bwrap_says_is_kept(tmp_path: Path) -> None:
    """On one line, without anything that drives a terminal, and not without end."""
    path = script(tmp_path, "printf 'bwrap: no\\033[31m\\nspace %05000d' 1 >&2; exit 1")
    attempts = kernel.try_layers(path, filter_bytes=ALLOW_ALL, restrict=None)
    assert {a.ok for a in attempts} == {False}
    assert attempts[0].error.startswith("bwrap: no?[31m space 000")
    assert len(attempts[0].error) == kernel.MAX_ERROR


def test_a_silent_or_hanging_bwrap_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By how it ended."""
    assert kernel.run([script(tmp_path, "kill -9 $$")])[0] == -9
    (first, *_) = kernel.try_layers(
        script(tmp_path, "exit 3"), filter_bytes=ALLOW_ALL, restrict=None
    )
    assert first.error == "exit code 3"
    monkeypatch.setattr(kernel, "SECONDS", 0.2)
    assert kernel.run([script(tmp_path, "exec sleep 9")]) == (
        124, "", "no answer within 0.2 seconds",
    )  # fmt: skip


def test_a_machine_without_bwrap_can_be_probed() -> None:
    """Then nothing of bwrap's is filled in."""
    found = read(None)
    assert (found.bwrap, found.bwrap_version, found.bwrap_error) == ("", (), "")
    assert found.oldroot_hole is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo 'error while loading shared libraries' >&2; exit 127", "error while loading"),
        ("exit 7", "exit code 7"),
        ("true", "exit code 0"),
    ],
)
def test_a_bwrap_that_does_not_run_is_an_error(tmp_path: Path, text: str, error: str) -> None:
    """Rather than one without options."""
    found = read(script(tmp_path, text))
    assert error in found.bwrap_error
    assert found.bwrap_missing == ()


def test_options_are_probed_and_not_guessed_from_the_version(tmp_path: Path) -> None:
    """Distributions add some to old versions."""
    text = "case $1 in --version) echo bubblewrap 0.6.1;; --help) echo '  --args FD';; esac; exit 0"
    found = read(script(tmp_path, text))
    assert found.bwrap_version == (0, 6, 1)
    assert "--args" not in found.bwrap_missing
    assert "--disable-userns" in found.bwrap_missing


def test_rights_of_the_file_are_seen(tmp_path: Path) -> None:
    """Also behind a link."""
    path = Path(script(tmp_path, "exit 1"))
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read(str(link)).bwrap_privileged == ""
    path.chmod(0o755 | stat.S_ISUID | stat.S_ISGID)
    must_work(path.stat().st_mode & stat.S_ISUID, "needs a file system with setuid")
    assert read(str(link)).bwrap_privileged == "setuid and setgid"
    assert read(str(link)).bwrap_real == str(path)


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ('PRETTY_NAME="Debian"\nID=debian\n', ("debian",)),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', ("rocky", "rhel", "centos", "fedora")),
        ("# comment\n\nID_LIKE=suse", ("suse",)),
        ("", ()),
    ],
)
def test_the_distribution_is_read(release: str, names: tuple[str, ...]) -> None:
    """Name first, then its relatives."""
    assert kernel.distributions(release) == names


def test_a_chroot_has_no_root_mount() -> None:
    """And a machine whose mounts cannot be read is none."""
    assert kernel.is_chroot("30 1 8:1 / /proc rw - proc proc rw")
    assert not kernel.is_chroot("30 1 8:1 / / rw - ext4 /dev/sda rw")
    assert not kernel.is_chroot("")


def test_masks_on_proc_are_found() -> None:
    """But for those that hide nothing."""
    points = ("/proc", "/proc/kcore", "/proc/sys/fs/binfmt_misc", "/processes", "/proc/sys")
    text = "\n".join(f"30 1 0:1 / {point} ro - tmpfs tmpfs ro" for point in points)
    assert kernel.proc_masks(text) == ("/proc/kcore", "/proc/sys")


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.12.1-amd64", 0), ("4.4.0-19041-Microsoft", 1), ("5.15.90.1-microsoft-standard-WSL2", 2)],
)
def test_wsl_is_told_apart(release: str, version: int) -> None:
    """Version 1 has no namespaces, version 2 has."""
    assert kernel._wsl(release) == version


def test_profiles_for_bwrap_are_found(tmp_path: Path) -> None:
    """In any spelling, but not where bwrap is only mentioned."""
    (tmp_path / "a").write_text('  profile x "/usr/bin/bwrap" flags=(unconfined) {\n userns,\n}\n')
    (tmp_path / "b").write_text("/usr/local/bin/bwrap {\n}\n")
    (tmp_path / "c").write_text("profile y /usr/bin/steam {\n  /usr/bin/bwrap Px,\n}\n")
    (tmp_path / "d").mkdir()
    assert kernel._profile_files(str(tmp_path)) == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert kernel._profile_files(f"{tmp_path}/none") == ()


def test_a_container_is_known_by_its_environment() -> None:
    """Kubernetes and whatever systemd was told."""
    assert kernel._container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "") == "kubernetes"


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_the_state_directory_must_be_the_users_own(tmp_path: Path, mode: int) -> None:
    """As the launcher wants it."""
    (tmp_path / "agent-sandbox").mkdir()
    (tmp_path / "agent-sandbox").chmod(mode)
    found = read(None, XDG_STATE_HOME=str(tmp_path))
    assert found.state_dir == f"{tmp_path}/agent-sandbox"
    assert found.state_error == ("" if mode == 0o700 else "others own it or can write it")


def test_a_bad_home_is_reported_and_not_raised() -> None:
    """Doctor must work on machines that do not."""
    assert "as the home directory" in read(None, HOME="/").state_error


def test_probing_writes_nothing_to_the_state_directory(tmp_path: Path) -> None:
    """It only looks whether it could."""
    found = read(None, XDG_STATE_HOME=str(tmp_path / "deep" / "er"))
    assert found.state_error == ""
    assert list(tmp_path.iterdir()) == []
