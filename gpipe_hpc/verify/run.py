"""From the settings to a report: a few steps of the layout, each held against a plain one."""

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
from gpipe_hpc.config import build_target, check_config, filled, ranks_to_come
from gpipe_hpc.device.device import device_of_rank
from gpipe_hpc.device.host.host_memory import free_bytes
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import count_parameters, normalise_layers
from gpipe_hpc.pytree import Nest, map_tensors
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.joining import join_world
from gpipe_hpc.trainer.one_step import train_one_step
from gpipe_hpc.trainer.run.identity import UNRECORDED, Run
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.start import open_session
from gpipe_hpc.verify.comparing import Report
from gpipe_hpc.verify.judging import Facts, Judge
from gpipe_hpc.verify.watching import (
    WORDS,
    Observations,
    Place,
    Seen,
    first_difference,
    watch_pipeline,
)

DEFAULT_STAGES: Final = 2


def verify(config: Config) -> Report | None:
    """Run the layout and the plain training side by side; return the report on rank 0.

    Without a launcher the ranks are threads of this process, as many as the layout asks for (two
    stages where it leaves that open), which share its devices; under one they are its processes,
    all on this machine.
    Raises ConfigError for settings that cannot be compared, and whatever the run itself raises.
    """
    launch = detect_launch()
    settings = own_settings(config, launch.world_size)
    if launch.world_size > 1:
        if not launch.one_machine:
            raise ConfigError(
                f"verify: expected all ranks on one machine, got {launch.local_size} of "
                f"{launch.world_size} on this one; start it on one machine, with the same "
                f"pipeline.stages and replicas"
            )
        return verify_rank(settings, join_world(config))
    size = ranks_to_come(settings, DEFAULT_STAGES)
    reports = run_on_threads(
        size,
        lambda world: verify_rank(settings, world),
        timeout_s=config.comm.timeout_s,
        device=partial(device_of_rank, config.train.device),
    )
    return reports[0]


def own_settings(config: Config, world_size: int) -> Config:
    """Return the settings of a run that resumes nothing and has a layout; check them."""
    pipeline = config.pipeline
    if world_size == 1 and pipeline.stages is None:
        pipeline = replace(pipeline, stages=DEFAULT_STAGES)
    checkpoint = replace(config.checkpoint, resume="never")
    settings = replace(config, pipeline=pipeline, checkpoint=checkpoint)
    size = world_size if world_size > 1 else ranks_to_come(settings, DEFAULT_STAGES)
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
    """Refuse replicas that train otherwise than one process does."""
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
            f"verify: expected an exact way for replicas to combine their gradients, got "
            f"{' and '.join(chosen)}, with which they train otherwise than one process does; "
            f"compare with outer=allreduce outer.compress=none"
        )


def _check_room(config: Config) -> None:
    """Refuse models of which this machine cannot hold the copies that a comparison takes."""
    layers = normalise_layers(build_target("model", config.model))
    num_parameters = count_parameters(layers)
    free = free_bytes()
    # Weights, gradients, two optimizer states in both trainings, and what is kept to compare.
    needed = 4 * num_parameters * (16 + 2 * config.pipeline.num_replicas)
    if free is not None and needed > free:
        raise ConfigError(
            f"verify: {num_parameters:,} parameters take about {needed / 1e9:.1f} GB to compare, "
            f"expected at most the {free / 1e9:.1f} GB that are free here; scale the model "
            f"down by its own settings (fewer or narrower layers of the same kinds)"
        )


def verify_rank(config: Config, world: World) -> Report | None:
    """Compare on one rank; `config`: that of `own_settings`. Rank 0 has the report."""
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
    """Yield a folder that all ranks share; rank 0 removes it in the end."""
    own = tempfile.mkdtemp(prefix="gpipe_hpc_verify_") if world.rank == 0 else None
    folder = Path(world.everybody.broadcast_object(own, root=0))
    try:
        yield folder
    finally:
        if own is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _compare(config: Config, world: World, folder: Path) -> tuple[Judge | None, int | None]:
    """Run the steps; return who judged, and the step that differed, if one did."""
    num_steps = min(last_step(config.train), config.verify.steps)
    with closing(
        open_session(config, world, Run(folder, UNRECORDED, is_repeated=False), None)
    ) as session:
        start = world.everybody.all_gather_object(_start_facts(session))
        judge = Judge(config, session, start) if world.rank == 0 else None
        facts: Facts = {}
        for step in range(num_steps):
            facts = run_step(session)
            gathered = world.everybody.all_gather_object(facts)
            is_same = judge.step(gathered) if judge is not None else None
            if not world.everybody.broadcast_object(is_same, root=0):
                return judge, step
        path = session.pipe.save(folder / "checkpoint", session.optimizer)
        saved = checkpoint_state(session)
        loss = session.pipe.evaluate(facts["own_inputs"], facts["own_targets"]).loss
    with closing(
        open_session(config, world, Run(folder, UNRECORDED, is_repeated=False), None)
    ) as fresh:
        fresh.pipe.load(path, fresh.optimizer)
        loaded = checkpoint_state(fresh)
    states = world.everybody.all_gather_object((saved, loaded))
    if judge is not None:
        judge.end(loss, states)
    return judge, None


def _start_facts(session: Session) -> Facts:
    return {"weights": _weights(session), "buffers": _buffers(session)}


def run_step(session: Session) -> Facts:
    """Train one step as the loop does; return what it used and made, copied to the host."""
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
        "clipped": _gradients(session),  # which no optimizer changes
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
    """Return what a checkpoint must bring back: weights, buffers, the optimizer, extra state."""
    state: dict[str, Any] = dict(_weights(session))
    for stage in session.pipe.stages.values():
        state |= {name: _host(b) for name, b in stage.named_buffers().items()}
        for index, layer in stage.layers.items():
            for name, module in layer.named_modules():
                if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                    state[f"extra state of layers.{index}.{name}"] = module.get_extra_state()
    for name, held in session.pipe.owned_parameters().items():
        where = f"{name}[{held.start}:{held.stop}]" if held.is_part else name
        for key, value in session.optimizer.state.get(held.parameter, {}).items():
            state[f"optimizer state {key} of {where}"] = _host(value)
    return state


def _locate(config: Config, world: World, folder: Path, step: int, judge: Judge | None) -> str:
    """Run again up to the step that differed, watching layers; return the first difference."""
    with closing(
        open_session(config, world, Run(folder, UNRECORDED, is_repeated=False), None)
    ) as session:
        for _ in range(step):
            run_step(session)
        own = watch_pipeline(session.pipe)
        run_step(session)
    # Watching ends with the session: its pipeline goes.
    everybody = world.everybody.all_gather_object(dict(own.seen))
    if judge is None:
        return ""
    ours = Observations()
    for seen in everybody:
        ours.seen |= seen
    found = first_difference(ours, judge.observed)
    return f"step {step + 1}, {_where(found, judge)}"


def _where(found: tuple[Place, Seen, Seen] | None, judge: Judge) -> str:
    if found is None:
        return (
            f"first seen in {judge.first_line} ({judge.first_name}); no layer's output, recomputed "
            f"output or gradient of an output differs when the step is run again: look at what "
            f"happens once or behind the layers (weight gradients, buffers, the optimizer, other "
            f"threads)"
        )
    place, ours, theirs = found
    name = judge.layer_names[place.layer]
    return (
        f"micro-batch {place.microbatch}, layers.{place.layer} ({name}): {WORDS[place.kind]} "
        f"differs first, expected a norm of {theirs.norm:.9g}, got {ours.norm:.9g}"
    )
