"""Loads this package's modules straight from their bytecode; on the launch path.

Python asks three finders, lists directories and makes a dozen system calls for each module. Of
sixty modules that is two milliseconds at every start. Here a name leads to one file. Whatever is
not as expected (no bytecode, older than its source, of another Python) is left to Python's own way.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    from _frozen_importlib import ModuleSpec

    Loader = object

PACKAGE = __name__.partition(".")[0] + "."
# What a file begins with (PEP 552): a number of the Python, four zeros, its source's time and size.
HEADER = 16


class Finder(Loader):
    """Finds and loads the modules of this package."""

    def __init__(self, magic: bytes) -> None:
        self._magic = magic + bytes(4)
        self._ending = f".{sys.implementation.cache_tag}.pyc"
        self._found: dict[str, bytes] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is, with its code; None: let Python look."""
        if path is None or not name.startswith(PACKAGE):
            return None
        directory, leaf = path[0], name.rpartition(".")[2]
        return self._spec(name, directory, leaf) or self._spec(
            name, f"{directory}/{leaf}", "__init__"
        )

    def _spec(self, name: str, directory: str, leaf: str) -> ModuleSpec | None:
        source = f"{directory}/{leaf}.py"
        prefix = sys.pycache_prefix
        place = f"{directory}/__pycache__" if prefix is None else prefix + directory
        cached = f"{place}/{leaf}{self._ending}"
        try:
            info = os.stat(source)
            fd = os.open(cached, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.read(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
        except OSError:
            return None
        age, size = int(info.st_mtime) & 0xFFFFFFFF, info.st_size & 0xFFFFFFFF
        stamp = age.to_bytes(4, "little") + size.to_bytes(4, "little")
        if data[:HEADER] != self._magic + stamp:
            return None
        is_package = leaf == "__init__"
        spec = ModuleSpec(name, self, origin=source, is_package=is_package)
        if is_package:
            spec.submodule_search_locations = [directory]
        spec.has_location = True
        spec.cached = cached
        self._found[name] = data
        return spec

    def create_module(self, _: ModuleSpec) -> None:
        """Let Python make the module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's code in it."""
        data = memoryview(self._found.pop(module.__name__))
        exec(marshal.loads(data[HEADER:]), module.__dict__)  # noqa: S102, S302 - our own


def install() -> None:
    """Use it from now on, for this package alone."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        from _frozen_importlib_external import MAGIC_NUMBER

        sys.meta_path.insert(0, Finder(MAGIC_NUMBER))
