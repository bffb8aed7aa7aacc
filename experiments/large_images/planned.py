"""The largest image that each schedule fits into the memory of its ranks, as planned.

An image model is partitioned into as many stages as the schedule has, and each image is a
micro-batch.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc.models import token_cross_entropy
from gpipe_hpc.models.zoo.names import build_model
from gpipe_hpc.planner.costs.counted import ModelCount, count_model
from gpipe_hpc.planner.cutting.minimax import minimax
from gpipe_hpc.planner.forecast import rank_forecasts
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.schedule import Costs, Schedule, build, lower, simulate

MODEL: Final = "resnet110_v2"
SIDE_STEP: Final = 32  # pixels
MOST: Final = 256  # steps
STATES: Final = 1  # optimizer states per parameter: momentum


class Contestant(NamedTuple):
    """A schedule and its label in the table; `images` is the largest number of images in flight."""

    name: str
    schedule: str
    images: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def table(self, ranks: int, images: int, recompute: str) -> Schedule:
        """Return the compute-only table of a step."""
        return build(
            self.schedule,
            ranks=ranks,
            microbatches=self.images or images,
            recompute=recompute,
            **dict(self.options),
        )


CONTESTANTS: Final = (
    Contestant("gpipe", "gpipe"),
    Contestant("one_f_one_b", "one_f_one_b"),
    Contestant("interleaved, 2 stages a rank", "interleaved", options=(("stages_per_rank", 2),)),
    Contestant("zb_h1", "zb_h1"),
    Contestant("zb_v", "zb_v"),
    Contestant("v_half", "v_half"),
    Contestant("chimera", "chimera"),
    Contestant("dualpipe", "dualpipe"),
    Contestant("gems, MAST (1 replication)", "gems", options=(("replications", 1),)),
    Contestant("gems, one image a pass (MASTER)", "gems"),
    Contestant("no pipeline: one image at a time", "gpipe", images=1),
)


@cache
def counted(side: int) -> ModelCount:
    """Return the counted model for one image with a given side in pixels."""
    image = torch.empty((1, 3, side, side), device="meta")
    label = torch.empty((1,), dtype=torch.long, device="meta")
    layers = build_model(MODEL, num_classes=10)
    return count_model(layers, image, label, token_cross_entropy)


def balances(model: ModelCount, table: Schedule) -> list[list[int]]:
    """Return candidate partitions: equal activations, and weighted by live micro-batches."""
    held = [float(each.activation_bytes) for each in model.layers]
    found = [minimax(held, table.num_stages)]
    live = table.max_activations
    if live is not None and table.num_stages == table.num_ranks and len(set(live)) > 1:
        found.append(_by_live(held, live))
    return found


def _by_live(held: Sequence[float], live: Sequence[int]) -> list[int]:
    """Return the partition with the smallest maximum of activations, given `live` micro-batches."""
    low, high = 0.0, sum(held) * max(live)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(held, live, middle) else (middle, high)
    return _filled(held, live, high) or minimax(held, len(live))


def _filled(held: Sequence[float], live: Sequence[int], room: float) -> list[int] | None:
    """Return a partition in which no stage keeps more than `room`, or None."""
    counts, at = [], 0
    for stage, number in enumerate(live):
        begin, total = at, 0.0
        others = len(live) - 1 - stage
        while at < len(held) - others and (total + held[at]) * number <= room:
            total += held[at]
            at += 1
        counts.append(at - begin)
    return counts if at == len(held) and all(counts) else None


def fullest_bytes(
    side: int, contestant: Contestant, ranks: int, images: int, recompute: str
) -> tuple[int, list[int]]:
    """Return the memory of the fullest rank with the best partition, and that partition."""
    model = counted(side)
    bare = contestant.table(ranks, images, recompute)
    table = lower(bare)

    def held(balance: Sequence[int]) -> int:
        stages = count_stages(model, balance)
        return max(rank.total_bytes for rank in rank_forecasts(model, stages, table, STATES))

    return min((held(balance), balance) for balance in balances(model, bare))


def largest_side(fits: Callable[[int], bool]) -> int:
    """Return the largest side that fits, in steps of `SIDE_STEP`; 0 if none does."""
    low, high = 0, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * SIDE_STEP) else (low, middle)
    return low * SIDE_STEP


def step_in_forwards(contestant: Contestant, ranks: int, images: int, recompute: str) -> float:
    """Return the step time of all images with equal stages, in forwards of a rank for one image.

    B costs two forwards. Schedules for one image at a time run one step per image.
    """
    table = contestant.table(ranks, images, recompute)
    share = ranks / table.num_stages
    costs = Costs(
        forward=share,
        backward=2 * share,
        input_gradient=share,
        weight_gradient=share,
        recompute=share,
    )
    return simulate(table, costs).makespan * images / (contestant.images or images)
