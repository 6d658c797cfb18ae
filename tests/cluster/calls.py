"""Which calls the backend makes to the API server, read from its source.

Every call of `Api` names a path. The path is followed through local variables, loops over
constants, and parameters of functions of the same module; what cannot be followed is an error, so
that no call is forgotten.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Methods of `Api` as Kubernetes calls them.
VERBS = {
    "get": ("get",), "create": ("create",), "patch": ("patch",), "delete": ("delete",),
    "list": ("list",), "watch": ("watch",),
}  # fmt: skip
FOLLOWED = ("list", "watch")
# A path as a text: /api/v1/nodes/NAME, /apis/GROUP.
NODE = re.compile(r"/api/v1/(\w+)")
# In kube_api itself: what its methods are made of, and the ones below.
OWN = "kube_api.py"
# A client's log is a GET of a subresource; an upgrade to WebSocket is one, too, for which newer API
# servers ask for `create`.
FIXED = {"log": {("pods/log", "get")}, "exec": {("pods/exec", "get"), ("pods/exec", "create")}}


class Module:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.constants = dict(_constants(self.tree))
        self.functions = [
            node for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]  # fmt: skip

    def calls(self) -> Iterator[tuple[str, str]]:
        """Resource and verb of every call."""
        for function in self.functions:
            for node in _inside(function):
                if isinstance(node, ast.Call):
                    yield from self._call(node, function)

    def _call(self, node: ast.Call, function: ast.AST) -> Iterator[tuple[str, str]]:
        words = ast.unparse(node.func)
        if words == "Follower":
            for resource in self.resources(node.args[1], function):
                yield from ((resource, verb) for verb in FOLLOWED)
        base, _, method = words.rpartition(".")
        if base.split(".")[-1] not in ("api", "_api"):
            return
        if method == "log":
            yield from FIXED["log"]
        for verb in VERBS.get(method, ()):
            for resource in self.resources(node.args[0], function):
                yield resource, verb

    def resources(self, node: ast.AST, function: ast.AST) -> set[str]:
        """The resources that an expression for a path may name; "": discovery."""
        if isinstance(node, ast.Call):
            method = ast.unparse(node.func).rpartition(".")[2]
            assert method in ("path", "_path"), f"{self.path.name}: {ast.unparse(node)}"
            return self.texts(node.args[0], function)
        if isinstance(node, ast.Constant | ast.JoinedStr):
            text = ast.unparse(node)
            if found := NODE.search(text):
                return {found[1]}
            assert "/apis/" in text, f"{self.path.name}: {text}"
            return {""}
        assert isinstance(node, ast.Name), f"{self.path.name}: {ast.unparse(node)}"
        return {r for value in self.values(node.id, function) for r in self.resources(*value)}

    def texts(self, node: ast.AST, function: ast.AST) -> set[str]:
        """The texts that an expression may be."""
        if isinstance(node, ast.Constant):
            return {str(node.value)}
        assert isinstance(node, ast.Name), f"{self.path.name}: {ast.unparse(node)}"
        if node.id in self.constants:
            return {self.constants[node.id]}
        return {t for value in self.values(node.id, function) for t in self.texts(*value)}

    def values(self, name: str, function: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
        """What a local name may be: assigned, looped over, or given by callers."""
        found: list[tuple[ast.AST, ast.AST]] = []
        for node in _inside(function):
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
                found.append((node.value, function))
            if isinstance(node, ast.For) and ast.unparse(node.target) == name:
                assert isinstance(node.iter, ast.Tuple), f"{self.path.name}: {ast.unparse(node)}"
                found += [(one, function) for one in node.iter.elts]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        names = [a.arg for a in function.args.args if a.arg != "self"]
        if name in names:
            for caller in self.functions:
                for node in _inside(caller):
                    called = isinstance(node, ast.Call) and ast.unparse(node.func)
                    if called in (function.name, f"self.{function.name}"):
                        assert isinstance(node, ast.Call)
                        found.append((node.args[names.index(name)], caller))
        assert found, f"{self.path.name}: nothing is known of '{name}' in {function.name}"
        return found


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    imported = {
        alias.asname or alias.name: alias.name
        for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    if "SANDBOXES" in imported:
        yield "SANDBOXES", "sandboxes"
    for node in tree.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = (
            zip(target.elts, value.elts, strict=True)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else [(target, value)]
        )
        for name, one in pairs:
            text = one.value if isinstance(one, ast.Constant) else None
            if isinstance(name, ast.Name) and isinstance(text, str):
                yield name.id, text


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _inside(node)


def made(backend: Path) -> set[tuple[str, str]]:
    """All calls of the backend, discovery left out: everybody may ask for that."""
    found: set[tuple[str, str]] = set()
    for path in sorted(backend.glob("kube*.py")):
        if path.name == OWN:
            continue
        found |= {call for call in Module(path).calls() if call[0]}
        if "/exec" in path.read_text():
            found |= FIXED["exec"]
    return found
