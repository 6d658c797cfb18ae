"""Our modules come straight from their bytecode, and from their source whenever that differs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agent_sandbox

SOURCE = Path(agent_sandbox.__file__).parent
ENTRY = """
import sys
sys.path.insert(0, sys.argv[1])
from agent_sandbox.cli import bytecode
bytecode.install()
bytecode.install()
from agent_sandbox.policy import paths, presets
import agent_sandbox.policy, json
by = [m.__name__.rpartition(".")[2] for m in (agent_sandbox.policy, paths, presets, json)
      if isinstance(m.__loader__, bytecode.Finder)]
print(len([f for f in sys.meta_path if isinstance(f, bytecode.Finder)]), *by)
print(paths.__file__, paths.__cached__, paths.__doc__.split()[0], agent_sandbox.policy.__path__)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of our own package, with bytecode."""
    shutil.copytree(
        SOURCE, tmp_path / "agent_sandbox", ignore=shutil.ignore_patterns("__pycache__")
    )
    load(tmp_path)
    return tmp_path


def load(place: Path, *options: str) -> list[str]:
    """Load modules as a start does; what was loaded from bytecode, and where from."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", *options, "-c", ENTRY, str(place)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def compiled(place: Path, name: str) -> Path:
    """The bytecode of a module of `policy`."""
    tag = sys.implementation.cache_tag
    return place / "agent_sandbox" / "policy" / "__pycache__" / f"{name}.{tag}.pyc"


def test_our_modules_come_from_bytecode_and_others_do_not(package: Path) -> None:
    """Once installed, whatever how often; with the names that Python would give them."""
    policy = package / "agent_sandbox" / "policy"
    first, second = load(package)
    assert first == "1 policy paths presets"
    word = (policy / "paths.py").read_text().removeprefix('"""').split()[0]
    assert second == f"{policy}/paths.py {compiled(package, 'paths')} {word} ['{policy}']"


@pytest.mark.parametrize("longer", [True, False])
def test_a_source_that_was_changed_counts(package: Path, longer: bool) -> None:
    """By its size, and by its time alone."""
    source = package / "agent_sandbox" / "policy" / "paths.py"
    info, text = source.stat(), source.read_text()
    if longer:
        source.write_text(text.replace('"""', '"""Changed ', 1))
    else:
        word = text.removeprefix('"""').split()[0]
        source.write_text(text.replace(word, "Changed"[: len(word)].ljust(len(word), "d"), 1))
    # Of the same size it counts by its time, and the other way round.
    later = info.st_mtime if longer else info.st_mtime + 10
    os.utime(source, (later, later))
    first, second = load(package)
    assert first == "1 policy presets"
    assert second.split()[2].startswith("Chan")
    # Python has compiled it anew.
    assert load(package)[0] == "1 policy paths presets"


@pytest.mark.parametrize("damage", ["missing", "empty", "another Python's", "checked by hash"])
def test_bytecode_that_is_not_as_expected_is_left_to_python(package: Path, damage: str) -> None:
    """Then its own rules hold."""
    file = compiled(package, "paths")
    data = file.read_bytes()
    changed = {
        "empty": b"",
        "another Python's": b"\0\0\0\0" + data[4:],
        "checked by hash": data[:4] + b"\3\0\0\0" + data[8:],
    }
    file.unlink()
    if damage in changed:
        file.write_bytes(changed[damage])
    assert load(package, "-B")[0] == "1 policy presets"


def test_another_place_for_bytecode_is_used(package: Path, tmp_path: Path) -> None:
    """A checkout of somebody else has it elsewhere."""
    option = ("-X", f"pycache_prefix={tmp_path}/elsewhere")
    assert load(package, *option)[0] == "1"
    first, second = load(package, *option)
    assert first == "1 policy paths presets"
    assert second.split()[1].startswith(f"{tmp_path}/elsewhere{package}/agent_sandbox/policy/paths")
