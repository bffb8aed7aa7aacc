"""A short training run with minimal layers, which measures the overheads of a step.

On a CPU the layers read more memory than the caches hold, as real layers do, so that the overheads
are measured with cold caches.
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

from gpipe_hpc.comm.collectives.group import barrier
from gpipe_hpc.comm.watchdog.heartbeat import run_with_heartbeat
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, collective_errors
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
_RATE: Final = 1e-6  # small enough that no optimizer reaches NaN
_MICROBATCHES: Final = 4
_SAMPLES: Final = 512  # per micro-batch: stages send 128 KiB in float32
# Only trackers that write local files; others would report this run to a server.
_LOCAL: Final = frozenset({"tensorboard"})


class ReadingLayer(nn.Linear):
    """Small linear layer that also reads `num_read` floats in its forward and backward."""

    def __init__(self, width: int, num_read: int) -> None:
        super().__init__(width, width)
        self._read = torch.ones(num_read)  # not a buffer, so that it is not synchronized

    def forward(self, value: Tensor) -> Tensor:
        """Apply the linear layer and read the additional memory."""
        output = super().forward(value)
        self._read.sum()
        register: Any = output.register_hook  # untyped in torch
        if output.requires_grad:
            register(self._read_again)
        return output

    def _read_again(self, _: Tensor) -> None:
        self._read.sum()


def reading_layers(num_layers: int, num_read: int) -> list[LayerSpec]:
    """Return the specifications of `num_layers` layers of type `ReadingLayer`."""
    return [LayerSpec(ReadingLayer, _WIDTH, num_read) for _ in range(num_layers)]


def prices_of_short_run(config: Config, world: World, mesh: Mesh, folder: Path) -> Prices | None:
    """Train a short run and return its measured overheads on rank 0, None elsewhere. Collective.

    The run uses `folder`, which all ranks see and which is removed afterwards. Its steps
    synchronize and write metrics as those of other runs do.
    """
    own, where = _settings(config, world, mesh, folder), "a short run of the preflight"
    writes = "tensorboard" in own.metrics.to and world.rank == 0
    # The import takes seconds, during which no collective may wait for this rank.
    run_with_heartbeat(
        world, where, partial(import_module, "torch.utils.tensorboard") if writes else None
    )
    is_quiet = world.rank == 0 or not world.is_one_process  # logging is global to the process
    try:
        with _quiet() if is_quiet else nullcontext():
            run_training(own, world, StopRequest())
        with collective_errors(world, where):
            found = None if world.rank else _prices(folder / CALIBRATION_FILE)
            barrier(
                world.world_group
            )  # no rank has a file open in the folder, which is now removed
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
    """Return the settings of the short run: the user's, as far as they affect overheads."""
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
def _quiet() -> Iterator[None]:
    """Suppress info messages and standard output of the short run; warnings are still logged."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
