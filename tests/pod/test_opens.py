"""Nothing of an image is used by its agent: every path that it opens or asks about, by strace."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.pod import bundle, enter, terms
from agent_sandbox.service.backend import pod_env
from conftest import As, make_readable, must_work

from . import ground
from .conftest import Pods

pytestmark = pytest.mark.kernel

EVIL = "/etc/evil.so"
# What an image's ENV can say to whom: loader, libc, libcrypto, Python, and whatever else asks.
HOSTILE = {
    **dict.fromkeys(("LD_PRELOAD", "BASH_ENV", "BWRAP", "SHELL"), EVIL),
    **dict.fromkeys((
        "LD_LIBRARY_PATH", "LOCPATH", "GCONV_PATH", "TZDIR", "HOME", "TMPDIR", "PYTHONHOME",
        "PYTHONPATH", "PYTHONUSERBASE", "SSL_CERT_DIR", "OPENSSL_MODULES", "OPENSSL_ENGINES",
    ), "/etc/evil"),
    **dict.fromkeys((
        # What is no such module ends whoever loads it: that is not to be setpriv.
        "LD_AUDIT", "OPENSSL_CONF", "SSL_CERT_FILE", "NLSPATH", "HOSTALIASES", "RANDFILE",
        "PYTHONSTARTUP", "PYTHONEXECUTABLE", "SSLKEYLOGFILE", "RESOLV_HOST_CONF", "LOCALDOMAIN",
    ), "/etc/evil/file"),
    "LANG": "xx_XX.EVIL", "LC_ALL": "zh_CN.GB18030", "LANGUAGE": "xx", "TZ": "Evil/Zone",
    "GLIBC_TUNABLES": "glibc.malloc.check=3", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "1",
    "PYTHONWARNINGS": "error", "PYTHONVERBOSE": "1", "PYTHONINSPECT": "1", "PYTHONSAFEPATH": "",
    "PYTHONPLATLIBDIR": "../../etc/evil", "PATH": "/usr/bin:/bin:/etc/evil",
    # Its beginning alone is like that of ours, and it is shorter.
    "AGENT": "x", "AGENT_S": "/etc/evil",
}  # fmt: skip
# Files by which an image can bring code along.
FILES = {
    "ld.so.preload": f"{EVIL}\n", "ld.so.cache": "evil", "gai.conf": "", "resolv.conf": "",
    "nsswitch.conf": "passwd: evil\nhosts: evil\n", "hosts": "127.0.0.1 localhost\n",
    "localtime": "evil", "ssl/openssl.cnf": "openssl_conf = evil\n", "selinux/config": "evil\n",
    "passwd": "root:x:0:0::/:/bin/sh\n", "group": "root:x:0:\n",
}  # fmt: skip
# The bundle, the sandbox's own files, and what the kernel and the engine make.
OURS = (terms.ROOT, terms.PLACE, "/proc", "/sys", "/dev")
# Places that are asked about or mounted on, and never opened: bwrap's own, and a file system of
# SELinux at its old place, known by its type alone.
ASKED = {"/", "/home", "/opt", "/selinux", "/newroot", "/oldroot", *pod_env.MOUNTS}
CALL = re.compile(r'^(\d+) +(\w+)\((?:AT_FDCWD, |\d+, )?"([^"]*)"(.*)')
OPENS = {"open", "openat", "openat2", "execve", "execveat", "creat", "uselib"}
ASKS = {"access", "faccessat", "faccessat2", "stat", "lstat", "newfstatat", "statx", "readlink",
        "readlinkat", "statfs"}  # fmt: skip
STRACE = ("strace", "-f", "-qq", "-s", "4096", "-e", "trace=%file")


def used(trace: Path, first: str) -> set[str]:
    """What was used of the image once `first` had been executed, by it and by its children."""
    before: set[str] = set()
    family: set[str] = set()
    found: set[str] = set()
    for line in trace.read_text(errors="replace").splitlines():
        call = CALL.match(line)
        if call is None:
            continue
        pid, name, path, rest = call.groups()
        if name == "execve" and path == first:
            family.add(pid)
        if not family:
            before.add(pid)
        if pid in family or (family and pid not in before):
            found |= _foreign(name, path, rest)
    assert family, "it was never started"
    return found


def _foreign(name: str, path: str, rest: str) -> set[str]:
    # bwrap calls the old and the new root so. Inside of them the same rules hold.
    within = re.sub("^/(old|new)root(?=/)", "", path)
    if not path.startswith("/") or within.startswith(tuple(f"{own}/" for own in OURS)):
        return set()
    is_content = name in OPENS and "O_PATH" not in rest
    if (is_content or name in OPENS | ASKS) and within.rstrip("/") not in {*OURS, ""}:
        return set() if within in ASKED and not is_content else {path}
    return set()


@pytest.fixture
def image() -> Iterator[str]:
    """An /etc that is hostile in every way."""
    base = Path(tempfile.mkdtemp(prefix="agsbx-image-", dir="/srv" if os.getuid() == 0 else None))
    for name, text in FILES.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text)
    (base / "evil").mkdir()
    shutil.copy(next(Path("/usr/lib").glob("*-linux-gnu/ossl-modules/legacy.so")), base / "evil.so")
    make_readable(base)
    yield str(base)
    ground.remove(base)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod says nothing against the image's variables: what drops them has to do it."""
    must_work(shutil.which("strace"), "strace is not installed")
    monkeypatch.setattr(pod_env, "NOTHING_OF_THE_IMAGE", {})


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.mark.usefixtures("alone")
def test_the_agent_uses_nothing_of_the_image(pods: Pods, runner: As, image: str) -> None:
    trace = runner.project() / "trace"
    pod = pods(etc=image, image=HOSTILE, before=(*STRACE, "-o", str(trace)))

    async def scene() -> None:
        link = await pod.claimed()
        files = link.files()
        await files.write("/workspace/a", _once(b"x"), limit=10)
        assert (await files.entry("/workspace/a")).size == 1
        await link.usage()
        await link.renew(0)

    ground.play(scene())
    assert pod.ended() == 0
    assert used(trace, pod_env.COMMAND[0]) == set()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("no enter", {EVIL, "/etc/evil/file"}),
        ("another loader", {"/etc/ld.so.preload", EVIL}),
        ("no archive", {"/opt/lib/python3{minor}.zip"}),
    ],
)
def test_it_would_without(  # noqa: PLR0917 - fixtures
    superuser: As, built: Path, pem: bytes, image: str, change: str, expected: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The controls: each protection on its own."""
    base = ground.directory(superuser)
    other = base / "bundle"
    shutil.copytree(built, other)
    minor = ""
    if change == "another loader":
        loader = next(path for path in (bundle.FIRST, bundle.FIRST_ARM) if os.path.exists(path))
        shutil.copy(loader, other / "bin" / "loader")
    elif change == "no archive":
        (archive,) = (other / "lib").glob("python*.zip")
        minor = archive.stem.removeprefix("python3")
        archive.unlink()
    else:
        monkeypatch.setattr(pod_env, "COMMAND", pod_env.COMMAND[1:])
    trace = base / "trace"
    place = ground.directory(superuser)
    given = {**HOSTILE, "LD_LIBRARY_PATH": "", "PYTHONVERBOSE": ""}
    pod = ground.Pod(
        superuser, place, other, pem, etc=image, image=given, before=(*STRACE, "-o", str(trace))
    )
    try:
        assert pod.process.stdout is not None
        pod.process.stdout.readline()
        found = used(trace, pod_env.COMMAND[0])
    finally:
        pod.end()
        ground.remove(place)
        ground.remove(base)
    assert {path.format(minor=minor) for path in expected} <= found


def traced(runner: As, built: Path, image: str, argv: tuple[str, ...], **options: Any) -> set[str]:
    """What a program of the bundle uses of an image."""
    trace = runner.project() / "trace"
    target = runner.project()
    words = ["bwrap", "--unshare-user", "--ro-bind", "/usr", "/usr", "--ro-bind", image, "/etc"]
    words += ["--proc", "/proc", "--dev", "/dev", "--symlink", "usr/lib", "/lib"]
    words += ["--symlink", "usr/lib64", "/lib64", "--ro-bind", str(built), terms.ROOT]
    words += ["--bind", str(target), "/target", "--remount-ro", "/", "--", *argv]
    done = runner.popen(
        [*STRACE, "-o", str(trace), *words], cwd="/", env={**HOSTILE, **options.pop("env", {})},
        stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    said = done.communicate(timeout=60)[1]
    # Without what drops the variables it goes wrong in many ways.
    assert done.returncode == 0 or argv[0] != pod_env.COMMAND[0], said
    return used(trace, argv[0])


@pytest.mark.usefixtures("alone")
def test_the_installer_uses_nothing_of_its_image(runner: As, built: Path, image: str) -> None:
    found = traced(runner, built, image, (*pod_env.INSTALL, "/target"))
    assert {path for path in found if not path.startswith("/target")} == set()
    # The control: without what drops the variables.
    found = traced(runner, built, image, (*pod_env.INSTALL[1:], "/target"))
    assert EVIL in found


@pytest.mark.usefixtures("alone")
def test_the_bridge_uses_nothing_of_the_image(runner: As, built: Path, image: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = {terms.AT: str(server.getsockname()[1])}
        options: dict[str, Any] = {"env": port, "stdin": subprocess.DEVNULL}
        assert traced(runner, built, image, pod_env.CONNECT, **options) == set()
        assert EVIL in traced(runner, built, image, pod_env.CONNECT[1:], **options)


def test_only_our_own_variables_get_through(runner: As, built: Path) -> None:
    given = {**HOSTILE, terms.CA: "a\nb", terms.AT: "1", "AGENT_SANDBO": "short"}
    done = runner.run([f"{built}/bin/enter", "/usr/bin/env", "-0"], env=given)
    found = dict(word.split("=", 1) for word in done.stdout.split("\0") if word)
    ours = {name: value for name, value in given.items() if name.startswith(terms.PREFIX)}
    assert found == {**ours, **terms.VARIABLES}
    assert terms.CA in ours
    # With none at all, and with nothing to execute.
    bare = {**dict.fromkeys(runner.environ())}
    done = runner.run([f"{built}/bin/enter", "/usr/bin/env", "-0"], env=bare)
    assert {word.split("=")[0] for word in done.stdout.split("\0") if word} == set(terms.VARIABLES)
    assert runner.run([f"{built}/bin/enter"]).returncode == 127
    assert runner.run([f"{built}/bin/enter", "/nonexistent"]).returncode == 127


def test_the_first_program_is_the_same_for_both_kinds_of_machine() -> None:
    """The other one is run where there is an emulator for it."""
    made = {machine: enter.program(machine) for machine in enter.CODE}
    assert {len(data) for data in made.values()} == {len(enter.program("x86_64"))}
    assert all(data.endswith(b"OPENSSL_ENGINES=/dev/null\0") for data in made.values())
    assert len(terms.PREFIX) == 8


@pytest.mark.parametrize("machine", sorted(enter.CODE))
def test_the_first_program_under_an_emulator(machine: str, tmp_path: Path) -> None:
    emulator = shutil.which(f"qemu-{machine}")
    if emulator is None:
        pytest.skip("no emulator for the other machine: it is run natively there")
    file = tmp_path / "enter"
    file.write_bytes(enter.program(machine))
    file.chmod(0o755)
    given = {"AGENT_SANDBOX_CA": "x", "OPENSSL_CONF": "evil", "OTHER": "y"}
    done = subprocess.run(
        [emulator, file, "/usr/bin/env", "-0"], env=given, check=True, capture_output=True
    )
    found = {word.split(b"=")[0].decode() for word in done.stdout.split(b"\0") if word}
    assert found == {"AGENT_SANDBOX_CA", *terms.VARIABLES}
