"""The state of optimizers sharded over the copies of a stage (ZeRO)."""

import weakref
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gpipe_hpc.comm.collectives.group import Group, Pending
from gpipe_hpc.data_parallel.layout import Buckets
from gpipe_hpc.data_parallel.optimizer_checks import check_elementwise
from gpipe_hpc.data_parallel.optimizers import OptimizerSharding, replace_parameters
from gpipe_hpc.data_parallel.reducer import GradientBuckets
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Outer


def choose_sharding(
    outer: Outer,
    gradients: Mapping[int, GradientBuckets],
    copies: Mapping[int, Group],
    buckets: tuple[Buckets, ...],
) -> OptimizerSharding | None:
    """Return how copies share the state of optimizers; None: each has its own, or is the only one.

    Args:
        outer: The settings.
        gradients: This rank's sets of parameters.
        copies: The ranks that hold each set.
        buckets: The buckets of each set of the model; none if there are no copies.

    Raises ConfigError for ``outer.shard=oss`` without fairscale.
    """
    if outer.shard == "none" or not buckets:
        return None
    if outer.shard == "flat":
        return FlatSharding(gradients, copies, buckets)
    try:
        from gpipe_hpc.data_parallel.fairscale_oss import OssSharding  # takes a second to load
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"outer.shard: expected fairscale for oss, got none ({error}); install it, or use "
            f"outer.shard=flat"
        ) from None

    return OssSharding(gradients, copies)


class FlatSharding:
    """``outer.shard=flat``: each copy updates an equal shard of every bucket, then all gather.

    The parameters are divided when the first optimizer is made. A set without other copies stays
    whole, and so does a tied parameter, which ranks of several stages hold.

    Args:
        gradients: This rank's sets of parameters.
        copies: The ranks that hold each set.
        buckets: The buckets of each set of the model.
    """

    shards_gradients = True
    not_owned: Set[str] = frozenset()

    def __init__(
        self,
        gradients: Mapping[int, GradientBuckets],
        copies: Mapping[int, Group],
        buckets: tuple[Buckets, ...],
    ) -> None:
        self._gradients = dict(sorted(gradients.items()))
        self._copies, self._buckets = copies, buckets
        self._is_sharded = False
        self._pending: list[Pending] = []
        # No process may end during a gathering: others wait for its shards.
        weakref.finalize(self, _finish, self._pending)

    def attach(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer update this rank's shards; the others are gathered after each step.

        Raises ConfigError unless it updates each element by itself, and has no state yet.
        """
        check_elementwise(optimizer)
        if not self._is_sharded:
            self._shard()
        own: dict[nn.Parameter, nn.Parameter | None] = {}
        for each in self._gradients.values():
            if each.shards is not None:
                owned = each.shards.owned
                own |= {
                    p: owned[n].parameter if n in owned else None for n, p in each.named.items()
                }
        places = self._places_of({p for group in optimizer.param_groups for p in group["params"]})
        replace_parameters(optimizer, own)
        sharded = {p for p, part in own.items() if part is not p}
        num_groups = len(optimizer.param_groups)

        def before_step(each: Optimizer, args: Any, kwargs: Any) -> None:
            if len(each.param_groups) != num_groups:
                _refuse_later_groups(each, sharded)
            self.wait()

        def after_step(each: Optimizer, args: Any, kwargs: Any) -> None:
            self._start_gathering(places)

        optimizer.register_step_pre_hook(before_step)
        optimizer.register_step_post_hook(after_step)

    def _shard(self) -> None:
        self._is_sharded = True
        for index, each in self._gradients.items():
            if self._copies[index].size > 1:
                each.shard(self._buckets[index], self._copies[index])

    def _places_of(self, parameters: set[nn.Parameter]) -> list[tuple[int, int]]:
        """Return set and number of the buckets with some of these, in the order of their gathering.

        Those of the first layers come first; the same on all copies.
        """
        return [
            (index, number)
            for index, each in self._gradients.items()
            if each.shards is not None
            for number in each.shards.numbers_with(parameters)
        ]

    def _start_gathering(self, places: Iterable[tuple[int, int]]) -> None:
        for index, number in places:
            shards = self._gradients[index].shards
            assert shards is not None, "only what is sharded has places"
            self._pending += shards.start_gathering(number)

    @property
    def is_gathering(self) -> bool:
        """Return whether some parameters that other ranks have updated may not have arrived."""
        return bool(self._pending)

    def wait(self) -> None:
        """Wait for all parameters."""
        for each in self._gradients.values():
            if each.shards is not None:
                each.shards.wait_for_all()
        self._pending.clear()


def _refuse_later_groups(optimizer: Optimizer, sharded: set[nn.Parameter]) -> None:
    groups = enumerate(optimizer.param_groups)
    found = next((i for i, g in groups if not sharded.isdisjoint(g["params"])), None)
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
