"""Keys and certificates of the test cluster: one authority, and what it has signed."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence

DAY = dt.timedelta(days=1)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    path.touch(mode)
    path.write_bytes(data)


def _name(common: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if group:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


class Authority:
    """Signs; its files are NAME.crt and NAME.key in one directory."""

    def __init__(self, base: Path) -> None:
        base.mkdir(mode=0o700)
        self.base = base
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name("agent-sandbox test cluster")
        builder = self._builder(self._subject, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self._save("ca", builder, self._key)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 30 * DAY)
        )

    def _save(
        self, name: str, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey
    ) -> None:
        signed = builder.sign(self._key, hashes.SHA256())
        self.path(name).with_suffix(".crt").write_bytes(
            signed.public_bytes(serialization.Encoding.PEM)
        )
        _write(self.path(name).with_suffix(".key"), _pem(key))

    def path(self, name: str) -> Path:
        """Where a pair is, without a suffix."""
        return self.base / name

    def pair(self, name: str, common: str, group: str = "", hosts: Sequence[str] = ()) -> None:
        """Make a pair that serves for hosts, and that is a user of a group."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._builder(_name(common, group), key).add_extension(
            x509.ExtendedKeyUsage(usage), critical=False
        )
        if hosts:
            alternatives = x509.SubjectAlternativeName([_general(host) for host in hosts])
            builder = builder.add_extension(alternatives, critical=False)
        self._save(name, builder, key)

    def signing(self, name: str) -> None:
        """A bare pair, as for tokens of service accounts: NAME.pub and NAME.key."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.path(name).with_suffix(".pub").write_bytes(public)
        _write(self.path(name).with_suffix(".key"), _pem(key))

    def kubeconfig(self, name: str, server: str) -> Path:
        """A configuration file for the user of a pair; JSON is YAML."""
        paths = {suffix: str(self.path(name).with_suffix(suffix)) for suffix in (".crt", ".key")}
        user = {"client-certificate": paths[".crt"], "client-key": paths[".key"]}
        cluster = {"server": server, "certificate-authority": str(self.path("ca.crt"))}
        described = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        }
        path = self.path(name).with_suffix(".conf")
        _write(path, json.dumps(described, indent=1).encode())
        return path


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
