"""Modules import only from their own line of the design or from lines above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import agent_sandbox

PACKAGE = Path(agent_sandbox.__file__).parent
# From the lowest line to the highest.
LINES = (
    ("errors", "record"), ("policy",), ("compose",), ("host",), ("launch",), ("proxy",),
    ("sandbox",), ("service", "client", "pod"), ("cli",), ("__main__",),
)  # fmt: skip
RANK = {name: rank for rank, line in enumerate(LINES) for name in line}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
# `policy` and `compose` decide; they may not look, wait, or start anything.
IMPURE = {
    "os", "posix", "sys", "io", "time", "datetime", "subprocess", "socket", "signal", "_signal",
    "pathlib", "shutil", "tempfile", "glob", "random", "secrets", "threading", "_thread",
    "multiprocessing", "asyncio", "select", "fcntl", "ctypes", "_ctypes", "platform", "pwd", "grp",
    "locale", "logging", "builtins", "importlib", "urllib", "http", "resource", "mmap",
}  # fmt: skip


def dotted(path: Path) -> tuple[str, ...]:
    """A module's name below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Every import with its line, in-function ones too, as absolute names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.relative_to(PACKAGE).parent.parts
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                above = package[: len(package) - (node.level - 1)]
                named = ("agent_sandbox", *above, *named)
            # `from . import x`: x may be a module itself.
            found += [(node.lineno, (*named, alias.name)) for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(dotted(p)))
def test_a_module_imports_only_from_its_own_line_or_above(path: Path) -> None:
    """The order of the design keeps decisions apart from actions."""
    own = RANK[dotted(path)[0]]
    wrong = [
        f"{path.name}:{line}: {'.'.join(name)}"
        for line, name in imports(path)
        if name[0] == "agent_sandbox" and len(name) > 1 and RANK.get(name[1], -1) > own
    ]
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(dotted(p)))
def test_every_module_stands_on_a_line_of_the_design(path: Path) -> None:
    """A new part of the package needs a place in the order."""
    assert dotted(path)[0] in RANK


PURE = [p for p in MODULES if dotted(p)[0] in ("policy", "compose", "errors", "record")]


@pytest.mark.parametrize("path", PURE, ids=lambda p: ".".join(dotted(p)))
def test_policy_touches_no_machine(path: Path) -> None:
    """The machine comes in as HostFacts; there is no clock, no file and no environment."""
    used = [(line, name[0]) for line, name in imports(path) if name[0] in IMPURE]
    assert used == []


@pytest.mark.parametrize("path", PURE, ids=lambda p: ".".join(dotted(p)))
def test_policy_opens_and_prints_nothing(path: Path) -> None:
    """Neither by a builtin."""
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__", "exit"}


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if dotted(p)[0] not in ("cli", "service", "__main__")],
    ids=lambda p: ".".join(dotted(p)),
)
def test_only_front_ends_print_or_exit(path: Path) -> None:
    """The library reports by values and exceptions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # A module that is also a process of its own may end that process.
    scripts = [n for n in tree.body if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)]
    exempt = {id(inner) for script in scripts for inner in ast.walk(script)}
    wrong = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and id(node) not in exempt
        and (
            (isinstance(node.func, ast.Name) and node.func.id in ("print", "exit", "quit"))
            or (isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "sys.exit")
        )
    ]
    assert wrong == []


def test_the_tests_see_imports_inside_functions(tmp_path: Path) -> None:
    """A control: the reader finds what it must find."""
    source = PACKAGE / "policy" / "decode.py"
    names = {".".join(name) for _, name in imports(source)}
    assert "agent_sandbox.policy.presets.check_name" in names
    assert "agent_sandbox.errors.PolicyError" in names
