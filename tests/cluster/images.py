"""Images without a registry: archives that `ctr images import` takes, known by digest.

`pause` and `plain` are a busybox. `base` is files of this machine's own Debian packages, and our
agent where every image of ours has it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from agent_sandbox.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BUSYBOX = "/bin/busybox"
REGISTRY = "registry.test"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Essential tools, Python, and their libraries. Those that a machine does not have are left out.
PACKAGES = (
    "base-files base-passwd bash bubblewrap coreutils dash debianutils diffutils findutils gawk "
    "grep gzip hostname libacl1 libattr1 libblkid1 libbz2-1.0 libc-bin libc6 libcap2 libcrypt1 "
    "libdb5.3 libexpat1 libffi8 libgcc-s1 libgmp10 liblzma5 libmount1 libmpfr6 libncursesw6 "
    "libnsl2 libpcre2-8-0 libproc2-0 libpython3.11-minimal libpython3.11-stdlib libreadline8 "
    "libselinux1 libsigsegv2 libsmartcols1 libsqlite3-0 libssl3 libstdc++6 libsystemd0 libtinfo6 "
    "libtirpc3 libudev1 libuuid1 libzstd1 libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkeyutils1 "
    "libkrb5support0 libcom-err2 libgcrypt20 libgpg-error0 liblz4-1 mawk media-types ncurses-base "
    "ncurses-bin openssl procps python3-minimal python3.11 python3.11-minimal sed tar "
    "util-linux util-linux-extra zlib1g"
).split()
# Never of use inside, and most of the bytes.
WITHOUT = (
    "/usr/share/doc/",
    "/usr/share/man/",
    "/usr/share/locale/",
    "/usr/share/bash-completion/",
)
MERGED = ("bin", "sbin", "lib", "lib64")
FOLDERS = "dev etc home home/agent proc root run sys tmp usr usr/bin var workspace".split()
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hostname": "sandbox\n",
}


class Image(Record):
    """An archive, and the names by which a pod may ask for what is in it."""

    archive: Path
    # Such as registry.test/base:1, and registry.test/base@sha256:….
    tag: str
    name: str


class Tree:
    """A layer in the making."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._data, mode="w", format=tarfile.PAX_FORMAT)
        self._names: set[str] = set()

    def _add(self, info: tarfile.TarInfo, data: bytes = b"") -> None:
        if info.name in self._names:
            return
        self._names.add(info.name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data) if data else None)

    def folder(self, name: str, mode: int = 0o755) -> None:
        """A directory, after those above it."""
        above = os.path.dirname(name)
        if above:
            self.folder(above)
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, mode
        self._add(info)

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """A file, after the directories above it."""
        self.folder(os.path.dirname(name))
        info = tarfile.TarInfo(name)
        info.mode = mode
        self._add(info, data)

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        if os.path.dirname(name):
            self.folder(os.path.dirname(name))
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        self._add(info)

    def copy(self, source: str, name: str) -> None:
        """What is at a path of this machine; owned by root, without set-id bits."""
        try:
            found = os.lstat(source)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(found.st_mode):
            self.link(name, os.readlink(source))
        elif stat.S_ISDIR(found.st_mode):
            self.folder(name, 0o1777 if found.st_mode & stat.S_ISVTX else 0o755)
        elif stat.S_ISREG(found.st_mode):
            readable = 0o755 if found.st_mode & 0o111 else 0o644
            self.file(name, Path(source).read_bytes(), readable)

    def bytes(self) -> bytes:
        """The layer."""
        self._tar.close()
        return self._data.getvalue()


def busybox() -> bytes:
    """A busybox with all its names, and what a pod's mounts need."""
    tree = Tree()
    tree.folder("tmp", 0o1777)
    for name in FOLDERS:
        tree.folder(name)
    for name, text in FILES.items():
        tree.file(name, text.encode())
    tree.file("bin/busybox", Path(BUSYBOX).read_bytes(), 0o755)
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if name != "busybox":
            tree.link(f"bin/{name}", "/bin/busybox")
    return tree.bytes()


def debian() -> bytes:
    """Files of packages, as they are installed here."""
    tree = Tree()
    tree.folder("tmp", 0o1777)
    for name in FOLDERS:
        tree.folder(name)
    for name in MERGED:
        tree.folder(f"usr/{name}")
        tree.link(name, f"usr/{name}")
    for name, text in FILES.items():
        tree.file(name, text.encode())
    tree.file("usr/bin/busybox", Path(BUSYBOX).read_bytes(), 0o755)
    for path in _installed(PACKAGES):
        first, _, rest = path.lstrip("/").partition("/")
        name = f"usr/{first}/{rest}" if first in MERGED and rest else path.lstrip("/")
        if name not in MERGED and not f"/{name}".startswith(WITHOUT):
            tree.copy(path, name)
    tree.link("usr/bin/sh", "dash")
    tree.link("usr/bin/awk", "mawk" if os.path.exists("/usr/bin/mawk") else "busybox")
    return tree.bytes()


def _installed(packages: Iterable[str]) -> list[str]:
    done = subprocess.run(
        ["dpkg-query", "-L", *packages], capture_output=True, text=True, check=False
    )
    return sorted(
        {line for line in done.stdout.splitlines() if line.startswith("/") and line != "/."}
    )


def folder(source: Path, target: str) -> bytes:
    """A directory of this machine at a place of the image."""
    tree = Tree()
    tree.folder(target)
    for top, folders, files in os.walk(source):
        for name in (*folders, *files):
            path = os.path.join(top, name)
            tree.copy(path, f"{target}/{os.path.relpath(path, source)}")
    return tree.bytes()


def image(base: Path, word: str, layers: Sequence[bytes], **config: object) -> Image:
    """Write the archive of an image; `config` is of the image's, such as Entrypoint."""
    described = _json({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [PATH], **config},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]},
    })  # fmt: skip
    manifest = _json({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _descriptor(CONFIG, described),
        "layers": [_descriptor(LAYER, layer) for layer in layers],
    })  # fmt: skip
    repository = f"{REGISTRY}/{word}"
    tag, name = f"{repository}:1", f"{repository}@{_digest(manifest)}"
    named = [
        {**_descriptor(MANIFEST, manifest), "annotations": {"io.containerd.image.name": known}}
        for known in (tag, name)
    ]
    blobs = {_digest(data): data for data in (*layers, described, manifest)}
    archive = base / f"{word}.tar"
    with tarfile.open(archive, "w") as tar:
        _put(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _put(tar, "index.json", _json({"schemaVersion": 2, "manifests": named}))
        for digest, data in blobs.items():
            _put(tar, f"blobs/{digest.replace(':', '/')}", data)
    return Image(archive=archive, tag=tag, name=name)


def layers(image: Image) -> list[bytes]:
    """The layers of an image, for another one that begins with them."""
    with tarfile.open(image.archive) as tar:

        def blob(digest: str) -> bytes:
            file = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert file is not None
            return file.read()

        index = tar.extractfile("index.json")
        assert index is not None
        manifest = json.loads(blob(json.loads(index.read())["manifests"][0]["digest"]))
        return [blob(layer["digest"]) for layer in manifest["layers"]]


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}
