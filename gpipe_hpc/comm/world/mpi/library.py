"""The MPI library as loaded by mpi4py: start, tags, point-to-point messages and shutdown.

Collectives are built from messages in `process_group`. mpi4py would finalize MPI at interpreter
exit, which blocks until all ranks do; `finish` finalizes it instead, once all ranks have arrived.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gpipe_hpc.comm.world.mpi.progress import MpiMessage, MpiProgress
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.setting_names import setting

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_BYTES: Final = 2**30
"""Largest message: MPI counts bytes with 31 bits, longer tensors are sent in several parts."""
# Time for the ranks of a failed run to wait for each other, so that all can log their messages:
# mpiexec kills the others once the first has ended.
_LAST_WORDS_S: Final = 10.0
_PAUSE_S: Final = 2e-3

LEFT: Final = 0
"""Tag of the message that announces a rank's end; groups use other tags."""
_KIND_BITS: Final = 4
_OWN_KIND: Final = (1 << _KIND_BITS) - 1  # traffic of a group's collectives
_MOST_QUEUE_BITS: Final = 10
# Tags of callers have 31 bits: the kind in the upper bits, the queue in the lower.
_KIND_SHIFT: Final = 27

_QUERIES: Final = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support", "MPIX_Query_ze_support")
# Variables of libraries without such a function, or whose function reports only the build.
_SWITCHES: Final = ("MV2_USE_CUDA", "MV2_USE_ROCM", "MPICH_GPU_SUPPORT_ENABLED", "I_MPI_OFFLOAD")


class Tags:
    """Encoder of group, kind of traffic and queue into MPI tags up to `highest`.

    All messages use one communicator. A tag consists of the number of the group, from 1 up, the
    kind of traffic and the queue within it. So no group needs its own communicator: creating one
    blocks in MPI until all members take part, where nothing could end the wait, and an MPI library
    supports only some thousands. `highest` is the library's limit, which MPI guarantees to be at
    least 32767.
    """

    def __init__(self, highest: int) -> None:
        bits = (highest + 1).bit_length() - 1
        self._queue_bits = min(_MOST_QUEUE_BITS, (bits - _KIND_BITS) // 2)
        self._num_groups = 1 << (bits - _KIND_BITS - self._queue_bits)

    def of(self, group: int, tag: int) -> int:
        """Return the MPI tag of a tag within a group; LaunchError if it is out of range."""
        return self._made(group, tag >> _KIND_SHIFT, tag & ((1 << _KIND_SHIFT) - 1))

    def own(self, group: int) -> int:
        """Return the MPI tag of the group's collectives."""
        return self._made(group, _OWN_KIND, 0)

    def _made(self, group: int, kind: int, queue: int) -> int:
        if queue >> self._queue_bits or not 0 <= kind <= _OWN_KIND:
            raise LaunchError(
                f"MPI: this library's limit on tags allows {1 << self._queue_bits} channels "
                f"between two ranks, but channel {queue} is needed; use fewer stages per rank, "
                f"another MPI, or {setting('comm.backend', 'gloo')}"
            )
        if group + 1 >= self._num_groups:
            raise LaunchError(
                f"MPI: this library's limit on tags allows {self._num_groups - 1} groups of ranks, "
                f"but one more is needed; use another MPI, or {setting('comm.backend', 'gloo')}"
            )
        return ((group + 1 << _KIND_BITS | kind) << self._queue_bits) | queue


class HostRanks(NamedTuple):
    """Index of this rank on its machine and number of ranks there."""

    local_rank: int
    local_size: int


class MpiLibrary:
    """The MPI library of this process and its messages in progress."""

    def __init__(self, module: Any, *, ends_itself: bool) -> None:
        self._mpi, self._ends_itself = module, ends_itself
        # A duplicate, so that messages of a script that uses MPI itself are not mixed with ours.
        self._comm: MPI.Intracomm = module.COMM_WORLD.Dup()
        self._comm.Set_errhandler(module.ERRORS_RETURN)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.tags = Tags(self._comm.Get_attr(module.TAG_UB) or 32767)
        self.progress = MpiProgress(self._done, self._has_left)
        self.num_groups = 0
        # Ranks with which messages were exchanged, and those that have announced their end.
        self._peers: set[int] = set()
        self._gone: set[int] = set()
        self.takes_device_pointers = takes_device_pointers(loaded_by(module.__file__))

    @property
    def name(self) -> str:
        """Return name and version of the library in one line."""
        return " ".join(self._mpi.Get_library_version().split())[:80]

    def neighbours(self) -> HostRanks:
        """Return this rank's index on its machine and the number of ranks there (collective)."""
        here = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        found = HostRanks(here.rank, here.size)
        here.Free()
        return found

    def broadcast_from_first(self, value: Any) -> Any:
        """Broadcast a Python object from rank 0; blocks, so call it before any other message."""
        return self._comm.bcast(value, root=0)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> MpiMessage:
        """Start sending a contiguous tensor."""

        def begin(part: torch.Tensor) -> "MPI.Request":
            return self._comm.Isend(self._memory(part), dest=rank, tag=tag)

        self._peers.add(rank)
        return self.progress.start(rank, _parts(tensor), begin, is_receive=False)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> MpiMessage:
        """Start receiving into a contiguous tensor."""

        def begin(part: torch.Tensor) -> "MPI.Request":
            return self._comm.Irecv(self._memory(part), source=rank, tag=tag)

        self._peers.add(rank)
        return self.progress.start(rank, _parts(tensor), begin, is_receive=True)

    def _memory(self, part: torch.Tensor) -> Any:
        return [self._mpi.buffer.fromaddress(part.data_ptr(), part.nbytes), self._mpi.BYTE]

    def _done(self, requests: "list[MPI.Request]") -> Sequence[tuple[int, int]]:
        """Return the positions of completed requests, each with the number of bytes received."""
        statuses = [self._mpi.Status() for _ in requests]
        positions = self._mpi.Request.Testsome(requests, statuses)
        return [
            (position, status.Get_count(self._mpi.BYTE))
            for position, status in zip(positions or (), statuses, strict=False)
        ]

    def _has_left(self, rank: int) -> bool:
        """Return whether a rank has announced that it ends; the caller must hold the lock."""
        status = self._mpi.Status()
        while self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=LEFT, status=status):
            self._comm.Recv([None, 0, self._mpi.BYTE], source=status.source, tag=LEFT)
            self._gone.add(status.source)
        return rank in self._gone

    def finish(self, timeout_s: float) -> None:
        """Finalize MPI once all ranks have called this; registered at exit.

        Ranks that still wait for this one are informed that it has ended. After a failure of any
        rank, all ranks wait briefly for each other. If all have arrived, MPI is finalized, because
        otherwise mpiexec would kill the other ranks; if not, MPI is not finalized.
        """
        if self._mpi.Is_finalized():
            return
        has_failed = self.progress.broken != "" or not self.num_groups
        is_well = self._meet(has_failed, _LAST_WORDS_S if has_failed else timeout_s)
        if is_well is not None:
            # After a failure MPI_Finalize may wait for messages that are never received.
            late = threading.Timer(_LAST_WORDS_S, _leave_at_once)
            late.daemon = True
            if not is_well:
                # The background thread must not call MPI after MPI_Finalize.
                self.progress.break_off("the run has failed")
                late.start()
            self._mpi.Finalize()
            late.cancel()
        elif self._ends_itself:
            # mpi4py would block in MPI_Finalize for ranks that never arrive.
            _leave_at_once()

    def _meet(self, has_failed: bool, limit_s: float) -> bool | None:
        """Wait for all ranks; return whether none has failed, or None if some arrive too late."""
        end_s = time.monotonic() + limit_s
        own, worst = (torch.tensor([fails], dtype=torch.int32) for fails in (has_failed, True))
        try:
            with self.progress.lock:
                told = [
                    self._comm.Isend([None, 0, self._mpi.BYTE], dest=peer, tag=LEFT)
                    for peer in sorted(self._peers)
                ]
                out, into = ([each.numpy(), self._mpi.INT] for each in (own, worst))
                met = self._comm.Iallreduce(out, into, op=self._mpi.MAX)
            while True:
                with self.progress.lock:
                    self._has_left(self.rank)
                    if self._mpi.Request.Testall([*told, met]):
                        return not worst.item()
                if time.monotonic() > end_s:
                    return None
                time.sleep(_PAUSE_S)
        except self._mpi.Exception:
            return None


def _leave_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def open_mpi() -> MpiLibrary:
    """Initialize MPI, or use it if already initialized; LaunchError if neither is possible."""
    try:
        import mpi4py
    except ImportError as error:
        raise LaunchError(
            "comm.backend=mpi: mpi4py is not installed; pip install 'gpipe-hpc[mpi]', or use "
            "another backend"
        ) from error
    known = "mpi4py.MPI" in sys.modules
    if not known:
        settings: Any = mpi4py.rc
        settings.thread_level, settings.finalize = "multiple", False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"comm.backend=mpi: mpi4py cannot load an MPI library ({error}); load the module of "
            "your MPI, or pip install mpich, and see MPI4PY_MPIABI"
        ) from error
    if MPI.Is_finalized():
        raise LaunchError(
            "comm.backend=mpi: this process has already finalized MPI; start a new process"
        )
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        names = {MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE", MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED"}
        raise LaunchError(
            f"comm.backend=mpi: several threads send, which needs MPI_THREAD_MULTIPLE or at least "
            f"MPI_THREAD_SERIALIZED, but {' '.join(MPI.Get_library_version().split())[:80]} "
            f"provides {names.get(level, level)}; do not import mpi4py.MPI earlier with "
            f"mpi4py.rc.threads=False, or use an MPI library built with thread support"
        )
    return MpiLibrary(MPI, ends_itself=known)


def takes_device_pointers(library: object, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process's MPI accepts pointers to device memory.

    Open MPI, MPICH and derivatives offer functions such as `MPIX_Query_cuda_support`. MVAPICH2,
    Cray MPICH and Intel MPI use an environment variable, which takes precedence if it is set.
    `library` has the functions of MPI as attributes; see `loaded_by`.
    """
    env = os.environ if environ is None else environ
    switches = [env[name] for name in _SWITCHES if name in env]
    if switches:
        return any(value.strip() not in ("", "0") for value in switches)
    for name in _QUERIES:
        query = getattr(library, name, None)
        if query is not None and query() == 1:
            return True
    return False


def loaded_by(module_file: str) -> ctypes.CDLL:
    """Return the symbols of a loaded extension module and of the libraries linked with it."""
    return ctypes.CDLL(module_file, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor's memory into parts that fit into one MPI message."""
    assert tensor.is_contiguous(), "a sent tensor must be contiguous"
    if tensor.nbytes <= MOST_BYTES:
        return (tensor,)
    return torch.split(tensor.view(-1).view(torch.uint8), MOST_BYTES)
