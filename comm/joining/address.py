"""The address of this host under which the other ranks reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence

from bagua_kernels import knobs

_SIOCGIFADDR = 0x8915
_VPN = ipaddress.ip_network("100.64.0.0/10")
_BRIDGE = ipaddress.ip_network("172.17.0.0/16")


def own_address() -> str:
    """Returns the address of this host under which the other ranks most likely reach it."""
    interface = knobs.GLOO_SOCKET_IFNAME.get().split(",")[0]
    if interface:
        return address_of(interface)
    master = knobs.MASTER_ADDR.get()
    if master in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    # The last one is an address that nobody has: on its way there lies the interface to the world.
    for name in filter(None, (master, socket.gethostname(), "192.0.2.1")):
        found = address_towards(name)
        # A host's own name often stands for its loopback, where other hosts cannot reach it.
        if found and not ipaddress.ip_address(found.split("%")[0]).is_loopback:
            return found
    return "127.0.0.1"


def address_towards(name: str) -> str:
    """Returns the address of this host from which it reaches another host; empty if there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # No packet is sent: connecting a datagram socket only chooses the route, and with it the address.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface, or its first IPv6 address of wider than link scope.

    Raises:
        ValueError: if there is no such interface, or it has no address.
    """
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={interface!r} is no network interface of this host; it has {', '.join(known)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(reply[20:24])
        except OSError:
            pass  # it has no IPv4 address
    if os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6") as table:
            for digits, _, _, scope, _, name in map(str.split, table):
                if name == interface and scope in ("00", "10"):
                    return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    raise ValueError(f"the network interface {interface!r} has no address: choose another by GLOO_SOCKET_IFNAME")


def check_interfaces() -> None:
    """Looks at each network interface of `GLOO_SOCKET_IFNAME`: Gloo's own error reaches all ranks, and names none.

    Raises:
        ValueError: if there is no such interface, or it has no address.
    """
    for interface in filter(None, knobs.GLOO_SOCKET_IFNAME.get().split(",")):
        address_of(interface)


def strays(addresses: Sequence[str]) -> dict[int, str]:
    """Returns the ranks that listen in another kind of network than most, and why; none where all have the same kind.

    A VPN or a bridge of containers on one host alone looks like a way to the others, and does not lead there.

    Args:
        addresses: those at which the ranks listen, in rank order.
    """
    kinds = [_kind(address) for address in addresses]
    if len(set(kinds)) < 2:
        return {}
    return {rank: f"{addresses[rank]} {kind}" for rank, kind in enumerate(kinds) if kind}


def _kind(address: str) -> str:
    """Returns what is particular about an address; empty for those of networks between hosts."""
    found = ipaddress.ip_address(address.split("%")[0])
    if found.is_loopback:
        return "leads to its own host only"
    if found.version == 4 and found in _VPN:
        return "is mostly one of a VPN"
    if found.version == 4 and found in _BRIDGE:
        return "is mostly one of a bridge for containers"
    return ""


def place_of(text: str) -> tuple[str, int] | None:
    """Returns the host and the port of "port" or "host:port"; an empty host where there is none, None for an empty text.

    Raises:
        ValueError: it is neither.
    """
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"expected a port from 0 to 65535, or host:port, got {text!r}")
    return host.strip("[]"), int(port)


def doors_of(text: str) -> list[tuple[str, int]]:
    """Returns the addresses of a list with commas.

    Raises:
        ValueError: one has no host, or no port.
    """
    found = [place_of(each.strip()) for each in text.split(",") if each.strip()]
    if any(each is None or not each[0] or not each[1] for each in found):
        raise ValueError(f"expected host:port, or several with commas between them, got {text!r}")
    return [each for each in found if each is not None]
