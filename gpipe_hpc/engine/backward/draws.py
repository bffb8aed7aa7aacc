"""Detection of random numbers that a backward draws: they have no key, so they are refused.

Each forward of a layer is keyed by (seed, step, micro-batch, layer). Backwards run in the order of
the table, each through all layers of a stage. So what one draws (Shake-Shake, stochastic rounding,
noise that a hook adds to gradients) depends on that order, and no resumed run can draw the same.
The generators are compared around each backward. Recomputation in a layer
(`torch.utils.checkpoint`) restores the generators that it uses, and is no draw.
"""

import logging
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
"""By number: the name of a thread, and for how many nanoseconds it has computed."""

_THREAD_CLOCK: Final = 0b110  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
_FIRST: Final = 2  # steps in which all generators are compared around each backward
_REMEDY: Final = (
    "draw them in the forward and keep them for the backward (ctx.save_for_backward), or make them "
    "of numbers that the forward was given"
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
        """Return the name of a generator that differs in `now`; empty if none does."""
        if not all(map(torch.equal, self.torchs, now.torchs)):
            return "torch's default generator"
        python, numpy = now.process.drawn_since(self.process)
        if python or numpy:
            return "Python's default generator" if python else "NumPy's default generator"
        return "a generator that a layer holds" if self.own != now.own else ""


class BackwardDraws:
    """Raises ModelError if a backward of one stage draws random numbers.

    In steps 1 to 3 the generators are compared around each backward. Then around all of a step's
    actions, of which forwards put back what they drew from; if they differ and it is not known who
    has drawn, around each backward from then on. `whole`: all layers of the stage.
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
        # Ranks that are threads and compute on accelerators seed the CPU's generator at any time.
        is_apart = len(self._generators) == 1 or not _has_other_ranks()
        self._start = self._now(self._whole) if is_apart and not self.looks else None
        self.looks &= is_apart

    def end(self) -> None:
        """End a step that has not failed."""
        if self._start is None:
            return
        others, before = self._start
        drawn = before.drawn(_Marks.now(self._generators, self._whole.layers))
        if drawn and not _has_other_ranks() and not _running(others):
            raise self._refusal(self._whole.where, drawn)
        self._is_suspected = bool(drawn)

    def refused_in_weights(self, runner: LayerRunner) -> AbstractContextManager[object]:
        """Return a block for a W that raises ModelError if it draws random numbers.

        A W may wait for other ranks, so it takes no lock. If ranks are threads, they move the
        generators meanwhile: then calls of torch's functions are looked at, on this thread.
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
        """Raise ModelError if the block, a backward of a runner, draws random numbers."""
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
                "%s: %s was drawn from while a backward ran, by a layer, a hook or another thread "
                "(%s), expected in forwards alone; a layer or hook should %s, a thread should have "
                "a generator of its own",
                runner.where,
                drawn,
                ", ".join(running),
                _REMEDY,
            )

    def _now(self, runner: LayerRunner) -> tuple[Threads, _Marks]:
        # Threads first, and last afterwards: a thread that draws in between computes in between.
        return _others(), _Marks.now(self._generators, runner.layers)

    def _refusal(self, where: str, drawn: str) -> ModelError:
        return ModelError(
            f"{where}: a backward drew random numbers from {drawn} (in an autograd.Function of a "
            f"layer, or in a hook), expected in forwards alone, where each micro-batch has a key: "
            f"these depend on the order of the table, and no resumed run repeats them; {_REMEDY}"
        )


def _held(layers: Sequence[Layer]) -> list[bytes]:
    values = [own.state() for layer in layers for own in layer.draws_from.own]
    # A tensor is pickled with its place in memory.
    return [v.numpy().tobytes() if isinstance(v, torch.Tensor) else pickle.dumps(v) for v in values]


def _others() -> Threads:
    """Return the threads that may draw: not this one, nor ours.

    A rank that is a thread and within a step may draw once it leaves the step.
    """
    own = threading.current_thread()
    return {
        thread.ident: (thread.name, _mark(thread))
        for thread in threading.enumerate()
        if thread is not own and thread.ident is not None and not _is_ours(thread)
    }


def _mark(thread: threading.Thread) -> int:
    if isinstance(thread, RankThread) and thread.num_edges % 2:
        return -thread.num_edges
    return _computed_ns(thread)


def _running(before: Threads) -> list[str]:
    """Return the names of threads that may have drawn since: those that have computed."""
    now = _others()
    threads = sorted(before.keys() | now.keys())
    return [(now.get(i) or before[i])[0] for i in threads if before.get(i) != now.get(i)]


def _computed_ns(thread: threading.Thread) -> int:
    """Return a thread's CPU time in ns; a number that differs in each call if it is not known.

    Linux has a clock for each thread of a process, given by its number. `/proc` is not current
    while a thread runs. `time.pthread_getcpuclockid` ends the process if the thread has just ended,
    and `sys._current_frames` may crash Python 3.11 if the thread runs meanwhile.
    """
    try:
        assert thread.native_id is not None, "a thread that has started"
        return time.clock_gettime_ns(~thread.native_id << 3 | _THREAD_CLOCK)
    except (OSError, OverflowError):
        return time.perf_counter_ns()


def _is_ours(thread: threading.Thread) -> bool:
    """Return whether a thread runs code of this package, which draws under the lock."""
    if isinstance(thread, RankThread):
        return False
    # An attribute of Python's own: without it a thread counts as the user's, which only warns.
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith("gpipe_hpc.")


def _has_other_ranks() -> bool:
    own = threading.current_thread()
    return any(isinstance(each, RankThread) and each is not own for each in threading.enumerate())
