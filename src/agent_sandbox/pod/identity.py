"""The agent's certificate, made at its start; its key exists in this process's memory alone."""

from __future__ import annotations

import hashlib
import os
import ssl

from . import terms
from .inner import Bundle, in_memory

# `openssl req` reads a configuration whether it needs one or not.
CONFIG = b"[req]\ndistinguished_name=dn\n[dn]\n"
# Longer than any pod lives: the service looks at the certificate itself, not at its dates.
DAYS = "3650"


class Making:
    """A key and a certificate that `openssl` is making."""

    def __init__(self, bundle: Bundle) -> None:
        self._files = [in_memory(name, b"") for name in ("key", "certificate")]
        config = in_memory("config", CONFIG)
        key, certificate = (f"/proc/self/fd/{fd}" for fd in self._files)
        argv = [
            *bundle.program("openssl"), "req", "-x509", "-newkey", "ec",
            "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", DAYS, "-subj",
            "/CN=agent-sandbox", "-config", f"/proc/self/fd/{config}", "-keyout", key,
            "-out", certificate,
        ]  # fmt: skip
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in range(3)]
        actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (*self._files, config)]
        self._pid = os.posix_spawn(argv[0], argv, terms.VARIABLES, file_actions=actions)
        os.close(config)
        os.close(null)

    def finish(self, authority: str) -> tuple[ssl.SSLContext, str]:
        """The agent's side of TLS, and the line that tells who it is."""
        status = os.waitpid(self._pid, 0)[1]
        if status:
            raise OSError(f"openssl failed ({status})")
        key, certificate = self._files
        context = server(authority, f"/proc/self/fd/{certificate}", f"/proc/self/fd/{key}")
        os.lseek(certificate, 0, os.SEEK_SET)
        der = ssl.PEM_cert_to_DER_cert(os.read(certificate, 1 << 16).decode("ascii"))
        for fd in self._files:
            os.close(fd)
        return context, f"{terms.LINE}{hashlib.sha256(der).hexdigest()}\n"


def server(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """TLS 1.3 for clients that the service's own authority has signed, and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    context.load_cert_chain(certificate, key)
    # Nobody resumes a session: each connection is one operation, and they are made beforehand.
    context.num_tickets = 0
    return context
