"""Random generators that are seeded for the run of one layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gpipe_hpc.models import GENERATOR_LOCK

LayerKey = Callable[[int], int]
"""Gives the random key of a layer (by its global index) for the micro-batch at hand."""


class Keyed:
    """Seed the generators that layers on a device may draw from."""

    def __init__(self, device: torch.device) -> None:
        self._generators = generators_of(device)
        self._outside: list[torch.Tensor] | None = None  # the states to go back to; None: not in

    def alone(self) -> "_Alone":
        """Draw alone within the block, after calls of what it yields: seed the generators anew.

        Afterwards they are as they were: the user's own, whom they also serve, sees no change.
        """
        return _Alone(self)

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let others draw within the block, amid a block of our own: we wait for them there.

        Elsewhere it changes nothing.
        """
        outside = self._outside
        if outside is None:
            yield
            return
        states = [generator.get_state() for generator in self._generators]
        self._set(outside)
        GENERATOR_LOCK.release()
        try:
            yield
        finally:
            GENERATOR_LOCK.acquire()
            self._set(states)

    def _seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _Alone:
    """The block of `Keyed.alone`. A class: as a generator it takes twice as long to enter."""

    __slots__ = ("_before", "_keyed", "_states")

    def __init__(self, keyed: Keyed) -> None:
        self._keyed = keyed

    def __enter__(self) -> Callable[[int], None]:
        GENERATOR_LOCK.acquire()
        keyed = self._keyed
        # 2 us. Not once a step: ranks that are threads would save one another's seeds.
        self._states = [generator.get_state() for generator in keyed._generators]
        self._before, keyed._outside = keyed._outside, self._states
        return keyed._seed

    def __exit__(self, *error: object) -> None:
        try:
            self._keyed._outside = self._before
            self._keyed._set(self._states)
        finally:
            GENERATOR_LOCK.release()


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators that `torch.manual_seed` seeds and a layer on `device` may draw from.

    Seeding them directly takes 2 us instead of 65.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
