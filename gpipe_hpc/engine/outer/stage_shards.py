"""The parameters of one stage, divided over its copies, and when they are gathered."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.engine.outer.held import Held
from gpipe_hpc.engine.outer.sharded_bucket import ShardedBucket
from gpipe_hpc.errors import ConfigError


class StageShards:
    """The buckets of a stage's parameters, each divided over the copies of the stage.

    `named`: the parameters by global name; those that are frozen now are in no shard and have to
    stay frozen. `names`: those of each bucket. `layers`: the layer of each parameter. Buckets keep
    their numbers: one without a trained parameter has no shards.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        names: Sequence[Sequence[str]],
        layers: Mapping[str, int],
        group: Group,
    ) -> None:
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self.buckets = [
            [
                ShardedBucket(kind, group)
                for kind in _by_kind({n: named[n] for n in part if n not in self._frozen})
            ]
            for part in names
        ]
        self._of_layer: dict[int, set[int]] = {}
        for number, part in enumerate(names):
            for name in part:
                self._of_layer.setdefault(layers[name], set()).add(number)
        self._under_way: dict[int, list[Pending]] = {}

    @property
    def held(self) -> dict[str, Held]:
        """Return what this rank updates, by global name; a frozen parameter as it is."""
        held = {name: Held.all_of(parameter) for name, parameter in self._frozen.items()}
        for bucket in self._each():
            held |= bucket.held
        return held

    def _each(self) -> list[ShardedBucket]:
        return [bucket for buckets in self.buckets for bucket in buckets]

    def begin(self) -> None:
        """Begin a step. Raises ConfigError for a parameter that was frozen and is not any more."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"outer.shard=flat: {name} was frozen when the optimizer was made and is in no "
                    f"shard, expected it to stay frozen, got requires_grad=True; unfreeze it "
                    f"before pipe.optimizer, or use outer.shard=none"
                )
        for bucket in self._each():
            bucket.begin()

    def refuse_other_memory(self) -> None:
        """Raise ConfigError for a parameter that was given other memory than its bucket's."""
        for bucket in self._each():
            bucket.refuse_other_memory()

    def drop(self) -> None:
        """Let go of the step's gradients."""
        for bucket in self._each():
            bucket.drop()

    def whole_gradients(self) -> dict[str, torch.Tensor | None]:
        """Gather copies of all gradients; all copies of the stage call it together."""
        gradients: dict[str, torch.Tensor | None] = dict.fromkeys(self._frozen)
        for bucket in self._each():
            gradients |= bucket.whole_gradients()
        return gradients

    def numbers_with(self, parameters: set[nn.Parameter]) -> list[int]:
        """Return the buckets with some of these, those of the first layers first."""
        return [
            number
            for number in reversed(range(len(self.buckets)))
            if any(not parameters.isdisjoint(bucket.whole) for bucket in self.buckets[number])
        ]

    def start_gathering(self, number: int) -> list[Pending]:
        """Start gathering the parameters of a bucket; each copy has updated its shard."""
        self._under_way[number] = [bucket.start_gathering() for bucket in self.buckets[number]]
        return self._under_way[number]

    @property
    def is_under_way(self) -> bool:
        """Say whether some parameters may not be there yet."""
        return bool(self._under_way)

    @property
    def under_way(self) -> Iterator[tuple[int, Pending]]:
        """Yield what has been started and not waited for, with the number of its bucket."""
        for number, started in self._under_way.items():
            for pending in started:
                yield number, pending

    def wait(self, number: int) -> None:
        """Return when the parameters of a bucket are there."""
        if self._under_way.pop(number, None) is not None:
            for bucket in self.buckets[number]:
                bucket.wait_for_parameters()

    def wait_for_layer(self, index: int) -> None:
        """Return when the parameters of a layer, by its global index, are there."""
        for number in sorted(self._of_layer.get(index, ()), reverse=True):
            self.wait(number)

    def wait_for_all(self) -> None:
        """Return when all parameters are there."""
        for number in sorted(self._under_way, reverse=True):
            self.wait(number)


def _by_kind(named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return list(kinds.values())
