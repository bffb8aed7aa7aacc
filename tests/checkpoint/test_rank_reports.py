"""What ranks tell the first one of all before a checkpoint is written: little, and all of it."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint import contents
from gpipe_hpc.checkpoint.contents import _writers
from gpipe_hpc.checkpoint.rank_reports import gather, sizes_of_all
from tests.support import mean_square

WIDTH = 4
WAYS = {
    "whole": {},
    "buffers that differ": {"buffers": "each"},
    "flat": {"outer": {"shard": "flat", "bucket_bytes": 100}},
    "apart": {"outer": {"every": 2}},
    "mirrored": {"schedule": "chimera"},
}


@pytest.mark.parametrize(
    ("ranks", "stages", "way"),
    [(1, 1, "whole"), (5, 2, "whole"), *((6, 2, way) for way in WAYS)],
)
def test_rank_0_knows_what_each_rank_has(ranks, stages, way, monkeypatch, tmp_path):
    """As where each tells all of it, in the same order: that says who writes what."""

    def body(world):
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.BatchNorm1d, WIDTH)] * 2
        has_holes = world.size % stages
        pipe = Pipeline(
            layers,
            mean_square,
            stages=stages,
            replicas=1 if has_holes else world.size // stages,
            microbatches=4,
            world=world,
            **WAYS[way],
        )
        optimizer = pipe.optimizer(lambda own: torch.optim.AdamW(own, lr=0.1))
        generator = torch.Generator().manual_seed(0)
        inputs, targets = torch.randn(2, 96, WIDTH, generator=generator)
        pipe.step(inputs[pipe.share(96)], targets[pipe.share(96)])
        optimizer.step()
        pipe.save(tmp_path / "kept", optimizer)
        return pipe.mesh.stages

    told, all_of_it = [], {}

    def noted(pipe, sizes, *rest):
        all_of_it[pipe.world.rank] = (dict(sizes), *rest)
        found = gather(pipe, sizes, *rest)
        told.extend(found or ())
        return found

    monkeypatch.setattr(contents, "gather", noted)
    places, *_ = run_on_threads(ranks, body)
    expected = [all_of_it[rank] for rank in range(ranks)]
    sizes = [each for each, *_ in expected]
    assert list(sizes_of_all(told, places)) == sizes
    assert _writers(sizes_of_all(told, places)) == _writers(sizes)
    for rank, own in enumerate(told):
        _, values, groups, states = expected[rank]
        of_first = expected[rank % places]
        assert (of_first[1] if own.values is None else own.values) == values
        assert (of_first[2] if own.groups is None else own.groups) == groups
        assert own.states == states
        if way == "whole" and rank >= places:
            assert (own.sizes, own.values, own.groups) == ({}, None, None)
