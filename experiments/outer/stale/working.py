"""The loop of a worker: read, compute a gradient, add an update."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from experiments.outer.stale.shard import ParameterShard, Values

# Maps parameters and an iteration to an update.
Compute = Callable[[Values, int], Mapping[str, Tensor]]


def work(
    shards: Sequence[ParameterShard],
    names: Sequence[Sequence[str]],
    worker: int,
    iterations: range,
    compute: Compute,
) -> None:
    """Run iterations as one worker; `names` has the parameters of each shard."""
    for clock in iterations:
        values: Values = {}
        for shard in shards:
            values |= shard.read(worker, clock)
        update = compute(values, clock)
        for shard, own in zip(shards, names, strict=True):
            shard.add(worker, clock, {name: update[name] for name in own})
