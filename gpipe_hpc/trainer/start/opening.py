"""Build the session of a run on this rank from the settings."""

import logging
from collections.abc import Mapping
from functools import partial
from operator import or_
from typing import Any

from gpipe_hpc.checkpoint import BackgroundSaver
from gpipe_hpc.checkpoint.in_memory import NeighbourCopies
from gpipe_hpc.comm.watchdog.heartbeat import run_with_heartbeat
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.config import build_target, on_ranks
from gpipe_hpc.data import CorruptTally, ShuffledSampler, tolerance
from gpipe_hpc.data.position import continues_data
from gpipe_hpc.errors import ModelError
from gpipe_hpc.optim.large_batch.adascale import AdaScale
from gpipe_hpc.optim.large_batch.ramp import batch_size_at
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.run_forecast import RunForecast, forecast_run
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.run.folder import Checkpoints
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.run.lock import RunLock
from gpipe_hpc.trainer.run.opening import record_start
from gpipe_hpc.trainer.session import ADASCALE, Session
from gpipe_hpc.trainer.start.building import build_pipeline, loss_of
from gpipe_hpc.trainer.start.checks import check_labels, check_model
from gpipe_hpc.trainer.start.data import OpenedData, open_data_first, open_data_where_needed
from gpipe_hpc.trainer.start.example import example_of, first_microbatch
from gpipe_hpc.trainer.start.origin import StartState

log = logging.getLogger("gpipe_hpc.train")


def open_session(
    config: Config,
    world: World,
    run: RunIdentity,
    lock: RunLock | None,
    copies: NeighbourCopies | None = None,
    asked: Config | None = None,
) -> Session:
    """Build the session on this rank and restore the state to resume from, if any. Collective.

    Args:
        config: the settings.
        world: all ranks.
        run: the start of the run.
        lock: lock of the run folder, on rank 0.
        copies: in-memory checkpoints, preferred to an older checkpoint on disk.
        asked: the settings as given, if a search has chosen the layout in `config`.
    """
    checkpoints = Checkpoints(run.folder, config.checkpoint.keep)
    origin = StartState(config, world, run, checkpoints, copies)
    opened = open_data_first(config, world, run.folder, origin.check_data)
    session = _built(config, world, run, lock, copies, checkpoints, origin, opened)
    session.asked = asked or config
    extra = origin.take_over(session.pipe, session.optimizer, opened.identity)
    if extra is not None and continues_data(extra, opened.identity, config.checkpoint.data):
        session.position = int(extra["position"])
        session.tally = CorruptTally(session.tally.limit, extra.get("corrupt", ()))
    if extra is not None and session.adascale is not None:
        _restore(session.adascale, extra, session.pipe.steps_done)
    with collective_errors(world, "opening the run"):
        if world.rank == 0 and run.lineage:
            steps_done, start = session.pipe.steps_done, None if copies is None else copies.start
            record_start(run.folder, steps_done, start)
    if copies is not None:
        copies.forget_others()
    session.tally.add(opened.facts.corrupt, says=world.rank == 0)
    return session


def _built(
    config: Config,
    world: World,
    run: RunIdentity,
    lock: RunLock | None,
    copies: NeighbourCopies | None,
    checkpoints: Checkpoints,
    origin: StartState,
    opened: OpenedData,
) -> Session:
    """Return the session of a run before any state is restored."""
    asked, config = config, on_ranks(config, world.size)
    train = config.train
    sampler = ShuffledSampler(
        opened.facts.num_samples, train.batch_size, train.seed, partial(batch_size_at, train=train)
    )
    with collective_errors(world, "opening the run"):
        if world.rank == 0:
            origin.move_aside()
        layers = build_target("model", config.model)
        loss_fn = loss_of(config, opened.facts, layers)
        check_model(config, opened.source, layers)
        check_labels(config, opened.source, loss_fn)
    example = example_of(config, world, opened.source, sampler)
    pipe = build_pipeline(config, world, layers, loss_fn, origin.cut, example)
    _refuse_frozen(world, pipe)
    look_ahead = None
    if opened.source is not None and opened.source.train.num_samples:
        read = partial(first_microbatch, config, opened.source, sampler)
        look_ahead = partial(forecast_run, pipe, layers, loss_fn, read, len(sampler.batch(0)[0]))
    foreseen = run_with_heartbeat(world, "counting the layers", look_ahead)
    planned = _planned(world, foreseen)
    pipe.expect_memory(planned)
    is_needed = pipe.needs_inputs or pipe.needs_targets
    source = open_data_where_needed(config, world, run.folder, opened, is_needed=is_needed)
    return Session(
        config,
        asked,
        pipe,
        pipe.optimizer(lambda _: build_optimizer(pipe.named_parameters(), config.optimizer)),
        source,
        opened.facts,
        opened.identity,
        sampler,
        checkpoints,
        run.folder,
        CorruptTally(tolerance(config.data)),
        run.name,
        lock,
        BackgroundSaver(pipe),
        copies,
        opened.baseline,
        foreseen,
        None if planned is None else planned[pipe.stage_rank],
        adascale=_adascale(config, pipe),
    )


def _refuse_frozen(world: World, pipe: Pipeline) -> None:
    """Raise ModelError on all ranks if no parameter requires a gradient. Collective."""
    with collective_errors(world, "opening the run"):
        own = any(parameter.requires_grad for _, parameter in pipe.named_parameters())
        if not world.world_group.merge_object(own, or_):
            raise ModelError(
                f"model: none of its {len(pipe.all_parameters)} parameters requires a gradient; "
                "unfreeze some with requires_grad_(True)"
            )


def _planned(world: World, foreseen: RunForecast | None) -> tuple[RankForecast, ...] | None:
    """Return rank 0's memory forecast of each stage rank, on all ranks. Collective."""
    told = None if foreseen is None else [vars(rank) for rank in foreseen.ranks]
    with collective_errors(world, "broadcasting the planned memory"):
        rows: list[dict[str, Any]] | None = world.world_group.broadcast_object(told, root=0)
    return None if rows is None else tuple(RankForecast(**row) for row in rows)


def _adascale(config: Config, pipe: Pipeline) -> AdaScale | None:
    lr = config.lr
    if lr.scaling != "adascale":
        return None
    assert lr.base_batch_size is not None, "the settings were checked"
    return AdaScale(pipe, config.train.batch_size / lr.base_batch_size)


def _restore(adascale: AdaScale, extra: Mapping[str, Any], steps_done: int) -> None:
    """Restore AdaScale from a checkpoint, or start it if the checkpoint's run did not use it."""
    if ADASCALE in extra:
        adascale.restore(extra[ADASCALE])
        return
    adascale.progress = float(steps_done)
    log.warning(
        "the checkpoint was saved without lr.scaling=adascale: its %d steps count as steps of "
        "the base batch, and the gradient noise is estimated from scratch",
        steps_done,
    )
