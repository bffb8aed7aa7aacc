"""Chimera: bidirectional pipelines, each of which fills the bubbles of the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.families.options import check_integer, even_ranks
from gpipe_hpc.schedule.families.orders import in_slots, tabulate
from gpipe_hpc.schedule.search.list_scheduling import Rules, list_schedule
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import mirrored
from gpipe_hpc.schedule.table.schedule import Placement, Schedule


def chimera(ranks: int, microbatches: int, pipelines: int = 2, scaling: str = "direct") -> Schedule:
    """Run an even number of pipelines, half of them in reverse, in units of K micro-batches.

        rank 0 0F00F2...3F13B1===3F33B3===...0B0===......0B2===
        rank 1 ...1F02F11F22F3...2B1===1B0===2B3===1B2===......
        rank 2 ...1F12F01F32F2...2B0===1B1===2B2===1B3===......
        rank 3 0F10F3...3F03B0===3F23B2===...0B1===......0B3===
        F- forward, B= backward, . idle; makespan 16, bubble 25.0% (idle over total)

    K ranks run M micro-batches; F and B are the times of a forward and a backward of a stage.
    `microbatches` counts those of all directions, which alternate. Each stage is held by
    `pipelines` (2f) ranks. If M is greater than K, several units run: ``direct`` concatenates units
    of K; ``forward_doubling`` uses units of 2K whose forwards run in pairs, which keeps twice the
    activations and halves the idle time if B = 2F. Backward halving is the same table with
    micro-batches of half the size. At F = B the bubble is (K - 2f) / (2 f M + K - 2f) for M a
    multiple of K; at B = 2F one unit of two pipelines takes K F + (2 K - 2) B. Ranks keep
    K - K / 2f + 1 to K micro-batches, or twice that with units of 2K. Source: Li and Hoefler,
    Chimera, SC 2021, figures 3, 6 and 8.
    """
    even_ranks("chimera", ranks)
    check_integer("chimera", "pipelines", pipelines, least=2)
    if pipelines % 2 or ranks % pipelines:
        allowed = [count for count in range(2, ranks + 1, 2) if ranks % count == 0]
        raise ScheduleError(
            f"schedule 'chimera': pipelines must be even and divide the number of ranks, expected "
            f"one of {allowed} for {ranks} ranks, got {pipelines}; set pipeline.options.pipelines"
        )
    if scaling not in _SCALINGS:
        raise ScheduleError(
            f"schedule 'chimera': unknown scaling {scaling!r}, expected one of "
            f"{', '.join(_SCALINGS)}; set pipeline.options.scaling"
        )
    in_turn, make = _SCALINGS[scaling]
    route_of = [index // in_turn % pipelines for index in range(microbatches)]
    placement = mirrored(ranks, pipelines, route_of)
    return tabulate("chimera", placement, make(placement))


def _in_equal_slots(placement: Placement) -> list[list[Action]]:
    """Return the order of actions if each F and B took one time slot, with consecutive units."""
    num_ranks, num_pipelines = placement.num_ranks, len(placement.routes)

    def slots() -> Iterator[tuple[int, int, Action]]:
        for microbatch in range(placement.num_microbatches):
            unit, index = divmod(microbatch, num_ranks)
            start = 2 * num_ranks * unit + 2 * (index // num_pipelines)
            for stage in range(num_ranks):
                rank = placement.rank_of(stage, microbatch)
                yield rank, start + stage, Action(Op.F, stage, microbatch)
                back = start + 2 * num_ranks - 1 - stage
                yield rank, back, Action(Op.B, stage, microbatch)

    return in_slots(slots(), num_ranks)


def _forwards_in_pairs(placement: Placement) -> list[list[Action]]:
    """Return the order with paired forwards for one unit of 2K micro-batches, repeated."""
    num_ranks, num_pipelines = placement.num_ranks, len(placement.routes)
    size = 2 * num_ranks
    rules = Rules(
        durations={Op.F: [1.0] * num_ranks, Op.B: [2.0] * num_ranks},
        priority=lambda op, stage, microbatch: (op is Op.B, -stage, microbatch),
        transfers=[0.0] * num_ranks,
        limits=[size] * num_ranks,
    )
    in_pairs = [index // 2 % num_pipelines for index in range(size)]
    unit = list_schedule(replace(placement, route_of=tuple(in_pairs)), rules)
    return [
        [
            action._replace(microbatch=first + (action.microbatch or 0))
            for first in range(0, placement.num_microbatches, size)
            for action in _pair_up(row)
        ]
        for row in unit
    ]


def _pair_up(row: Sequence[Action]) -> list[Action]:
    """Move the first forward of each pair directly before the second."""
    paired: list[Action] = []
    for action in row:
        if action.op is Op.F:
            assert action.microbatch is not None, f"{action} has no micro-batch"
            if action.microbatch % 2 == 0:
                continue
            paired.append(action._replace(microbatch=action.microbatch - 1))
        paired.append(action)
    return paired


# For each scaling: consecutive micro-batches that take one direction, and the ordering function.
_SCALINGS: Final = MappingProxyType[str, tuple[int, Callable[[Placement], list[list[Action]]]]](
    {"direct": (1, _in_equal_slots), "forward_doubling": (2, _forwards_in_pairs)}
)
