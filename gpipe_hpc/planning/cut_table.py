"""Show a cut, and prove that it holds the whole model."""

from collections.abc import Iterable, Mapping, Sequence

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import Layer, layer_name, layer_parameters, stage_layers


def cut_table(
    layers: Sequence[Layer],
    counts: Sequence[int],
    *,
    holders: Sequence[Sequence[int]] | None = None,
    costs: Sequence[float] | None = None,
    measure: str = "time",
    parameters: Sequence[int] | None = None,
) -> str:
    """Return a cut as a text table: stage, rank, layers, parameters, share.

    ``counts`` are the layers of each stage, ``holders`` the ranks of each stage (default: stage k
    on rank k). ``costs`` are one number a layer in the unit called ``measure``; the share of each
    stage in their sum fills the last column (default: the parameters themselves). ``parameters``
    are the layers' own counts where they are known already. A last line has the sums and how far
    the dearest stage is above the mean. Raises `PartitionError` when the cut misses a layer.
    """
    if sum(counts) != len(layers):
        raise PartitionError(
            f"partition: does not hold the whole model, expected {len(layers)} layers, got "
            f"{sum(counts)} in {list(counts)}; cut the model anew"
        )
    sizes = list(layer_parameters(layers) if parameters is None else parameters)
    weights = list(sizes if costs is None else costs)
    ranks = holders if holders is not None else [[stage] for stage in range(len(counts))]
    whole = sum(weights)
    shares: list[float] = []
    rows = [["stage", "rank", "layers", "", "parameters", f"% {_unit(costs, measure)}"]]
    for stage, span in enumerate(stage_layers(counts)):
        shares.append(sum(weights[i] for i in span) / whole if whole else 0.0)
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
    over = 100 * (max(shares) * len(shares) - 1) if whole else 0.0
    rows.append(["all", "", f"{len(layers)}", "", f"{sum(sizes):,}", f"max +{over:.1f}"])
    return _aligned(rows, right={0, 4, 5})


def _unit(costs: Sequence[float] | None, measure: str) -> str:
    return "parameters" if costs is None else measure


def compressed(names: Sequence[str]) -> str:
    """Return names in order with repeats folded: ``Embedding, 4 x (Attention, MLP), Norm``."""
    parts: list[str] = []
    start = 0
    while start < len(names):
        repeats = {period: _repeats(names, start, period) for period in range(1, 9)}
        folded = {p: r for p, r in repeats.items() if r > 1}
        # The fold that swallows most names; the shorter of two that swallow as many.
        period = max(folded, key=lambda p: (p * folded[p], -p), default=1)
        group = ", ".join(names[start : start + period])
        times = folded.get(period, 1)
        wrapped = f"({group})" if period > 1 else group
        parts.append(f"{times} x {wrapped}" if times > 1 else group)
        start += period * times
    return ", ".join(parts)


def _repeats(names: Sequence[str], start: int, period: int) -> int:
    """Return how often the group of ``period`` names at ``start`` stands there in a row."""
    group = list(names[start : start + period])
    times = 1
    while list(names[start + times * period : start + (times + 1) * period]) == group:
        times += 1
    return times if len(group) == period else 1


def _aligned(rows: Sequence[Sequence[str]], right: set[int]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


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
