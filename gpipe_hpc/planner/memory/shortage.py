"""What to say of ranks that need more memory than they may use."""

from collections.abc import Sequence

from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.units import bytes_text, ranges_text


def shortage(
    ranks: Sequence[RankForecast],
    limits: Sequence[float],
    *,
    recompute: str,
    schedule: str,
    can_cut: bool = True,
    others: str = "",
) -> str:
    """Return which ranks of a pipeline need more than they may fill, how much, and what would help.

    `limits`: the bytes that each rank may fill. `recompute` and `schedule` are what they run with,
    which is not advised again; `can_cut`: whether micro-batches have more than one sample;
    `others`: what was tried in its place, said instead of advice. Nothing where every rank fits.
    """
    over = [at for at, rank in enumerate(ranks) if rank.total_bytes > limits[at]]
    if not over:
        return ""
    lasting = [rank.lasting_bytes for rank in ranks]
    processes = ", the process" if any(rank.process_bytes for rank in ranks) else ""
    heaviest = max(range(len(ranks)), key=lambda at: lasting[at] - limits[at])
    parts = f"weights, gradients, optimizer{processes}, activations and workspace, as counted"
    head = f"{_needs(ranks, limits, over)} ({parts})"
    if lasting[heaviest] > limits[heaviest]:
        return (
            f"{head}; weights, gradients and optimizer{processes} alone take "
            f"{bytes_text(lasting[heaviest])} on rank {heaviest}: use more stages "
            "(pipeline.stages), or a smaller model"
        )
    if others:
        return f"{head}\n{others}"
    remedies = []
    if can_cut:
        remedies.append("more micro-batches of fewer samples (pipeline.microbatches)")
    if recompute != "budget":
        remedies.append("pipeline.recompute=budget (finds what fits, if anything does)")
    if schedule != "auto":
        remedies.append("pipeline.schedule=auto (searches for an order that fits)")
    remedies.append("more stages")
    return (
        f"{head}; to need less: {', '.join(remedies)}; `python -m gpipe_hpc.plan` with these "
        f"settings tries some of them together"
    )


def _needs(ranks: Sequence[RankForecast], limits: Sequence[float], over: Sequence[int]) -> str:
    """Say what the rank needs that lacks most, and which others lack something, too."""
    worst = max(over, key=lambda at: ranks[at].total_bytes - limits[at])
    needed, allowed = bytes_text(ranks[worst].total_bytes), bytes_text(limits[worst])
    if len(over) == 1:
        return f"rank {worst} needs {needed}, pipeline.memory_bytes allows {allowed}"
    which = f"ranks {ranges_text(over)} need"
    if len(set(limits)) == 1:
        return f"{which} up to {needed}, pipeline.memory_bytes allows {allowed}"
    return f"{which} too much: rank {worst} {needed}, pipeline.memory_bytes allows it {allowed}"
