"""A certificate authority for one run, and for nobody but the hosts that have a secret.

Its key is made here and never leaves this process. What the command sees is its certificate, which
says itself for which names it may vouch: even with the key it would be of no use elsewhere.
"""

from __future__ import annotations

import os
import ssl
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Longer than any run. The key ends with the process.
VALID_DAYS = 365
# Where systems keep the certificates that they trust, in one file.
ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)  # fmt: skip
# HTTP/1 alone: it is what we read and write.
PROTOCOLS = ["http/1.1"]
MAX_ROOTS = 16 << 20


class Authority:
    """One key that vouches, and a server's context for each host."""

    def __init__(self, hosts: Iterable[str], library: str = "") -> None:
        if library:
            # Last: what the standard library has must not come from elsewhere.
            sys.path.append(library)
        from . import issuing

        issued = issuing.issue(sorted(set(hosts)), VALID_DAYS)
        self.certificate: str = issued.certificate
        self._contexts = {host: _server_context(pem) for host, pem in issued.leaves.items()}

    def context(self, host: str) -> ssl.SSLContext:
        """What a client that asks for `host` is met with."""
        return self._contexts[host]


def _server_context(pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _strict(context)
    # The module reads keys from files only; this one is in memory, and gone a moment later.
    fd = os.memfd_create("key", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def client_context(more: str) -> ssl.SSLContext:
    """For connections outside: the system's certificates, and those of the user's own file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strict(context)
    context.load_default_certs()
    if more:
        context.load_verify_locations(cadata=more)
    return context


def _strict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(PROTOCOLS)


def bundle(certificate: str, more: str) -> str:
    """Everything that the command may trust: ours, the host's, the user's."""
    return "\n".join(part.strip() for part in (certificate, more, _roots()) if part.strip()) + "\n"


def _roots() -> str:
    for path in (ssl.get_default_verify_paths().openssl_cafile, *ROOTS):
        try:
            with open(path, encoding="ascii", errors="ignore") as file:
                return file.read(MAX_ROOTS)
        except OSError:
            continue
    return ""


def write(path: str, text: str) -> None:
    """Fill the file that is mounted inside. It is there already, and stays the same file."""
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags), "w", encoding="ascii", errors="ignore") as file:
        file.write(text)
