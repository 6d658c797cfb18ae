"""The name of a replica: as long-lived as its data directory, in which its own sandboxes are."""

from __future__ import annotations

import os
import ssl

from ...errors import HostError, UsageError, reason
from .. import store_private
from ..core import ids
from .upstream import fingerprint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FILE, KIND = "replica", "rep-"
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - to know them
PEM = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----")


def of(data: str) -> str:
    """The id of the replica of a data directory, made with the first start. It is locked."""
    path = f"{data}/{FILE}"
    fd = store_private.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        found = os.read(fd, 64).decode("ascii", "replace").strip()
        if not found:
            found = ids.new(KIND)
            os.write(fd, f"{found}\n".encode())
    finally:
        os.close(fd)
    if not ids.is_id(KIND, found):
        raise HostError(
            f"'{path}' has no id of a replica", code="data-broken",
            hint="remove it; sandboxes on this machine are then lost",
        )  # fmt: skip
    return found


def place(data: str) -> str:
    """Which data directory that is, of all machines. A copy, or a restored one, is another."""
    if not data:
        return ""
    found = os.stat(data)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}:{found.st_dev}:{found.st_ino}"


def advertised(given: tuple[str, int] | None, bound: Sequence[tuple[str, int]]) -> str:
    """Where other replicas reach this one: as said, or the first address it listens at."""
    host, port = given or (bound[0] if bound else ("", 0))
    if not host or host in WILDCARDS:
        raise UsageError(
            "with --database other replicas have to reach this one, and nobody said where",
            hint="--advertise ADDR:PORT, an address of this machine", code="serve-advertise",
        )  # fmt: skip
    port = port or (bound[0][1] if bound else 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def certificate(path: str) -> str:
    """The fingerprint of the first certificate in a file; "" without a file."""
    if not path:
        return ""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
        begin, end = text.index(PEM[0]), text.index(PEM[1])
        return fingerprint(ssl.PEM_cert_to_DER_cert(text[begin : end + len(PEM[1])]))
    except (OSError, ValueError) as error:
        words = reason(error) if isinstance(error, OSError) else "no certificate in it"
        raise UsageError(
            f"cannot use the certificate '{path}': {words}",
            hint="--tls-cert takes a PEM chain, --tls-key its key", code="serve-tls",
        ) from error  # fmt: skip
