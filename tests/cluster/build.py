"""Builds Kubernetes from Debian's source package, once, into a cache beside the repository.

    build.py [--api] [--cached]     prints the directory of the programs

With --api only what an API server alone needs. With --cached nothing is built: exit code 1 says
that something is missing.

No package has a kube-apiserver or a kubelet, but Debian 12's source package is the whole tree with
all that it imports, and Debian's Go builds it: four to six minutes on two cores, without a network
but for the mirror. The directory's name has a hash of the source and of what is done to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
API = ("kube-apiserver", "kubectl")
VERSION = "v1.20.2"
ORIGIN = "kubernetes_1.20.5+really1.20.2.orig.tar.gz"
# apt checks signatures; this says that the mirror still has what was tested.
SHA256 = "b83c0780efb182d928dc63d46488a847f161f04e40a94b96bf5247dd671ecdfc"
MIRROR = (
    "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    " http://deb.debian.org/debian bookworm main\n"
)
GO = "/usr/lib/go-1.19/bin"
# What `make generated_files` would make; the package has no generated OpenAPI, and nothing links
# without it.
MARK = re.compile(rb"^// \+k8s:openapi-gen=", re.MULTILINE)
OPENAPI = ("pkg", "vendor/k8s.io", "staging/src/k8s.io", "cmd")
NOT_OPENAPI = ("sample", "code-generator", "kube-openapi/test", "/test/")
STEPS = "openapi-gen, then each program; static, stripped; 1"
# Since Go 1.18 the caller owns the iterator of a map (github.com/modern-go/reflect2, 1.0.2). The
# vendored 1.0.1 gives none, and memory of somebody else is written: an API server then dies of the
# first custom resource with a map in it.
REFLECT = "vendor/github.com/modern-go/reflect2"
BEGUN = """\
func begun(rtype unsafe.Pointer, m unsafe.Pointer) *hiter {
	it := new(hiter)
	mapiterinit(rtype, m, it)
	return it
}

type UnsafeMapIterator struct {
"""
PATCHES = (
    (
        f"{REFLECT}/unsafe_link.go",
        "func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer) *hiter\n",
        "func mapiterinit(rtype unsafe.Pointer, m unsafe.Pointer, it *hiter)\n",
    ),
    (
        f"{REFLECT}/unsafe_link.go",
        "\t// rest fields are ignored\n",
        # As runtime.hiter has them: six pointers, then words that are none.
        "\tpointers [6]unsafe.Pointer\n\twords [4]uintptr\n",
    ),
    (
        f"{REFLECT}/unsafe_map.go",
        "\t\thiter:      mapiterinit(type2.rtype, *(*unsafe.Pointer)(obj)),\n",
        "\t\thiter:      begun(type2.rtype, *(*unsafe.Pointer)(obj)),\n",
    ),
    (
        f"{REFLECT}/unsafe_map.go",
        "type UnsafeMapIterator struct {\n",
        BEGUN,
    ),
)
SECONDS = 3600


def cache() -> Path:
    """Where builds are."""
    if os.geteuid() == 0:
        return Path("/var/cache/agent-sandbox-tests")
    named = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named).expanduser() / "agent-sandbox-tests"


def place() -> Path:
    """The directory of this source, built in this way."""
    recipe = f"{SHA256}\n{VERSION}\n{GO}\n{STEPS}\n{PATCHES}"
    return cache() / f"kubernetes-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def lacking(programs: Iterable[str]) -> list[str]:
    """Those that are not built."""
    return [program for program in programs if not (place() / program).exists()]


def build(programs: Iterable[str]) -> Path:
    """Build what is missing; a program appears complete, or not at all."""
    target = place()
    target.mkdir(parents=True, exist_ok=True)
    for made in (target, target.parent):
        made.chmod(0o755)
    with (target.parent / ".kubernetes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = lacking(programs)
        if not missing:
            return target
        for left in target.parent.glob(".new-kubernetes-*"):  # of a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=".new-kubernetes-", dir=target.parent))
        try:
            for program in _compiled(work, _source(work), missing):
                program.rename(target / program.name)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _source(work: Path) -> Path:
    """The unpacked and patched source."""
    lists = work / "lists"
    (lists / "partial").mkdir(parents=True)
    (work / "src.list").write_text(MIRROR)
    # apt's own user could not write here.
    options = (
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::Etc::sourcelist={work / 'src.list'}",
        f"Dir::State::lists={lists}",
        "APT::Sandbox::User=root",
    )
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    _do(*apt, "update", cwd=work)
    _do(*apt, "source", "--download-only", "kubernetes", cwd=work)
    got = hashlib.sha256((work / ORIGIN).read_bytes()).hexdigest()
    if got != SHA256:
        sys.exit(f"{ORIGIN} has sha256 {got}, not {SHA256}")
    (description,) = work.glob("kubernetes_*.dsc")
    # `source` of apt has checked the package against the archive's signature.
    _do("dpkg-source", "--no-check", "-x", str(description), "src", cwd=work)
    for name, old, new in PATCHES:
        file = work / "src" / name
        text = file.read_text()
        if text.count(old) != 1:
            sys.exit(f"{name} is not what it was: cannot patch it")
        file.write_text(text.replace(old, new))
    return work / "src"


def _compiled(work: Path, source: Path, programs: Iterable[str]) -> Iterator[Path]:
    """The programs, each when it is done."""
    root = work / "go" / "src" / "k8s.io"
    root.mkdir(parents=True)
    source = source.rename(root / "kubernetes")
    made = work / "bin"
    made.mkdir()
    env = {
        **os.environ,
        "PATH": f"{GO}:{os.environ['PATH']}",
        "GOPATH": str(work / "go"),
        "GOCACHE": str(work / "gocache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOFLAGS": "-buildvcs=false",
    }
    generator = work / "openapi-gen"
    tool = "k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    _do("go", "build", "-o", str(generator), tool, cwd=source, env=env)
    (source / "pkg/generated/openapi").mkdir(parents=True, exist_ok=True)
    _do(
        str(generator), "--logtostderr", "-i", ",".join(_described(source)),
        "-p", "k8s.io/kubernetes/pkg/generated/openapi", "-O", "zz_generated.openapi",
        "-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt",
        "-r", str(work / "violations"), "--output-base", str(work / "go" / "src"),
        cwd=source, env=env,
    )  # fmt: skip
    for program in programs:
        print(f"building {program}", file=sys.stderr, flush=True)
        words = ("go", "build", "-ldflags", _flags(), "-o", str(made / program))
        _do(*words, f"./cmd/{program}", cwd=source, env=env)
        yield made / program


def _described(source: Path) -> list[str]:
    """Packages whose types the API describes."""
    found = set()
    for top in OPENAPI:
        for file in (source / top).rglob("*.go"):
            if not file.is_file() or not MARK.search(file.read_bytes()):
                continue
            path = str(file.parent.relative_to(source)).replace("staging/src/", "vendor/")
            found.add(f"k8s.io/kubernetes/{path}")
    return sorted(path for path in found if not any(word in path for word in NOT_OPENAPI))


def _flags() -> str:
    """Without a version the programs refuse each other."""
    facts = {"gitVersion": VERSION, "gitMajor": "1", "gitMinor": "20", "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stated = [
        f"-X k8s.io/kubernetes/vendor/{package}.{name}={value}"
        for package in packages
        for name, value in facts.items()
    ]
    return " ".join(("-s -w", *stated))


def _do(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=SECONDS,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(argv)[:300]}: {done.stdout[-3000:]}{done.stderr[-3000:]}")


def main(words: list[str]) -> int:
    """Print the directory, if all is there."""
    programs = API if "--api" in words else PROGRAMS
    if "--cached" in words:
        return bool(lacking(programs))
    print(build(programs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
