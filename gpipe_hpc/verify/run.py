"""Run a few steps of the configured layout and compare each with a plain step."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gpipe_hpc.comm.world.launcher import detect_launch
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.config import build_target, check_config, filled, num_planned_ranks
from gpipe_hpc.device.device import device_of_rank
from gpipe_hpc.device.host.host_memory import free_bytes
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import count_parameters, normalise_layers
from gpipe_hpc.pytree import Nest, map_tensors
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.one_step import train_one_step
from gpipe_hpc.trainer.run.identity import UNRECORDED, RunIdentity
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.start import open_session
from gpipe_hpc.trainer.start_world import join_world
from gpipe_hpc.verify.comparing import VerifyReport
from gpipe_hpc.verify.judging import Facts, LayoutComparison, Part
from gpipe_hpc.verify.watching import (
    WORDS,
    Observations,
    RecordedTensor,
    TensorPlace,
    first_difference,
    watch_pipeline,
)

DEFAULT_STAGES: Final = 2


def verify(config: Config) -> VerifyReport | None:
    """Run the layout and the plain training; return the report on rank 0, None elsewhere.

    Without a launcher, the ranks are threads of this process, as many as the layout needs (two
    stages if their number is not set), which share its devices. Under a launcher, the ranks are its
    processes, which must all be on one machine.

    Raises:
        ConfigError: the settings cannot be compared with a plain process.
    """
    launch = detect_launch()
    settings = own_settings(config, launch.world_size)
    if launch.world_size > 1:
        if not launch.one_machine:
            raise ConfigError(
                f"verify: all ranks must be on one machine, but only {launch.local_size} of "
                f"{launch.world_size} are on this one; start verify on one machine, with the same "
                f"pipeline.stages and replicas"
            )
        return verify_rank(settings, join_world(config))
    size = num_planned_ranks(settings, DEFAULT_STAGES)
    reports = run_on_threads(
        size,
        lambda world: verify_rank(settings, world),
        timeout_s=config.comm.timeout_s,
        device=partial(device_of_rank, config.train.device),
    )
    return reports[0]


def own_settings(config: Config, world_size: int) -> Config:
    """Return checked settings with a number of stages and without resuming from a checkpoint."""
    pipeline = config.pipeline
    if world_size == 1 and pipeline.stages is None:
        pipeline = replace(pipeline, stages=DEFAULT_STAGES)
    checkpoint = replace(config.checkpoint, resume="never")
    settings = replace(config, pipeline=pipeline, checkpoint=checkpoint)
    size = world_size if world_size > 1 else num_planned_ranks(settings, DEFAULT_STAGES)
    _check_comparable(filled(settings, size))
    check_config(settings, size)
    if min(last_step(settings.train), config.verify.steps) < 1:
        raise ConfigError(
            f"verify: expected at least one step, got train.steps={config.train.steps} and "
            f"verify.steps={config.verify.steps}; raise them"
        )
    _check_room(filled(settings, size))
    return settings


def _check_comparable(config: Config) -> None:
    """Raise ConfigError for settings with which replicas train differently from one process."""
    pipeline = config.pipeline
    if pipeline.normalise_over_replicas and pipeline.num_replicas > 1:
        raise ConfigError(
            "verify: expected pipeline.normalise_over_replicas=false, got true: a plain process "
            "runs one micro-batch after another and cannot normalise several together; compare "
            "with pipeline.replicas=1"
        )
    outer = config.outer
    chosen = [f"outer.compress={outer.compress}"] if outer.compress != "none" else []
    chosen += [f"outer.every={outer.every}"] if outer.uses_local_sgd else []
    if pipeline.num_replicas > 1 and chosen:
        raise ConfigError(
            f"verify: expected an exact reduction of gradients over replicas, got "
            f"{' and '.join(chosen)}, with which training differs from that of one process; "
            f"compare with outer=allreduce outer.compress=none"
        )


def _check_room(config: Config) -> None:
    """Raise ConfigError if this machine lacks the memory for a comparison."""
    layers = normalise_layers(build_target("model", config.model))
    num_parameters = count_parameters(layers)
    free = free_bytes()
    # Weights, gradients, two optimizer states in both trainings, and copies for the comparison.
    needed = 4 * num_parameters * (16 + 2 * config.pipeline.num_replicas)
    if free is not None and needed > free:
        raise ConfigError(
            f"verify: a comparison of {num_parameters:,} parameters needs about "
            f"{needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free; make the model smaller "
            f"by its own settings (fewer or narrower layers of the same kinds)"
        )


def verify_rank(config: Config, world: World) -> VerifyReport | None:
    """Run the comparison on one rank; return the report on rank 0, None elsewhere.

    `config` is the result of `own_settings`.
    """
    exactly = world.device.deterministic() if config.train.deterministic else nullcontext()
    with exactly, _scratch(world) as folder:
        judge, failed = _compare(config, world, folder)
        if failed is not None:
            where = _locate(config, world, folder, failed, judge)
            if judge is not None:
                judge.report.first = where
        return None if judge is None else judge.report


@contextmanager
def _scratch(world: World) -> Iterator[Path]:
    """Yield a temporary folder that all ranks share; rank 0 removes it on exit."""
    own = tempfile.mkdtemp(prefix="gpipe_hpc_verify_") if world.rank == 0 else None
    folder = Path(world.world_group.broadcast_object(own, root=0))
    try:
        yield folder
    finally:
        if own is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _compare(
    config: Config, world: World, folder: Path
) -> tuple[LayoutComparison | None, int | None]:
    """Run and compare the steps; return the judge (rank 0 only) and the first different step."""
    num_steps = min(last_step(config.train), config.verify.steps)
    with closing(
        open_session(config, world, RunIdentity(folder, UNRECORDED, is_repeated=False), None)
    ) as session:
        start = world.world_group.all_gather_object(_start_facts(session))
        judge = LayoutComparison(config, session, start) if world.rank == 0 else None
        facts: Facts = {}
        for step in range(num_steps):
            facts = run_step(session)
            gathered = world.world_group.all_gather_object(facts)
            is_same = judge.step(gathered) if judge is not None else None
            if not world.world_group.broadcast_object(is_same, root=0):
                return judge, step
        path = session.pipe.save(folder / "checkpoint", session.optimizer)
        saved = checkpoint_state(session)
        loss = session.pipe.evaluate(facts["own_inputs"], facts["own_targets"]).loss
    with closing(
        open_session(config, world, RunIdentity(folder, UNRECORDED, is_repeated=False), None)
    ) as fresh:
        fresh.pipe.load(path, fresh.optimizer)
        loaded = checkpoint_state(fresh)
    states = world.world_group.all_gather_object((saved, loaded))
    if judge is not None:
        judge.end(loss, states)
    return judge, None


def _start_facts(session: Session) -> Facts:
    return {"weights": _weights(session), "buffers": _buffers(session)}


def run_step(session: Session) -> Facts:
    """Train one step as the training loop does; return inputs and results on the host."""
    pipe = session.pipe
    weight = pipe.loss_weight
    scale = 1.0 if pipe.loss_scale is None else pipe.loss_scale.value
    gradients: dict[str, Tensor | None] = {}
    trained = train_one_step(session, lambda: gradients.update(_gradients(session)))
    batch, result = trained.batch, trained.result
    return {
        "own_inputs": batch.inputs,
        "own_targets": batch.targets,
        "inputs": _host(batch.inputs) if pipe.needs_inputs else None,
        "targets": _host(batch.targets) if pipe.needs_targets else None,
        "loss_weight": weight,
        "loss_scale": scale,
        "loss": result.loss,
        "microbatch_losses": list(result.microbatch_losses),
        "is_skipped": result.is_skipped,
        "gradients": gradients,
        "norm": trained.grad_norm,
        "clipped": _gradients(session),  # optimizers do not change gradients
        "lr": trained.lr,
        "weights": _weights(session),
        "buffers": _buffers(session),
    }


def _gradients(session: Session) -> dict[str, Tensor | None]:
    gradients = session.pipe.gradients().items()
    return {name: None if gradient is None else _host(gradient) for name, gradient in gradients}


def _weights(session: Session) -> dict[str, Tensor]:
    return {name: _host(p) for name, p in session.pipe.named_parameters()}


def _buffers(session: Session) -> dict[str, Tensor]:
    return {
        f"layers.{index}.{name}": _host(buffer)
        for stage in session.pipe.stages.values()
        for index, layer in stage.layers.items()
        for name, buffer in layer.named_buffers()
    }


def _host(nest: Nest) -> Any:
    return map_tensors(lambda t: t.detach().to("cpu", copy=True), nest)


def checkpoint_state(session: Session) -> dict[str, Any]:
    """Return the state that a checkpoint must restore, by global name."""
    state: dict[str, Any] = dict(_weights(session))
    for stage in session.pipe.stages.values():
        state |= {name: _host(b) for name, b in stage.named_buffers().items()}
        for index, layer in stage.layers.items():
            for name, module in layer.named_modules():
                if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                    state[f"extra state of layers.{index}.{name}"] = module.get_extra_state()
    for name, held in session.pipe.owned_parameters().items():
        for key, value in session.optimizer.state.get(held.parameter, {}).items():
            where = f"optimizer state {key} of {name}"
            if isinstance(value, Tensor) and held.is_elementwise(value):
                state[where] = Part(held.start, _host(value))
            else:
                state[where] = _host(value)
    return state


def _locate(
    config: Config, world: World, folder: Path, step: int, judge: LayoutComparison | None
) -> str:
    """Repeat the run up to the step that differs and describe where the first difference is."""
    with closing(
        open_session(config, world, RunIdentity(folder, UNRECORDED, is_repeated=False), None)
    ) as session:
        for _ in range(step):
            run_step(session)
        own = watch_pipeline(session.pipe)
        run_step(session)
    # The hooks end with the session, which discards its pipeline.
    everybody = world.world_group.all_gather_object(dict(own.seen))
    if judge is None:
        return ""
    ours = Observations()
    for seen in everybody:
        ours.seen |= seen
    found = first_difference(ours, judge.observed)
    return f"step {step + 1}, {_where(found, judge)}"


def _where(
    found: tuple[TensorPlace, RecordedTensor, RecordedTensor] | None, judge: LayoutComparison
) -> str:
    if found is None:
        return (
            f"first seen in {judge.first_line} ({judge.first_name}); no layer's output, recomputed "
            f"output or gradient of an output differs when the step is run again: check effects "
            f"that occur once or outside of the layers (weight gradients, buffers, the optimizer, "
            f"other threads)"
        )
    place, ours, theirs = found
    name = judge.layer_names[place.layer]
    return (
        f"micro-batch {place.microbatch}, layers.{place.layer} ({name}): {WORDS[place.kind]} "
        f"differs first, expected a norm of {theirs.norm:.9g}, got {ours.norm:.9g}"
    )
