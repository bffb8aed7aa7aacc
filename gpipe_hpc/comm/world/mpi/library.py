"""MPI as mpi4py brings it: started once, with threads, by what launched the ranks.

What a run sends through it are messages from one rank to another; see `process_group` for what is
made of them. mpi4py ends MPI as the interpreter ends, which waits for all ranks: here `finish` does
it, once all have come to their end.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gpipe_hpc.comm.world.mpi.device_pointers import loaded_by, takes_device_pointers
from gpipe_hpc.comm.world.mpi.progress import Message, Progress
from gpipe_hpc.comm.world.mpi.tags import Tags
from gpipe_hpc.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_BYTES: Final = 2**30
"""Of one message: MPI counts them by 31 bits, longer ones go in several parts."""
# How long the ranks of a failed run wait for one another, so that all have said their last words:
# mpiexec kills the rest once the first has ended.
_LAST_WORDS_S: Final = 10.0
_PAUSE_S: Final = 2e-3


LEFT: Final = 0
"""The tag by which a rank says that it leaves; groups have others."""


class Neighbours(NamedTuple):
    """Which of the ranks of this machine this one is, and how many there are."""

    local_rank: int
    local_size: int


class Library:
    """MPI of this process, and what is under way in it."""

    def __init__(
        self, module: Any, device_pointers: bool | None = None, *, ends_itself: bool
    ) -> None:
        self._mpi, self._ends_itself = module, ends_itself
        # Of our own, so that no message of a script that uses MPI itself is taken for one of ours.
        self._comm: MPI.Intracomm = module.COMM_WORLD.Dup()
        self._comm.Set_errhandler(module.ERRORS_RETURN)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.tags = Tags(self._comm.Get_attr(module.TAG_UB) or 32767)
        self.progress = Progress(self._done, self._has_left)
        self.num_groups = 0
        # Those that this rank has exchanged messages with, and those of them that have left.
        self._peers: set[int] = set()
        self._gone: set[int] = set()
        self.takes_device_pointers = (
            takes_device_pointers(loaded_by(module.__file__))
            if device_pointers is None
            else device_pointers
        )

    @property
    def name(self) -> str:
        """Return what the library calls itself, in a line."""
        return " ".join(self._mpi.Get_library_version().split())[:80]

    def neighbours(self) -> Neighbours:
        """Return this rank's place on its machine; every rank calls it."""
        here = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        found = Neighbours(here.rank, here.size)
        here.Free()
        return found

    def told_by_first(self, value: Any) -> Any:
        """Return rank 0's value; every rank calls it, before anything else is sent."""
        return self._comm.bcast(value, root=0)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Start sending the memory of a tensor without gaps."""

        def begin(part: torch.Tensor) -> "MPI.Request":
            return self._comm.Isend(self._memory(part), dest=rank, tag=tag)

        self._peers.add(rank)
        return self.progress.start(rank, _parts(tensor), begin, is_receive=False)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Start receiving into the memory of a tensor without gaps."""

        def begin(part: torch.Tensor) -> "MPI.Request":
            return self._comm.Irecv(self._memory(part), source=rank, tag=tag)

        self._peers.add(rank)
        return self.progress.start(rank, _parts(tensor), begin, is_receive=True)

    def _memory(self, part: torch.Tensor) -> Any:
        return [self._mpi.buffer.fromaddress(part.data_ptr(), part.nbytes), self._mpi.BYTE]

    def _done(self, requests: "list[MPI.Request]") -> Sequence[tuple[int, int]]:
        """Return which requests are done, each with the bytes that came."""
        statuses = [self._mpi.Status() for _ in requests]
        positions = self._mpi.Request.Testsome(requests, statuses)
        return [
            (position, status.Get_count(self._mpi.BYTE))
            for position, status in zip(positions or (), statuses, strict=False)
        ]

    def _has_left(self, rank: int) -> bool:
        """Say whether a rank has told that it leaves; the caller has the lock."""
        status = self._mpi.Status()
        while self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=LEFT, status=status):
            self._comm.Recv([None, 0, self._mpi.BYTE], source=status.source, tag=LEFT)
            self._gone.add(status.source)
        return rank in self._gone

    def finish(self, timeout_s: float) -> None:
        """End MPI, once all ranks have come here; called at exit.

        Who still waits for this rank then hears that it has left. After a failure, also of another
        rank, all wait for one another a moment. MPI is ended if all have come, as mpiexec kills the
        others of who does not end it; else it is left as it is.
        """
        if self._mpi.Is_finalized():
            return
        has_failed = self.progress.broken != "" or not self.num_groups
        is_well = self._meet(has_failed, _LAST_WORDS_S if has_failed else timeout_s)
        if is_well is not None:
            # After a failure MPI's end may wait for messages that nobody takes.
            late = threading.Timer(_LAST_WORDS_S, _leave_at_once)
            late.daemon = True
            if not is_well:
                # The thread that tests what is under way may not after the end.
                self.progress.break_off("the run has failed")
                late.start()
            self._mpi.Finalize()
            late.cancel()
        elif self._ends_itself:
            # mpi4py would wait in MPI's end for ranks that never come.
            _leave_at_once()

    def _meet(self, has_failed: bool, limit_s: float) -> bool | None:
        """Say whether none of the ranks has failed; None if not all come here within a time."""
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


def open_mpi(device_pointers: bool | None = None) -> Library:
    """Start MPI, or join the one that this process has started; LaunchError where it cannot be.

    `device_pointers`: whether it takes pointers into a device's memory; None: ask it.
    """
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
            f"comm.backend=mpi: expected MPI_THREAD_MULTIPLE, or MPI_THREAD_SERIALIZED at least, "
            f"as boundaries are sent beside the compute, got {names.get(level, level)} from "
            f"{' '.join(MPI.Get_library_version().split())[:80]}; let nothing import mpi4py.MPI "
            f"before with mpi4py.rc.threads=False, or use an MPI that was built for threads"
        )
    return Library(MPI, device_pointers, ends_itself=known)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut the memory of a tensor into what one message of MPI may be."""
    assert tensor.is_contiguous(), "a tensor that is sent has no gaps"
    if tensor.nbytes <= MOST_BYTES:
        return (tensor,)
    return torch.split(tensor.view(-1).view(torch.uint8), MOST_BYTES)
