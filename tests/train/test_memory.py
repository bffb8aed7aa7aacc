"""A model that no rank could hold whole: each builds and keeps its own quarter."""

import json

import pytest

pytestmark = pytest.mark.slow

MB = 2**20
FILLING_BYTES = 32_000_000  # what is read between two timings of a layer
# Layers of 4 MB: with fewer and larger ones, what the C library keeps of freed memory would hide
# what is measured.
WIDTH = 1024
LAYER_BYTES = 4 * WIDTH * WIDTH
# A user's model whose factory counts; at its end each rank says how much it ever held.
MODEL = """
import atexit
import json
import os
from pathlib import Path

from torch import nn

from gpipe_hpc import LayerSpec

built = []


def make(*sizes):
    layer = nn.Linear(*sizes)
    if not layer.weight.is_meta:
        built.append(sizes)
    return layer


def report():
    (peak,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    content = {"peak_bytes": int(peak.split()[1]) * 1024, "built": built}
    Path(f"report{os.environ['RANK']}.json").write_text(json.dumps(content))


def build(width, num_large):
    atexit.register(report)
    large = [LayerSpec(make, width, width) for _ in range(num_large)]
    return [LayerSpec(make, 64, width), *large, LayerSpec(make, width, 10)]
"""


@pytest.fixture
def reports(train, tmp_path):
    (tmp_path / "large.py").write_text(MODEL)

    def run(width, num_large, *overrides):
        settings = (
            "model=mlp",
            "model._target_=large.build",
            f"model.width={width}",
            f"model.num_large={num_large}",
            "data=synthetic_vectors",
            "optimizer=sgd",
            "optimizer.momentum=0",
            "train.batch_size=8",
            "train.steps=3",
            "train.validate_every=0",
            "pipeline.microbatches=4",
            f"run.dir=run{width}",
        )
        train(4, *settings, *overrides, env={"PYTHONPATH": str(tmp_path)})
        return [json.loads((tmp_path / f"report{rank}.json").read_text()) for rank in range(4)]

    return run


@pytest.mark.parametrize("partition, num_large", [("parameters", 100), ("time", 48)])
def test_each_rank_holds_a_quarter(reports, partition, num_large):
    cut = f"pipeline.partition={partition}"
    constant = [report["peak_bytes"] for report in reports(8, num_large, cut)]
    large = reports(WIDTH, num_large, cut)
    num_built = [report["built"].count([WIDTH, WIDTH]) for report in large]
    # The rank that measures builds a kind of layer once more in each round, for a moment.
    num_measured = sum(num_built) - num_large
    assert (num_measured > 0) == (partition == "time")
    for rank, report in enumerate(large):
        num_own = num_built[rank] - num_measured * (rank == 0)
        assert num_large / 5 <= num_own <= num_large / 3
        kept = 2 * num_own * LAYER_BYTES  # weights and gradients
        extra = report["peak_bytes"] - constant[rank]
        if num_measured and rank == 0:  # what fills the caches is part of the small model's peak
            extra += FILLING_BYTES
        assert 0.9 * kept < extra < kept + 100 * MB, (rank, num_own, extra / MB)
    built = sum(len(report["built"]) for report in large)
    if partition == "parameters":
        assert built == num_large + 2
