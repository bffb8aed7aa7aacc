"""The library, and the train command on one GPU, need only torch and NumPy."""

import subprocess
import sys
from pathlib import Path

from tests.bare_environment import bare_environment

ROOT = Path(__file__).parents[1]

PROGRAM = """
import importlib, pathlib, sys
import torch
from torch import nn
import gpipe_hpc

try:
    import hydra
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("nothing is blocked")
for name in gpipe_hpc.__all__:
    getattr(gpipe_hpc, name)
folder = pathlib.Path(sys.argv[1])
layers = [gpipe_hpc.LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
pipe = gpipe_hpc.Pipeline(layers, lambda o, t: (o - t).square().mean(), microbatches=2)
optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters))
first = pipe.step(torch.ones(4, 4), torch.zeros(4, 4)).loss
optimizer.step()
pipe.save(folder / "checkpoint")
pipe.load(folder / "checkpoint")
assert pipe.evaluate(torch.ones(4, 4), torch.zeros(4, 4)).loss < first
for path in pathlib.Path("experiments/gpu").glob("*.py"):
    if path.stem not in ("__main__", "exactness"):  # this one needs pytest
        importlib.import_module(f"experiments.gpu.{path.stem}")
print("done")
"""


def test_the_library_runs_with_torch_and_numpy_alone(environ, tmp_path):
    """Regression: `Pipeline` imported Hydra and OmegaConf to spell the names of settings."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env=bare_environment(environ, tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0 and "done" in run.stdout, run.stdout + run.stderr
