"""Device abstraction: the only module that distinguishes CPU, CUDA, XPU and other accelerators.

Code that copies tensors between host and device, uses streams or queries memory is given a
`Device`. There are two implementations: `HostDevice` for the CPU and `Accelerator` for every
accelerator that torch supports. Tests add a third one, which checks that no tensor is used before
it is ready.
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

# An alias, because within `Device` the name `torch` is a property.
Dtype = torch.dtype


class Event(Protocol):
    """A device event: complete as soon as all work queued before it in its stream is complete."""

    def record(self, stream: "Stream | None" = None) -> None:
        """Record the event at the end of a stream, by default of the current stream."""

    def query(self) -> bool:
        """Return whether the event is complete; True if it was never recorded."""

    def synchronize(self) -> None:
        """Block the host until the event is complete."""

    def elapsed_ms(self, later: "Event") -> float:
        """Return the time from this event to a later one, in milliseconds.

        Both events must be complete and created with ``timing=True``.
        """


class Stream(Protocol):
    """A queue of operations that a device executes in order; several streams run concurrently."""

    def wait_event(self, event: Event) -> None:
        """Make work queued on this stream from now on wait for an event."""

    def wait_stream(self, other: "Stream") -> None:
        """Make work queued on this stream from now on wait for the work now queued on `other`."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event at the end of the stream and return it; by default a new one."""

    def synchronize(self) -> None:
        """Block the host until all work queued on the stream is complete."""


class Device(Protocol):
    """The device of a rank: its memory, streams, events and copies to and from the host."""

    @property
    def torch(self) -> torch.device:
        """Return the torch device with its index, such as ``cuda:3``."""

    @property
    def type(self) -> str:
        """Return the torch device type, such as ``cpu``, ``cuda`` or ``xpu``."""

    @property
    def is_accelerator(self) -> bool:
        """Return whether the device has its own memory and executes operations asynchronously."""

    @property
    def name(self) -> str:
        """Return the product name, such as ``NVIDIA H100 80GB HBM3``."""

    @property
    def backend(self) -> str:
        """Return torch.distributed's default backend for this device, such as ``nccl``."""

    @property
    def identity(self) -> str:
        """Return a string that two ranks share if they use the same device; empty on a CPU.

        Each partition of a device (MIG) has its own identity.
        """

    @property
    def is_slice(self) -> bool:
        """Return whether this is a device partition (MIG) whose other partitions may be busy."""

    @property
    def numa_node(self) -> int | None:
        """Return the NUMA node of the host closest to the device; None on a CPU or if unknown."""

    @property
    def library_bytes(self) -> int:
        """Return the bytes of device memory that libraries such as cuBLAS allocate at first use.

        torch's allocator counts these bytes as tensors.
        """

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of this device (same type and index)."""

    def is_astray(self, tensor: Tensor) -> bool:
        """Return whether a tensor is neither on this device nor on the host."""

    def to_device(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Return the tensor on this device, copying only if it is elsewhere.

        If `non_blocking` is true and the source is pinned, the call returns before the copy is
        complete. The caller must not write to the source until the current stream has completed the
        copy.
        """

    def copy_to_device(self, own: Tensor, host: Tensor) -> None:
        """Copy pinned host memory into an existing device tensor, on the current stream."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the host, blocking until the copy is complete."""

    def copy_to_host(self, pinned: Tensor, tensor: Tensor) -> None:
        """Copy a device tensor into pinned host memory without blocking the host.

        The copy runs on the current stream. Before reading `pinned`, wait for an event recorded
        after this call.
        """

    def pinned(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return uninitialized host memory that is pinned, so that copies overlap with compute."""

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return a new uninitialized tensor on this device."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters and buffers of a module to the device in place; return the module."""

    def stream(self) -> Stream:
        """Return a stream that runs concurrently with the current one."""

    def current_stream(self) -> Stream:
        """Return the current stream of the calling thread."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a context manager that makes `stream` the current stream of the calling thread."""

    def event(self, *, timing: bool = False) -> Event:
        """Return a new event that is not recorded yet; `elapsed_ms` needs `timing=True`."""

    def keep_for_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory from being reused until a stream's queued work is complete.

        Required if a stream uses a tensor that was allocated while another stream was current; see
        `torch.Tensor.record_stream`.
        """

    def synchronize(self) -> None:
        """Block the host until all work queued on the device is complete."""

    def use(self) -> None:
        """Make this the current device of the calling thread; call it in every new thread."""

    def generators(self) -> list[Generator]:
        """Return the random number generators that layers on this device may use, the CPU's first.

        Raises ConfigError if torch does not expose the generators of the device.
        """

    def memory_allocated(self) -> int:
        """Return the bytes in use: by tensors on an accelerator, by this process on a CPU."""

    def memory_peak(self) -> int:
        """Return the peak of `memory_allocated` in bytes since the start or `reset_peak`."""

    def memory_reserved(self) -> int:
        """Return the bytes reserved by torch's caching allocator, including unused blocks."""

    def memory_total(self) -> int | None:
        """Return the capacity of the device in bytes; None on a CPU, whose memory ranks share."""

    def memory_free(self) -> int | None:
        """Return the bytes that can still be allocated; None if the system does not report it."""

    def reset_peak(self) -> None:
        """Reset the peak that `memory_peak` returns."""

    def trim(self) -> None:
        """Return freed memory to the system, so that other processes can use it."""

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators are bitwise deterministic or raise.

        It applies to the whole process and sets the device libraries' own options for determinism.
        """

    def out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means that host or device memory is exhausted."""


class HostDevice:
    """The CPU: operations are synchronous, so streams and events do nothing."""

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
        """Return whether a tensor is in host memory."""
        return tensor.device.type == self.type

    def is_astray(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on an accelerator."""
        return tensor.device.type not in _HOST_OR_META

    def to_device(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Return the tensor on the host; no copy if it is already there."""
        return tensor.to(self.torch)

    def copy_to_device(self, own: Tensor, host: Tensor) -> None:
        """Copy `host` into `own`."""
        own.copy_(host)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the host; no copy if it is already there."""
        return tensor.to(self.torch)

    def copy_to_host(self, pinned: Tensor, tensor: Tensor) -> None:
        """Copy `tensor` into `pinned`."""
        pinned.copy_(tensor)

    def pinned(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return ordinary host memory: a CPU needs no pinned buffers."""
        return torch.empty(shape, dtype=dtype, device=self.torch)

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return a new uninitialized tensor."""
        return torch.empty(shape, dtype=dtype, device=self.torch)

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters and buffers of a module to the device, in place."""
        return module.to(self.torch)

    def stream(self) -> Stream:
        """Return a stream whose work is always complete."""
        return _HostStream()

    def current_stream(self) -> Stream:
        """Return a stream whose work is always complete."""
        return _HostStream()

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def event(self, *, timing: bool = False) -> Event:
        """Return an event that records the time of `time.perf_counter`."""
        return _HostEvent()

    def keep_for_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Do nothing: no stream uses memory later."""

    def synchronize(self) -> None:
        """Do nothing: all operations are synchronous."""

    def use(self) -> None:
        """Do nothing: every thread can use the CPU."""

    def generators(self) -> list[Generator]:
        """Return the CPU's default generator."""
        return [torch.default_generator]

    def memory_allocated(self) -> int:
        """Return the resident bytes of this process; 0 if the system does not report them."""
        return used_bytes()

    def memory_peak(self) -> int:
        """Return the peak resident bytes of this process since the start or `reset_peak`."""
        return peak_bytes()

    def memory_reserved(self) -> int:
        """Return the resident memory of this process in bytes."""
        return used_bytes()

    def memory_total(self) -> None:
        """Return None: the ranks of a machine share its memory."""

    def memory_free(self) -> int | None:
        """Return the bytes that the machine and job limits leave; None if not reported."""
        return free_bytes()

    def reset_peak(self) -> None:
        """Reset the peak resident memory of this process, if the system allows it."""
        reset_peak()

    def trim(self) -> None:
        """Return freed heap memory to the system."""
        trim_freed_memory()

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators are bitwise deterministic or raise."""
        return _deterministic()

    def out_of_memory(self, error: BaseException) -> bool:
        """Return whether torch or Python failed to allocate host memory."""
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
        assert isinstance(later, _HostEvent), "the events belong to different device types"
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
    """A torch accelerator: CUDA (NVIDIA and AMD), XPU or an out-of-tree device type."""

    torch: torch.device  # with its index

    is_accelerator: Final = True

    @property
    def type(self) -> str:
        """Return the torch device type, such as ``cuda``."""
        return self.torch.type

    @property
    def name(self) -> str:
        """Return the product name, or the device type if torch does not report one."""
        ask = getattr(self._module, "get_device_name", None)
        return self.type if ask is None else str(ask(self.torch.index))

    @property
    def backend(self) -> str:
        """Return torch.distributed's default backend for this device type; gloo if it has none."""
        return _table_of_backends().get(self.type, "gloo")

    @property
    def identity(self) -> str:
        """Return the device's UUID, else its PCI address, else its index as seen by this process.

        The index alone does not identify a device: some launchers expose a single device, number 0,
        to each rank. The NVIDIA driver is queried first, because torch may report the UUID of the
        whole device for a MIG partition.
        """
        own = _uuid_of_driver(self.torch.index) if self.type == "cuda" else None
        if own is not None:
            return f"{self.type} {own}"
        ask = getattr(self._module, "get_device_properties", None)
        told = None if ask is None else ask(self.torch.index)
        uuid = str(getattr(told, "uuid", ""))
        if uuid.strip("0-"):
            return f"{self.type} {uuid}"
        bus = _pci_address(told)
        if None not in bus[1:]:
            return f"{self.type} {bus} of {kernel_identity()}"
        seen = sorted(
            (k, v) for k, v in os.environ.items() if any(t in k for t in _VISIBILITY_PARTS)
        )
        return f"{self.type} {self.torch.index} of {shared_identity('mnt')} {gethostname()} {seen}"

    @property
    def is_slice(self) -> bool:
        """Return whether the product name contains ``MIG``, as in ``NVIDIA A100 MIG 1g.5gb``."""
        return " MIG " in self.name

    @property
    def numa_node(self) -> int | None:
        """Return the NUMA node that Linux reports for the PCI address; None if unknown."""
        ask = getattr(self._module, "get_device_properties", None)
        domain, bus, device = _pci_address(None if ask is None else ask(self.torch.index))
        return None if bus is None or device is None else node_of_pci(domain or 0, bus, device)

    @property
    def library_bytes(self) -> int:
        """Return the bytes of cuBLAS workspaces.

        There is one workspace for each thread that runs matmuls: the forward thread and autograd's
        backward thread. Not counted: an additional workspace for a side stream, as PowerSGD uses,
        and the memory of other libraries.
        """
        if self.type != "cuda" or torch.version.hip is not None:
            return 0
        return 2 * _cublas_workspace_bytes(self.torch.index)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on this device (same type and index)."""
        return tensor.device == self.torch

    def is_astray(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on another device, possibly of the same type."""
        return tensor.device.type not in _HOST_OR_META and tensor.device != self.torch

    def to_device(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        """Return the tensor on this device; see `Device.to_device`."""
        return tensor.to(self.torch, non_blocking=non_blocking)

    def copy_to_device(self, own: Tensor, host: Tensor) -> None:
        """Copy pinned host memory into `own` on the current stream without blocking the host."""
        own.copy_(host, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the host, blocking until the copy is complete."""
        return tensor.to(_HOST)

    def copy_to_host(self, pinned: Tensor, tensor: Tensor) -> None:
        """Copy into pinned memory on the current stream without blocking the host."""
        pinned.copy_(tensor, non_blocking=True)

    def pinned(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return uninitialized pinned (page-locked) host memory."""
        return torch.empty(shape, dtype=dtype, device=_HOST, pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Return a new uninitialized tensor on this device."""
        return torch.empty(shape, dtype=dtype, device=self.torch)

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters and buffers of a module to the device, in place."""
        return module.to(self.torch)

    def stream(self) -> Stream:
        """Return a stream from torch's stream pool of this device."""
        return _TorchStream(torch.Stream(self.torch))

    def current_stream(self) -> Stream:
        """Return the current stream of the calling thread."""
        return _TorchStream(torch.accelerator.current_stream(self.torch))

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a context manager that makes `stream` the current stream of the calling thread."""
        return _current(_torch_stream(stream), self.torch)

    def event(self, *, timing: bool = False) -> Event:
        """Return a new event that is not recorded yet."""
        return _TorchEvent(torch.Event(self.torch, enable_timing=timing))

    def keep_for_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory from being reused until a stream's queued work is complete."""
        tensor.record_stream(_torch_stream(stream))

    def synchronize(self) -> None:
        """Block the host until all work queued on the device is complete."""
        torch.accelerator.synchronize(self.torch)

    def use(self) -> None:
        """Make this the current device of the calling thread."""
        torch.accelerator.set_device_index(self.torch)

    def generators(self) -> list[Generator]:
        """Return the CPU's default generator and the device's."""
        module = self._module
        if not hasattr(module, "default_generators"):
            raise ConfigError(
                f"train.device={self.type} is not supported: its torch module has no "
                f"default_generators, which are needed to seed dropout; use another version of "
                f"its package, or {setting('train.device', 'cpu')}"
            )
        if not module.default_generators:  # CUDA is not initialized yet
            module.init()
        return [torch.default_generator, module.default_generators[self.torch.index]]

    def memory_allocated(self) -> int:
        """Return the bytes of tensors on the device."""
        return int(self._of_memory("memory_allocated")(self.torch))

    def memory_peak(self) -> int:
        """Return the peak bytes of tensors on the device."""
        return int(self._of_memory("max_memory_allocated")(self.torch))

    def memory_reserved(self) -> int:
        """Return the bytes reserved by torch's caching allocator."""
        return int(self._of_memory("memory_reserved")(self.torch))

    def memory_total(self) -> int | None:
        """Return the capacity of the device in bytes; None if torch does not report it."""
        told = self._memory_info()
        return None if told is None else told[1]

    def memory_free(self) -> int | None:
        """Return free device memory plus unused memory of torch's caching allocator, in bytes."""
        told = self._memory_info()
        return None if told is None else told[0] + self.memory_reserved() - self.memory_allocated()

    def reset_peak(self) -> None:
        """Reset the peak that `memory_peak` returns."""
        self._of_memory("reset_peak_memory_stats")(self.torch)

    def trim(self) -> None:
        """Release the unused blocks of torch's caching allocator."""
        self._of_memory("empty_cache")()

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators are bitwise deterministic or raise."""
        # cuBLAS reads it once, at first use; without it the order of summation may vary.
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        return _deterministic()

    def out_of_memory(self, error: BaseException) -> bool:
        """Return whether device memory, a library's workspace or pinned memory ran out."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(
            text in str(error) for text in _OUT_OF_MEMORY_TEXTS
        )

    def _memory_info(self) -> tuple[int, int] | None:
        try:
            told: tuple[int, int] = self._of_memory("get_memory_info")(self.torch)
        except RuntimeError:  # not every device type supports it
            return None
        return told

    def _of_memory(self, name: str) -> Any:
        """Return a memory function of `torch.accelerator`, else of the device type's own module."""
        found = getattr(torch.accelerator, name, None)
        return found or getattr(self._module, OF_MEMORY[name])

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.torch)


def device_of_rank(name: str, local_rank: int | None) -> Device:
    """Return the device on which a rank computes and make it current in the calling thread.

    A rank without an explicit index uses device number ``local_rank % device_count``, because some
    launchers expose only one device to each rank. `claim_device` checks that no two ranks use the
    same device.

    Args:
        name: ``auto``, ``cpu``, a device type such as ``cuda``, or one device such as ``cuda:0``,
            which all ranks of the machine then share.
        local_rank: index of this rank on its machine; None if an external launcher has already
            selected the current device.

    Raises ConfigError if the device type is unknown, not available or not usable for training.
    """
    kind = automatic_kind() if name == "auto" else known_kind(name)
    if kind is None:
        raise ConfigError(
            f"train.device: expected auto, {KNOWN_KINDS}, got {name!r}; choose one of them, or "
            f"install the package that provides this device"
        )
    if kind.type == "cpu":
        return HostDevice()
    if kind.type == "mps":
        raise ConfigError(
            "train.device=mps is not supported: losses are accumulated in float64, which mps does "
            f"not have; use {setting('train.device', 'cpu')}"
        )
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != kind.type:
        raise ConfigError(
            f"train.device: expected a device of type {kind.type}, but torch finds "
            f"{'no accelerator' if here is None else here.type} on this machine; use "
            f"{setting('train.device', 'cpu')}, or check the driver, variables that hide devices "
            f"(such as CUDA_VISIBLE_DEVICES), and the torch build"
        )
    count = torch.accelerator.device_count()
    index: int | None = kind.index
    if index is None and local_rank is not None:
        index = local_rank % count
    elif index is None:
        index = torch.accelerator.current_device_index()
    if index >= count:
        raise ConfigError(
            f"train.device: expected one of the {count} {kind.type} devices visible to this "
            f"process, {kind.type}:0 to {kind.type}:{count - 1}, got {name}; choose one of them"
        )
    refuse_old_torch(kind.type)
    device = Accelerator(torch.device(kind.type, index))
    device.use()
    wake_backward(device)
    return device


def wake_backward(device: Device) -> None:
    """Run a small elementwise backward so that autograd's device thread has a CUDA context.

    If the first kernel of that thread is a matmul, cuBLAS finds no context in it, creates one and
    prints a warning (seen with torch 2.11).
    """
    with torch.enable_grad():
        one = torch.zeros(1, device=device.torch, requires_grad=True)
        torch.autograd.backward(one.mul(1.0))


def refuse_old_torch(kind: str) -> None:
    """Raise ConfigError naming the torch functions that a device type needs and torch lacks."""
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
            f"train.device={kind} needs {names}, which torch {torch.__version__} does not have; "
            f"use torch 2.10 or newer, or {setting('train.device', 'cpu')}"
        )


def _has(value: object, names: Sequence[str]) -> bool:
    return not names or (hasattr(value, names[0]) and _has(getattr(value, names[0]), names[1:]))


def planned_device(name: str) -> Device:
    """Return the device that `name` will select in a planned run, even if it is not installed here.

    Its type may be queried, but not its memory.
    """
    kind = automatic_kind() if name == "auto" else torch.device(name)
    return HostDevice() if kind.type == "cpu" else Accelerator(kind)


def _uuid_of_driver(index: int) -> str | None:
    """Return the UUID that the NVIDIA driver reports for a device or MIG partition.

    `index` counts the devices visible to this process. None if the driver is missing.
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
    """Return the bytes of a thread's cuBLAS workspace: from the environment, else torch's default.

    If the device is absent, the default of compute capability 9 and later is used. The rule is that
    of aten/src/ATen/cuda/CublasHandlePool.cpp; an H200 uses 33,554,432 bytes per thread.
    """
    wish = os.environ.get(_WORKSPACE, "")
    if re.fullmatch(r"(:\d+:\d+)+", wish):
        told = [int(word) for word in wish.split(":")[1:]]
        return sum(2**10 * size * count for size, count in zip(told[::2], told[1::2], strict=True))
    is_here = index is not None and torch.cuda.is_available()
    is_old = is_here and torch.cuda.get_device_capability(index)[0] < 9
    return 2**10 * (2 * 4096 + 8 * 16 if is_old else 8 * 4096)


def _pci_address(told: object) -> list[int | None]:
    """Return PCI domain, bus and device from torch's device properties; None if missing."""
    return [getattr(told, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is in host memory, so that reading it does not wait for a device."""
    return tensor.device.type == "cpu"


def known_kind(name: str) -> torch.device | None:
    """Return the torch device that a string such as ``cuda:1`` names; None if unknown to torch."""
    try:
        found = torch.device(name)
    except RuntimeError:
        return None
    return None if found.type == "meta" else found


def known_backends() -> list[str]:
    """Return the default backends of all device types that torch.distributed knows."""
    return sorted(set(_table_of_backends().values()))


def _table_of_backends() -> dict[str, str]:
    """Return torch.distributed's default backend of each device type.

    The `fake` backend of torch's own tests is left out: it sends nothing, and it is registered for
    device types without a backend as soon as some modules of torch are imported.
    """
    table = dist.Backend.default_device_backend_map
    return {kind: backend for kind, backend in table.items() if backend != "fake"}


def automatic_kind() -> torch.device:
    """Return the type of this machine's accelerator, without an index; the CPU if it has none.

    Apple's ``mps`` is excluded: it has no float64, in which losses are accumulated.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return _HOST if found is None or found.type == "mps" else found


def maker_name(device: Device) -> str:
    """Return the product name of a device; for a CPU, the name of the processor."""
    return device.name if device.is_accelerator else processor_name()


def name_here(device: Device) -> str | None:
    """Return the product name of this machine's device of the same type as `device`, or None."""
    if device.is_accelerator and automatic_kind().type != device.type:
        return None
    return maker_name(device)


def generators_in_use() -> list[Generator]:
    """Return the CPU's generator and, if an accelerator is in use, that of its current device."""
    kind = torch.accelerator.current_accelerator()
    own = () if kind is None else getattr(torch.get_device_module(kind), "default_generators", ())
    index = torch.accelerator.current_device_index() if own else 0
    return [torch.default_generator, *own[index : index + 1]]


def accepts_device(group: dist.ProcessGroup, device: Device) -> bool:
    """Return whether a process group accepts tensors of a device, directly or by host copies."""
    kinds = {each.split(":")[0] for each in str(dist.get_backend_config(group)).split(",")}
    return device.type in kinds


def uses_device_memory(group: dist.ProcessGroup, device: Device) -> bool:
    """Return whether a process group communicates from device memory, ordered by streams.

    If not, its tensors are copied through host memory.
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
"""Names in torch required for an accelerator; all exist since torch 2.7."""
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
"""Memory functions of `torch.accelerator` and their names in torch.cuda and torch.xpu.

They exist since torch 2.9, get_memory_info since 2.10; before, the device type's own module is
used.
"""

_HOST: Final = torch.device("cpu")
# Pairs of size in KiB and count, such as ":4096:2:16:8".
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
# Device types on which a tensor is never misplaced.
_HOST_OR_META: Final = ("cpu", "meta")
# Parts of the names of variables that hide devices: CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK.
_VISIBILITY_PARTS: Final = ("VISIBLE", "AFFINITY_MASK")
_NO_HOST_MEMORY: Final = "DefaultCPUAllocator: can't allocate memory"
# Messages of the driver (outside torch's allocator), of cuBLAS and cuDNN workspaces, and of NCCL.
_OUT_OF_MEMORY_TEXTS: Final = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


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
        return self.torch.elapsed_time(_torch_event(later))

    def _stream(self, stream: Stream | None) -> torch.Stream:
        if stream is None:
            return torch.accelerator.current_stream(self.torch.device)
        return _torch_stream(stream)


class _TorchStream:
    def __init__(self, stream: torch.Stream) -> None:
        self.torch = stream

    def wait_event(self, event: Event) -> None:
        self.torch.wait_event(_torch_event(event))

    def wait_stream(self, other: Stream) -> None:
        self.torch.wait_stream(_torch_stream(other))

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:
            event = _TorchEvent(torch.Event(self.torch.device))
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.torch.synchronize()


def _torch_stream(stream: Stream) -> torch.Stream:
    assert isinstance(stream, _TorchStream), "the stream belongs to another device type"
    return stream.torch


def _torch_event(event: Event) -> torch.Event:
    assert isinstance(event, _TorchEvent), "the event belongs to another device type"
    return event.torch


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # No code here reads uninitialized memory, and filling it costs time.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills


@contextmanager
def _current(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    # Not `with stream:`, which stores the previous stream in the stream: unsafe for two threads.
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
