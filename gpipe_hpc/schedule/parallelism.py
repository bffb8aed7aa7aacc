"""Work and depth of a table: the parallelism available on an unlimited number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.schedule.table.actions import COMPUTE, Action, Op
from gpipe_hpc.schedule.table.dependencies import dependencies, provides
from gpipe_hpc.schedule.timeline import Timeline

# Compute actions of one micro-batch, by op and stage, with their durations.
_Chain = Mapping[tuple[Op, int], float]
_ORDER: Final = {Op.F: 0, Op.R: 1, Op.B: 2, Op.I: 2, Op.W: 3}


class Parallelism(NamedTuple):
    """Work and depth of a step, in the time unit of its costs; see `parallelism_of`."""

    work: float
    depth: float

    @property
    def average(self) -> float:
        """Return the average parallelism: work divided by depth, 0 without work."""
        return self.work / self.depth if self.depth else 0.0


def parallelism_of(timeline: Timeline, paces: Sequence[float] = ()) -> Parallelism:
    """Return work and depth of a simulated step.

    Work is the total time of all compute actions. Depth is the longest chain of dependent actions:
    the step time on unlimited ranks with free transfers. `paces`, the relative compute time of each
    rank (empty: equal), is divided out.
    """
    microbatches: dict[int | None, dict[tuple[Op, int], float]] = {}
    for rank, row in enumerate(timeline.events):
        pace = paces[rank] if paces else 1.0
        for event in row:
            op, stage, microbatch, _ = event.action
            if op in COMPUTE:
                chain = microbatches.setdefault(microbatch, {})
                chain[op, stage] = (event.end_s - event.start_s) / pace
    work = sum(sum(chain.values()) for chain in microbatches.values())
    # Micro-batches are independent, and most have equal durations.
    chains = {tuple(sorted(chain.items())): chain for chain in microbatches.values()}
    return Parallelism(work, max((_depth(each, timeline) for each in chains.values()), default=0.0))


def _depth(chain: _Chain, timeline: Timeline) -> float:
    """Return the duration of the longest dependency chain of a micro-batch."""
    ends: dict[Action, float] = {}
    for op, stage in sorted(chain, key=_place):
        action = Action(op, stage, 0)
        needed = dependencies(action, timeline.num_stages, 1, timeline.skips)
        end = max((ends.get(need, 0.0) for need in needed), default=0.0) + chain[op, stage]
        ends.update(dict.fromkeys(provides(action), end))
    return max(ends.values(), default=0.0)


def _place(kind: tuple[Op, int]) -> tuple[int, int]:
    """Return a key that sorts by data flow: forwards by stage, then backwards in reverse order."""
    op, stage = kind
    return _ORDER[op], stage if op in (Op.F, Op.R) else -stage
