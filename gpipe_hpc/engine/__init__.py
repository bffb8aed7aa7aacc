"""The engine: run one rank's list of actions on its stages.

A micro-batch takes one path, downwards: `engine` (built once by `Pipeline`), `steps` (a whole step
of a rank), `executor` (its list of actions), `stage_runner` (forward, recomputation and backward of
one stage), `layer_runner` (consecutive layers), the layer. Each action gets one frozen `run.Run`.

- `assembly`, `stage`, `wiring`: stages, and the channels and groups that connect them.
- `random_state`, `buffers`: state that a forward changes besides its output, by micro-batch.
- `inputs`, `outputs`: inputs are never written to; outputs get memory of their own.
- `offload`: activations that are moved to host memory.
- `backward`, `backward_draws`, `outsiders`: a backward, in one piece or split into I and W, and
  checks of its random numbers and its graph.
- `buffer_sync`, `parameters`: buffers and parameters that copies of a stage share.
- `loss`, `step_reduction`, `step_result`: the all-reduce at the end of a step, and its totals.
- `gradient_norms`, `batchnorm_statistics`, `same_data`: values that this all-reduce carries too.
- `precision`: autocast and the loss scale.
- `local_sgd`: replicas that train separately between outer steps.
- `recorder`: start and end times of actions.

Other packages import the names of `__all__` only; they are resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_hpc.engine.backward import (
        Deferred,
        DeferWeights,
        accumulate_gradients,
        edge_of,
    )
    from gpipe_hpc.engine.buffers import Home, version_of
    from gpipe_hpc.engine.engine import Engine
    from gpipe_hpc.engine.gradient_norms import norms_of
    from gpipe_hpc.engine.precision import LossScale, casting, keeping_casts
    from gpipe_hpc.engine.random_state import own_generators
    from gpipe_hpc.engine.recorder import ActionTimes, StepMarks, StepTimes
    from gpipe_hpc.engine.run import Run
    from gpipe_hpc.engine.step_result import StepResult
    from gpipe_hpc.engine.wiring import Tables, Wiring

__all__ = [
    "ActionTimes",
    "DeferWeights",
    "Deferred",
    "Engine",
    "Home",
    "LossScale",
    "Run",
    "StepMarks",
    "StepResult",
    "StepTimes",
    "Tables",
    "Wiring",
    "accumulate_gradients",
    "casting",
    "edge_of",
    "keeping_casts",
    "norms_of",
    "own_generators",
    "version_of",
]


def __getattr__(name: str) -> Any:
    homes = {
        "ActionTimes": "recorder",
        "DeferWeights": "backward",
        "Deferred": "backward",
        "Engine": "engine",
        "Home": "buffers",
        "LossScale": "precision",
        "Run": "run",
        "StepMarks": "recorder",
        "StepResult": "step_result",
        "StepTimes": "recorder",
        "Tables": "wiring",
        "Wiring": "wiring",
        "accumulate_gradients": "backward",
        "casting": "precision",
        "edge_of": "backward",
        "keeping_casts": "precision",
        "norms_of": "gradient_norms",
        "own_generators": "random_state",
        "version_of": "buffers",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
