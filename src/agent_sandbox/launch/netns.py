"""What a gate does in a sandbox's network namespace: routes, listeners, and connections on demand.

A socket belongs to the network namespace in which it was made. So whoever may join a sandbox's
namespace can make sockets there and hand them to a process that stays outside. A `local` default
route makes every address one of the sandbox's own: a listener on the wildcard address takes
whatever is connected to, and getsockname(2) tells what that was.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
import select
import sys
import time

from .syscalls import SYS_PRCTL, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # "tcp" or "udp", an address or WILDCARD, a port.
    Listener = tuple[str, str, int]

WILDCARD = "*"
# linux/nsfs.h, linux/sched.h, linux/sockios.h, linux/if.h, linux/prctl.h, linux/in6.h
NS_GET_USERNS = 0xB701
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SYS_SETNS = {"x86_64": 308, "aarch64": 268}
SIOCGIFFLAGS, IFF_UP = 0x8913, 1
PR_SET_DUMPABLE = 4
# linux/rtnetlink.h. `lo` is the first interface of every namespace.
RTM_NEWROUTE, RTA_OIF, LOOPBACK_INDEX = 24, 4, 1
RTM_NEWADDR, IFA_ADDRESS, IFA_LOCAL = 20, 1, 2
NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 1, 4, 0x200, 0x400
RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL = 255, 4, 254, 2
# linux/in.h: tells a datagram's own destination, so that the answer can come from there.
IP_PKTINFO = 8
# linux/in6.h: a local route alone does not make an IPv6 address one to bind to, or to answer from.
IPV6_FREEBIND = 78

# Addresses of the sandbox itself, beside the stand-ins for names. Programs that ask for addresses
# of a kind that the machine has (AI_ADDRCONFIG) do not count loopback as one.
OWN_V4, OWN_V6 = "198.18.0.1", "2001:2::1"

READY_SECONDS = 30.0
CONNECT_SECONDS = 10.0
# Connections are held here until the proxy has been loaded.
BACKLOG = 4096
# How many listeners one sandbox may have, and how many connections may be in the making.
MAX_LISTENERS = 4096
MAX_PENDING = 1024
MAX_REQUEST = 256
# Descriptors on their way count against the sender's limit, for all programs of a user together.
IN_FLIGHT_PAUSE = 10


def join(init: int) -> None:
    """Enter the network namespace of a sandbox, and be its master there."""
    space = os.open(f"/proc/{init}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if os.path.samestat(os.fstat(space), os.stat("/proc/self/ns/net")):
        # The routes below would cut the host off.
        raise OSError(errno.EINVAL, "the sandbox has no network namespace of its own")
    # bwrap's namespaces belong to its first user namespace; the command runs in a second one. A
    # namespace that is not a sandbox's belongs to our own, and that one cannot be joined (EINVAL).
    owner = fcntl.ioctl(space, NS_GET_USERNS)
    machine = os.uname().machine
    syscall(SYS_SETNS[machine], owner, CLONE_NEWUSER)
    syscall(SYS_SETNS[machine], space, CLONE_NEWNET)
    # Not to be traced, and no /proc/PID/fd to take sockets from, for anybody but root.
    syscall(SYS_PRCTL[machine], PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.close(owner)
    os.close(space)


def wait_for_loopback(init: int) -> None:
    """Wait until bwrap has brought `lo` up. Doing it first would make bwrap fail: it is EXCL."""
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    deadline = time.monotonic() + READY_SECONDS
    # struct ifreq: a name of 16 bytes, then the flags.
    request = b"lo".ljust(40, b"\0")
    while True:
        flags = fcntl.ioctl(probe.fileno(), SIOCGIFFLAGS, request)[16:18]
        if int.from_bytes(flags, sys.byteorder) & IFF_UP:
            break
        if not os.path.exists(f"/proc/{init}"):
            raise ProcessLookupError("the sandbox has ended")
        if time.monotonic() > deadline:
            raise TimeoutError("bwrap did not bring the loopback interface up")
        time.sleep(0.0002)
    probe.close()


def has_ipv6() -> bool:
    """Whether there is IPv6 here: a kernel may lack it, a setting may have turned it off.

    The setting decides, not whether ::1 can be used: it appears a moment after `lo` is up.
    """
    try:
        # What is below /proc/sys/net is that of the reader's own namespace.
        fd = os.open("/proc/sys/net/ipv6/conf/lo/disable_ipv6", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    text = os.read(fd, 16)
    os.close(fd)
    return text.strip() == b"0"


def _number(value: int, size: int) -> bytes:
    return value.to_bytes(size, sys.byteorder)


def route_message(family: int) -> bytes:
    """`ip route add local default dev lo table local`, for one family. Pure."""
    message = bytes((
        family, 0, 0, 0,
        RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL,
    ))  # fmt: skip
    message += _number(0, 4) + _attribute(RTA_OIF, _number(LOOPBACK_INDEX, 4))
    return _message(RTM_NEWROUTE, message)


def address_message(family: int, address: bytes) -> bytes:
    """`ip address add ADDRESS dev lo`, for a single address. Pure."""
    message = bytes((family, len(address) * 8, 0, 0)) + _number(LOOPBACK_INDEX, 4)
    message += _attribute(IFA_LOCAL, address) + _attribute(IFA_ADDRESS, address)
    return _message(RTM_NEWADDR, message)


def _attribute(kind: int, value: bytes) -> bytes:
    return _number(4 + len(value), 2) + _number(kind, 2) + value


def _message(kind: int, message: bytes) -> bytes:
    flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
    header = _number(16 + len(message), 4) + _number(kind, 2) + _number(flags, 2)
    return header + _number(1, 4) + _number(0, 4) + message


def add_routes(*, ipv6: bool) -> None:
    """Make every address one of the sandbox's own."""
    own = {_socket.AF_INET: OWN_V4} | ({_socket.AF_INET6: OWN_V6} if ipv6 else {})
    netlink = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 0)
    try:
        for family, address in own.items():
            packed = _socket.inet_pton(family, address)
            for message in (address_message(family, packed), route_message(family)):
                netlink.send(message)
                # struct nlmsgerr follows the header: a negative error number, or 0.
                answer = netlink.recv(4096)
                failed = -int.from_bytes(answer[16:20], sys.byteorder, signed=True)
                if failed:
                    raise OSError(failed, f"no local route: {os.strerror(failed)}")
    finally:
        netlink.close()


def _family(address: str, *, ipv6: bool) -> tuple[int, str]:
    if address == WILDCARD:
        return (_socket.AF_INET6, "::") if ipv6 else (_socket.AF_INET, "0.0.0.0")  # noqa: S104
    return (_socket.AF_INET6 if ":" in address else _socket.AF_INET), address


def listen(kind: str, address: str, port: int, *, ipv6: bool) -> _socket.socket:
    """A socket that takes what comes to an address and port of the sandbox."""
    family, host = _family(address, ipv6=ipv6)
    udp = kind == "udp"
    made = _socket.socket(family, _socket.SOCK_DGRAM if udp else _socket.SOCK_STREAM)
    try:
        if family == _socket.AF_INET6:
            made.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, address != WILDCARD)
            made.setsockopt(_socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        if udp:
            # Before the first datagram can arrive.
            made.setsockopt(_socket.IPPROTO_IP, IP_PKTINFO, 1)
            if family == _socket.AF_INET6:
                made.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_RECVPKTINFO, 1)
        # No SO_REUSEADDR: nobody inside may bind the same port beside it.
        made.bind((host, port))
        if not udp:
            made.listen(BACKLOG)
        made.setblocking(False)  # noqa: FBT003 - positional only
    except OSError:
        made.close()
        raise
    return made


def listen_all(wanted: Iterable[Listener], *, ipv6: bool) -> list[tuple[Listener, _socket.socket]]:
    """Every listener of the start; those for IPv6 only where there is IPv6."""
    found: list[tuple[Listener, _socket.socket]] = []
    for kind, address, port in wanted:
        if ":" in address and not ipv6:
            continue
        made = listen(kind, address, port, ipv6=ipv6)
        found.append(((kind, address, port), made))
    return found


def parse_request(data: bytes) -> tuple[str, str, str, int] | None:
    """`N bind|connect ADDR PORT` → number, verb, address, port; None for anything else. Pure."""
    words = data.decode("ascii", "replace").split(" ")
    if len(words) != 4 or words[1] not in ("bind", "connect"):
        return None
    number, verb, address, port = words
    if not (number.isdigit() and port.isdigit() and 0 < int(port) < 65536):
        return None
    return number, verb, address, int(port)


class Post:
    """A gate at its place: answers the proxy until it, or the supervisor, is gone.

    The proxy speaks to hostile peers. All that it can have from here are sockets of a namespace
    that leads nowhere.
    """

    def __init__(self, line: int, life: int, *, ipv6: bool) -> None:
        self._line = _socket.socket(fileno=line)
        self._line.setblocking(False)  # noqa: FBT003 - positional only
        self._life = life
        self._ipv6 = ipv6
        self._listeners = 0
        # Answers that the proxy has not taken yet, each with a socket or none.
        self._answers: list[tuple[str, _socket.socket | None]] = []
        # Connections in the making: descriptor → (request's number, socket, time limit).
        self._pending: dict[int, tuple[str, _socket.socket, float]] = {}

    def announce(self, listeners: Iterable[tuple[Listener, _socket.socket]]) -> None:
        """Hand over the listeners of the start."""
        for (kind, address, port), made in listeners:
            self._listeners += 1
            self._answers.append((f"listener {kind} {address} {port}", made))
        self._answers.append(("ready", None))

    def serve(self) -> None:
        """Answer until the other side of either descriptor is closed."""
        line = self._line.fileno()
        while True:
            poller = select.poll()
            poller.register(self._life, select.POLLIN)
            # Nothing more is asked for while an answer waits: so answers cannot pile up.
            poller.register(line, select.POLLOUT if self._answers else select.POLLIN)
            for fd in self._pending:
                poller.register(fd, select.POLLOUT)
            for fd, _ in poller.poll(self._pause()):
                if fd == self._life:
                    return
                if fd == line:
                    if not (self._flush() if self._answers else self._take()):
                        return
                elif fd in self._pending:
                    self._connected(fd)
            self._expire()

    def _pause(self) -> int | None:
        if not self._pending:
            return None
        due = min(limit for _, _, limit in self._pending.values())
        return max(0, int((due - time.monotonic()) * 1000) + 1)

    def _flush(self) -> bool:
        """Send what can be sent; False when the proxy is gone."""
        while self._answers:
            text, made = self._answers[0]
            rights = []
            if made is not None:
                rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, _number(made.fileno(), 4))]
            try:
                self._line.sendmsg([text.encode("ascii", "replace")], rights)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    return False
                time.sleep(IN_FLIGHT_PAUSE / 1000)
                return True
            del self._answers[0]
            if made is not None:
                made.close()
        return True

    def _take(self) -> bool:
        """One request; False when the proxy is gone."""
        try:
            data = self._line.recv(MAX_REQUEST)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        request = parse_request(data)
        if request is not None:
            number, verb, address, port = request
            try:
                (self._bind if verb == "bind" else self._connect)(number, address, port)
            except OSError as error:
                self._refuse(number, error.strerror or str(error))
        return True

    def _refuse(self, number: str, why: str) -> None:
        self._answers.append((f"{number} error {why}", None))

    def _bind(self, number: str, address: str, port: int) -> None:
        if self._listeners >= MAX_LISTENERS:
            self._refuse(number, "too many listeners")
            return
        made = listen("tcp", address, port, ipv6=self._ipv6)
        self._listeners += 1
        self._answers.append((f"{number} ok", made))

    def _connect(self, number: str, address: str, port: int) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._refuse(number, "too many connections in the making")
            return
        family, host = _family(address, ipv6=self._ipv6)
        made = _socket.socket(family, _socket.SOCK_STREAM)
        made.setblocking(False)  # noqa: FBT003 - positional only
        try:
            made.connect((host, port))
        except BlockingIOError:
            limit = time.monotonic() + CONNECT_SECONDS
            self._pending[made.fileno()] = (number, made, limit)
            return
        except OSError:
            made.close()
            raise
        self._answers.append((f"{number} ok", made))

    def _connected(self, fd: int) -> None:
        number, made, _ = self._pending.pop(fd)
        failed = made.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if failed:
            made.close()
            self._refuse(number, os.strerror(failed))
        else:
            self._answers.append((f"{number} ok", made))

    def _expire(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, (_, _, limit) in self._pending.items() if limit <= now]:
            number, made, _ = self._pending.pop(fd)
            made.close()
            self._refuse(number, "timed out")
