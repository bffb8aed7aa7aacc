"""The first process of a host: creates the namespaces, then starts commands on request.

    python -I inside.py FACTS        FACTS: JSON, see `Facts`

Imports only the standard library. Requests and answers are JSON, one per packet of the socket
`control`; the first packet reports whether the host is up, and passes its end of the link. When
`control` is closed or this process ends, the kernel ends every process of the host, because this is
process 1 of their namespace.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

_NEW_MOUNTS, _NEW_NAME, _NEW_USERS = 0x00020000, 0x04000000, 0x10000000
_NEW_PROCESSES, _NEW_NETWORK = 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_SET_DEATH_SIGNAL: Final = 1
_TUN_SET_INTERFACE: Final = 0x400454CA
_IFF_TUN, _IFF_NO_HEADER = 0x0001, 0x1000
_SET_FLAGS, _SET_ADDRESS, _SET_MASK, _SET_MTU, _SET_QUEUE = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_UP_AND_RUNNING: Final = 0x41
_QUEUED_PACKETS: Final = 1000  # packets that may wait in the kernel for the link
# Errors that mean missing permission of this machine, not a mistake of this program.
_REFUSALS: Final = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENODEV, errno.ENOSPC}

_libc = ctypes.CDLL(None, use_errno=True)


class Facts(NamedTuple):
    """Configuration of a host: two socket descriptors, host names and addresses, in order."""

    control: int
    name: str
    address: str
    names: dict[str, str]
    mtu: int


class RefusedError(Exception):
    """The machine does not permit an operation that a host needs."""


def main() -> None:
    """Set up the host and serve requests."""
    facts = Facts(**json.loads(sys.argv[1]))
    control = socket.socket(fileno=facts.control)
    control.set_inheritable(False)
    try:
        _leave_namespaces()
    except RefusedError as error:
        _send(control, {"lacking": str(error)})
        return
    first = os.fork()
    if first == 0:
        _end_with_parent()
        os._exit(_be_first(facts, control))
    # The kernel keeps process 1 until all processes of the host have ended.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    control.close()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)


def _be_first(facts: Facts, control: socket.socket) -> int:
    try:
        _furnish(facts)
        link = _open_link(facts)
    except RefusedError as error:
        _send(control, {"lacking": str(error)})
        return 0
    socket.send_fds(control, [b'{"up": true}'], [link])
    os.close(link)  # the receiver of the copy is the link
    _serve(control)
    return 0


def _checked(what: str, result: int) -> None:
    if result != 0:
        _refuse(what, OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))


def _refuse(what: str, error: OSError) -> NoReturn:
    if error.errno in _REFUSALS:
        raise RefusedError(f"{what}: {error.strerror}") from error
    raise error


def _leave_namespaces() -> None:
    """Create new namespaces; without root, as root of a new user namespace."""
    flags = _NEW_MOUNTS | _NEW_NAME | _NEW_PROCESSES | _NEW_NETWORK
    user, group = os.getuid(), os.getgid()
    if user:
        flags |= _NEW_USERS
    _checked("making namespaces", _libc.unshare(flags))
    if user:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError as error:
            _refuse("being root of new namespaces", error)


def _end_with_parent() -> None:
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (each.encode() or None for each in (source, target, kind))
    done = _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _checked(f"mounting {target}", done)


def _furnish(facts: Facts) -> None:
    """Set up host name, processes, shared memory and host table of the host."""
    socket.sethostname(facts.name)
    _mount("", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", 0)
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777")
    table = Path("/dev/shm/hosts")
    known = {"localhost": "127.0.0.1"} | facts.names
    table.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
    _mount(str(table), "/etc/hosts", "", _MS_BIND)
    table.unlink()


def _open_link(facts: Facts) -> int:
    """Create this host's end of the link, with its address; return its packet descriptor."""
    with contextlib.suppress(OSError):  # fewer packets to count
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    with contextlib.suppress(OSError):  # the default of most machines
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("cubic")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:

        def ask(code: int, interface: str, value: bytes) -> None:
            try:
                fcntl.ioctl(asker, code, struct.pack("16s24s", interface.encode(), value))
            except OSError as error:
                _refuse(f"setting up {interface}", error)

        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            asked = struct.pack("16sH22x", b"link", _IFF_TUN | _IFF_NO_HEADER)
            fcntl.ioctl(end, _TUN_SET_INTERFACE, asked)
        except FileNotFoundError as error:
            raise RefusedError("/dev/net/tun: there is none on this machine") from error
        except OSError as error:
            _refuse("/dev/net/tun", error)
        ask(_SET_ADDRESS, "link", _internet(facts.address))
        ask(_SET_MASK, "link", _internet("255.255.255.0"))
        ask(_SET_MTU, "link", struct.pack("i", facts.mtu))
        with contextlib.suppress(RefusedError):  # needs root of the machine; otherwise 500
            ask(_SET_QUEUE, "link", struct.pack("i", _QUEUED_PACKETS))
        for interface in ("lo", "link"):
            ask(_SET_FLAGS, interface, struct.pack("H", _UP_AND_RUNNING))
    return end


def _internet(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _serve(control: socket.socket) -> None:
    """Answer requests until the socket is closed."""
    codes: dict[int, int | None] = {}
    while packet := control.recv(1 << 20):
        _send(control, _answer(json.loads(packet), codes))


def _answer(request: dict[str, Any], codes: dict[int, int | None]) -> dict[str, Any]:
    match request["do"]:
        case "start":
            pid = _start(request)
            codes[pid] = None
            return {"job": pid}
        case "poll":
            _reap(codes)
            return {"code": codes[request["job"]]}
        case "signal":
            _reap(codes)
            if codes[request["job"]] is None:
                _kill(request["job"], request["number"])
            return {}
        case unknown:
            raise AssertionError(f"no such request: {unknown}")


def _reap(codes: dict[int, int | None]) -> None:
    """Record ended processes: those started here, and orphans adopted by process 1."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if codes.get(pid, 0) is None:
                codes[pid] = os.waitstatus_to_exitcode(status)


def _kill(job: int, number: int) -> None:
    try:
        os.killpg(job, number)
    except ProcessLookupError:  # it has not created its session yet
        os.kill(job, number)


def _start(request: dict[str, Any]) -> int:
    """Start a command in its own session; its output is appended to a file."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
        os.chdir(request["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execvpe(request["command"][0], request["command"], request["environ"])
    except OSError as error:
        os.write(2, f"{request['command'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
