"""Who the service is for the agents in its pods: an authority of its own, and what it has signed.

The authority's certificate is in every pod, where it is no secret. Its key signs one certificate,
the service's, and is then thrown away: nobody can ever sign a second one.
"""

from __future__ import annotations

import datetime as dt
import os
import ssl

from ...record import Record
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cryptography import x509

DAYS = 3650
MARK = b"-----BEGIN CERTIFICATE-----"


class Identity(Record):
    """The service's side of TLS, and what agents are told to trust."""

    ca: str
    client: ssl.SSLContext


def make() -> bytes:
    """A new identity, to be kept by the store: the service's key, its certificate, the authority.

    Raises Problem NOT_INSTALLED without the library that makes certificates.
    """
    try:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise Problem(
            "NOT_INSTALLED", "this backend needs the library 'cryptography'",
            hint="pip install 'agent-sandbox[kubernetes]'",
        ) from error  # fmt: skip
    from cryptography import x509

    signer, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    above, own = _name("agent-sandbox authority"), _name("agent-sandbox service")
    root = _begin(above, above, signer.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    leaf = _begin(own, above, key.public_key()).add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    leaf = leaf.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True
    )
    # Strict readers (Python 3.13) want to know whose key it is.
    leaf = leaf.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    root = root.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(signer.public_key()), critical=False
    )
    root = root.add_extension(_signs(), critical=True)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    made = [
        built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        for built in (leaf, root)
    ]
    return private + b"".join(made)


def _begin(subject: x509.Name, issuer: x509.Name, key: object) -> x509.CertificateBuilder:
    from cryptography import x509

    now = dt.datetime.now(dt.UTC)
    # A day back: clocks of nodes differ.
    return x509.CertificateBuilder(
        issuer_name=issuer, subject_name=subject, public_key=key,  # type: ignore[arg-type]
        serial_number=x509.random_serial_number(),
        not_valid_before=now - dt.timedelta(days=1), not_valid_after=now + dt.timedelta(days=DAYS),
    )  # fmt: skip


def _signs() -> x509.KeyUsage:
    from cryptography import x509

    from ...proxy.issuing import USES

    return x509.KeyUsage(**{use: use == "key_cert_sign" for use in USES})


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def contexts(pem: bytes) -> Identity:
    """The identity that was kept."""
    own, mark, authority = pem.rpartition(MARK)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # An agent signs its own certificate. It is known by its fingerprint, which the engine has told
    # us, and which is compared before anything is sent (`pod_wire`).
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # The library reads keys from files only.
    fd = os.memfd_create("identity")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(own)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return Identity(ca=(mark + authority).decode("ascii"), client=context)
