"""Messages about ranks that need more memory than their limit."""

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
    """Describe which ranks exceed their memory limit, with remedies; empty if none does.

    Args:
      limits: bytes that each rank may use.
      recompute, schedule: settings of the run, which are not suggested again.
      can_cut: whether micro-batches have more than one sample.
      others: description of the alternatives tried, shown instead of the remedies.
    """
    over = [at for at, rank in enumerate(ranks) if rank.total_bytes > limits[at]]
    if not over:
        return ""
    lasting = [rank.lasting_bytes for rank in ranks]
    processes = ", the process" if any(rank.process_bytes for rank in ranks) else ""
    heaviest = max(range(len(ranks)), key=lambda at: lasting[at] - limits[at])
    parts = f"weights, gradients, optimizer{processes}, activations and workspace, counted"
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
        remedies.append("pipeline.recompute=budget (recomputes as little as necessary)")
    if schedule != "auto":
        remedies.append("pipeline.schedule=auto (searches for an order that fits)")
    remedies.append("more stages")
    return (
        f"{head}; to reduce it: {', '.join(remedies)}; `python -m gpipe_hpc.plan` with these "
        f"settings tries combinations"
    )


def _needs(ranks: Sequence[RankForecast], limits: Sequence[float], over: Sequence[int]) -> str:
    """Describe the memory of the rank that exceeds its limit most, and name the other ranks."""
    worst = max(over, key=lambda at: ranks[at].total_bytes - limits[at])
    needed, allowed = bytes_text(ranks[worst].total_bytes), bytes_text(limits[worst])
    if len(over) == 1:
        return f"rank {worst} needs {needed}, pipeline.memory_bytes allows {allowed}"
    which = f"ranks {ranges_text(over)} need"
    if len(set(limits)) == 1:
        return f"{which} up to {needed}, pipeline.memory_bytes allows {allowed}"
    return (
        f"{which} too much: rank {worst} needs {needed}, pipeline.memory_bytes allows {allowed} "
        f"on that rank"
    )
