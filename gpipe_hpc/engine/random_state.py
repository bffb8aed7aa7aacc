"""Random numbers that depend on (seed, step, micro-batch, layer) only.

Before each layer torch's generators are seeded with the layer's key, which takes 3 us. Seeding
Python's and NumPy's generators takes ten times as long, so they are seeded only for layers that are
known to draw from them. The first run of a layer shows whether it does. A layer that begins to draw
later is found by comparing the states of Python's and NumPy's generators once per forward of a
stage: if they have changed, the forward runs once more with all generators seeded for each layer
(see `LayerRunner.run`). Afterwards the user's generators have the states that they had before.
"""

import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from operator import methodcaller
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.models import (
    GENERATOR_LOCK,
    numpy_is_seedable,
    numpy_words,
    seed_numpy,
    seed_python,
    source_key,
)
from gpipe_hpc.torch_compat import TorchDispatchMode

log = logging.getLogger("gpipe_hpc.pipeline")

FIRST_OWN: Final = 2
"""The number of the first generator that a layer holds, see `source_key`."""

_GET_STATE: Final = methodcaller("get_state")
_HAS_NORMAL: Final = 3  # the position of this flag in NumPy's state
_MAX_SEARCHES: Final = 8
_NOTHING: Final = nullcontext()


class ProcessState(NamedTuple):
    """The states of Python's and NumPy's global generators.

    `numpy` is the state as `restore` needs it; None if it was not requested, or if the program has
    replaced NumPy's default generator. `numpy_bytes` is the state as it is compared.
    """

    python: tuple[Any, ...]
    numpy: Any
    numpy_bytes: bytes

    @classmethod
    def now(
        cls, earlier: "ProcessState | None" = None, *, can_restore: bool = True
    ) -> "ProcessState":
        """Return the present states. Reading `numpy` takes 40 us, the rest 7 us.

        `earlier`: states of which `numpy` is used again if NumPy has not drawn since.
        """
        numpy_bytes = _numpy_bytes()
        numpy: Any = None
        if can_restore and numpy_bytes:
            is_same = earlier is not None and earlier.numpy_bytes == numpy_bytes
            numpy = earlier.numpy if earlier is not None and is_same else None
            # NumPy keeps every second normal number outside these bytes: drawing it changes none.
            if numpy is None or numpy[_HAS_NORMAL]:
                numpy = np.random.get_state()
        return cls(random.getstate(), numpy, numpy_bytes)

    def restore(self) -> None:
        """Restore these states."""
        random.setstate(self.python)
        if self.numpy is not None and numpy_is_seedable():
            np.random.set_state(self.numpy)

    def drawn_since(self, before: "ProcessState") -> tuple[bool, bool]:
        """Return for Python's and for NumPy's generator whether it has moved."""
        return _has_moved(self.python, before.python), self.numpy_bytes != before.numpy_bytes

    def is_left(self) -> bool:
        """Return whether the present states differ from these."""
        return _numpy_bytes() != self.numpy_bytes or _has_moved(random.getstate(), self.python)


def _has_moved(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether two states of Python's generator differ, by comparing a few words.

    Each draw changes the position, the last word. When it wraps around the other words change too,
    as they do with another seed.
    """
    return (now[1][-1], now[1][:3], now[2:]) != (before[1][-1], before[1][:3], before[2:])


def _numpy_bytes() -> bytes:
    """Return the state of NumPy's global generator for comparison; empty if it is no MT19937.

    The state is read at `BitGenerator.ctypes.state_address`, as `get_state` takes a hundred times
    as long, which is the time of a forward of some layers.
    """
    module: Any = np.random
    generator = module.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    state: bytes = _memory_of(generator).tobytes()
    return state


@lru_cache(maxsize=4)  # which keeps the generator, and so its memory
def _memory_of(generator: np.random.MT19937) -> Any:
    """Return a view of a generator's state: 624 words, and the position in them."""
    memory = (generator.ctypes.state_address, True)
    words = {"version": 3, "data": memory, "shape": (625,), "typestr": "<u4"}
    return np.asarray(SimpleNamespace(__array_interface__=words))


class OwnGenerator(NamedTuple):
    """The functions that seed, read and restore a generator that is an attribute of a layer."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]


class DrawsFrom:
    """The generators that one layer is known to draw from in one mode (training or evaluation).

    Args:
        own: The generators that the layer has as attributes.

    Attributes:
        is_known: The layer has run once, and its use of Python's and NumPy's generators was seen.
        is_suspected: torch's generators changed in one of its runs, and the cause is not known.
        torch, python, numpy: Whether it draws from these default generators.
    """

    __slots__ = ("is_known", "is_suspected", "numpy", "own", "python", "torch")

    def __init__(self, own: tuple[OwnGenerator, ...]) -> None:
        self.is_known = self.is_suspected = False
        self.torch = self.python = self.numpy = False
        self.own = own

    @property
    def only_torch(self) -> bool:
        """Return whether the layer is known to draw at most from torch's default generators."""
        return self.is_known and not (self.is_suspected or self.python or self.numpy or self.own)


Drawn = tuple[int | None, int | None, int | None]
"""Hashes of torch's, Python's and NumPy's states after a run of a layer; None for unused ones."""

NOTHING_DRAWN: Final[Drawn] = (None, None, None)


class DrawWatch(TorchDispatchMode):
    """Detects calls on this thread of torch functions that draw from the default generators.

    Comparing the generators' states would also detect draws of other threads.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled layers run compiled in this mode."""
        return True

    def __init__(self, draws: DrawsFrom) -> None:
        initialise: Any = super().__init__
        initialise()
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run one function and note whether it draws from a default generator."""
        keywords = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            arguments = func._schema.arguments
            given = {each.name: each.default_value for each in arguments}
            given |= dict(zip(given, args, strict=False)) | keywords
            # Attention has the tag also without dropout.
            if given.get("generator") is None and given.get("dropout_p") != 0.0:
                self._draws.torch = True
        return func(*args, **keywords)


class RandomState:
    """The generators that the layers of a stage may draw from.

    A context manager around the layers of one forward: meanwhile no other rank of this process runs
    layers, and afterwards the states of all generators are restored.
    """

    def __init__(self, device: Device) -> None:
        self.generators = device.generators()
        self.seeds = [generator.manual_seed for generator in self.generators]
        self.num_learned = 0  # number of times that a run has changed what is known of a layer
        self.was_disturbed = False  # whether other code draws from torch's generators in our steps
        # Seed Python's and NumPy's before every layer, as the layers cannot run once more.
        self.seeds_all = False
        # torch's states outside the present block or backward, and at the end of the last block.
        self._torch: list[torch.Tensor] | None = None
        self._left: list[torch.Tensor] | None = None
        # Python's and NumPy's states outside the blocks of this step, and of the step before.
        self._process: ProcessState | None = None
        self._earlier: ProcessState | None = None
        self._num_searches = 0  # forwards run once more in which no layer was found to draw
        self._has_warned = False
        # Of the layer that runs now:
        self._own: list[Any] = []  # the earlier states of its own generators
        self._found = (False, False)  # what was known of its draws from torch's before this run
        self._seeded_torch: list[torch.Tensor] | None = None  # as seeded, if this run compares them
        self._seeded_process: ProcessState | None = None
        self._is_process_seeded = False
        self._has_moved = False  # whether a layer of this block moved Python's or NumPy's

    def begin(self) -> None:
        """Begin a step or an evaluation; draws since the last one are ignored."""
        self._earlier, self._left, self._process = self._process or self._earlier, None, None

    def __enter__(self) -> "RandomState":
        """Save the states of the generators."""
        GENERATOR_LOCK.acquire()
        # Not once per step: ranks that are threads would save each other's seeds.
        self._torch = list(map(_GET_STATE, self.generators))
        self._has_moved = False
        if self._process is None:
            self._process = ProcessState.now(self._earlier)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the generators."""
        for generator, state in zip(self.generators, self._torch or (), strict=True):
            generator.set_state(state)
        self._torch = None
        if self._is_process_seeded:
            self._restore_process()
        GENERATOR_LOCK.release()

    def look_for_others(self, *, torchs: bool, process: bool) -> None:
        """Detect draws of other code since the last block of the step.

        `torchs`: a layer draws from torch's generators; `process`: one draws from Python's or
        NumPy's.
        """
        if torchs:
            if self._left is not None and self._torch is not None:
                self.was_disturbed |= not all(map(torch.equal, self._left, self._torch))
            self._left = self._torch
        if process and self._process is not None and self._process.is_left():
            self._warn_of_others()
            self._process = ProcessState.now()

    def seed(self, key: int, draws: DrawsFrom, *, inspects: bool) -> AbstractContextManager[object]:
        """Seed the generators for one layer; return a context to run it in, before `finish`.

        `inspects`: detect whether the layer has begun to draw from torch's generators.
        """
        for seed in self.seeds:
            seed(key)
        is_new, self._seeded_torch, self._own = not draws.is_known, None, []
        self._found = draws.is_suspected, draws.torch
        if is_new or self.seeds_all or draws.python or draws.numpy:
            if not self.seeds_all:
                # `finish` restores both, so draws of earlier layers are detected here.
                assert self._process is not None, "saved when the block begins"
                self._has_moved |= self._process.is_left()
            self._is_process_seeded = True
            if draws.python or is_new or self.seeds_all:
                seed_python(key)
            if draws.numpy or is_new or self.seeds_all:
                seed_numpy(key)
        self._seeded_process = ProcessState.now(can_restore=False) if is_new else None
        for place, own in enumerate(draws.own):
            self._own.append(own.state())
            own.seed(source_key(key, FIRST_OWN + place))
        if draws.torch or not (inspects or is_new):
            return _NOTHING
        if draws.is_suspected:
            draws.is_suspected = False
            return DrawWatch(draws)
        self._seeded_torch = list(map(_GET_STATE, self.generators))
        return _NOTHING

    def finish(self, draws: DrawsFrom, *, measures: bool) -> Drawn:
        """End the run of a layer; return hashes of the states after it, if `measures`."""
        for own, state in zip(draws.own, self._own, strict=True):
            own.restore(state)
        self._own = []
        if self._seeded_torch is not None:
            states = list(map(_GET_STATE, self.generators))
            draws.is_suspected = not all(map(torch.equal, states, self._seeded_torch))
            self._seeded_torch = None
        if self._seeded_process is not None:
            now = ProcessState.now(can_restore=False)
            python, numpy = now.drawn_since(self._seeded_process)
            draws.python |= python
            draws.numpy |= numpy
            self._seeded_process, draws.is_known = None, True
            self.num_learned += 1
        elif (draws.is_suspected, draws.torch) != self._found:
            self.num_learned += 1
        draws_any = draws.torch or draws.is_suspected or draws.python or draws.numpy
        drawn = self._drawn(draws) if measures and draws_any else NOTHING_DRAWN
        if self._is_process_seeded and not self.seeds_all:  # else at the end of the block
            self._restore_process()
        return drawn

    def _drawn(self, draws: DrawsFrom) -> Drawn:
        torchs = None
        if draws.torch or draws.is_suspected:
            states = map(_GET_STATE, self.generators)
            torchs = hash(b"".join([state.numpy().tobytes() for state in states]))
        return (
            torchs,
            hash(random.getstate()) if draws.python else None,
            hash(_numpy_bytes()) if draws.numpy else None,
        )

    def has_moved(self) -> bool:
        """Return whether Python's or NumPy's generator has moved since the block began.

        The draws of layers that are known to draw from them do not count: their effect is undone.
        """
        if self.seeds_all:
            return False
        assert self._process is not None, "saved when the block begins"
        before = self._process
        if not self._has_moved and not before.is_left():
            return False
        self._has_moved = False
        self._process = ProcessState.now()
        if self._num_searches > _MAX_SEARCHES:
            return False
        self._before_search, self._num_searches = before, self._num_searches + 1
        if self._num_searches > _MAX_SEARCHES:
            self._warn_of_others()
            return False
        return True

    def end_search(self, *, has_found: bool) -> None:
        """End a repeated forward; if a layer was found to draw, restore the states before it."""
        if has_found:
            self._process = self._before_search
            self._restore_process()
            self._num_searches -= 1

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Return a block, within one of a forward, in which other ranks of this process may run."""
        outside = self._torch
        if outside is None:
            yield
            return
        torchs = list(map(_GET_STATE, self.generators))
        process = ProcessState.now() if self._is_process_seeded else None
        _set_states(self.generators, outside)
        if process is not None and self._process is not None:
            self._process.restore()
        GENERATOR_LOCK.release()
        try:
            yield
        finally:
            GENERATOR_LOCK.acquire()
            _set_states(self.generators, torchs)
            if process is not None:
                process.restore()

    def backward(self, *, lets_go: bool) -> AbstractContextManager[object]:
        """Return a context manager for a backward, in which other rank threads draw no numbers.

        `torch.utils.checkpoint` within a layer seeds the process's generators in a backward and
        runs the layer's forward again. On a device it does so on a thread of torch's own, which
        could not release the lock, so the lock is not taken there. `lets_go`: whether `let_go`,
        which releases the lock for a while, may be called within it.
        """
        if len(self.generators) > 1:
            return _NOTHING
        return self._backward_that_lets_go() if lets_go else GENERATOR_LOCK

    @contextmanager
    def _backward_that_lets_go(self) -> Iterator[None]:
        with GENERATOR_LOCK:
            self._torch = list(map(_GET_STATE, self.generators))
            try:
                yield
            finally:
                self._torch = None

    def _restore_process(self) -> None:
        assert self._process is not None, "saved when the block begins"
        self._process.restore()
        self._is_process_seeded = False

    def _warn_of_others(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "random numbers: code outside of layers (another thread, or a hook in a backward) "
                "draws from Python's or NumPy's default generator during steps. Its numbers may "
                "repeat, and layers that begin to draw later may not be detected; give that code "
                "a generator of its own"
            )


def own_generators(layer: nn.Module, without: Collection[int]) -> tuple[OwnGenerator, ...]:
    """Return the generators that are attributes of a layer or of its submodules, each once.

    `without`: the ids of generators to leave out, because they are seeded already.
    """
    found: dict[int, OwnGenerator] = {}
    for _, module in sorted(layer.named_modules(), key=lambda item: item[0]):
        for _, value in sorted(vars(module).items()):
            generator = _as_own(value)
            if generator is not None and id(value) not in without:
                found.setdefault(id(value), generator)
    return tuple(found.values())


def _as_own(value: Any) -> OwnGenerator | None:
    if isinstance(value, torch.Generator):
        return OwnGenerator(value.manual_seed, value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return OwnGenerator(value.seed, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        seed_words = value.seed
        return OwnGenerator(
            lambda key: seed_words(numpy_words(key)), value.get_state, value.set_state
        )
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        kind = type(bits)

        def restore(state: Any) -> None:
            bits.state = state

        return OwnGenerator(
            lambda key: restore(kind(numpy_words(key)).state), lambda: bits.state, restore
        )
    return None


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
