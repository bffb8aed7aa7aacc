"""A run goes on with fewer ranks, and with more again: the same samples, losses and rates."""

import json
import sys
from collections import Counter

import pytest

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.planner.cutting.unequal_ranks import cut_for_ranks
from tests.support import metrics, train_here

MINE = '''
import torch
from torch import nn

from gpipe_hpc import LayerSpec

SEEN = []
LAST = [10**9]  # the sample after which its rank fails


class Data(torch.utils.data.Dataset):
    """Sample i is i, and noise."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = torch.randn(4, generator=torch.Generator().manual_seed(index)).double()
        return torch.cat([torch.tensor([float(index)]).double(), noise]), noise[:2]


class Watching(nn.Module):
    """Notes which samples come by, and hides them."""

    def forward(self, inputs):
        if self.training:
            SEEN.extend(int(number) for number in inputs[:, 0])
            if len(SEEN) > LAST[0]:
                raise OSError("lost")
        return inputs[:, 1:]


def build():
    return [Watching(), *_linears()]


def _linears():
    for before, after in ((4, 8), (8, 8), (8, 8), (8, 2)):
        yield LayerSpec(nn.Linear, before, after, dtype=torch.float64)
        yield nn.Dropout(0.2)
'''
BATCH, SAMPLES, STEPS = 6, 19, 12  # one of twenty is held back
SETTINGS = (
    "model._target_=goes_on.build",
    "data._target_=goes_on.Data",
    f"train.batch_size={BATCH}",
    f"train.steps={STEPS}",
    "train.validate_every=0",
    "lr.warmup_steps=3",
    "pipeline.partition=parameters",
    "pipeline.recompute=never",
    "checkpoint.every=5",
    "checkpoint.keep=99",
)


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Return the module of the model, which notes the samples that the first layer has seen."""
    (tmp_path / "goes_on.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import goes_on

    yield goes_on
    del sys.modules["goes_on"]


def sizes():
    """Yield how many samples each step has: the last one of an epoch is smaller."""
    while True:
        yield from (BATCH, BATCH, BATCH, SAMPLES % BATCH)


def by_step(run):
    return {line["step"]: line for line in metrics(run) if "loss" in line}


LAYOUTS = {
    "stages and replicas": ("pipeline.stages=2", "pipeline.replicas=2", "pipeline.microbatches=2"),
    "fit": ("pipeline.stages=fit", "pipeline.replicas=2", "pipeline.microbatches=2"),
    "as many stages as ranks": ("pipeline.microbatches=4",),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] * (name == "fit"))
        for name, each in LAYOUTS.items()
    ],
)
def test_every_sample_comes_once_an_epoch_whatever_ranks_come_and_go(
    seen, tmp_path, caplog, layout
):
    train_here(1, *SETTINGS, "pipeline.stages=1", "pipeline.microbatches=4", "run.dir=whole")
    seen.SEEN.clear()
    trained: dict[int, list[int]] = {}
    caplog.set_level("INFO", "gpipe_hpc.train")
    before = 0
    for ranks, first, last in ((4, 0, 3), (3, 3, 6), (2, 5, 9), (4, 9, STEPS)):
        if first < before:  # killed: what it had done since the last checkpoint is lost
            (lost,) = (tmp_path / "run" / "checkpoints").glob(f"step_{before:08d}")
            lost.rename(tmp_path / "lost")
        caplog.clear()
        train_here(ranks, *SETTINGS, *layout, "run.dir=run", f"train.stop_at={last}")
        assert (f" before, {ranks} now: " in caplog.text) == (first > 0)
        assert "micro-batches, and is into" not in caplog.text
        size = sizes()
        for step in range(1, last + 1):
            count = next(size)
            if step > first:
                trained[step] = [seen.SEEN.pop(0) for _ in range(count)]
        assert not seen.SEEN
        before = last
    epochs = [[trained[4 * epoch + step] for step in range(1, 5)] for epoch in range(3)]
    counts = [Counter(sample for batch in epoch for sample in batch) for epoch in epochs]
    assert len(counts[0]) == SAMPLES and set(counts[0].values()) == {1}
    assert counts[1] == counts[2] == counts[0] and epochs[1] != epochs[0]
    whole, run = by_step(tmp_path / "whole"), by_step(tmp_path / "run")
    assert whole.keys() == run.keys() == set(range(1, STEPS + 1))
    for step, line in whole.items():
        assert run[step]["lr"] == line["lr"] and run[step]["position"] == line["position"]
        assert run[step]["loss"] == pytest.approx(line["loss"], rel=0, abs=1e-10)


def test_a_batch_that_is_cut_otherwise_is_told_of(seen, tmp_path, caplog):
    """With pipeline.replicas by the number of ranks, dropout drew other numbers without a word."""
    layout = ("pipeline.stages=2", "pipeline.microbatches=2", "run.dir=run")
    train_here(4, *SETTINGS, *layout, "pipeline.replicas=2", "train.stop_at=2")
    train_here(2, *SETTINGS, *layout, "pipeline.replicas=1", "train.stop_at=4")
    assert "cut into 4 micro-batches and is now cut into 2" in caplog.text


def test_a_measured_cut_is_made_anew_for_other_ranks_and_not_measured_again(seen, tmp_path, caplog):
    """A run that began with whole replicas kept their cut with holes, and the other way round."""
    layout = ("pipeline.stages=2", "pipeline.replicas=2", "pipeline.microbatches=2")
    by_time = ("pipeline.partition=time", "run.dir=run")
    caplog.set_level("INFO", "gpipe_hpc")
    cuts = []
    for ranks, last in ((4, 2), (3, 4), (4, 6)):
        caplog.clear()
        train_here(ranks, *SETTINGS, *layout, *by_time, f"train.stop_at={last}")
        told = f"layers for {'3 ranks' if ranks == 3 else 'equal numbers of ranks per stage'}, with"
        assert (told in caplog.text) == (last > 2)
        manifest = tmp_path / "run" / "checkpoints" / f"step_{last:08d}" / "gpipe_hpc.json"
        cuts.append(json.loads(manifest.read_text())["partition"])
    whole, with_holes, again = cuts
    assert whole["num_ranks"] is None and with_holes["num_ranks"] == 3
    assert with_holes["costs"] == whole["costs"]
    assert with_holes["counts"] == cut_for_ranks(whole["costs"], 2, 3)
    assert again == whole


@pytest.mark.parametrize(
    ("ranks", "is_lost_too", "told"),
    [
        (4, False, "resumed from copies in memory: 6 steps done"),
        (
            4,
            True,
            "step 6 cannot be used: the copies of ranks 0, 2 are missing",
        ),
        (3, False, "the in-memory checkpoint of step 6 has another layout"),
    ],
    ids=["kept", "lost too", "another layout"],
)
def test_what_memory_holds_is_gone_on_from_else_the_checkpoint(
    seen, caplog, tmp_path, ranks, is_lost_too, told
):
    """If copies are lost or of another layout, one line says so and the checkpoint is read."""
    memory = tmp_path / "memory"
    memory.mkdir()
    layout = ("pipeline.stages=2", "pipeline.replicas=2", "pipeline.microbatches=2")
    copied = ("checkpoint.neighbour_every=3", f"checkpoint.neighbour_dir={memory}")
    run = (*SETTINGS, *layout, *copied, "run.dir=run")
    train_here(1, *SETTINGS, "pipeline.stages=1", "pipeline.microbatches=4", "run.dir=whole")
    seen.SEEN.clear()
    seen.LAST[0] = SAMPLES + 3 * BATCH  # in the eighth step
    with pytest.raises(GpipeError, match="lost"):
        train_here(4, *run)
    seen.LAST[0] = 10**9
    copies = list(memory.glob("*/*/rank*"))
    assert {path.name[-1] for path in copies} == {"3", "6"}
    for path in copies:
        if is_lost_too and path.name.startswith(("rank00000", "rank00002")):  # stage 0
            path.unlink()
    caplog.set_level("INFO", "gpipe_hpc.train")
    train_here(ranks, *run)
    assert ("4 ranks before, 3 now" in caplog.text) == (ranks == 3)
    from_memory = ranks == 4 and not is_lost_too
    assert told in caplog.text
    assert ("resumed from copies in memory: 6 steps done" in caplog.text) == from_memory
    assert ("step_00000005: 5 steps done" in caplog.text) == (not from_memory)
    whole, ours = by_step(tmp_path / "whole"), by_step(tmp_path / "run")
    assert whole.keys() == ours.keys()
    for step, line in whole.items():
        assert ours[step]["position"] == line["position"]
        assert ours[step]["loss"] == pytest.approx(line["loss"], rel=0, abs=1e-10)
