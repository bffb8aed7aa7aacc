"""Network interfaces of this machine and the route to another one."""

import ctypes
import ipaddress
import socket
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

_ELSEWHERE: Final = "192.0.2.1"  # reserved for documentation (RFC 5737); nothing is sent there
_PORT: Final = 9
_IPV4_AT, _IPV6_AT = slice(4, 8), slice(8, 24)  # offsets in struct sockaddr


class Interface(NamedTuple):
    """A network interface and one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class _Entry(ctypes.Structure):
    """The start of `struct ifaddrs`, see getifaddrs(3)."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def own_interfaces() -> list[Interface]:
    """Return the network interfaces of this machine, one entry for each address; IPv4 before IPv6.

    Link-local IPv6 addresses are left out, because other hosts cannot use them.
    """
    found = [Interface(name, address) for name, address in _entries()]
    return sorted(found, key=lambda each: ":" in each.address)


def _entries() -> Iterator[tuple[str, str]]:
    library, first = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        place = first.value
        while place:
            entry = _Entry.from_address(place)
            address = _address_in(entry.address) if entry.address else ""
            if address:
                yield entry.name.decode(errors="replace"), address
            place = entry.next
    finally:
        library.freeifaddrs(first)


def _address_in(place: int) -> str:
    """Return the IP address in the `struct sockaddr` at address `place`; empty if not usable."""
    head = ctypes.string_at(place, 2)
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(place, 8)[_IPV4_AT])
    if family == socket.AF_INET6:
        found = ipaddress.IPv6Address(ctypes.string_at(place, 24)[_IPV6_AT])
        return "" if found.is_link_local else str(found)
    return ""


def holder_of(address: str) -> Interface | None:
    """Return the interface of this machine that has an address; None if there is none."""
    return next((each for each in own_interfaces() if each.address == address), None)


def address_of(name: str) -> str:
    """Return the first IP address of the interface with this name; empty if it has none."""
    return next((each.address for each in own_interfaces() if each.name == name), "")


def address_towards(host: str) -> str:
    """Return the local IP address from which packets to a host are sent; empty if unknown."""
    try:
        found = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM) if host else []
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return ""


def address_outside() -> str:
    """Return the local address of the default route, else of the first interface, else ""."""
    found = [address_towards(_ELSEWHERE), *(each.address for each in own_interfaces())]
    return next((each for each in found if each and not is_loopback(each)), "")


def is_loopback(address: str) -> bool:
    """Return whether a name or address is a loopback address or ``localhost``."""
    if address.strip() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip()).is_loopback
    except ValueError:
        return False
