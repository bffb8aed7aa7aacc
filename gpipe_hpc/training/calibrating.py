"""What a run measured of its layers, written beside its checkpoints for the next plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from gpipe_hpc import __version__
from gpipe_hpc.comm.device import maker_name
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planning.advice import layer_times
from gpipe_hpc.planning.costs.calibration import Calibration, shape_of, write_calibration
from gpipe_hpc.planning.costs.gauges import LayerTimes
from gpipe_hpc.planning.review import by_forwards
from gpipe_hpc.schedule import Timeline
from gpipe_hpc.training.foresight import Foresight
from gpipe_hpc.training.summary.figures import RankFigures

CALIBRATION_FILE: Final = "calibration.yaml"


def measured_times(
    pipe: Pipeline, foreseen: Foresight, measured: Timeline, forwards_s: Mapping[int, float]
) -> tuple[LayerTimes, ...]:
    """Return what each layer took in a measured step, as on rank 0.

    The step says how long a stage takes; `forwards_s`, what the forwards of layers took where they
    were watched, says how the layers of a stage share that.
    """
    cut = pipe.partition
    basis = by_forwards(foreseen.known.times, forwards_s, cut.counts)
    return layer_times(measured, cut.counts, basis, cut.paces)


def calibrate(
    folder: Path,
    pipe: Pipeline,
    foreseen: Foresight,
    measured: Timeline,
    ranks: Sequence[RankFigures],
) -> None:
    """Write what the layers took in a step of the fullest replica."""
    fullest = pipe.layout.portions.fullest
    own = [each for each in ranks if each.replica == fullest]
    forwards_s = {layer.layer: layer.forward_s for each in own for layer in each.layers}
    count = foreseen.known.count
    found = Calibration(
        device=pipe.world.device.type,
        device_name=maker_name(pipe.world.device),
        precision=pipe.request.precision,
        hosts=len({each.host for each in ranks}),
        ranks=pipe.world.size,
        versions={"gpipe_hpc": __version__, "torch": str(torch.__version__)},
        input_bytes=sum(count.inputs.tensors),
        model=shape_of(count),
        layers=measured_times(pipe, foreseen, measured, forwards_s),
    )
    write_calibration(folder / CALIBRATION_FILE, found)
