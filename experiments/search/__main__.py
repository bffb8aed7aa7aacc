"""Check that the best layouts of a search's ranking are faster than the worst ones.

    torchrun --standalone --nproc_per_node 2 -m experiments.search [NAME=VALUE ...]

All layouts are built in one job and take steps in turn, so that other load affects all equally.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.config import build_target, check_config, compose_config
from gpipe_hpc.models import loss_function, normalise_layers
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner.report.columns import aligned
from gpipe_hpc.planner.search.text import distinct
from gpipe_hpc.planner.search.trial import CandidateEvaluation
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.search.answer import compared
from gpipe_hpc.trainer.search.from_settings import LayoutSearch
from gpipe_hpc.trainer.start.building import build_pipeline
from gpipe_hpc.trainer.start_world import join_world

NUM_EACH = 3
ROUNDS = 12
SETTINGS = (
    "model=gpt",
    "data=python_source",
    "comm.timeout_s=1800",
    "plan.search=true",
    "plan.link_bytes_per_s=3e9",
    "plan.within_latency_s=1e-4",
)


def ends_of_ranking(
    config: Config, words: list[str]
) -> list[tuple[CandidateEvaluation, list[str]]]:
    """Return the first and last lines of the ranking, with their settings."""
    trials = distinct(compared(config, words).ranking.trials, 1000)
    base = LayoutSearch.of(config, words).space(config.plan.ranks or 1).base
    chosen = [*trials[:NUM_EACH], *trials[-NUM_EACH:]]
    return [(trial, trial.overrides(base)) for trial in chosen]


def pipeline_of(words: list[str], world: World) -> Pipeline:
    config = compose_config(words)
    check_config(config, world.size)
    data = config.data.shapes(config.train.batch_size)
    loss_fn = loss_function(data[2])
    samples = config.train.batch_size // (
        config.pipeline.num_replicas * config.pipeline.microbatches
    )
    tokens = tokens_of(config, max(1, samples))
    layers = normalise_layers(build_target("model", config.model))
    return build_pipeline(config, world, layers, loss_fn, None, tokens)


def tokens_of(config: Config, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shape = config.data.shapes(num_samples)[0].sizes
    drawn = torch.randint(0, 100, (2, *shape), generator=made)
    return drawn[0], drawn[1]


def step_s(pipe: Pipeline, optimizer: torch.optim.Optimizer, world: World, config: Config) -> float:
    """Return the seconds of a step without the optimizer, which the plan does not count."""
    inputs, targets = tokens_of(config, config.train.batch_size)
    part = pipe.share(len(inputs))
    together_now = torch.zeros(1)
    world.world_group.all_reduce(together_now)
    began_s = time.perf_counter()
    pipe.step(inputs[part], targets[part])
    world.world_group.all_reduce(together_now)
    took_s = time.perf_counter() - began_s
    optimizer.step()
    return took_s


def main() -> None:
    words = [*SETTINGS, *sys.argv[1:]]
    config = compose_config(words)
    world = join_world(config)
    config = replace(config, plan=replace(config.plan, ranks=world.size))
    with collective_errors(world, "ranking"):
        own = ends_of_ranking(config, words) if world.rank == 0 else None
        lines = [] if own is None else [(each.step_s, said) for each, said in own]
        lines = world.world_group.broadcast_object(lines, root=0)
    pipes = [pipeline_of([*words, *said], world) for _, said in lines]
    optimizers = [pipe.optimizer(partial(torch.optim.AdamW, lr=1e-4)) for pipe in pipes]
    each_one = list(zip(pipes, optimizers, strict=True))
    for pipe, optimizer in each_one:
        step_s(pipe, optimizer, world, config)  # the first step opens connections
    times = [
        [step_s(pipe, optimizer, world, config) for pipe, optimizer in each_one]
        for _ in range(ROUNDS)
    ]
    if world.rank:
        return
    rows = [["", "planned", "least", "median", "settings"]]
    for at, (planned_s, said) in enumerate(lines):
        own_s = [each[at] for each in times]
        figures = [f"{1e3 * each:.0f} ms" for each in (planned_s, min(own_s), median(own_s))]
        rows.append([f"{'best' if at < NUM_EACH else 'worst'}", *figures, " ".join(said)])
    print(aligned(rows))


if __name__ == "__main__":
    main()
