"""Makes the bundle: a Python, our own modules, `openssl` and `bwrap`, with all that they load.

    python3 -m agent_sandbox.pod.bundle DIR [--python /usr/bin/python3]

It runs in any image of the same machine type, also in one without a libc, since it brings its own
loader. Everything is taken from the machine on which this runs, and only what is needed.
"""

from __future__ import annotations

import os
import subprocess  # noqa: TID253 - a program of its own, not a launch
import sys

from . import enter, inner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PYTHON = "/usr/bin/python3"
TOOLS = {
    "openssl": ("/usr/bin/openssl",),
    "bwrap": ("/usr/bin/bwrap", "/usr/local/bin/bwrap"),
    "setsid": ("/usr/bin/setsid", "/bin/setsid"),
    "dash": ("/usr/bin/dash", "/bin/dash"),
}
# What the agent's processes import, also what they import late.
MODULES = (
    "agent_sandbox.pod.main", "agent_sandbox.pod.agent", "agent_sandbox.pod.files",
    "agent_sandbox.pod.connect", "agent_sandbox.pod.install", "agent_sandbox.pod.identity",
    "encodings.ascii", "encodings.utf_8", "encodings.latin_1", "encodings.idna", "zlib",
)  # fmt: skip
# Prints what was loaded: name, file; frozen modules have a source as well, which other programs
# with the same interpreter may want.
ASK = """
import sys, sysconfig
sys.path.insert(0, {source!r})
for name in {modules!r}:
    __import__(name)
import os
stdlib = sysconfig.get_path("stdlib")
print(sysconfig.get_config_var("py_version_short"))
for name, module in sorted(sys.modules.items()):
    file = getattr(module, "__file__", None) or ""
    if not file:
        guess = os.path.join(stdlib, *name.split("."))
        file = next((p for p in (guess + "/__init__.py", guess + ".py") if os.path.exists(p)), "")
    if file and name != "__main__" and "sysconfig" not in name:
        print(name, file, sep="\\t")
"""
COMPILE = """
import py_compile, sys
for line in sys.stdin.read().splitlines():
    source, target, shown = line.split("\\t")
    py_compile.compile(source, target, shown, doraise=True, optimize=2,
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""
# What a loader reads of the image that it runs in, and what our copy reads instead: a name of the
# same length that cannot exist. An image's /etc/ld.so.preload would otherwise run in the agent.
READ_NOTHING = {
    b"/etc/ld.so.preload\0": b"/dev/null/preloads\0", b"/etc/ld.so.cache\0": b"/dev/null/caches\0",
}  # fmt: skip
# The same for libraries: bwrap's reads a configuration of SELinux when it is loaded.
MUTED = {b"/etc/selinux/": b"/dev/null////"}
# Where a loader looks for what is nowhere else, as our copy must never do: /dev is the engine's.
SEARCHED = tuple(
    f"/lib/{kind}/\0/usr/lib/{kind}/\0/lib/\0/usr/lib/\0".encode("ascii")
    for kind in ("x86_64-linux-gnu", "aarch64-linux-gnu")
)
# An archive with nothing in it (APPNOTE.TXT, 4.3.16).
NO_MODULES = b"PK\5\6" + bytes(18)
FIRST, FIRST_ARM = "/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"


class Unfit(Exception):
    """This machine lacks something."""


def make(target: str, python: str = PYTHON) -> None:
    """Make it in a directory that does not exist or is empty."""
    os.makedirs(target, exist_ok=True)
    if os.listdir(target):
        raise Unfit(f"'{target}' is not empty")
    for name in ("bin", "lib", "empty", "hidden/bin", "hidden/lib"):
        os.makedirs(f"{target}/{name}")
    for file in inner.TERMINAL_FILES:
        # Something to mount on, where the rest is hidden.
        _write(f"{target}/hidden/{file}", b"", 0o444)
    programs = {"python3": os.path.realpath(python), **{n: _tool(n) for n in TOOLS}}
    loader = next((path for path in (FIRST, FIRST_ARM) if os.path.exists(path)), None)
    if loader is None:
        raise Unfit("no loader of glibc here")
    _write(f"{target}/bin/loader", _deaf(loader), 0o755)
    _write(f"{target}/bin/enter", enter.program(os.uname().machine), 0o755)
    for name, path in programs.items():
        _copy(path, f"{target}/bin/{name}", 0o755)
    extensions = _python_files(target, programs["python3"])
    for path in libraries(loader, [*programs.values(), *extensions]):
        _write(f"{target}/lib/{os.path.basename(path)}", _muted(path), 0o755)


def _deaf(loader: str) -> bytes:
    """The loader, without its ears for the image."""
    data = _read(loader)
    for name, nothing in READ_NOTHING.items():
        if name not in data:
            raise Unfit(f"'{loader}' is not the loader that we know")
        data = data.replace(name, nothing)
    places = next((found for found in SEARCHED if found in data), None)
    if places is None:
        raise Unfit(f"'{loader}' does not look for libraries where Debian's does")
    nowhere = (b"/dev/".ljust(len(place), b"/") for place in places.split(b"\0")[:-1])
    return data.replace(places, b"".join(place + b"\0" for place in nowhere))


def _muted(library: str) -> bytes:
    data = _read(library)
    for name, nothing in MUTED.items():
        data = data.replace(name, nothing)
    return data


def _tool(name: str) -> str:
    found = next((path for path in TOOLS[name] if os.path.exists(path)), None)
    if found is None:
        raise Unfit(f"'{name}' is not installed")
    return os.path.realpath(found)


def libraries(loader: str, programs: Iterable[str]) -> list[str]:
    """The shared libraries of these, by what the loader itself says."""
    found: dict[str, str] = {}
    for program in programs:
        done = _run([loader, "--list", program])
        for line in done.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            path = rest.rpartition(" (")[0]
            if arrow and path.startswith("/") and not name.startswith("ld-linux"):
                found[name] = path
            elif arrow and "not found" in rest:
                raise Unfit(f"'{program}' needs '{name}'")
    # Opened by name when a thread ends (pthread_exit(3)), not linked.
    for path in list(found.values()):
        beside = f"{os.path.dirname(path)}/libgcc_s.so.1"
        if os.path.exists(beside):
            found["libgcc_s.so.1"] = beside
    return sorted(found.values())


def _python_files(target: str, python: str) -> list[str]:
    """Compile our modules and those that they need; the extensions among them."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    asked = ASK.format(source=source, modules=MODULES)
    version, *lines = _run([python, "-I", "-S", "-c", asked]).splitlines()
    library = f"{target}/lib/python{version}"
    os.makedirs(f"{library}/lib-dynload")
    # Python looks for this one first, upwards from its own directory: in the image's /opt/lib too.
    _write(f"{target}/lib/python{version.replace('.', '')}.zip", NO_MODULES, 0o644)
    extensions: list[str] = []
    orders: list[str] = []
    for line in lines:
        name, file = line.split("\t")
        if file.endswith(".py"):
            below = name.replace(".", "/")
            below += "/__init__" if file.endswith("/__init__.py") else ""
            os.makedirs(os.path.dirname(f"{library}/{below}"), exist_ok=True)
            orders.append(f"{file}\t{library}/{below}.pyc\t{below}.py")
        else:
            extensions.append(file)
            _copy(file, f"{library}/lib-dynload/{os.path.basename(file)}", 0o644)
    _run([python, "-I", "-S", "-c", COMPILE], "\n".join(orders))
    for directory, _, names in os.walk(library):
        for name in names:
            os.chmod(f"{directory}/{name}", 0o644)
    return extensions


def _run(argv: list[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise Unfit(f"'{argv[0]}' failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _copy(source: str, target: str, mode: int) -> None:
    _write(target, _read(source), mode)


def _read(source: str) -> bytes:
    with open(source, "rb") as file:
        return file.read()


def _write(target: str, data: bytes, mode: int) -> None:
    with open(target, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)


def main(arguments: list[str]) -> int:
    """The command line."""
    target, *rest = arguments or [""]
    python = rest[1] if len(rest) == 2 and rest[0] == "--python" else PYTHON
    if not target or target.startswith("-") or (rest and len(rest) != 2):
        sys.stderr.write(f"usage: {sys.argv[0]} DIR [--python PATH]\n")
        return 2
    os.umask(0o022)
    try:
        make(os.path.abspath(target), python)
    except Unfit as error:
        sys.stderr.write(f"cannot make the bundle: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
