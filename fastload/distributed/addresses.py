"""The network address by which other nodes reach this one. IPv4; Linux."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress

from fastload.errors import RendezvousError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's address, in a struct ifreq
LOOPBACK = "127.0.0.1"


def own_address() -> str:
    """Return an address of this machine that other nodes can reach.

    It is the first of these: the address of the interface in GLOO_SOCKET_IFNAME; the address of the host's name, unless
    that is the loopback (as Debian sets it up); the address of the default route; the address of the only other
    interface.

    Raises:
        RendezvousError: there is no such address.
    """
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        name = named.split(",")[0]
        if (address := _addresses().get(name)) is None:
            raise RendezvousError(
                f"GLOO_SOCKET_IFNAME={named} is not an interface with an IPv4 address. Set it to one of "
                f"{', '.join(_addresses())}"
            )
        return address
    candidates = [*_of_host_name(), *_of_route("192.0.2.1"), *_addresses().values()]
    for address in candidates:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise RendezvousError(
        f"{socket.gethostname()} has only the address {LOOPBACK}, so other nodes cannot reach it. Its interfaces are "
        f"{', '.join(_addresses()) or 'none'}. Set GLOO_SOCKET_IFNAME to one that other nodes can reach"
    )


def interface_of(address: str) -> str | None:
    """Return the name of the interface of this machine with this address, or None."""
    return next((name for name, own in _addresses().items() if own == address), None)


def address_towards(address: str) -> str | None:
    """Return this machine's own address on the route to `address`, or None without a route. Send nothing."""
    return next(iter(_of_route(address)), None)


def numeric(host: str) -> str:
    """Return the IP address that `host` writes, such as 127.0.0.1 for 127.1 and ::1 for [::1], or else `host`."""
    bare = host.removeprefix("[").removesuffix("]")
    with suppress(OSError, UnicodeError):
        # No name is looked up.
        return str(socket.getaddrinfo(bare, None, flags=socket.AI_NUMERICHOST)[0][4][0])
    return host


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host."""
    try:
        return ipaddress.ip_address(numeric(host)).is_loopback
    except ValueError:
        return host == "localhost"


def in_url(host: str) -> str:
    """Return a host as URLs need it: [::1] for ::1."""
    found = numeric(host)
    return f"[{found}]" if ":" in found else found


def _of_host_name() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]


def _of_route(target: str) -> list[str]:
    """Return this machine's address towards `target`, if any. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


def _addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, by name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # It has no IPv4 address.
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
