"""Detection of random numbers that a backward draws, which raises ModelError.

Forwards are seeded by (seed, step, micro-batch, layer), but a backward runs through all layers of a
stage, in the order of the table. Numbers that it draws (Shake-Shake, stochastic rounding, noise
that a hook adds to gradients) would depend on that order, and a resumed run could not draw the same
ones. So the generators' states are compared around each backward. Recomputation within a layer
(`torch.utils.checkpoint`) restores the generators that it uses, so it is not detected as a draw.
"""

import logging
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.world.threads import RankThread
from gpipe_hpc.engine.layer_runner import Layer, LayerRunner
from gpipe_hpc.engine.random_state import DrawsFrom, DrawWatch, ProcessState, RandomState
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import GENERATOR_LOCK

log = logging.getLogger("gpipe_hpc.pipeline")

Threads = dict[int, tuple[str, int]]
"""Name and CPU time in ns of threads, by thread identifier."""

_THREAD_CLOCK: Final = 0b110  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
_FIRST: Final = 2  # steps in which all generators are compared around each backward
_REMEDY: Final = (
    "draw them in the forward and save them for the backward (ctx.save_for_backward), or compute "
    "them from inputs of the forward"
)


class _Marks(NamedTuple):
    """The states of all generators that a stage's layers may draw from."""

    torchs: list[torch.Tensor]
    process: ProcessState
    own: list[bytes]

    @classmethod
    def now(cls, generators: Sequence[torch.Generator], layers: Sequence[Layer]) -> "_Marks":
        """Return the present states."""
        with GENERATOR_LOCK:
            torchs = [generator.get_state() for generator in generators]
            return cls(torchs, ProcessState.now(can_restore=False), _held(layers))

    def drawn(self, now: "_Marks") -> str:
        """Return the name of a generator whose state differs in `now`; empty if none does."""
        if not all(map(torch.equal, self.torchs, now.torchs)):
            return "torch's default generator"
        python, numpy = now.process.drawn_since(self.process)
        if python or numpy:
            return "Python's default generator" if python else "NumPy's default generator"
        return "a generator that a layer holds" if self.own != now.own else ""


class BackwardDraws:
    """Raises ModelError if a backward of one stage draws random numbers.

    In the first steps the generators are compared around each backward. Later they are compared
    around all actions of a step, of which forwards restore the generators. If they differ but
    another thread may have drawn, they are compared around each backward of the next step.

    Args:
        random: The generators of the stage.
        whole: All layers of the stage.
    """

    def __init__(self, random: RandomState, whole: LayerRunner) -> None:
        self._generators, self._whole = random.generators, whole
        self._num_steps = 0
        self._is_suspected = self._is_told = False
        self._start: tuple[Threads, _Marks] | None = None
        self.looks = True

    def begin(self) -> None:
        """Begin a step."""
        self._num_steps += 1
        self.looks = self._num_steps <= _FIRST or self._is_suspected
        # Ranks that are threads with accelerators may seed the CPU's generator at any time.
        is_apart = len(self._generators) == 1 or not _has_other_ranks()
        self._start = self._now(self._whole) if is_apart and not self.looks else None
        self.looks &= is_apart

    def end(self) -> None:
        """End a step that has not failed; ModelError if a backward is known to have drawn."""
        if self._start is None:
            return
        others, before = self._start
        drawn = before.drawn(_Marks.now(self._generators, self._whole.layers))
        if drawn and not _has_other_ranks() and not _running(others):
            raise self._refusal(self._whole.where, drawn)
        self._is_suspected = bool(drawn)

    def refused_in_weights(self, runner: LayerRunner) -> AbstractContextManager[object]:
        """Return a block for a W that raises ModelError if it draws random numbers.

        A W may wait for other ranks, so it takes no lock, and ranks that are threads may draw in
        the meantime. In that case only draws by torch functions on this thread are detected.
        """
        if not self.looks:
            return nullcontext()
        return self._refused_calls(runner) if _has_other_ranks() else self.refused(runner)

    @contextmanager
    def _refused_calls(self, runner: LayerRunner) -> Iterator[None]:
        draws = DrawsFrom(())
        with DrawWatch(draws):
            yield
        if draws.torch:
            raise self._refusal(runner.where, "torch's default generator")

    @contextmanager
    def refused(self, runner: LayerRunner) -> Iterator[None]:
        """Return a block for a backward of some layers; ModelError if it draws random numbers."""
        others, before = self._now(runner)
        yield
        drawn = before.drawn(_Marks.now(self._generators, runner.layers))
        if not drawn:
            return
        running = _running(others)
        if not running:
            raise self._refusal(runner.where, drawn)
        if not self._is_told:
            self._is_told = True
            log.warning(
                "%s: a layer, a hook or another thread (%s) has drawn random numbers from %s "
                "during a backward; only forwards may draw from it. In a layer or hook, %s; give a "
                "thread a generator of its own",
                runner.where,
                ", ".join(running),
                drawn,
                _REMEDY,
            )

    def _now(self, runner: LayerRunner) -> tuple[Threads, _Marks]:
        # Threads are read before the generators here, and after them at the end: so a thread that
        # has drawn in between has used CPU time in between.
        return _others(), _Marks.now(self._generators, runner.layers)

    def _refusal(self, where: str, drawn: str) -> ModelError:
        return ModelError(
            f"{where}: a backward drew random numbers from {drawn} (in an autograd.Function of a "
            f"layer, or in a hook). Only forwards are seeded for each micro-batch: numbers drawn "
            f"in a backward depend on the schedule, and a resumed run does not repeat them; "
            f"{_REMEDY}"
        )


def _held(layers: Sequence[Layer]) -> list[bytes]:
    values = [own.state() for layer in layers for own in layer.draws_from.own]
    # Not pickled if it is a tensor, as the pickle would contain its offset in memory.
    return [v.numpy().tobytes() if isinstance(v, torch.Tensor) else pickle.dumps(v) for v in values]


def _others() -> Threads:
    """Return the threads that may draw: all but this one and threads of this package."""
    own = threading.current_thread()
    return {
        thread.ident: (thread.name, _mark(thread))
        for thread in threading.enumerate()
        if thread is not own and thread.ident is not None and not _is_ours(thread)
    }


def _mark(thread: threading.Thread) -> int:
    """Return a number that changes if a thread may have drawn.

    It is the CPU time. Within a step a rank that is a thread draws under the lock only, so for such
    a thread it is the number of its step boundaries.
    """
    if isinstance(thread, RankThread) and thread.num_edges % 2:
        return -thread.num_edges
    return _computed_ns(thread)


def _running(before: Threads) -> list[str]:
    """Return the names of threads that have used CPU time since, so may have drawn."""
    now = _others()
    threads = sorted(before.keys() | now.keys())
    return [(now.get(i) or before[i])[0] for i in threads if before.get(i) != now.get(i)]


def _computed_ns(thread: threading.Thread) -> int:
    """Return a thread's CPU time in ns; if it is unknown, a number that differs in each call.

    It is read from the clock that Linux has for each thread, by thread number. Alternatives are
    unsuitable: `/proc` is not current while a thread runs, `time.pthread_getcpuclockid` aborts the
    process if the thread has just ended, and `sys._current_frames` may crash Python 3.11.
    """
    # In Python 3.11 a fork leaves the number of the main thread as it was.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        assert number is not None, "known of each thread that has started"
        return time.clock_gettime_ns(~number << 3 | _THREAD_CLOCK)
    except (OSError, OverflowError):
        return time.perf_counter_ns()


def _is_ours(thread: threading.Thread) -> bool:
    """Return whether a thread runs code of this package, which draws only under the lock."""
    if isinstance(thread, RankThread):
        return False
    # A private attribute of Python: without it a thread counts as the user's, which only warns.
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith("gpipe_hpc.")


def _has_other_ranks() -> bool:
    own = threading.current_thread()
    return any(isinstance(each, RankThread) and each is not own for each in threading.enumerate())
