"""Sockets that listen, and who is at the other end of an accepted one."""

from __future__ import annotations

import os
import socket
import stat
import struct

from ...errors import HostError, reason
from .messages import Peer

# A peer that vanished without a word (a cable, a suspended machine) is found after 2 minutes.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
# sun_path, without its NUL.
MAX_UNIX_PATH = 107


def tcp(host: str, port: int, backlog: int) -> socket.socket:
    """Bind one numeric address or name (its first address)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _failed(f"{host}:{port}", error) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `::` must not also mean every IPv4 address.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise _failed(f"{host}:{port}", error) from None
    sock.settimeout(0)
    return sock


def unix(path: str, mode: int, backlog: int) -> tuple[socket.socket, tuple[int, int]]:
    """Bind a path; the socket, and the file that was made (device, inode)."""
    if len(os.fsencode(path)) > MAX_UNIX_PATH:
        raise HostError(
            f"the path of the socket is too long: {path}", code="service-listen",
            hint=f"a unix socket's path has at most {MAX_UNIX_PATH} bytes; use a shorter --data",
        )  # fmt: skip
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        # Nobody can connect before listen(), so nobody does with the mode of the umask.
        made = _set_mode(path, mode)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise _failed(path, error) from None
    sock.settimeout(0)
    return sock, made


def _set_mode(path: str, mode: int) -> tuple[int, int]:
    """Undo the umask, on the very file and not on what a link there leads to."""
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISSOCK(found.st_mode):
            raise HostError(f"{path} was replaced while it was made", code="service-listen")
        os.chmod(f"/proc/self/fd/{handle}", mode)
        return found.st_dev, found.st_ino
    finally:
        os.close(handle)


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody answers. Nothing else is ever removed, and no link followed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _failed(path, error) from None
    if not stat.S_ISSOCK(found.st_mode):
        raise HostError(
            f"{path} exists and is not a socket", code="service-listen", hint="remove it yourself"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A full backlog must not block us: then somebody is there.
        probe.settimeout(0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            remove(path, (found.st_dev, found.st_ino))
            return
        except FileNotFoundError:
            return
        except OSError:
            pass
    raise HostError(
        f"somebody listens at {path} already", code="service-listen", hint="is a server running?"
    )


def remove(path: str, made: tuple[int, int]) -> None:
    """Remove the file that we made or looked at, if it is still that one."""
    try:
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == made:
            os.unlink(path)
    except FileNotFoundError:
        pass


def _failed(where: str, error: OSError) -> HostError:
    return HostError(f"cannot listen at {where}: {reason(error)}", code="service-listen")


# --- accepted ones


def peer(sock: socket.socket, address: object, *, tls: bool) -> tuple[Peer, str]:
    """Who it is, and the key under which its connections are counted."""
    if sock.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return Peer(address="unix", uid=uid, pid=pid, unix=True, tls=tls), f"uid:{uid}"
    for level, option, value in KEEPALIVE:
        sock.setsockopt(level, option, value)
    host, port = (address[0], address[1]) if isinstance(address, tuple) else ("", 0)
    return Peer(address=host, port=port, tls=tls), counted(sock.family, host)


def counted(family: int, host: str) -> str:
    """One key for everything that one party can have: of IPv6, a /64."""
    if family != socket.AF_INET6:
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()
