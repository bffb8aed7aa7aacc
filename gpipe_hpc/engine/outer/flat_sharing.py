"""``outer.shard=flat``: the shards of all stages of a rank, gathered behind each update."""

import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.engine.outer.buckets import Buckets
from gpipe_hpc.engine.outer.held import Held
from gpipe_hpc.engine.outer.optimizers import keep_only
from gpipe_hpc.engine.outer.probing import check_divisible
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.errors import ConfigError

Place = tuple[int, int]
"""A stage and the number of one of its buckets."""


class FlatSharing:
    """Divides the parameters of a rank's stages over their copies, with the first optimizer.

    `copies`: the ranks that hold each stage; `buckets`: those of each. A stage without other copies
    stays whole, and so does a tied parameter, which ranks of several stages hold.
    """

    divides_gradients = True

    def __init__(
        self, stages: Mapping[int, Stage], copies: Mapping[int, Group], buckets: tuple[Buckets, ...]
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._copies, self._buckets = copies, buckets
        self._is_divided = False
        self._pending: list[Pending] = []
        # Nobody may leave in the midst of a gathering: others wait for its shards.
        weakref.finalize(self, _finish, self._pending)

    def take(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer update this rank's shards; the others are gathered behind each step.

        Raises ConfigError for one that does not go element by element, or has a state already.
        """
        check_divisible(optimizer)
        if not self._is_divided:
            self._divide()
        held = self.held()
        places = self._places_of({p for group in optimizer.param_groups for p in group["params"]})
        own = {p: held[name].parameter if name in held else None for name, p in whole.items()}
        keep_only(optimizer, own)
        divided = {p for p, part in own.items() if part is not p}
        num_groups = len(optimizer.param_groups)

        def before(each: Optimizer, args: Any, kwargs: Any) -> None:
            if len(each.param_groups) != num_groups:
                _refuse_whole(each, divided)
            self.wait()

        def after(each: Optimizer, args: Any, kwargs: Any) -> None:
            self._start_gathering(places)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _divide(self) -> None:
        """Divide the parameters that are trained now."""
        self._is_divided = True
        for index, stage in self._stages.items():
            if self._copies[index].size > 1:
                stage.divide(self._buckets[index], self._copies[index])

    def held(self) -> dict[str, Held]:
        """Return what this rank updates, by global name."""
        return {n: held for s in self._stages.values() for n, held in s.held().items()}

    def _places_of(self, parameters: set[nn.Parameter]) -> list[Place]:
        """Return the buckets with some of these, in the order of their gathering.

        Those of the first layers come first; the same on all copies.
        """
        return [
            (index, number)
            for index, stage in self._stages.items()
            if stage.shards is not None
            for number in stage.shards.numbers_with(parameters)
        ]

    def _start_gathering(self, places: Iterable[Place]) -> None:
        for index, number in places:
            shards = self._stages[index].shards
            assert shards is not None, "only what is divided has places"
            self._pending += shards.start_gathering(number)

    @property
    def is_under_way(self) -> bool:
        """Say whether some parameters that other ranks have updated may not be here yet."""
        return bool(self._pending)

    def wait(self) -> None:
        """Return when all parameters are here."""
        for stage in self._stages.values():
            if stage.shards is not None:
                stage.shards.wait_for_all()
        self._pending.clear()


def _refuse_whole(optimizer: Optimizer, divided: set[nn.Parameter]) -> None:
    groups = enumerate(optimizer.param_groups)
    found = next((i for i, g in groups if not divided.isdisjoint(g["params"])), None)
    if found is not None:
        raise ConfigError(
            f"outer.shard=flat: expected all groups of an optimizer when pipe.optimizer makes it, "
            f"got group {found} added later, whose parameters are divided over the copies; make "
            f"all groups in the function, or another optimizer by pipe.optimizer"
        )


def _finish(pending: list[Pending]) -> None:
    for each in pending:
        with suppress(Exception):
            each.wait()
