"""Between replicas the certificate is the one that the database names, or nothing is sent."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.service.replicas import gateway, identity
from agent_sandbox.service.replicas.upstream import Address, Unreached, Upstream

from .ground import Ground, Replica, ending, go, made


def certificate(directory: Path, name: str) -> tuple[str, str]:
    """A certificate of its own, and its key."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", cert, "-days", "1", "-subj", f"/CN={name}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


async def _pair(ground: Ground) -> tuple[Replica, Replica]:
    replicas = []
    for name in ("one", "two"):
        ground.flags["certificate"], ground.flags["key"] = certificate(ground.directory, name)
        replicas.append(await ground.replica(name))
    return replicas[0], replicas[1]


def test_requests_between_replicas_go_over_tls(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await _pair(ground)
            assert first.url.startswith("https")
            box = await made(first.client(verify=False))
            client = second.client(verify=False)
            for _ in range(3):
                assert (await client.get(f"/v1/sandboxes/{box}")).json()["id"] == box
            # The connection was kept, and used again.
            (links,) = second.shared.upstream._idle.values()
            assert len(links) == 1

    go(work())


def test_cannot_take_the_place_of_a_replica_without_its_key(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets hold of its address has another certificate, and sees no byte of a request.

    The control: with the certificate that the database names the request arrives.
    """
    monkeypatch.setattr(gateway, "PATIENCE", 0.5)

    async def work() -> None:
        import ssl

        async with ending(ground):
            first, second = await _pair(ground)
            box = await made(first.client(verify=False))
            cert, key = certificate(ground.directory, "thief")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
            got: list[bytes] = []

            async def thief(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                got.append(await reader.read(1000))
                writer.close()

            server = await asyncio.start_server(thief, "127.0.0.1", 0, ssl=context)
            port = server.sockets[0].getsockname()[1]
            store = second.shared.store
            store.change(
                "UPDATE replicas SET address = ? WHERE id = ?",
                (f"127.0.0.1:{port}", first.shared.id),
            )
            client = second.client(verify=False)
            answer = await client.get(f"/v1/sandboxes/{box}")
            assert answer.json()["code"] == "REPLICA_UNAVAILABLE"
            assert set(got) <= {b""}
            store.change(
                "UPDATE replicas SET fingerprint = ? WHERE id = ?",
                (identity.certificate(cert), first.shared.id),
            )
            await client.get(f"/v1/sandboxes/{box}")
            assert any(piece.startswith(b"GET /v1/sandboxes/") for piece in got)
            server.close()

    go(work())


def test_a_replica_without_tls_is_not_taken_for_one_with_it(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            plain = await ground.replica()
            port = plain.app.bound[0][1]
            with pytest.raises(Unreached):
                await Upstream().open(Address(host="127.0.0.1", port=port, fingerprint="0" * 64))

    go(work())
