"""Many pipelines one after another in one process: each closes what it opened."""

import gc
import os
import time

import torch
from torch import nn

from gpipe_hpc import Pipeline
from tests.support import patience


def num_files():
    return len(os.listdir("/proc/self/fd"))


def search():
    """Train and drop pipelines; return the open files after each, and how far losses are off."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)
    found, off = [], 0.0
    for settings in ({"stages": 2}, {"replicas": 2}, {"stages": 2}, {"stages": 2}, {"stages": 2}):
        layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
        torch.manual_seed(1)
        for layer in layers:
            nn.init.normal_(layer.weight)
        plain = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
        pipe = Pipeline(layers, nn.MSELoss(), microbatches=2, **settings)
        share = pipe.share(8)
        off = max(off, abs(float(pipe.step(x[share], y[share]).loss) - float(plain.detach())))
        del pipe
        gc.collect()
        deadline_s = time.monotonic() + 10 * patience()
        while found and num_files() > min(found) and time.monotonic() < deadline_s:
            time.sleep(0.01)  # its watcher ends by and by
        found.append(num_files())
    return found, off


def test_a_dropped_pipeline_closes_what_it_opened(start_ranks, tmp_path, repository):
    """Each left a connection to the store open: a process ended after a thousand of them."""
    (tmp_path / "own_script.py").write_text(
        "from tests.cases.test_dropped_pipelines import search\n"
        "found, off = search()\n"
        "assert off < 1e-10, off\n"
        "assert found[-1] <= found[1], found\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{repository}"}
    ranks = start_ranks(2, module="own_script", env=env).wait(60 * patience())
    assert ranks.codes == [0, 0], "\n".join(ranks.outputs)
