"""One training step, shared by `train`, `verify` and `bench`."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gpipe_hpc.comm.world.world import broadcast_errors
from gpipe_hpc.data.batches import Batch
from gpipe_hpc.device.deferred import AsyncHostTensor, Mark, record_mark, seconds_between
from gpipe_hpc.engine import StepResult
from gpipe_hpc.errors import NonFiniteError
from gpipe_hpc.optim.lr import lr_at, set_lr
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.traces.files import OutsideActivity


class StepPartTimes(NamedTuple):
    """Time of the parts of a step on this rank, in seconds.

    Args:
        reading_s: reading the batch.
        reading_ahead_s: the part of reading before the pipeline of all ranks began.
        edge_s: the part of `Pipeline.step` outside the pipeline: all-reduce of the ranks' status,
            and scaling of the gradients.
        clipping_s: clipping the gradient.
        optimizer_s: the optimizer's step.
    """

    reading_s: float
    reading_ahead_s: float
    edge_s: float
    clipping_s: float
    optimizer_s: float


class StepTimestamps(NamedTuple):
    """Time marks between the parts of a step; on an accelerator, reading them synchronizes.

    `left` marks the end of the step, after `Pipeline.outer_step`.
    """

    began: Mark
    read: Mark
    piped: Mark
    looked: Mark
    clipped: Mark
    stepped: Mark
    left: Mark

    def spent(self, pipeline_s: float) -> StepPartTimes:
        """Return the seconds of each part of a step, given the pipeline time of all ranks."""
        reading_s = seconds_between(self.began, self.read)
        behind_s = seconds_between(self.read, self.piped) - pipeline_s
        return StepPartTimes(
            reading_s,
            max(0.0, reading_s + min(0.0, behind_s)),  # other ranks began while this one read
            max(0.0, behind_s),
            seconds_between(self.looked, self.clipped),
            seconds_between(self.clipped, self.stepped),
        )

    def moments(self) -> tuple[OutsideActivity, ...]:
        """Return this rank's activities outside the pipeline, with host times in seconds.

        Empty on an accelerator, whose marks use the device's clock.
        """
        spans = (
            ("reading", self.began, self.read),
            ("clipping", self.looked, self.clipped),
            ("optimizer", self.clipped, self.stepped),
        )
        return tuple(
            OutsideActivity(name, start, end)
            for name, start, end in spans
            if isinstance(start, float) and isinstance(end, float)
        )


class TrainedStep(NamedTuple):
    """Inputs and results of a training step.

    `step` counts from 1. `norm` is the gradient norm before clipping, still being copied to the
    host; None without clipping.
    """

    step: int
    batch: Batch
    result: StepResult
    lr: float
    norm: AsyncHostTensor | None
    laps: StepTimestamps

    @property
    def grad_norm(self) -> float | None:
        """Return the gradient norm before clipping; waits for its copy to the host."""
        return None if self.norm is None else float(self.norm.read())


def train_one_step(
    session: Session,
    look: Callable[[], None] | None = None,
    tell: Callable[[], Sequence[float]] | None = None,
) -> TrainedStep:
    """Train on the next batch: forward, backward, clipping, optimizer step, outer step.

    Args:
        session: the run.
        look: called after backward, before the gradients are clipped.
        tell: see `Pipeline.step`.
    """
    pipe, config = session.pipe, session.config
    mark = partial(record_mark, pipe.world.device)
    began = mark()
    batch = session.next_batch()
    read = mark()
    result = pipe.step(batch.inputs, batch.targets, tell)
    piped = mark()
    if look is not None:
        look()
    looked, norm = mark(), None
    if config.train.clip_norm is not None:
        norm = AsyncHostTensor.of(pipe.clip_grad_norm_(config.train.clip_norm), pipe.world.device)
    clipped = mark()
    lr = _lr(session, batch, result)
    set_lr(session.optimizer, lr)
    where = "the optimizer's step"
    with broadcast_errors(pipe.world, where), pipe.explain_memory_errors(where):
        session.optimizer.step()
    stepped = mark()
    pipe.outer_step()
    if pipe.steps_done == config.train.steps:
        pipe.unite_replicas()
    laps = StepTimestamps(began, read, piped, looked, clipped, stepped, mark())
    session.position = batch.position
    return TrainedStep(pipe.steps_done, batch, result, lr, norm, laps)


def _lr(session: Session, batch: Batch, result: StepResult) -> float:
    config, adascale = session.config, session.adascale
    if adascale is None:
        return lr_at(session.pipe.steps_done - 1, config)
    assert config.lr.base_batch_size is not None, "the settings were checked"
    adascale.update(result, batch.num_samples / config.lr.base_batch_size)
    return adascale.rate(partial(lr_at, config=config))


def refuse_non_finite(session: Session, trained: TrainedStep) -> None:
    """Raise NonFiniteError, on every rank, if a step's loss or gradient norm is not finite."""
    pipe, result, step = session.pipe, trained.result, trained.step
    if not math.isfinite(result.loss):
        bad = [m for m, loss in enumerate(result.microbatch_losses) if not math.isfinite(loss)]
        replica, microbatch = pipe.layout.portions.owner(bad[0]) if bad else (0, 0)
        last = pipe.layout.of(replica).schedule.placement.rank_of(
            pipe.schedule.num_stages - 1, microbatch
        )
        raise NonFiniteError(
            f"step {step}, rank {pipe.mesh.world_rank(replica, last)}, micro-batch "
            f"{microbatch} of replica {replica}: the loss is {result.loss}, not finite "
            f"({len(bad)} of {len(result.microbatch_losses)} micro-batches); {_remedy(session)}"
        )
    norm = trained.grad_norm
    if norm is not None and not math.isfinite(norm):
        raise NonFiniteError(
            f"step {step}: the gradient norm is {norm}, not finite, with a loss of "
            f"{result.loss:g}; {_remedy(session)}"
        )


def _remedy(session: Session) -> str:
    newest = session.checkpoints.newest()
    kept = f"the last intact checkpoint is {newest}" if newest else "no checkpoint was written"
    return f"lower optimizer.lr, or check the data of this step; {kept}"
