"""Format a partition as a table, and check that it contains the whole model."""

from collections.abc import Iterable, Mapping, Sequence

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import Layer, layer_name, layer_parameters, stage_layers
from gpipe_hpc.planner.cutting.pins import Pins, pins_text
from gpipe_hpc.planner.report.columns import aligned, compressed


def cut_table(
    layers: Sequence[Layer],
    counts: Sequence[int],
    *,
    holders: Sequence[Sequence[int]] | None = None,
    costs: Sequence[float] | None = None,
    measure: str = "time",
    paces: Sequence[float] = (),
    pins: Pins = (),
) -> str:
    """Format a partition as a text table with one row per stage: ranks, layers, parameters, share.

    The last line contains the totals and the excess of the most expensive stage over the mean, or
    of the busiest rank if ranks share the micro-batches of a stage.

    Args:
      counts: number of layers of each stage.
      holders: ranks of each stage (default: stage k on rank k).
      costs: cost of each layer in the unit `measure`, shown as each stage's share (default:
        parameters).
      paces: slowdown of each stage on slow ranks, which counts in its share.
      pins: pinned layers, listed below the table.

    Raises PartitionError if the partition does not contain all layers.
    """
    if sum(counts) != len(layers):
        raise PartitionError(
            f"partition: does not contain the whole model: expected {len(layers)} layers, got "
            f"{sum(counts)} in {list(counts)}; partition the model again"
        )
    sizes = layer_parameters(layers)
    weights = list(sizes if costs is None else costs)
    ranks = holders if holders is not None else [[stage] for stage in range(len(counts))]
    slow = paces or [1.0] * len(counts)
    spans = stage_layers(counts)
    amounts = [sum(weights[i] for i in span) * pace for span, pace in zip(spans, slow, strict=True)]
    whole = sum(amounts)
    shares: list[float] = []
    unit = "parameters" if costs is None else measure
    rows = [["stage", "rank", "layers", "", "parameters", f"% {unit}"]]
    for stage, span in enumerate(spans):
        shares.append(amounts[stage] / whole if whole else 0.0)
        rows.append(
            [
                str(stage),
                ",".join(map(str, ranks[stage])),
                f"{span[0]}-{span[-1]}" if span else "none",
                compressed([layer_name(layers[i]) for i in span]),
                f"{sum(sizes[i] for i in span):,}",
                f"{100 * shares[-1]:.1f}",
            ]
        )
    over = 100 * _above_mean(shares, ranks) if whole else 0.0
    rows.append(["all", "", f"{len(layers)}", "", f"{sum(sizes):,}", f"max +{over:.1f}"])
    pinned = pins_text(pins, layers, len(counts))
    return "\n".join(filter(None, [aligned(rows, left={1, 2, 3}), pinned]))


def _above_mean(shares: Sequence[float], holders: Sequence[Sequence[int]]) -> float:
    """Return the relative excess of the most expensive stage, or busiest rank, over the mean."""
    num_ranks = len({rank for own in holders for rank in own})
    if not sum(map(len, holders)) == num_ranks > len(shares):
        return max(shares) * len(shares) - 1
    busiest = max(share / len(own) for share, own in zip(shares, holders, strict=True))
    return busiest * num_ranks - 1


def check_conservation(whole: Mapping[str, int], stages: Iterable[Mapping[str, int]]) -> None:
    """Raise PartitionError unless the stages together have exactly the parameters of the model.

    `whole` and each stage map global parameter names to numbers of elements: `parameter_sizes` of
    the model, and of each built stage. Pass each stage once, even if several ranks have a replica.
    """
    owner: dict[str, int] = {}
    for stage, owned in enumerate(stages):
        for name, size in owned.items():
            if name in owner:
                raise _unlike(f"{name} on one stage", f"stages {owner[name]} and {stage}")
            if whole.get(name) != size:
                expected = f"{whole[name]} elements" if name in whole else "no such parameter"
                raise _unlike(f"{expected} of {name}", f"{size} on stage {stage}")
            owner[name] = stage
    missing = [name for name in whole if name not in owner]
    if missing:
        raise _unlike(f"{missing[0]} on a stage", f"none ({len(missing)} missing in total)")


def _unlike(expected: str, got: str) -> PartitionError:
    return PartitionError(
        f"partition: the stages do not match the model: expected {expected}, got {got}; make "
        f"every LayerSpec build the same layer each time it is called"
    )
