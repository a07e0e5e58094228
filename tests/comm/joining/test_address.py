"""By which address other ranks reach this host."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from bagua_kernels.comm.joining.address import address_of, own_address


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface that was named comes first, then the one towards MASTER_ADDR, then the host's name."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1" == address_of("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for master in ("localhost", "127.0.0.1", "::1"):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    # The name of a host that stands for its loopback is of no use to others; what leads to the world is taken instead.
    resolve, asked = socket.getaddrinfo, []

    def only(name: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return resolve(
            {"own": "127.0.1.1", "192.0.2.1": "127.0.0.9"}.get(name, "no.such.host.invalid"), *args, **kwargs
        )

    monkeypatch.setattr(socket, "getaddrinfo", only)
    monkeypatch.setattr(socket, "gethostname", lambda: "own")
    assert own_address() == "127.0.0.1"
    assert asked == ["no.such.host.invalid", "own", "192.0.2.1"]
    with pytest.raises(ValueError, match=r"'nosuch0' is no network interface of this host; it has .*lo"):
        address_of("nosuch0")
