"""What to say of ranks that need more memory than they may use."""

from collections.abc import Sequence

from gpipe_hpc.planning.forecast import RankForecast
from gpipe_hpc.planning.units import bytes_text, ranges_text


def shortage(
    ranks: Sequence[RankForecast],
    limit_bytes: float,
    *,
    recompute: str,
    schedule: str,
    can_cut: bool = True,
    others: str = "",
) -> str:
    """Return which ranks of a pipeline need more than a limit, how much, and what would help.

    `recompute` and `schedule` are what they run with, which is not advised again; `can_cut`:
    whether micro-batches have more than one sample; `others`: what was tried in its place, said
    instead of advice. Nothing where every rank fits.
    """
    over = [index for index, rank in enumerate(ranks) if rank.total_bytes > limit_bytes]
    if not over:
        return ""
    fullest = max(over, key=lambda index: ranks[index].total_bytes)
    needed = ranks[fullest].total_bytes
    lasting = [rank.total_bytes - rank.activation_bytes for rank in ranks]
    heaviest = max(range(len(ranks)), key=lambda index: lasting[index])
    who = f"rank {over[0]} needs" if len(over) == 1 else f"ranks {ranges_text(over)} need up to"
    head = (
        f"{who} {bytes_text(needed)}, pipeline.memory_bytes allows {bytes_text(limit_bytes)} "
        f"(weights, gradients, optimizer and activations, as counted)"
    )
    if lasting[heaviest] > limit_bytes:
        return (
            f"{head}; weights, gradients and optimizer alone take "
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
