"""On which port torch's library listens, which none of its calls lets us choose.

Gloo asks the kernel for any port. It does so by the C function `bind`, whose address the dynamic
linker keeps in a table of that library. For the time in which a device of Gloo is opened, the entry
of the table leads to a function of ours, which asks for the next port of a range instead of any.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from gpipe_hpc.comm.reaching.ports import Ports
from gpipe_hpc.errors import ConfigError

_LINK_MAP: Final = 2  # what dlinfo(3) is asked for
# Of the dynamic section: see elf(5).
_SIZE_OF_TABLE, _NAMES, _SYMBOLS, _TABLE = 2, 5, 6, 23
_ENTRY, _SYMBOL, _TAG = struct.Struct("<QQq"), 24, struct.Struct("<qQ")
_FAMILIES: Final = {2: 4, 10: 16}  # of addresses with a port in bytes 2 and 3: IPv4, IPv6
_BIND: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)


@contextmanager
def bound_within(ports: Ports, start: int) -> Iterator[list[int]]:
    """Let torch's library listen on ports of the range meanwhile; give those that it took.

    `start`: where in the range to begin. Raises ConfigError where this torch does not allow it.
    """
    slot, taken = _slot(), list[int]()
    own = ctypes.CDLL(None, use_errno=True).bind

    def bind(descriptor: int, place: int, size: int) -> int:
        address = bytearray(ctypes.string_at(place, size))
        family = int.from_bytes(address[:2], sys.byteorder)
        if family not in _FAMILIES or address[2:4] != b"\0\0":
            return _called(own, descriptor, bytes(address))
        for port in ports.in_turn(start):
            address[2:4] = port.to_bytes(2, "big")
            if _called(own, descriptor, bytes(address)) == 0:
                taken.append(port)
                return 0
            if ctypes.get_errno() != errno.EADDRINUSE:
                return -1
        return -1

    call = _BIND(bind)
    before = slot.value
    slot.value = ctypes.cast(call, ctypes.c_void_p).value
    try:
        yield taken
    finally:
        slot.value = before


def _called(bind: Any, descriptor: int, address: bytes) -> int:
    found: int = bind(descriptor, address, len(address))
    return found


@cache
def _slot() -> ctypes.c_void_p:
    """Return the entry of `bind` in the table of torch's library."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    place = _entry_of(path, b"bind") if sys.platform == "linux" and path.exists() else None
    if place is None or not _is_writable(place):
        raise ConfigError(
            f"comm.ports: expected a torch whose Gloo can be told a port, got {torch.__version__} "
            f"on {sys.platform} without a table that names it; leave comm.ports=null, and let the "
            f"hosts reach one another on the ports that the kernel gives to any connection "
            f"(sysctl net.ipv4.ip_local_port_range)"
        )
    return ctypes.c_void_p.from_address(place)


def _entry_of(library: Path, name: bytes) -> int | None:
    """Return where the address of a function that a library calls is kept; None if nowhere."""
    if struct.calcsize("P") != 8 or sys.byteorder != "little":
        return None
    handle = ctypes.CDLL(str(library), mode=os.RTLD_LAZY | os.RTLD_NOLOAD)._handle
    found = ctypes.c_void_p()
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), _LINK_MAP, ctypes.byref(found)) != 0:
        return None
    assert found.value is not None, "dlinfo gives a map where it succeeds"
    # The map begins with the place of the library, a name, and the place of its dynamic section.
    base, _, dynamic = struct.unpack("<QQQ", ctypes.string_at(found.value, 24))
    tags = _tags(dynamic)
    if not {_TABLE, _SIZE_OF_TABLE, _SYMBOLS, _NAMES} <= tags.keys():
        return None
    table = ctypes.string_at(tags[_TABLE], tags[_SIZE_OF_TABLE])
    for offset, info, _ in _ENTRY.iter_unpack(table):
        at = tags[_SYMBOLS] + _SYMBOL * (info >> 32)
        (begins,) = struct.unpack("<I", ctypes.string_at(at, 4))
        if ctypes.string_at(tags[_NAMES] + begins, len(name) + 1) == name + b"\0":
            return int(base + offset)
    return None


def _tags(place: int) -> dict[int, int]:
    found: dict[int, int] = {}
    while True:
        tag, value = _TAG.unpack(ctypes.string_at(place, _TAG.size))
        if tag == 0:
            return found
        found[tag] = value
        place += _TAG.size


def _is_writable(place: int) -> bool:
    """Say whether memory may be written: some libraries' tables are closed once they are loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        first, last = (int(word, 16) for word in span.split("-"))
        if first <= place < last:
            return "w" in rights
    return False
