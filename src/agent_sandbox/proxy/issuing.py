"""Makes certificates. The one module that needs the `cryptography` library.

The standard library can use certificates but not make them, and to write the encoding by hand is no
place for a first attempt.
"""

from __future__ import annotations

import datetime as dt
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NO_ADDRESSES = ("0.0.0.0/0", "::/0")
USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


class Issued(Record):
    """The authority's certificate; key and certificates of each host."""

    certificate: str
    leaves: Mapping[str, bytes]


def issue(hosts: Sequence[str], days: int) -> Issued:
    """An authority for these hosts, and one certificate for each."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("agent-sandbox, for one run")
    root = _begin(name, name, key, days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    root = root.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    # Names below a permitted one are permitted, too; addresses are not at all.
    root = root.add_extension(
        x509.NameConstraints(
            permitted_subtrees=[x509.DNSName(host) for host in hosts],
            excluded_subtrees=[x509.IPAddress(ipaddress.ip_network(n)) for n in NO_ADDRESSES],
        ),
        critical=True,
    )
    made = _identified(root, key, key).sign(key, hashes.SHA256())
    leaves = {host: _leaf(host, name, key, days) + _pem(made) for host in hosts}
    return Issued(certificate=_pem(made).decode("ascii"), leaves=leaves)


def _leaf(host: str, issuer: x509.Name, signer: ec.EllipticCurvePrivateKey, days: int) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name has room for 64 characters; clients look at the alternative name alone.
    built = _begin(_name(host[:64]), issuer, key, days)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(_usage("digital_signature"), critical=True)
    built = built.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    made = _identified(built, key, signer).sign(signer, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + _pem(made)


def _begin(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    # A day back: clocks differ between a machine and what runs on it.
    return x509.CertificateBuilder(
        issuer_name=issuer, subject_name=subject, public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - dt.timedelta(days=1),
        not_valid_after=now + dt.timedelta(days=days),
    )  # fmt: skip


def _identified(
    built: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:  # fmt: skip
    """Strict clients (Python 3.13) want both identifiers."""
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return built.add_extension(own, critical=False).add_extension(above, critical=False)


def _usage(*on: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in on for use in USES})


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
