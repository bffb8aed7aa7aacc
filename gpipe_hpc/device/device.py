"""The device on which a rank computes: the only module that knows what kinds of it there are.

A `Device` is handed down to whatever moves tensors between host and device, runs something beside
the compute, or asks for memory. Two are here: `HostDevice`, the CPU, and `Accelerator`, any that
torch has. Tests bring another, which watches that nothing is used before it is there.
"""

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from socket import gethostname
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final, Protocol
from uuid import UUID

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

from gpipe_hpc.device.cores.machine import node_of_pci
from gpipe_hpc.device.host.allocator import trim_freed_memory
from gpipe_hpc.device.host.host_memory import free_bytes, peak_bytes, reset_peak, used_bytes
from gpipe_hpc.device.host.machine import kernel_identity, processor_name, shared_identity
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.setting_names import setting

# By names of their own, as a device has a property `torch`.
Dtype = torch.dtype


class Event(Protocol):
    """A mark in a stream: done once everything is done that was put there before it."""

    def record(self, stream: "Stream | None" = None) -> None:
        """Put the mark at the end of a stream; None for the current one."""

    def query(self) -> bool:
        """Say whether the mark is done; True before it was recorded."""

    def synchronize(self) -> None:
        """Let the host wait for the mark."""

    def elapsed_ms(self, later: "Event") -> float:
        """Return the milliseconds to a later mark; both are done and were made with `timing`."""


class Stream(Protocol):
    """What the device does in order; several streams of one device run side by side."""

    def wait_event(self, event: Event) -> None:
        """Let what comes from now on begin after a mark."""

    def wait_stream(self, other: "Stream") -> None:
        """Let what comes from now on begin after all that another stream has to do so far."""

    def record_event(self, event: Event | None = None) -> Event:
        """Put a mark at the end, a new one without timing if none is given; return it."""

    def synchronize(self) -> None:
        """Let the host wait for all that the stream has to do so far."""


class Device(Protocol):
    """Where a rank computes, and how its memory, its streams and the host's memory meet."""

    @property
    def torch(self) -> torch.device:
        """Return the device as torch names it, as ``cuda:3``: where new tensors are made."""

    @property
    def type(self) -> str:
        """Return its kind, as torch's autocast wants it: ``cpu``, ``cuda``, ``xpu``."""

    @property
    def is_accelerator(self) -> bool:
        """Say whether it has memory and streams of its own: what it is told, it does later."""

    @property
    def name(self) -> str:
        """Return what it is called, as ``NVIDIA H100 80GB HBM3``."""

    @property
    def backend(self) -> str:
        """Return torch.distributed's own backend for its tensors, as ``gloo``, ``nccl``."""

    @property
    def identity(self) -> str:
        """Return a text that two ranks share if they compute on one device; empty on a CPU.

        A slice of a device (MIG) is one of its own.
        """

    @property
    def is_slice(self) -> bool:
        """Say whether it is a slice of a device whose other slices others may compute on."""

    @property
    def numa_node(self) -> int | None:
        """Return the NUMA node of its host that it is next to; None on a CPU, or if not known."""

    @property
    def library_bytes(self) -> int:
        """Return what libraries keep of its memory, among torch's tensors, once layers have run."""

    def holds(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in the memory of this device, not of another of its kind."""

    def is_astray(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies neither here nor on the host: on another device."""

    def bring(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Return a tensor of the device with these values; the same if it lies there already.

        `non_blocking`: the host goes on at once if the source is pinned, and must not write to it
        before the current stream has come there.
        """

    def bring_into(self, own: Tensor, host: Tensor) -> None:
        """Copy from pinned memory into a tensor of the device, on the current stream."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host with these values once it has them: the host waits."""

    def fetch_into(self, pinned: Tensor, tensor: Tensor) -> None:
        """Copy into pinned memory on the current stream; the host does not wait.

        Who reads `pinned` waits for an event that was recorded behind this.
        """

    def pinned(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return new host memory that copies run from and to beside what the device computes."""

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return a new tensor of the device with any values."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters and buffers of a module to the device, in place; return it."""

    def stream(self) -> Stream:
        """Return a stream beside the current one."""

    def current_stream(self) -> Stream:
        """Return the stream that this thread's operators go to."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a block within which this thread's operators go to a stream."""

    def event(self, *, timing: bool = False) -> Event:
        """Return a mark that is not recorded yet; `timing`: one that `elapsed_ms` can read."""

    def lend(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory, once it is let go of, until a stream has done what it has to.

        Needed where a stream uses a tensor that was made while another was current.
        """

    def synchronize(self) -> None:
        """Let the host wait for everything that the device has to do."""

    def use(self) -> None:
        """Make this the device of the calling thread; each new thread that uses it calls this."""

    def generators(self) -> list[Generator]:
        """Return the generators that a layer on this device may draw from, the CPU's first.

        Raises ConfigError for a device whose generators are not to be had.
        """

    def memory_allocated(self) -> int:
        """Return the bytes in use: of tensors on an accelerator, of this process on a CPU."""

    def memory_peak(self) -> int:
        """Return the most bytes in use so far, or since `reset_peak`."""

    def memory_reserved(self) -> int:
        """Return the bytes that torch holds of the device, used or not."""

    def memory_total(self) -> int | None:
        """Return the bytes that the device has; None on a CPU, whose memory ranks share."""

    def memory_free(self) -> int | None:
        """Return the bytes that may still be allocated; None where the system does not tell."""

    def reset_peak(self) -> None:
        """Begin a new peak of `memory_peak`."""

    def trim(self) -> None:
        """Give back to the system, and so to other processes, what this one has freed."""

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a block within which operators give the same bits each time, or raise.

        Of the whole process, and of the device's libraries where they have such settings.
        """

    def out_of_memory(self, error: BaseException) -> bool:
        """Say whether an error means that memory ran out."""


class HostDevice:
    """The CPU: everything is done when the call returns, so streams and marks have no work."""

    torch: Final = torch.device("cpu")
    type: Final = "cpu"
    is_accelerator: Final = False
    name: Final = "cpu"
    backend: Final = "gloo"
    identity: Final = ""
    is_slice: Final = False
    numa_node: Final = None
    library_bytes: Final = 0

    def holds(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in the host's memory."""
        return tensor.device.type == self.type

    def is_astray(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies on an accelerator."""
        return tensor.device.type not in _NOWHERE_ELSE

    def bring(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Return the tensor itself, if it is one of the host."""
        return tensor.to(self.torch)

    def bring_into(self, own: Tensor, host: Tensor) -> None:
        """Copy from one tensor to another."""
        own.copy_(host)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, if it is one of the host."""
        return tensor.to(self.torch)

    def fetch_into(self, pinned: Tensor, tensor: Tensor) -> None:
        """Copy from one tensor to another."""
        pinned.copy_(tensor)

    def pinned(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return plain memory: nothing copies beside the compute."""
        return torch.empty(shape, dtype=dtype, device=self.torch)

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return a new tensor with any values."""
        return torch.empty(shape, dtype=dtype, device=self.torch)

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters and buffers of a module to the device, in place."""
        return module.to(self.torch)

    def stream(self) -> Stream:
        """Return a stream that is always done."""
        return _HostStream()

    def current_stream(self) -> Stream:
        """Return a stream that is always done."""
        return _HostStream()

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a block that changes nothing."""
        return nullcontext()

    def event(self, *, timing: bool = False) -> Event:
        """Return a mark that tells the time of `time.perf_counter`."""
        return _HostEvent()

    def lend(self, tensor: Tensor, stream: Stream) -> None:
        """Do nothing: no stream uses memory later."""

    def synchronize(self) -> None:
        """Do nothing: everything is done."""

    def use(self) -> None:
        """Do nothing: each thread has the CPU."""

    def generators(self) -> list[Generator]:
        """Return the CPU's generator."""
        return [torch.default_generator]

    def memory_allocated(self) -> int:
        """Return the resident bytes of this process; 0 where the system does not tell."""
        return used_bytes()

    def memory_peak(self) -> int:
        """Return the resident bytes of this process at the fullest, or since `reset_peak`."""
        return peak_bytes()

    def memory_reserved(self) -> int:
        """Return the resident bytes of this process."""
        return used_bytes()

    def memory_total(self) -> None:
        """Return None: the ranks of a machine share its memory."""

    def memory_free(self) -> int | None:
        """Return what the machine and the job's limits leave; None if the system does not tell."""
        return free_bytes()

    def reset_peak(self) -> None:
        """Begin a new peak of the process, where the system allows it."""
        reset_peak()

    def trim(self) -> None:
        """Give freed memory back to the system."""
        trim_freed_memory()

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a block within which operators give the same bits each time, or raise."""
        return _deterministic()

    def out_of_memory(self, error: BaseException) -> bool:
        """Say whether torch or Python got no memory from the system."""
        return isinstance(error, MemoryError) or _NO_HOST_MEMORY in str(error)


class _HostEvent:
    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at_s = perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_ms(self, later: Event) -> float:
        assert isinstance(later, _HostEvent), "marks of two kinds of devices"
        return 1e3 * (later._at_s - self._at_s)


class _HostStream:
    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = _HostEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True)
class Accelerator:
    """A device of torch's accelerator: of CUDA (NVIDIA and AMD), XPU, or one out of the tree."""

    torch: torch.device  # with its index

    is_accelerator: Final = True

    @property
    def type(self) -> str:
        """Return its kind, as ``cuda``."""
        return self.torch.type

    @property
    def name(self) -> str:
        """Return what its maker calls it; its kind where torch does not tell."""
        ask = getattr(self._module, "get_device_name", None)
        return self.type if ask is None else str(ask(self.torch.index))

    @property
    def backend(self) -> str:
        """Return the backend that torch.distributed's table has for it; gloo if it has none."""
        return _table_of_backends().get(self.type, "gloo")

    @property
    def identity(self) -> str:
        """Return its UUID; else its place on its host's bus; else what this process calls it.

        Not its index: launchers show each rank its own device alone, which is then number 0.
        NVIDIA's driver is asked first: of a slice, torch may tell the UUID of the whole.
        """
        own = _uuid_of_driver(self.torch.index) if self.type == "cuda" else None
        if own is not None:
            return f"{self.type} {own}"
        ask = getattr(self._module, "get_device_properties", None)
        told = None if ask is None else ask(self.torch.index)
        uuid = str(getattr(told, "uuid", ""))
        if uuid.strip("0-"):
            return f"{self.type} {uuid}"
        bus = _place_on_bus(told)
        if None not in bus[1:]:
            return f"{self.type} {bus} of {kernel_identity()}"
        seen = sorted((k, v) for k, v in os.environ.items() if any(t in k for t in _SHOWING))
        return f"{self.type} {self.torch.index} of {shared_identity('mnt')} {gethostname()} {seen}"

    @property
    def is_slice(self) -> bool:
        """Say whether it is a slice, which NVIDIA's names say: ``NVIDIA A100 MIG 1g.5gb``."""
        return " MIG " in self.name

    @property
    def numa_node(self) -> int | None:
        """Return the node that Linux tells for its place on the bus, where torch tells that."""
        ask = getattr(self._module, "get_device_properties", None)
        domain, bus, device = _place_on_bus(None if ask is None else ask(self.torch.index))
        return None if bus is None or device is None else node_of_pci(domain or 0, bus, device)

    @property
    def library_bytes(self) -> int:
        """Return the bytes of cuBLAS's workspaces; those of other libraries nobody has measured.

        Each thread that computes products has one: that of forwards, and torch's for backwards.
        One more for a stream of its own, as PowerSGD has, is left out.
        """
        if self.type != "cuda" or torch.version.hip is not None:
            return 0
        return 2 * _cublas_workspace_bytes(self.torch.index)

    def holds(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in the memory of this very device."""
        return tensor.device == self.torch

    def is_astray(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies on another device, be it one of this kind."""
        return tensor.device.type not in _NOWHERE_ELSE and tensor.device != self.torch

    def bring(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Return a tensor of the device with these values; see `Device.bring`."""
        return tensor.to(self.torch, non_blocking=non_blocking)

    def bring_into(self, own: Tensor, host: Tensor) -> None:
        """Copy from pinned memory on the current stream; the host does not wait."""
        own.copy_(host, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host; the host waits for it."""
        return tensor.to(_HOST)

    def fetch_into(self, pinned: Tensor, tensor: Tensor) -> None:
        """Copy into pinned memory on the current stream; the host does not wait."""
        pinned.copy_(tensor, non_blocking=True)

    def pinned(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return new host memory whose pages stay where they are."""
        return torch.empty(shape, dtype=dtype, device=_HOST, pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return a new tensor of the device with any values."""
        return torch.empty(shape, dtype=dtype, device=self.torch)

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters and buffers of a module to the device, in place."""
        return module.to(self.torch)

    def stream(self) -> Stream:
        """Return a stream of torch's pool for this device."""
        return _TorchStream(torch.Stream(self.torch))

    def current_stream(self) -> Stream:
        """Return the stream that this thread's operators go to."""
        return _TorchStream(torch.accelerator.current_stream(self.torch))

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a block within which this thread's operators go to a stream."""
        return _current(_torchs(stream), self.torch)

    def event(self, *, timing: bool = False) -> Event:
        """Return a mark that is not recorded yet."""
        return _TorchEvent(torch.Event(self.torch, enable_timing=timing))

    def lend(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory until a stream has done what it has to."""
        tensor.record_stream(_torchs(stream))

    def synchronize(self) -> None:
        """Let the host wait for everything that the device has to do."""
        torch.accelerator.synchronize(self.torch)

    def use(self) -> None:
        """Make this the device of the calling thread."""
        torch.accelerator.set_device_index(self.torch)

    def generators(self) -> list[Generator]:
        """Return the CPU's generator and the device's."""
        module = self._module
        if not hasattr(module, "default_generators"):
            raise ConfigError(
                f"train.device: expected one whose generators can be seeded, so that dropout is "
                f"the same in every layout, got {self.type}, whose module has no "
                f"default_generators; use another version of its package, or "
                f"{setting('train.device', 'cpu')}"
            )
        if not module.default_generators:  # before anything was done there
            module.init()
        return [torch.default_generator, module.default_generators[self.torch.index]]

    def memory_allocated(self) -> int:
        """Return the bytes of tensors on the device."""
        return int(self._of_memory("memory_allocated")(self.torch))

    def memory_peak(self) -> int:
        """Return the most bytes of tensors on the device."""
        return int(self._of_memory("max_memory_allocated")(self.torch))

    def memory_reserved(self) -> int:
        """Return the bytes that torch's allocator holds of the device."""
        return int(self._of_memory("memory_reserved")(self.torch))

    def memory_total(self) -> int | None:
        """Return the bytes that the device has; None where torch does not tell."""
        told = self._memory_info()
        return None if told is None else told[1]

    def memory_free(self) -> int | None:
        """Return what nobody has of the device, and what torch's allocator holds unused."""
        told = self._memory_info()
        return None if told is None else told[0] + self.memory_reserved() - self.memory_allocated()

    def reset_peak(self) -> None:
        """Begin a new peak of `memory_peak`."""
        self._of_memory("reset_peak_memory_stats")(self.torch)

    def trim(self) -> None:
        """Give back what torch's allocator holds of the device unused."""
        self._of_memory("empty_cache")()

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a block within which operators give the same bits each time, or raise."""
        # cuBLAS reads it when it is first used, and else sums in any order.
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        return _deterministic()

    def out_of_memory(self, error: BaseException) -> bool:
        """Say whether the device, a library on it or pinned memory ran out."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _RAN_OUT)

    def _memory_info(self) -> tuple[int, int] | None:
        try:
            told: tuple[int, int] = self._of_memory("get_memory_info")(self.torch)
        except RuntimeError:  # not every kind has it
            return None
        return told

    def _of_memory(self, name: str) -> Any:
        """Return one of torch's functions for the memory of all kinds, or that of this kind."""
        found = getattr(torch.accelerator, name, None)
        return found or getattr(self._module, OF_MEMORY[name])

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.torch)


def device_of_rank(name: str, local_rank: int | None) -> Device:
    """Return the device on which a rank computes; it becomes that of the calling thread.

    `name`: auto, cpu, a kind as ``cuda``, or one device of a kind as ``cuda:0``, which all ranks of
    a machine then share. `local_rank`: which of its machine's ranks this is; None where somebody
    else has started the ranks, and chosen the current device. A rank takes the device of its local
    rank, counted round where it sees fewer: some launchers show each rank its own alone. Whether
    two ranks have one device, they find out together; see `claim_device`.

    Raises ConfigError for a kind that torch does not know or see, or that cannot be trained on.
    """
    kind = automatic_kind() if name == "auto" else known_kind(name)
    if kind is None:
        raise ConfigError(
            f"train.device: expected auto, {KNOWN_KINDS}, got {name!r}; choose one of them, or "
            f"install the package that brings it"
        )
    if kind.type == "cpu":
        return HostDevice()
    if kind.type == "mps":
        raise ConfigError(
            "train.device: expected one with float64, in which losses are summed, got mps, which "
            f"has none; use {setting('train.device', 'cpu')}"
        )
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != kind.type:
        raise ConfigError(
            f"train.device: expected a device of kind {kind.type}, got a torch that sees "
            f"{'none' if here is None else here.type}; use "
            f"{setting('train.device', 'cpu')}, or check the driver, what hides devices from this "
            f"process, and the torch build"
        )
    count = torch.accelerator.device_count()
    index: int | None = kind.index
    if index is None and local_rank is not None:
        index = local_rank % count
    elif index is None:
        index = torch.accelerator.current_device_index()
    if index >= count:
        raise ConfigError(
            f"train.device: expected one of the {count} of kind {kind.type} that this process "
            f"sees, {kind.type}:0 to {kind.type}:{count - 1}, got {name}; choose one of them"
        )
    refuse_old_torch(kind.type)
    device = Accelerator(torch.device(kind.type, index))
    device.use()
    wake_backward(device)
    return device


def wake_backward(device: Device) -> None:
    """Let torch's thread for backwards on a device begin with a plain kernel.

    Where its first one was a product, as on ranks to which a gradient comes, cuBLAS found that the
    thread had no context, made one and warned of it (seen with torch 2.11).
    """
    with torch.enable_grad():
        one = torch.zeros(1, device=device.torch, requires_grad=True)
        torch.autograd.backward(one.mul(1.0))


def refuse_old_torch(kind: str) -> None:
    """Raise ConfigError, with their names, where torch lacks functions that a kind needs."""
    lacking = [name for name in NEEDED if not _has(torch, name.split("."))]
    module = torch.get_device_module(kind) if "get_device_module" not in lacking else None
    lacking += [
        f"accelerator.{name}"
        for name, own in OF_MEMORY.items()
        if not (hasattr(torch.accelerator, name) or hasattr(module, own))
    ]
    if lacking:
        names = ", ".join(f"torch.{name}" for name in lacking)
        raise ConfigError(
            f"train.device: expected a torch with {names}, got {torch.__version__} without; use "
            f"torch 2.10 or newer, or {setting('train.device', 'cpu')}"
        )


def _has(value: object, names: Sequence[str]) -> bool:
    return not names or (hasattr(value, names[0]) and _has(getattr(value, names[0]), names[1:]))


def device_to_come(name: str) -> Device:
    """Return a device of the kind that a run with this name will have, though it is not here.

    It can be asked for its kind, not for its memory.
    """
    kind = automatic_kind() if name == "auto" else torch.device(name)
    return HostDevice() if kind.type == "cpu" else Accelerator(kind)


def _uuid_of_driver(index: int) -> str | None:
    """Return the UUID that NVIDIA's driver has for a device or, if it is one, a slice (MIG).

    `index`: as this process counts those that it is shown, whichever names show them. None where
    there is no such driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        told = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetUuid_v2(uuid, device)
        )
    except (OSError, AttributeError):
        return None
    return str(UUID(bytes=bytes(uuid))) if told == 0 and any(uuid) else None


def _cublas_workspace_bytes(index: int | None) -> int:
    """Return what torch gives cuBLAS for a thread: what a variable says, else by the device.

    Of a device that is not here: what torch gives the newer ones. The rule is that of
    aten/src/ATen/cuda/CublasHandlePool.cpp; on an H200, 33,554,432 bytes a thread were seen.
    """
    wish = os.environ.get(_WORKSPACE, "")
    if re.fullmatch(r"(:\d+:\d+)+", wish):
        told = [int(word) for word in wish.split(":")[1:]]
        return sum(2**10 * size * count for size, count in zip(told[::2], told[1::2], strict=True))
    is_here = index is not None and torch.cuda.is_available()
    is_old = is_here and torch.cuda.get_device_capability(index)[0] < 9
    return 2**10 * (2 * 4096 + 8 * 16 if is_old else 8 * 4096)


def _place_on_bus(told: object) -> list[int | None]:
    """Return domain, bus and device of what torch tells of a device; None for what it does not."""
    return [getattr(told, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]


def on_host(tensor: Tensor) -> bool:
    """Say whether a tensor lies in the host's memory, and reading it waits for no device."""
    return tensor.device.type == "cpu"


def known_kind(name: str) -> torch.device | None:
    """Return what a name as ``cuda`` or ``cuda:1`` means to torch; None if it means nothing."""
    try:
        found = torch.device(name)
    except RuntimeError:
        return None
    return None if found.type == "meta" else found


def known_backends() -> list[str]:
    """Return the backends that torch.distributed's table has for any kind of device."""
    return sorted(set(_table_of_backends().values()))


def _table_of_backends() -> dict[str, str]:
    """Return torch.distributed's table: the backend of each kind of device.

    Without the one of torch's own tests, which sends nothing. It takes the kinds that have no other
    as soon as some parts of torch are loaded.
    """
    table = dist.Backend.default_device_backend_map
    return {kind: backend for kind, backend in table.items() if backend != "fake"}


def automatic_kind() -> torch.device:
    """Return the kind of this machine's accelerator, without an index; the CPU if there is none.

    Apple's ``mps`` is left out: it knows no float64, in which losses are summed.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return _HOST if found is None or found.type == "mps" else found


def maker_name(device: Device) -> str:
    """Return what the maker of a device calls it; of a CPU, what its processor is called."""
    return device.name if device.is_accelerator else processor_name()


def name_here(device: Device) -> str | None:
    """Return what this machine's device of the same kind is called; None if it has none."""
    if device.is_accelerator and automatic_kind().type != device.type:
        return None
    return maker_name(device)


def generators_in_use() -> list[Generator]:
    """Return the CPU's generator and, once an accelerator is in use, its current device's."""
    kind = torch.accelerator.current_accelerator()
    own = () if kind is None else getattr(torch.get_device_module(kind), "default_generators", ())
    index = torch.accelerator.current_device_index() if own else 0
    return [torch.default_generator, *own[index : index + 1]]


def knows(group: dist.ProcessGroup, device: Device) -> bool:
    """Say whether a group of torch takes tensors of a device at all, if by way of the host."""
    kinds = {each.split(":")[0] for each in str(dist.get_backend_config(group)).split(",")}
    return device.type in kinds


def carries(group: dist.ProcessGroup, device: Device) -> bool:
    """Say whether a group of torch sends from an accelerator's own memory, in order of streams.

    Else its tensors go by way of the host.
    """
    told = str(dist.get_backend_config(group)).split(",")
    return (
        device.is_accelerator
        and device.backend != "gloo"
        and f"{device.type}:{device.backend}" in told
    )


KNOWN_KINDS: Final = "cpu, cuda (NVIDIA and AMD), xpu (Intel) or the name of another accelerator"
NEEDED: Final = (
    "Event",
    "Stream",
    "accelerator.current_accelerator",
    "accelerator.current_device_index",
    "accelerator.current_stream",
    "accelerator.device_count",
    "accelerator.set_device_index",
    "accelerator.set_stream",
    "accelerator.synchronize",
    "get_device_module",
)
"""What is asked of torch for an accelerator; all of it is there since 2.7."""
OF_MEMORY: Final = MappingProxyType(
    {
        "empty_cache": "empty_cache",
        "get_memory_info": "mem_get_info",
        "max_memory_allocated": "max_memory_allocated",
        "memory_allocated": "memory_allocated",
        "memory_reserved": "memory_reserved",
        "reset_peak_memory_stats": "reset_peak_memory_stats",
    }
)
"""What is asked of `torch.accelerator` for memory, and what torch.cuda and torch.xpu call it.

It came with 2.9, get_memory_info with 2.10; before, the module of the kind is asked.
"""

_HOST: Final = torch.device("cpu")
# KiB and how many of each, as ":4096:2:16:8".
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
# Kinds of devices that no tensor can be lost on: the host, and none at all.
_NOWHERE_ELSE: Final = ("cpu", "meta")
# Parts of the names of variables that hide devices: CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK.
_SHOWING: Final = ("VISIBLE", "AFFINITY_MASK")
_NO_HOST_MEMORY: Final = "DefaultCPUAllocator: can't allocate memory"
# Of the driver where torch's allocator is not asked, of cuBLAS for its workspace, and of NCCL.
_RAN_OUT: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class _TorchEvent:
    def __init__(self, event: torch.Event) -> None:
        self.torch = event

    def record(self, stream: Stream | None = None) -> None:
        self.torch.record(self._stream(stream))

    def query(self) -> bool:
        return self.torch.query()

    def synchronize(self) -> None:
        self.torch.synchronize()

    def elapsed_ms(self, later: Event) -> float:
        return self.torch.elapsed_time(_mark(later))

    def _stream(self, stream: Stream | None) -> torch.Stream:
        if stream is None:
            return torch.accelerator.current_stream(self.torch.device)
        return _torchs(stream)


class _TorchStream:
    def __init__(self, stream: torch.Stream) -> None:
        self.torch = stream

    def wait_event(self, event: Event) -> None:
        self.torch.wait_event(_mark(event))

    def wait_stream(self, other: Stream) -> None:
        self.torch.wait_stream(_torchs(other))

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:
            event = _TorchEvent(torch.Event(self.torch.device))
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.torch.synchronize()


def _torchs(stream: Stream) -> torch.Stream:
    assert isinstance(stream, _TorchStream), "a stream of another kind of device"
    return stream.torch


def _mark(event: Event) -> torch.Event:
    assert isinstance(event, _TorchEvent), "a mark of another kind of device"
    return event.torch


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that nobody wrote, and to fill it takes time.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills


@contextmanager
def _current(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    # A stream of torch as a block remembers in itself what was before: two threads may not share.
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
