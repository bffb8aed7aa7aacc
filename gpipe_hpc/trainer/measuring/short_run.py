"""A training of layers with hardly any work: what its steps take is beside their layers.

On a CPU these layers read more than its caches hold, as layers with work do, and what a step takes
beside them finds little of its own there.
"""

import io
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.collectives.group import meet
from gpipe_hpc.comm.watchdog.patience import patiently
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, together
from gpipe_hpc.data.synthetic import SyntheticVectorsConfig
from gpipe_hpc.errors import DataError
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner.costs.calibration import read_calibration
from gpipe_hpc.planner.costs.prices import Prices
from gpipe_hpc.settings import Config, Outer, PipelineConfig
from gpipe_hpc.trainer.calibrating import CALIBRATION_FILE
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest

_WIDTH: Final = 64
_READ: Final = 2**23  # float32
_STEPS: Final = 40
_BUCKET_BYTES: Final = 25_000_000
_RATE: Final = 1e-6  # so that no optimizer makes numbers that are none
_MICROBATCHES: Final = 4
_SAMPLES: Final = 512  # of a micro-batch: stages hand over 128 KiB in float32
# What writes figures on this machine; others would tell a server of a run that is none.
_LOCAL: Final = frozenset({"tensorboard"})


class Reading(nn.Linear):
    """A small layer that reads so many numbers on its way, in its forward and in its backward."""

    def __init__(self, width: int, num_read: int) -> None:
        super().__init__(width, width)
        self._read = torch.ones(num_read)  # no parameter and no buffer: nobody sums or sends it

    def forward(self, value: Tensor) -> Tensor:
        """Return what a linear layer does."""
        output = super().forward(value)
        self._read.sum()
        register: Any = output.register_hook  # torch has left it without types
        if output.requires_grad:
            register(self._read_again)
        return output

    def _read_again(self, _: Tensor) -> None:
        self._read.sum()


def reading_layers(num_layers: int, num_read: int) -> list[LayerSpec]:
    """Return such layers, one behind the other."""
    return [LayerSpec(Reading, _WIDTH, num_read) for _ in range(num_layers)]


def prices_of_short_run(config: Config, world: World, mesh: Mesh, folder: Path) -> Prices | None:
    """Return, on rank 0, what such a run has measured, as any run writes it; None on others.

    Every rank calls it. The run is made in `folder`, which all see and which is gone afterwards.
    Its steps have the edges of any run's, and write as many figures.
    """
    own, where = _settings(config, world, mesh, folder), "a short run beside the preflight"
    writes = "tensorboard" in own.metrics.to and world.rank == 0
    # It takes seconds, in which no collective may wait for this rank.
    patiently(world, where, partial(import_module, "torch.utils.tensorboard") if writes else None)
    is_quiet = world.rank == 0 or not world.is_one_process  # the process's, so once for a process
    try:
        with _unheard() if is_quiet else nullcontext():
            run_training(own, world, StopRequest())
        with together(world, where):
            found = None if world.rank else _prices(folder / CALIBRATION_FILE)
            meet(world.everybody)  # none has a file of the folder open that is removed now
        return found
    finally:
        if not world.rank:
            shutil.rmtree(folder, ignore_errors=True)


def _prices(path: Path) -> Prices:
    if not path.exists():
        raise DataError(
            f"{path}: the short run did not write this file; see the warnings above, and check "
            "the free space of its file system"
        )
    return read_calibration(path).prices


def _settings(config: Config, world: World, mesh: Mesh, folder: Path) -> Config:
    """Return the settings of the run: of the user's, those that count beside layers."""
    num_samples = _SAMPLES * _MICROBATCHES * mesh.replicas
    num_read = 0 if world.device.is_accelerator else _READ
    plain = Config()
    train = replace(
        config.train,
        steps=_STEPS,
        stop_at=None,
        batch_size=num_samples,
        batch_ramp=plain.train.batch_ramp,
        accumulation=1,
        validate_every=0,
        validate_batches=1,
        compile=False,
        device=world.device.type,
    )
    target = f"{reading_layers.__module__}.{reading_layers.__qualname__}"
    pipeline = PipelineConfig(
        stages=mesh.stages,
        replicas=mesh.replicas,
        microbatches=_MICROBATCHES,
        partition="uniform",
        recompute="never",
    )
    return Config(
        model={"_target_": target, "num_layers": mesh.stages, "num_read": num_read},
        data=SyntheticVectorsConfig(num_samples=num_samples, width=_WIDTH, num_classes=_WIDTH),
        optimizer=replace(config.optimizer, lr=_RATE),
        outer=Outer(bucket_bytes=_BUCKET_BYTES),
        pipeline=pipeline,
        train=train,
        comm=config.comm,
        metrics=replace(config.metrics, to=sorted(_LOCAL.intersection(config.metrics.to))),
        run=replace(config.run, dir=str(folder)),
        lr=replace(plain.lr, warmup_steps=0),
        checkpoint=replace(plain.checkpoint, every=0),
        preflight=replace(config.preflight, before_run=False),
    )


@contextmanager
def _unheard() -> Iterator[None]:
    """Keep what a run says of itself from whoever asked for something else; warnings are heard."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
