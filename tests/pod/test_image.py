"""Nothing that an image brings runs in its agent. The controls show that it would."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.pod import bundle, terms
from agent_sandbox.service.backend import pod_env
from conftest import As, make_readable, must_work

from . import ground
from .conftest import Pods, factory

pytestmark = pytest.mark.kernel

# Any library that a program can be made to load; as a module of OpenSSL it works, and so stays.
MODULE = "ossl-modules/legacy.so"
EVIL = "/etc/evil.so"
CONFIG = """openssl_conf = init
[init]
providers = all
[all]
default = plain
evil = bad
[plain]
activate = 1
[bad]
module = {module}
activate = 1
"""
SHOW = "{0}print(open('/proc/self/maps').read())"


@pytest.fixture
def etc() -> Iterator[Path]:
    """An /etc of the image's own."""
    found = [path / MODULE for path in Path("/usr/lib").glob("*-linux-gnu") if path.is_dir()]
    must_work(any(path.exists() for path in found), "OpenSSL's modules are not installed")
    base = Path(tempfile.mkdtemp(prefix="agsbx-image-", dir="/srv"))
    (base / "ssl").mkdir()
    shutil.copy(next(path for path in found if path.exists()), base / "evil.so")
    for name in ("passwd", "group"):
        shutil.copy(f"/etc/{name}", base / name)
    yield base
    ground.remove(base)


def ready(base: Path, files: dict[str, str]) -> str:
    """The image with these files."""
    for name, text in files.items():
        (base / name).write_text(text)
    make_readable(base)
    return str(base)


def maps(pod: ground.Pod) -> str:
    """What the agent has loaded."""
    pod.fingerprint()
    return Path(f"/proc/{pod.init}/maps").read_text()


def machines(owner: As, etc: str, *argv: str, **env: str) -> str:
    """A program of the machine in this image, by the machine's own loader."""
    options = ["--ro-bind", "/", "/", "--ro-bind", etc, "/etc", "--dev", "/dev", "--proc", "/proc"]
    settings = [word for name, value in env.items() for word in ("--setenv", name, value)]
    done = owner.run(["bwrap", *options, *settings, "--", *argv], cwd="/")
    return str(done.stdout) + str(done.stderr)


@pytest.fixture
def made(superuser: As, built: Path, pem: bytes) -> Iterator[Pods]:
    """Makes agents; only root sees what they have loaded."""
    yield from factory(superuser, built, pem)


def test_cannot_be_preloaded_by_a_file_of_the_image(made: Pods, superuser: As, etc: Path) -> None:
    image = ready(etc, {"ld.so.preload": f"{EVIL}\n"})
    pod = made(etc=image)
    assert EVIL not in maps(pod)
    assert f"{terms.ROOT}/lib/" in maps(pod)
    # The control: the loader of the machine heeds it.
    assert EVIL in machines(superuser, image, "/usr/bin/python3", "-c", SHOW.format(""))


def test_cannot_be_preloaded_by_a_variable_of_the_image(
    made: Pods, superuser: As, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ready(etc, {})
    given = {"LD_PRELOAD": EVIL, "LD_AUDIT": EVIL}
    assert EVIL not in maps(made(etc=image, image=given))
    # The control: where nothing drops it and the pod does not say otherwise, the image's holds.
    monkeypatch.setattr(pod_env, "COMMAND", pod_env.COMMAND[1:])
    rest = {k: v for k, v in pod_env.NOTHING_OF_THE_IMAGE.items() if k != "LD_PRELOAD"}
    monkeypatch.setattr(pod_env, "NOTHING_OF_THE_IMAGE", rest)
    assert EVIL in maps(made(etc=image, image={"LD_PRELOAD": EVIL}))


def test_cannot_be_configured_to_load_a_module_of_the_image(
    made: Pods, superuser: As, etc: Path
) -> None:
    image = ready(etc, {"ssl/openssl.cnf": CONFIG.format(module=EVIL)})
    assert EVIL not in maps(made(etc=image))
    # The control.
    shown = machines(superuser, image, "/usr/bin/python3", "-c", SHOW.format("import ssl; "))
    assert EVIL in shown


def test_the_program_that_makes_its_key_reads_nothing_of_the_image(
    made: Pods, superuser: As, etc: Path
) -> None:
    """It ends soon; but a module that is a pipe without a writer would keep it for ever."""
    os.mkfifo(etc / "pipe.so")
    image = ready(etc, {"ssl/openssl.cnf": CONFIG.format(module="/etc/pipe.so")})
    assert made(etc=image).fingerprint()
    # The control.
    tried = ("timeout", "3", "/usr/bin/openssl", "rand", "-hex", "4")
    assert machines(superuser, image, *tried) == ""


def test_a_loader_that_cannot_be_made_deaf_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "loader"
    other.write_bytes(b"\x7fELF another one")
    monkeypatch.setattr(bundle, "FIRST", str(other))
    with pytest.raises(bundle.Unfit, match="not the loader"):
        bundle.make(str(tmp_path / "made"))


def test_names_that_cannot_exist_are_as_long_as_those_they_replace(built: Path) -> None:
    assert all(len(old) == len(new) for old, new in bundle.READ_NOTHING.items())
    data = (built / "bin" / "loader").read_bytes()
    assert not any(name in data for name in bundle.READ_NOTHING)
    assert terms.VARIABLES["OPENSSL_CONF"] == os.devnull
