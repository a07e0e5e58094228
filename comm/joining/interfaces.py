"""Which network interfaces this host has, which one Gloo takes, and how its TCP is set up. Reads Linux' tables."""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bagua_kernels.comm.joining.address import address_towards
from bagua_kernels.comm.joining.evidence import text_of

# Variables of launchers and transports that decide where traffic goes, and how many threads a rank runs.
VARIABLES = (
    "MASTER_ADDR",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_CONTAINER_PREFIXES = ("docker", "virbr", "veth", "br-", "cni", "lxc", "lxdbr", "podman", "flannel", "cali")
_SYS = Path("/sys/class/net")
_PROC = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Interface:
    """A network interface of this host.

    Attributes:
        name: such as eth0.
        addresses: with the length of the network's prefix, such as 10.0.0.3/24; IPv4 first.
        mtu: bytes; 0 if unknown.
        speed: Mbit/s; 0 if unknown, as it is for virtual ones.
        state: "up", "down" or "unknown".
    """

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 0
    speed: int = 0
    state: str = "unknown"

    @property
    def is_loopback(self) -> bool:
        """Returns True if it leads to this host only."""
        return self.name in ("lo", "lo0") or any(is_loopback(address) for address in self.addresses)

    @property
    def stays_inside(self) -> bool:
        """Returns True if it leads to this host only, or, by its name, to containers or virtual machines on it."""
        return self.is_loopback or self.name.startswith(_CONTAINER_PREFIXES)

    @property
    def leads_out(self) -> bool:
        """Returns True if other hosts may be reached through it."""
        return bool(self.addresses) and self.state != "down" and not self.stays_inside


@dataclass(frozen=True)
class GlooInterface:
    """The interface that Gloo takes.

    Attributes:
        name: the interface; empty if it is unknown.
        address: what the other ranks connect to; empty if there is none.
        reason: what decided: "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "hostname", or "fallback" where the hostname resolves
            to no address of this host and Gloo takes loopback.
        problem: why it cannot work, or an empty text.
    """

    name: str
    address: str
    reason: str
    problem: str = ""


@dataclass(frozen=True)
class Network:
    """The network as this host sees it.

    Attributes:
        interfaces: all of them.
        choice: the one that Gloo takes.
        towards_master: the interface through which the kernel reaches MASTER_ADDR; empty if unknown.
        congestion: TCP's congestion control, such as cubic.
        receive_buffer: the largest that TCP gives a socket, in bytes; 0 if unknown.
        send_buffer: likewise.
        variables: those of `VARIABLES` that are set.
    """

    interfaces: tuple[Interface, ...]
    choice: GlooInterface
    towards_master: str = ""
    congestion: str = ""
    receive_buffer: int = 0
    send_buffer: int = 0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def used(self) -> Interface:
        """Returns the interface that Gloo takes."""
        found = [interface for interface in self.interfaces if interface.name == self.choice.name]
        return found[0] if found else Interface(self.choice.name)

    @property
    def best(self) -> str:
        """Returns the interface to name in GLOO_SOCKET_IFNAME: that towards MASTER_ADDR, else the fastest; or ""."""
        outward = [interface for interface in self.interfaces if interface.leads_out]
        outward.sort(key=lambda one: (one.name != self.towards_master, one.state != "up", -one.speed))
        return outward[0].name if outward else ""


def examine() -> Network:
    """Looks at this host."""
    variables = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    found, master = interfaces(), variables.get("MASTER_ADDR", "")
    return Network(
        interfaces=found,
        choice=choose(found, variables),
        towards_master=_owner(address_towards(master), found) if master else "",
        congestion=text_of(_PROC / "tcp_congestion_control"),
        receive_buffer=_largest("tcp_rmem"),
        send_buffer=_largest("tcp_wmem"),
        variables=variables,
    )


def choose(
    found: Sequence[Interface],
    variables: Mapping[str, str],
    resolve: Callable[[], tuple[str, Sequence[str]]] | None = None,
) -> GlooInterface:
    """Returns the interface that Gloo takes after `bagua_kernels.comm.init`.

    Args:
        found: this host's interfaces.
        variables: the environment.
        resolve: returns this host's name and the addresses that it resolves to; by default asks the system.
    """
    name = variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        one = next((interface for interface in found if interface.name == name), None)
        address = one.addresses[0].split("/")[0] if one is not None and one.addresses else ""
        problem = ""
        if one is None:
            problem = f"this host has no interface {name}, only {', '.join(interface.name for interface in found)}"
        elif not address:
            problem = f"{name} has no address"
        elif one.state == "down":
            problem = f"{name} is down"
        return GlooInterface(name, address, "GLOO_SOCKET_IFNAME", problem)
    loopback = next((interface.name for interface in found if interface.is_loopback), "lo")
    master = variables.get("MASTER_ADDR", "")
    if master == "localhost" or is_loopback(master):
        return GlooInterface(loopback, "127.0.0.1" if master == "localhost" else master, "MASTER_ADDR")
    host, addresses = (resolve or _resolve)()
    # Gloo, too, takes the first address to which a socket can be bound.
    for address in addresses:
        owner = _owner(address, found)
        if owner:
            return GlooInterface(owner, address, "hostname")
    got = f"resolves to {', '.join(addresses)}, which is no address of this host" if addresses else "does not resolve"
    return GlooInterface(loopback, "127.0.0.1", "fallback", f"the hostname {host} {got}")


def is_loopback(address: str) -> bool:
    """Returns True if an address, with or without the length of a prefix, is a loopback address."""
    try:
        return ipaddress.ip_address(address.split("/")[0]).is_loopback
    except ValueError:
        return False


def interfaces() -> tuple[Interface, ...]:
    """Returns this host's interfaces; without addresses where the C library cannot be asked."""
    addresses = _addresses()
    return tuple(
        Interface(
            name,
            tuple(sorted(addresses.get(name, ()), key=lambda address: ":" in address)),
            _number(_SYS / name / "mtu"),
            max(0, _number(_SYS / name / "speed")),
            text_of(_SYS / name / "operstate") or "unknown",
        )
        for _, name in socket.if_nameindex()
    )


def interface_of(address: str) -> str:
    """Returns the name of the interface of this host that has an address; empty if none has."""
    return _owner(address, interfaces())


def listening() -> tuple[str, ...]:
    """Returns the IPv4 addresses on which this process listens, save the wildcard: those that Gloo really took."""
    own = set()
    for link in Path("/proc/self/fd").glob("*"):
        try:
            own.add(os.readlink(link))
        except OSError:  # closed since it was listed
            continue
    found = set()
    for line in text_of(Path("/proc/self/net/tcp")).splitlines()[1:]:
        fields = line.split()
        # Columns: number, local address:port, remote, state (0A listens), ..., and at 9 the socket's inode.
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            packed = bytes.fromhex(fields[1].split(":")[0])[::-1]
            found.add(str(ipaddress.ip_address(packed)))
    return tuple(sorted(found - {"0.0.0.0"}))


def _owner(address: str, found: Sequence[Interface]) -> str:
    """Returns the interface that has an address; all of 127.0.0.0/8 is loopback's."""
    for interface in found:
        if address in (own.split("/")[0] for own in interface.addresses):
            return interface.name
    if is_loopback(address):
        return next((interface.name for interface in found if interface.is_loopback), "lo")
    return ""


def _resolve() -> tuple[str, Sequence[str]]:
    host = socket.gethostname()
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return host, ()
    return host, tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


class _Entry(ctypes.Structure):
    """C's `struct ifaddrs`, as far as it is read."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
]


def _addresses() -> dict[str, list[str]]:
    """Asks the C library, as Gloo does: Python's library knows the interfaces' names but not their addresses."""
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if not hasattr(library, "getifaddrs") or library.getifaddrs(ctypes.byref(first)) != 0:
        return {}
    found: dict[str, list[str]] = {}
    entry = first
    while entry:
        one = entry.contents
        address, mask = _unpack(one.address), _unpack(one.mask)
        if address is not None:
            length = int(mask or 0).bit_count() if mask is not None else address.max_prefixlen
            found.setdefault(one.name.decode(), []).append(f"{address}/{length}")
        entry = one.next
    library.freeifaddrs(first)
    return found


def _unpack(pointer: int | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Reads a `struct sockaddr`: the family, the port, and for IPv6 four bytes more, then the address."""
    family = int.from_bytes(ctypes.string_at(pointer, 2), "little") if pointer else 0
    if pointer and family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(pointer + 4, 4))
    if pointer and family == socket.AF_INET6:
        return ipaddress.IPv6Address(ctypes.string_at(pointer + 8, 16))
    return None


def _number(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.lstrip("-").isdigit() else 0


def _largest(name: str) -> int:
    """Returns the last of the three numbers (least, default, most) of a setting of TCP's buffers."""
    numbers = text_of(_PROC / name).split()
    return int(numbers[2]) if len(numbers) == 3 else 0
