"""A checkpoint written before there were hashes is read for ever: the one in format_1/.

Two ranks wrote it after two steps of AdamW: a linear layer, BatchNorm, and the linear layer again,
tied to the first.
"""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import CheckpointError
from tests.support import mean_square

OLD = Path(__file__).with_name("format_1")

# What its writer had after a third step, on the same two ranks.
LOSS = 232.82750956217447
SHARED = [[-0.6122147440910339, -0.407928466796875], [-0.4029254913330078, 0.6526418924331665]]
BIAS = [-0.2797137498855591, -0.28633296489715576]


def pipeline(world=None):
    tied = LayerSpec(nn.Linear, 2, 2, bias=False).tied({"weight": "shared"})
    layers = [tied, LayerSpec(nn.BatchNorm1d, 2), tied]
    pipe = Pipeline(layers, mean_square, microbatches=2, seed=1, world=world)
    groups = pipe.parameters() or [{"params": []}]
    return pipe, torch.optim.AdamW(groups, lr=1.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_it_goes_on_on_any_layout_with_one_warning(num_ranks, caplog):
    def body(world):
        pipe, optimizer = pipeline(world)
        extra = pipe.load(OLD, optimizer)
        inputs = torch.arange(12.0).reshape(6, 2) * 3 - 5
        loss = pipe.step(inputs, inputs.flip(1)).loss
        optimizer.step()
        named = {name: p.tolist() for name, p in pipe.named_parameters()}
        return extra, pipe.steps_done, loss, named

    found = run_on_threads(num_ranks, body)
    named = {name: value for *_, part in found for name, value in part.items()}
    for extra, steps_done, loss, _ in found:
        assert extra == {"position": 12, "corrupt": []}
        assert steps_done == 3
        assert loss == pytest.approx(LOSS, rel=1e-6)
    torch.testing.assert_close(torch.tensor(named["layers.0.weight"]), torch.tensor(SHARED))
    torch.testing.assert_close(torch.tensor(named["layers.1.bias"]), torch.tensor(BIAS))
    told = [record.getMessage() for record in caplog.records if "checkpoint" in record.name]
    assert len(told) == 1 and "without hashes" in told[0]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("change", ["short", "garbled", "missing"])
def test_what_cannot_be_read_is_found_before_anything_changes(tmp_path, name, change):
    """Without hashes each tensor is read once for nothing: what torch refuses changes nothing."""
    broken = Path(shutil.copytree(OLD, tmp_path / "broken"))
    raw = bytearray((broken / name).read_bytes())
    if change == "missing":
        (broken / name).unlink()
    else:
        raw[-500:] = b"" if change == "short" else b"?" * 500
        (broken / name).write_bytes(raw)

    def body(world):
        pipe, optimizer = pipeline(world)
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        with pytest.raises(CheckpointError, match=name):
            pipe.load(broken, optimizer)
        assert not optimizer.state
        return all(torch.equal(p, before[name]) for name, p in pipe.named_parameters())

    assert run_on_threads(2, body) == [True, True]
