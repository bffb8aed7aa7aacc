"""From the settings to what the loop works with: data, pipeline, optimizer, resumed state."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpipe_hpc.checkpoint import read_facts
from gpipe_hpc.comm.group import broadcast_object
from gpipe_hpc.comm.world import World, together
from gpipe_hpc.config import Config, TrainConfig, bind_target, build_target
from gpipe_hpc.engine.assembly import check_agreement
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import loss_function
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planning import Partition
from gpipe_hpc.training.data import Dataset, DataSource, ShuffledSampler, open_data
from gpipe_hpc.training.optimizer import build_optimizer
from gpipe_hpc.training.run_folder import Checkpoints

log = logging.getLogger("gpipe_hpc.train")


@dataclass
class Session:
    """Everything a run consists of, on one rank."""

    config: Config
    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    source: DataSource
    sampler: ShuffledSampler
    checkpoints: Checkpoints
    run_folder: Path
    position: int = 0  # samples consumed since the start of the run

    def read(
        self, dataset: Dataset, indices: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Read this replica's share of a global batch: what this rank's stages need of it."""
        own = indices[self.pipe.share(len(indices))]
        inputs = dataset.read_inputs(own) if self.pipe.needs_inputs else None
        targets = dataset.read_targets(own) if self.pipe.needs_targets else None
        return inputs, targets

    def save(self) -> Path:
        """Write a checkpoint of this step, and drop the oldest."""
        path = self.checkpoints.path(self.pipe.steps_done)
        self.pipe.save(path, self.optimizer, {"position": self.position})
        with together(self.pipe.world, "removing old checkpoints"):
            if self.pipe.world.rank == 0:
                self.checkpoints.prune()
        return path


def open_session(config: Config, world: World, run_folder: Path, restarted: bool) -> Session:
    """Build the run on this rank and, where there is a checkpoint to resume, take it over.

    `restarted`: goes on from what it saved itself, whatever checkpoint.resume says.
    """
    everybody = world.group([tuple(range(world.size))])
    checkpoints = Checkpoints(run_folder, config.checkpoint.keep)
    with together(world, "opening the run"):
        found = _resume(config, checkpoints, restarted) if world.rank == 0 else None
        resumed: Path | None = broadcast_object(everybody, found, root=0)
        source = open_data(config.data)
        check_agreement(everybody, {"data": (source.train.digest(), source.validation.digest())})
        layers = build_target("model", config.model)
        loss_fn = bind_target("loss", config.loss) if config.loss else loss_function(source.loss)
        sampler = ShuffledSampler(
            source.train.num_samples, config.train.batch_size, config.train.seed
        )
    pipe = Pipeline(
        layers,
        loss_fn,
        stages=config.pipeline.stages,
        replicas=config.pipeline.replicas,
        microbatches=config.pipeline.microbatches * config.train.accumulation,
        schedule=config.pipeline.schedule,
        schedule_options=config.pipeline.options,
        recompute=config.pipeline.recompute,
        partition=_partition(config, resumed),
        example=_example(config, world, source, sampler),
        seed=config.train.seed,
        precision=config.train.precision,
        world=world,
    )
    optimizer = build_optimizer(pipe.named_parameters(), config.optimizer)
    session = Session(config, pipe, optimizer, source, sampler, checkpoints, run_folder)
    if resumed is not None:
        extra = pipe.load(resumed, optimizer)
        session.position = int(extra["position"])
        log.info("resumed from %s: %d steps done", resumed, pipe.steps_done)
    return session


def _resume(config: Config, checkpoints: Checkpoints, restarted: bool) -> Path | None:
    """Return the checkpoint to start from; a run that will train puts away those past it."""
    found = checkpoints.resume_from(config.checkpoint.resume, restarted)
    done = 0 if found is None else read_facts(found)["steps_done"]
    if last_step(config.train) > done:
        for path in checkpoints.set_aside(found):
            log.warning("starting from step %d: what an earlier run saved is now %s", done, path)
    return found


def last_step(train: TrainConfig) -> int:
    """Return the step after which the run ends."""
    return train.steps if train.stop_at is None else min(train.steps, train.stop_at)


def _partition(config: Config, resumed: Path | None) -> Any:
    """Return the cut asked for; a measured one is that of the checkpoint, if it fits."""
    policy = config.pipeline.partition
    if policy != "time" or resumed is None:
        return policy
    stored = Partition(**read_facts(resumed)["partition"])
    return stored if stored.measure == "time" else policy


def _example(
    config: Config, world: World, source: DataSource, sampler: ShuffledSampler
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read one micro-batch to measure layers on; rank 0 alone does so."""
    if config.pipeline.partition != "time" or world.rank != 0:
        return None
    indices, _ = sampler.batch(0)
    pieces = config.pipeline.replicas * config.pipeline.microbatches * config.train.accumulation
    own = indices[: max(1, -(-len(indices) // pieces))]
    with together(world, "reading an example"):
        if not own:
            raise ConfigError("data: expected at least one sample to train on, got none")
        return source.train.read_inputs(own), source.train.read_targets(own)
