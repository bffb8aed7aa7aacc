"""One rank of the measurement of overlap: two pipelines of the same weights take turns.

    python -m experiments.outer.slow_link.overlap_ranks FACTS     FACTS: JSON; see `Facts`

Rank 0 prints a line of JSON for each step, see `Step`, and writes a picture of the last of each.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.models import build_model, token_cross_entropy
from gpipe_hpc.schedule import Event, Op, Timeline
from gpipe_hpc.schedule.table.actions import COMPUTE
from gpipe_hpc.visualize import draw_svg

_VOCABULARY: Final = 256
_NUM_UNTIMED: Final = 2  # first steps of each: they open connections and size memory


class Facts(NamedTuple):
    """What runs. `bucket_bytes` and `samples` (of the global batch) are those of both."""

    rounds: int
    microbatches: int
    samples: int
    width: int
    seq_len: int
    bucket_bytes: float
    pictures: str  # folder


class Own(NamedTuple):
    """What a rank tells of a step, in seconds of the clock that all processes here share."""

    stage_rank: int
    began_s: float
    computed_s: float  # when its last compute action ended
    ended_s: float
    reduced_s: float  # for how long a reduction was under way


class Step(NamedTuple):
    """Seconds of one step, over all ranks.

    `compute_s`: until the last compute action of any ended; `drain_s`: from the last one of a last
    stage until then; `reduction_s`: for how long a reduction was under way on a rank, at most.
    """

    overlap: bool
    step_s: float
    compute_s: float
    drain_s: float
    reduction_s: float


def main() -> None:
    """Take turns; print what was measured."""
    facts = Facts(**json.loads(sys.argv[1]))
    pipes = {overlap: _pipeline(facts, overlap) for overlap in (True, False)}
    generator = torch.Generator().manual_seed(0)
    shape = (facts.samples, facts.seq_len + 1)
    tokens = torch.randint(0, _VOCABULARY, shape, generator=generator)
    for number in range(_NUM_UNTIMED + facts.rounds):
        for overlap in (True, False) if number % 2 else (False, True):
            pipe = pipes[overlap]
            part = pipe.share(facts.samples)
            pipe.world_group.all_reduce(torch.zeros(1))  # all begin together
            began_s = time.perf_counter()
            pipe.step(tokens[part, :-1], tokens[part, 1:])
            own = _own(pipe, began_s, time.perf_counter())
            ranks = [Own(*each) for each in pipe.world_group.all_gather_object(tuple(own))]
            timeline = pipe.timeline()
            if pipe.world.rank == 0 and number >= _NUM_UNTIMED:
                print(json.dumps(_step(overlap, ranks)._asdict()), flush=True)
                _draw(timeline, Path(facts.pictures), overlap)


def _pipeline(facts: Facts, overlap: bool) -> Pipeline:
    settings: dict[str, Any] = {"vocab_size": _VOCABULARY, "block_size": facts.seq_len}
    return Pipeline(
        build_model("gpt", num_layers=4, num_heads=4, width=facts.width, **settings),
        token_cross_entropy,
        stages=2,
        replicas=2,
        microbatches=facts.microbatches,
        recompute="never",
        outer={"overlap": overlap, "bucket_bytes": facts.bucket_bytes},
    )


def _own(pipe: Pipeline, began_s: float, ended_s: float) -> Own:
    events = pipe.last_step_moments().events(pipe.stage_rank)
    computed_s = max(event.end_s for event in events if event.action.op in COMPUTE)
    reduced_s = covered_s([event for event in events if event.action.op is Op.REDUCE_GRAD])
    return Own(pipe.stage_rank, began_s, computed_s, ended_s, reduced_s)


def _step(overlap: bool, ranks: list[Own]) -> Step:
    began_s = min(rank.began_s for rank in ranks)
    computed_s = max(rank.computed_s for rank in ranks)
    last_stage = max(rank.stage_rank for rank in ranks)
    drained_s = max(rank.computed_s for rank in ranks if rank.stage_rank == last_stage)
    return Step(
        overlap=overlap,
        step_s=max(rank.ended_s for rank in ranks) - began_s,
        compute_s=computed_s - began_s,
        drain_s=computed_s - drained_s,
        reduction_s=max(rank.reduced_s for rank in ranks),
    )


def covered_s(events: list[Event]) -> float:
    """Return for how long at least one of the events was under way."""
    covered_s, until_s = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_s):
        covered_s += max(0.0, event.end_s - max(event.start_s, until_s))
        until_s = max(until_s, event.end_s)
    return covered_s


def _draw(timeline: Timeline, folder: Path, overlap: bool) -> None:
    name = "overlap" if overlap else "no_overlap"
    (folder / f"{name}.svg").write_text(draw_svg(timeline))


if __name__ == "__main__":
    main()
