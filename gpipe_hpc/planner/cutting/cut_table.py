"""Show a cut, and prove that it holds the whole model."""

from collections.abc import Iterable, Mapping, Sequence

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import Layer, layer_name, layer_parameters, stage_layers
from gpipe_hpc.planner.cutting.pins import Pins, pins_text
from gpipe_hpc.planner.telling.columns import aligned, compressed


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
    """Return a cut as a text table: stage, rank, layers, parameters, share.

    ``counts`` are the layers of each stage, ``holders`` the ranks of each stage (default: stage k
    on rank k). ``costs`` are one number a layer in the unit called ``measure``; the share of each
    stage in their sum fills the last column (default: the parameters themselves); ``paces`` say how
    many times as long each stage takes where ranks are slow, which counts in the share. A last line
    has the sums and how far the dearest stage is above the mean; where ranks share a stage's
    micro-batches, how far the busiest rank is; `pins` that the cut holds follow. Raises
    `PartitionError` when the cut misses a layer.
    """
    if sum(counts) != len(layers):
        raise PartitionError(
            f"partition: does not hold the whole model, expected {len(layers)} layers, got "
            f"{sum(counts)} in {list(counts)}; cut the model again"
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
    """Return by which share of the mean the dearest stage, or the busiest rank, is above it."""
    num_ranks = len({rank for own in holders for rank in own})
    if not sum(map(len, holders)) == num_ranks > len(shares):
        return max(shares) * len(shares) - 1
    busiest = max(share / len(own) for share, own in zip(shares, holders, strict=True))
    return busiest * num_ranks - 1


def check_conservation(whole: Mapping[str, int], stages: Iterable[Mapping[str, int]]) -> None:
    """Raise `PartitionError` unless the stages' parameters together are exactly the model's.

    ``whole`` and each stage give the number of elements of every parameter by global name:
    `parameter_sizes` of the model, and what each stage really built. A copy of a stage on a second
    rank is not another stage: give it once.
    """
    owner: dict[str, int] = {}
    for stage, owned in enumerate(stages):
        for name, size in owned.items():
            if name in owner:
                raise _unlike(f"{name} on one stage", f"it on stages {owner[name]} and {stage}")
            if whole.get(name) != size:
                expected = f"{whole[name]} elements" if name in whole else "no such parameter"
                raise _unlike(f"{expected} of {name}", f"{size} on stage {stage}")
            owner[name] = stage
    missing = [name for name in whole if name not in owner]
    if missing:
        raise _unlike(f"{missing[0]} on a stage", f"it on none ({len(missing)} missing in all)")


def _unlike(expected: str, got: str) -> PartitionError:
    return PartitionError(
        f"partition: the stages are not the whole model, expected {expected}, got {got}; make "
        f"every LayerSpec build the same layer each time it is called"
    )
