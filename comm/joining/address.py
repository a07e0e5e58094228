"""The address of this host under which the other ranks reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from bagua_kernels import knobs

_SIOCGIFADDR = 0x8915


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
