"""Pipeline-parallel training of models too big for one device.

Names are resolved on first use, so that `import gpipe_hpc.schedule` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_hpc.batches import whole
    from gpipe_hpc.checkpoint import latest
    from gpipe_hpc.comm.net.pickling import register_boundary_type
    from gpipe_hpc.comm.world.threads import run_on_threads
    from gpipe_hpc.engine import StepResult
    from gpipe_hpc.models import LayerSpec, add_loss, add_metric
    from gpipe_hpc.optim.large_batch.adascale import AdaScale
    from gpipe_hpc.optim.large_batch.lamb import LAMB
    from gpipe_hpc.optim.large_batch.lars import LARS
    from gpipe_hpc.pipeline import Pipeline
    from gpipe_hpc.trainer.figures.metrics import Metrics

__all__ = [
    "LAMB",
    "LARS",
    "AdaScale",
    "LayerSpec",
    "Metrics",
    "Pipeline",
    "StepResult",
    "add_loss",
    "add_metric",
    "latest",
    "register_boundary_type",
    "run_on_threads",
    "whole",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    homes = {
        "AdaScale": "gpipe_hpc.optim.large_batch.adascale",
        "LAMB": "gpipe_hpc.optim.large_batch.lamb",
        "LARS": "gpipe_hpc.optim.large_batch.lars",
        "LayerSpec": "gpipe_hpc.models",
        "Metrics": "gpipe_hpc.trainer.figures.metrics",
        "Pipeline": "gpipe_hpc.pipeline",
        "StepResult": "gpipe_hpc.engine",
        "add_loss": "gpipe_hpc.models",
        "add_metric": "gpipe_hpc.models",
        "latest": "gpipe_hpc.checkpoint",
        "register_boundary_type": "gpipe_hpc.comm.net.pickling",
        "run_on_threads": "gpipe_hpc.comm.world.threads",
        "whole": "gpipe_hpc.batches",
    }
    if name not in homes:
        raise AttributeError(f"module 'gpipe_hpc' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
