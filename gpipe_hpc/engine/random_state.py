"""Random numbers that depend only on (seed, step, micro-batch, layer); the user's do not change.

Before each layer torch's generators are seeded with its key, which takes 3 us. Python's and NumPy's
take ten times as long, and so they are seeded only for layers that are known to draw from them.
The first run of a layer finds that out. One that begins to draw later is found by comparing the
states of Python's and NumPy's generators once per forward of a stage: if they have moved, the
forward runs once more with each layer seeded (see `LayerRunner.run`).
"""

import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from operator import methodcaller
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
    """The states of Python's generator and of NumPy's global one.

    `numpy`: in the form that `restore` needs; None if it was not asked for, or if the program has
    replaced the generator that NumPy comes with. `numpy_bytes`: in the form that is compared.
    """

    python: tuple[Any, ...]
    numpy: Any
    numpy_bytes: bytes

    @classmethod
    def now(
        cls, earlier: "ProcessState | None" = None, *, can_restore: bool = True
    ) -> "ProcessState":
        """Return the present states; NumPy's for `restore` takes 40 us, the others 7.

        `earlier`: a state whose form for `restore` is used again if NumPy has not drawn since.
        """
        numpy_bytes = _numpy_bytes()
        numpy: Any = None
        if can_restore and numpy_bytes:
            is_same = earlier is not None and earlier.numpy_bytes == numpy_bytes
            numpy = earlier.numpy if earlier is not None and is_same else None
            # A second normal number is kept outside these bytes, so drawing it changes none.
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
        """Return whether one of the two has moved since."""
        return _numpy_bytes() != self.numpy_bytes or _has_moved(random.getstate(), self.python)


def _has_moved(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether two states of Python's generator differ, by comparing a few words.

    Each draw moves the position, the last word; where that begins again the others change too, and
    another seed makes other ones.
    """
    return (now[1][-1], now[1][:3], now[2:]) != (before[1][-1], before[1][:3], before[2:])


def _numpy_bytes() -> bytes:
    """Return the state of NumPy's global generator for comparison; empty if it is no MT19937.

    They lie where `BitGenerator.ctypes.state_address` says. `get_state` takes a hundred times as
    long, and as long as a forward of some layers.
    """
    module: Any = np.random
    generator = module.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    state: bytes = _memory_of(generator).tobytes()
    return state


class _GeneratorWords:
    """The state of a Mersenne Twister as NumPy can view it: 624 words and the position in them."""

    def __init__(self, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": (625,),
            "typestr": "<u4",
        }


@lru_cache(maxsize=4)  # which keeps the generator, and so its memory
def _memory_of(generator: np.random.MT19937) -> Any:
    return np.asarray(_GeneratorWords(generator.ctypes.state_address))


class OwnGenerator(NamedTuple):
    """Calls that seed, read and restore one generator that is an attribute of a layer."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]


class DrawsFrom:
    """The generators that one layer draws from, in one mode (training or not), as far as known.

    `is_suspected`: torch's generators moved in one of its runs, and it is not known why.
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


class Drawn(NamedTuple):
    """Hashes of the states of the generators after a run of a layer; None for unused ones."""

    torch: int | None = None
    python: int | None = None
    numpy: int | None = None


_NOTHING_DRAWN: Final = Drawn()


class DrawWatch(TorchDispatchMode):
    """Detects calls of torch functions that draw from its default generators, on this thread.

    Another thread may move them, too. Compiled code stays compiled under it.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled layers stay compiled in this mode."""
        return True

    def __init__(self, draws: DrawsFrom) -> None:
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


class RandomState:
    """The generators that the layers of a stage may draw from.

    Used as a block around the layers of one forward: within it no other rank of this process runs
    its layers, and afterwards all generators are as they were.
    """

    def __init__(self, device: Device) -> None:
        self.generators = device.generators()
        self.seeds = [generator.manual_seed for generator in self.generators]
        self.num_learned = 0  # how often a run has found out what some layer draws from
        self.was_disturbed = False  # whether others draw from torch's generators within our steps
        # Python's and NumPy's are seeded before every layer: for layers that cannot run once more.
        self.seeds_all = False
        self._torch: list[torch.Tensor] | None = (
            None  # torch's states outside the block or backward
        )
        self._left: list[torch.Tensor] | None = (
            None  # torch's as the last block of the step left it
        )
        self._process: ProcessState | None = (
            None  # Python's and NumPy's outside the blocks of a step
        )
        self._earlier: ProcessState | None = None  # the same, in the step before
        self._num_searches = 0  # forwards run once more in which no layer was found to draw
        self._has_warned = False
        # Of the layer that runs now:
        self._own: list[Any] = []  # the states that its own generators had
        self._found = (False, False)  # what was known before of its draws from torch's
        self._seeded_torch: list[torch.Tensor] | None = None  # as seeded, if this run compares them
        self._seeded_process: ProcessState | None = None
        self._is_process_seeded = False
        self._has_moved = False  # Python's or NumPy's, by a layer of this block

    def begin(self) -> None:
        """Begin a step or an evaluation; draws since the last one are ignored."""
        self._earlier, self._left, self._process = self._process or self._earlier, None, None

    def __enter__(self) -> "RandomState":
        """Save the states of the generators."""
        GENERATOR_LOCK.acquire()
        # Not once per step: ranks that are threads would save one another's seeds.
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
        """Detect, when a block begins, draws of other code since the last block of the step.

        `torchs`: a layer draws from torch's generators; `process`: one from Python's or NumPy's.
        """
        if torchs:
            if self._left is not None and self._torch is not None:
                self.was_disturbed |= not all(map(torch.equal, self._left, self._torch))
            self._left = self._torch
        if process and self._process is not None and self._process.is_left():
            self._warn_of_others()
            self._process = ProcessState.now()

    def seed(self, key: int, draws: DrawsFrom, *, inspects: bool) -> AbstractContextManager[object]:
        """Seed for the run of one layer; return the block to run it in, with `finish` after it.

        `inspects`: find out whether it has begun to draw from torch's generators.
        """
        for seed in self.seeds:
            seed(key)
        is_new, self._seeded_torch, self._own = not draws.is_known, None, []
        self._found = draws.is_suspected, draws.torch
        if is_new or self.seeds_all or draws.python or draws.numpy:
            if not self.seeds_all:
                # Afterwards both are put back, so what an earlier layer drew is noticed here.
                assert self._process is not None, "taken at the begin of the block"
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
        """End the run of a layer; return how far it drew, if `measures`."""
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
        drawn = self._drawn(draws) if measures and draws_any else _NOTHING_DRAWN
        if self._is_process_seeded and not self.seeds_all:  # else at the end of the block
            self._restore_process()
        return drawn

    def drawn_from_torch(self) -> Drawn:
        """Return how far a layer drew that draws from torch's generators alone."""
        return Drawn(hash(b"".join([s.numpy().tobytes() for s in _states(self.generators)])))

    def _drawn(self, draws: DrawsFrom) -> Drawn:
        torchs = self.drawn_from_torch().torch if draws.torch or draws.is_suspected else None
        if not (draws.python or draws.numpy):
            return Drawn(torchs)
        return Drawn(
            torchs,
            hash(random.getstate()) if draws.python else None,
            hash(_numpy_bytes()) if draws.numpy else None,
        )

    def has_moved(self) -> bool:
        """Return whether Python's or NumPy's generator has moved since the block began.

        What was known to draw from them has been put back already.
        """
        if self.seeds_all:
            return False
        assert self._process is not None, "taken at the begin of the block"
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
        """End a repeated forward; if no layer was found to draw, other code's draws are kept."""
        if has_found:
            self._process = self._before_search
            self._restore_process()
            self._num_searches -= 1

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Return a block, within one of ours, in which other ranks of this process may draw."""
        outside = self._torch
        if outside is None:
            yield
            return
        torchs = _states(self.generators)
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
        """Return a block for a backward in which no other rank of this process draws.

        `torch.utils.checkpoint` within a layer seeds the process's generators there and runs the
        layer's forward again. On a device such a backward runs on a thread of torch's own, which
        could not let go: there the lock is not taken. `lets_go`: `let_go` may be called within.
        """
        if len(self.generators) > 1:
            return _NOTHING
        return self._backward_that_lets_go() if lets_go else GENERATOR_LOCK

    @contextmanager
    def _backward_that_lets_go(self) -> Iterator[None]:
        with GENERATOR_LOCK:
            self._torch = _states(self.generators)
            try:
                yield
            finally:
                self._torch = None

    def _restore_process(self) -> None:
        assert self._process is not None, "taken at the begin of the block"
        self._process.restore()
        self._is_process_seeded = False

    def _warn_of_others(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "random numbers: something else than a layer draws from Python's or NumPy's "
                "default generator amid steps (another thread, or a hook of a backward), expected "
                "layers alone: what it draws may come to it again, and layers that begin to draw "
                "later are not looked for without end; give it a generator of its own"
            )


def own_generators(layer: nn.Module, without: Collection[int]) -> tuple[OwnGenerator, ...]:
    """Return the generators that are attributes of a layer or of its submodules, each once.

    `without`: the ids of those that are seeded as others already.
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


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return list(map(_GET_STATE, generators))


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
