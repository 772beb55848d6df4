"""Hosts as network namespaces, joined by a router that delays, filters and counts.

Each host has one address and one way out, a TUN device, whose other end is a file of this process. What comes out of it
is looked at: the first packet of a connection is let through if its edge is allowed, the others if their connection is
known, everything else is counted and dropped. Packets take `delay_s`, one way, and keep their order.

Needs root, /dev/net/tun and `ip`.
"""

import asyncio
import ctypes
import fcntl
import itertools
import os
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
TUN_WITHOUT_HEADER = 0x1001
DEVICE = "wire"
PREFIX = "10.77"
TCP = 6
SYN, ACK = 0x02, 0x10
MOST_AT_ONCE = 64
"""Packets taken from a host before others have their turn."""

Edge = tuple[str, str, int]
"""Roles of caller and called, and the port."""


def possible() -> str:
    """Return why there can be no namespaces here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    name = f"try{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    except FileNotFoundError:
        return "needs ip, of iproute2"
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made.stderr.decode().strip() if made.returncode else ""


@dataclass(frozen=True)
class Host:
    """One namespace."""

    namespace: str
    role: str
    address: str
    wire: int
    """File of its device."""


class Network:
    """The router, and the hosts that have joined; runs on the event loop it is entered on."""

    def __init__(self, allows: Callable[[str, str, int], bool]) -> None:
        """Make a network without hosts.

        Args:
            allows: whether a role may call another one at a port.
        """
        self.delay_s = 0.0
        self.passed: Counter[Edge] = Counter()
        """Connections that were let through."""
        self.refused: Counter[Edge] = Counter()
        """Packets that were not."""
        self._allows = allows
        self._hosts: dict[str, Host] = {}
        self._at: dict[bytes, Host] = {}
        self._known: set[tuple[bytes, int, bytes, int]] = set()
        self._numbers = itertools.count(1)
        self._due_s = 0.0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts.values():
            self._loop.remove_reader(host.wire)
            os.close(host.wire)
            _ip("netns", "del", host.namespace)
        self._hosts.clear()

    def join(self, name: str, role: str) -> str:
        """Add a host; return its address."""
        number = next(self._numbers)
        namespace, address = f"rider{os.getpid()}-{number}", f"{PREFIX}.{number}.1"
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        host = Host(namespace, role, address, _open_wire(namespace))
        _ip("-n", namespace, "addr", "add", f"{address}/16", "dev", DEVICE)
        _ip("-n", namespace, "link", "set", DEVICE, "up", "txqueuelen", "1000")
        self._hosts[name] = self._at[socket.inet_aton(address)] = host
        self._loop.add_reader(host.wire, self._read, host)
        return address

    def inside(self, name: str) -> tuple[str, ...]:
        """Return what runs a command on a host."""
        return ("ip", "netns", "exec", self._hosts[name].namespace)

    def _read(self, host: Host) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                packet = os.read(host.wire, 65536)
            except BlockingIOError:
                return
            sink = self._sink(host, packet)
            if sink is not None:
                self._due_s = max(self._due_s, self._loop.time() + self.delay_s)
                self._loop.call_at(self._due_s, self._write, sink, packet)

    def _write(self, sink: Host, packet: bytes) -> None:
        if sink.namespace in {each.namespace for each in self._hosts.values()}:
            try:
                os.write(sink.wire, packet)
            except BlockingIOError:
                self.refused["", sink.role, 0] += 1  # a full queue drops packets, as a real one does

    def _sink(self, source: Host, packet: bytes) -> Host | None:
        """Return where a packet goes; None: nowhere."""
        if packet[0] >> 4 != 4:
            return None  # hosts look for routers of IPv6; there is none
        sink = self._at.get(packet[16:20])
        if sink is None or packet[9] != TCP:
            self.refused[source.role, sink.role if sink else "?", 0] += 1
            return None
        begin = (packet[0] & 0x0F) * 4
        ports = struct.unpack_from("!HH", packet, begin)
        flags = packet[begin + 13]
        one, other = (packet[12:16], ports[0]), (packet[16:20], ports[1])
        if flags & (SYN | ACK) == SYN:
            return self._begun((*one, *other), (source.role, sink.role, ports[1]), sink)
        if (*one, *other) in self._known or (*other, *one) in self._known:
            return sink
        self.refused[source.role, sink.role, ports[1]] += 1
        return None

    def _begun(self, connection: tuple[bytes, int, bytes, int], edge: Edge, sink: Host) -> Host | None:
        """Let a connection begin if its edge is allowed."""
        if not self._allows(*edge):
            self.refused[edge] += 1
            return None
        self.passed[edge] += 1
        self._known.add(connection)
        return sink


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _open_wire(namespace: str) -> int:
    """Return the file of a new device inside a namespace; only a thread of its own ever goes there."""
    found: list[int] = []

    def work() -> None:
        away = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(away, CLONE_NEWNET) == 0:
            wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), TUN_WITHOUT_HEADER))
            found.append(wire)
        os.close(away)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not found:
        raise OSError(f"{namespace} cannot be entered")
    return found[0]
