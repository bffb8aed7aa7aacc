"""Random generators that are seeded for the run of one layer.

torch's are seeded for every layer. Python's and NumPy's global ones only for layers that draw from
them, as that takes ten times as long: the first run of a layer finds out which it draws from. If
one begins to later, that is seen at the end of the run: its R then starts from the same states,
and the next run of each layer finds out anew. A state of torch's that has moved may be another
thread's doing; so the next run of the layer is watched, where torch's functions say what draws.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc.comm.device import Device
from gpipe_hpc.engine.state.sources import (
    FIRST_OWN,
    OwnGenerator,
    ProcessMarks,
    have_stayed,
    numpy_mark,
)
from gpipe_hpc.models import (
    GENERATOR_LOCK,
    ProcessStates,
    seed_numpy,
    seed_python,
    source_key,
)
from gpipe_hpc.torch_compat import TorchDispatchMode

LayerKey = Callable[[int], int]
"""Gives the random key of a layer (by its global index) for the micro-batch at hand."""


log = logging.getLogger("gpipe_hpc.pipeline")

_MAX_SEARCHES: Final = 8
_UNWATCHED: Final = nullcontext()


class Draws:
    """From which generators one layer draws, in training or in evaluation, as far as is known.

    `is_suspected`: torch's generators moved in one of its runs, and it is not known why.
    """

    __slots__ = ("is_known", "is_suspected", "numpy", "own", "python", "torch")

    def __init__(self) -> None:
        self.is_known = self.is_suspected = False
        self.torch = self.python = self.numpy = False
        self.own: tuple[OwnGenerator, ...] = ()

    @property
    def are_none(self) -> bool:
        """Say whether the layer is known to draw from nothing."""
        if not self.is_known or self.is_suspected or self.own:
            return False
        return not (self.torch or self.python or self.numpy)

    def learned(self) -> tuple[bool, ...]:
        """Return what runs find out."""
        return self.is_known, self.is_suspected, self.torch, self.python, self.numpy


class Known(NamedTuple):
    """What is known of layers that run together, in the modes that they are in.

    `draws_torchs`: one draws from torch's generators. `may_draw_others`: one draws from Python's or
    NumPy's, or it is not known.
    """

    draws: tuple[Draws, ...] = ()
    draws_torchs: bool = False
    may_draw_others: bool = False

    @classmethod
    def of(cls, draws: tuple[Draws, ...]) -> "Known":
        """Sum up what is known of each."""
        return cls(
            draws,
            any(each.torch for each in draws),
            any(each.python or each.numpy or not each.is_known for each in draws),
        )


_NOBODY: Final = Known()


class DrawWatch(TorchDispatchMode):
    """Notes whether functions of torch draw from its default generators, on this thread.

    Compiled code stays compiled under it.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled be compiled: a layer may insist on it."""
        return True

    def __init__(self, draws: Draws) -> None:
        initialise: Any = super().__init__
        initialise()
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run one function."""
        keywords = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            arguments = func._schema.arguments
            given = {each.name: each.default_value for each in arguments}
            given |= dict(zip(given, args, strict=False)) | keywords
            # Attention has the tag also without dropout.
            if given.get("generator") is None and given.get("dropout_p") != 0.0:
                self._draws.torch = True
        return func(*args, **keywords)


class Drawn(NamedTuple):
    """How far a run of a layer moved the generators that it draws from, or seems to."""

    torch: int | None = None
    python: int | None = None
    numpy: int | None = None


_NOTHING: Final = Drawn()


class Keyed:
    """Seed the generators that layers on a device may draw from."""

    def __init__(self, device: Device) -> None:
        self.generators = device.generators()
        self.was_disturbed = False  # whether others draw from torch's generators amid our steps
        self.num_learned = 0  # how often a run has found out what some layer draws from
        self._current: Drawing | None = None  # the block that we are in
        self._backward: list[torch.Tensor] | None = None  # torch's states ahead of the one we run
        self._has_told = False
        self._num_searches = 0  # for layers that have begun to draw
        self._left: bytes | None = None  # torch's state as the last run of the step left it
        self._marks: ProcessMarks | None = None  # Python's and NumPy's as the last run left them

    def begin(self) -> None:
        """Begin a step: whoever has drawn since the last one was free to."""
        self._left = self._marks = None

    def alone(self, known: Known = _NOBODY, start: ProcessMarks | None = None) -> "Drawing":
        """Return a block for runs of layers, of which `known` tells, within which nobody else runs.

        Afterwards the generators are as they were: the user's own, whom they also serve, sees no
        change. `start`: where Python's and NumPy's stood when an earlier run of the same layers
        drew from them as they were.
        """
        return Drawing(self, known, start)

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let others draw within the block, amid a block of our own: we wait for them there.

        Elsewhere it changes nothing.
        """
        current, before = self._current, self._backward
        if current is not None:
            inside = current.go_outside()
        elif before is not None:
            inside = _Inside([generator.get_state() for generator in self.generators], None)
            self._set(before)
        else:
            yield
            return
        GENERATOR_LOCK.release()
        try:
            yield
        finally:
            GENERATOR_LOCK.acquire()
            self._set(inside.torchs)
            if inside.process is not None:
                inside.process.restore()

    def backward(self, *, lets_go: bool) -> AbstractContextManager[object]:
        """Return a block that keeps ranks that are threads of this process apart from a backward.

        `torch.utils.checkpoint` within a layer seeds the process's generators there and runs the
        layer's forward again. On a device such a backward runs on a thread of torch's own, which
        could not let go: there the lock is not taken. `lets_go`: `let_go` may be called within.
        """
        if len(self.generators) > 1:
            return _UNWATCHED
        return self._backward_that_lets_go() if lets_go else GENERATOR_LOCK

    @contextmanager
    def _backward_that_lets_go(self) -> Iterator[None]:
        with GENERATOR_LOCK:
            self._backward = [generator.get_state() for generator in self.generators]
            try:
                yield
            finally:
                self._backward = None

    def tell_of_others(self) -> None:
        """Warn, once, that others draw from Python's or NumPy's generator."""
        if not self._has_told:
            self._has_told = True
            log.warning(
                "random numbers: something else than a layer draws from Python's or NumPy's "
                "default generator amid steps (another thread, or a hook of a backward), expected "
                "layers alone: what it draws may come to it again, and layers that begin to draw "
                "later are not looked for without end; give it a generator of its own"
            )

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


class Drawing:
    """The block of `Keyed.alone`. `unkeyed`: where Python's and NumPy's generators stood at its
    start, if they were drawn from by a layer that nobody knew to do so."""

    __slots__ = (
        "_before",
        "_found",
        "_keyed",
        "_known",
        "_marks",
        "_own",
        "_process",
        "_seeded",
        "_start",
        "_states",
        "unkeyed",
    )

    def __init__(self, keyed: Keyed, known: Known, start: ProcessMarks | None) -> None:
        self._keyed, self._known, self._start = keyed, known, start
        self._process: ProcessStates | None = None
        self._found: tuple[bool, ...] | None = None  # what was known ahead of a run that looks
        self._seeded: bytes | None = None
        self._marks: ProcessMarks | None = None
        self._own: list[object] = []
        self.unkeyed: ProcessMarks | None = None

    def __enter__(self) -> "Drawing":
        GENERATOR_LOCK.acquire()
        keyed = self._keyed
        # Not once a step: ranks that are threads would save one another's seeds.
        self._states = [generator.get_state() for generator in keyed.generators]
        self._before, keyed._current = keyed._current, self
        if self._known.draws_torchs:
            state = _bytes(self._states)
            keyed.was_disturbed |= keyed._left is not None and keyed._left != state
            keyed._left = state
        if self._start is not None or self._known.may_draw_others:
            self._process = ProcessStates.now()
            if keyed._marks is not None and any(ProcessMarks.now().differ(keyed._marks)):
                keyed.tell_of_others()
            if self._start is not None:
                self._start.restore()
        elif keyed._marks is None:
            keyed._marks = ProcessMarks.now()
        return self

    def __exit__(self, *error: object) -> None:
        keyed = self._keyed
        try:
            keyed._current = self._before
            keyed._set(self._states)
            if self._process is not None:
                self._process.restore()
                keyed._marks = ProcessMarks.now()
            elif error[0] is None:
                self._look_for_new_draws()
        finally:
            GENERATOR_LOCK.release()

    def go_outside(self) -> "_Inside":
        """Put the generators as they were before the block; return how they are now."""
        torchs = [generator.get_state() for generator in self._keyed.generators]
        process = None if self._process is None else ProcessStates.now()
        self._keyed._set(self._states)
        if self._process is not None:
            self._process.restore()
        return _Inside(torchs, process)

    def seed(
        self, draws: Draws, key: int, *, checks: bool = False
    ) -> AbstractContextManager[object]:
        """Seed for the run of one layer; return the block to run it in.

        `checks`: find out whether it has begun to draw from torch's generators.
        """
        generators = self._keyed.generators
        for generator in generators:
            generator.manual_seed(key)
        is_new = not draws.is_known
        if not (checks or is_new or draws.python or draws.numpy or draws.own):
            return _UNWATCHED
        self._found = draws.learned() if checks or is_new else None
        if self._process is not None and self._start is None:
            if draws.python or is_new:
                seed_python(key)
            if draws.numpy or is_new:
                seed_numpy(key)
        self._own = [own.state() for own in draws.own]
        for place, own in enumerate(draws.own):
            own.seed(source_key(key, FIRST_OWN + place))
        self._marks = ProcessMarks.now() if is_new else None
        if draws.torch or not (checks or is_new):
            return _UNWATCHED
        if draws.is_suspected:
            draws.is_suspected = False
            return DrawWatch(draws)
        self._seeded = _bytes([generator.get_state() for generator in generators])
        return _UNWATCHED

    def end(self, draws: Draws) -> Drawn:
        """End the run of a layer; return how much it drew."""
        if self._own:
            for own, state in zip(draws.own, self._own, strict=True):
                own.restore(state)
            self._own = []
        if self._seeded is not None:
            states = [generator.get_state() for generator in self._keyed.generators]
            draws.is_suspected = _bytes(states) != self._seeded
            self._seeded = None
        if self._marks is not None:
            python, numpy = ProcessMarks.now().differ(self._marks)
            draws.python |= python
            draws.numpy |= numpy
            self._marks, draws.is_known = None, True
        if self._found is not None:
            self._keyed.num_learned += draws.learned() != self._found
            self._found = None
        may_draw = draws.torch or draws.is_suspected
        if not (may_draw or draws.python or draws.numpy):
            return _NOTHING
        states = [generator.get_state() for generator in self._keyed.generators]
        return Drawn(
            hash(_bytes(states)) if may_draw else None,
            hash(random.getstate()) if draws.python else None,
            hash(numpy_mark()) if draws.numpy else None,
        )

    def _look_for_new_draws(self) -> None:
        """Let all layers find out anew if one drew from a generator that it was not known to.

        A few times: if it goes on, others draw, whose numbers a search puts back.
        """
        keyed = self._keyed
        assert keyed._marks is not None, "taken on entering"
        if have_stayed(keyed._marks):
            return
        now = ProcessMarks.now()
        before, keyed._marks = keyed._marks, now
        has_moved = any(now.differ(before))
        if not has_moved or keyed._num_searches > _MAX_SEARCHES:
            return
        keyed._num_searches += 1
        if keyed._num_searches > _MAX_SEARCHES:
            keyed.tell_of_others()
            return
        self.unkeyed = before
        keyed.num_learned += 1
        for draws in self._known.draws:
            draws.is_known = False


class _Inside(NamedTuple):
    """The states of generators amid a block."""

    torchs: list[torch.Tensor]
    process: ProcessStates | None


def _bytes(states: Sequence[torch.Tensor]) -> bytes:
    return b"".join([state.numpy().tobytes() for state in states])
