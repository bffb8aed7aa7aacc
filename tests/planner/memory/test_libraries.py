"""What libraries keep of a device stands in the plan of every rank that has a stage."""

import torch
from torch import nn

from gpipe_hpc.device.device import Accelerator
from gpipe_hpc.models import LayerSpec, mean_squared_error
from gpipe_hpc.planner import CountedCosts, Example
from gpipe_hpc.planner.forecast import forecast
from gpipe_hpc.schedule import build


def planned(workspace, monkeypatch):
    """Return the bytes of each of two ranks, for a GPU that is not here."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    batch = torch.empty(2, 4, device="meta")
    on = Example(batch, batch, mean_squared_error, 0, Accelerator(torch.device("cuda")))
    count = CountedCosts(layers, on).count
    found = forecast(count, (1, 1), build("gpipe", ranks=2, microbatches=2), 2)
    return [rank.total_bytes for rank in found.ranks]


def test_a_plan_for_a_gpu_counts_the_workspaces_of_cublas(monkeypatch):
    """On the first GPU the peak of a step was 67 MB above the plan."""
    small, large = planned(":16:8", monkeypatch), planned(":4096:8", monkeypatch)
    more = 2 * 2**10 * (4096 * 8 - 16 * 8)
    assert [after - before for before, after in zip(small, large, strict=True)] == [more, more]
