"""Tests of data=own: random generators of items, collation, and errors of the user's code."""

import random
import sys
import warnings

import numpy as np
import pytest
import torch

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.config.commands import exit_code_of
from gpipe_hpc.data import BatchReader, ReadRequest, identify, open_data, open_readers
from gpipe_hpc.data.shapes import microbatch
from gpipe_hpc.errors import ConfigError, DataError

MODULE = '''
import random

import numpy as np
import torch


class Items(torch.utils.data.Dataset):
    """Item i: i and noise of all three kinds; the target is what was drawn, too."""

    def __init__(self, size=10, scale=1.0):
        self.size, self.scale, self.read = size, scale, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *drawn]), torch.tensor(drawn)


class Apart:
    """Reads inputs and targets apart."""

    def __len__(self):
        return 6

    def read_inputs(self, indices):
        return np.array(indices, np.float32)[:, None]

    def read_targets(self, indices):
        return np.array(indices)


def both(size):
    return Items(size), Items(3)


def dicts(size=4):
    items = [{"x": np.float32([i, i]), "y": i} for i in range(size)]
    return items


def texts(size=4):
    """As Hugging Face data sets give them."""
    return [{"input_ids": [1], "attention_mask": [1], "labels": [1]} for _ in range(size)]


def pairs_of_dicts(items):
    whole = torch.utils.data.default_collate(items)
    return {"x": whole["x"]}, whole["y"]


def ragged(size=10):
    return [(torch.zeros(5 + (i == 7)), i) for i in range(size)]


def number():
    return 3


def loader():
    return torch.utils.data.DataLoader(Items(), batch_size=2)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Items())


def arrays():
    return np.zeros((4, 2)), np.zeros(4)


class Picture:
    """As PIL's: nothing that a batch can be made of."""


def pictures():
    return [(Picture(), 1)] * 4


def triples():
    return [(1, 2, 3)] * 4


def fails(size=3):
    raise ValueError("no such folder")


class Failing(Items):
    def __getitem__(self, index):
        return self.helper(index)

    def helper(self, index):
        raise KeyError("lost")
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "users_items.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_items"
    sys.modules.pop("users_items", None)


def settings(target: str, *words: str):
    return compose_config(["model={_target_:my.build}", f"data._target_={target}", *words]).data


def test_keywords_that_the_user_sets_are_passed_and_no_others(mine):
    """Settings of another preset, such as seq_len, are not passed to the user's function."""
    data = settings(f"{mine}.Items", "data.size=7", "data.workers=3", "data.validation_fraction=0")
    assert data.keywords == {"size": 7}
    assert (data.workers, data.validation_fraction, data.prefetch) == (3, 0, 2)
    assert open_data(data).train.num_samples == 7
    same = settings(f"{mine}.Items", "data=own", "data.size=7", "data.scale=2")
    assert same.keywords == {"size": 7, "scale": 2}
    with pytest.raises(ConfigError, match=r"unexpected keyword argument .sise."):
        open_data(settings(f"{mine}.Items", "data.sise=7"))


def test_items_are_split_or_come_split(mine):
    source = open_data(settings(f"{mine}.Items", "data.size=40", "data.validation_fraction=0.1"))
    assert (source.train.num_samples, source.validation.num_samples) == (36, 4)
    every = [
        int(row[0])
        for part in (source.train, source.validation)
        for row in part.read_inputs(range(part.num_samples))
    ]
    assert sorted(every) == list(range(40))
    pair = open_data(settings(f"{mine}.both", "data.size=5"))
    assert (pair.train.num_samples, pair.validation.num_samples) == (5, 3)


def test_an_item_depends_on_seed_epoch_and_number_alone(mine):
    """Regression: the first and the last rank drew different augmentations for the same item."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = random.random(), np.random.rand(), torch.rand(())
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    data = settings(f"{mine}.Items")
    whole, other = open_data(data, seed=1).train, open_data(data, seed=2).train
    inputs, targets = whole.read_inputs([3, 1], 2), whole.read_targets([3, 1], 2)
    assert torch.equal(inputs[:, 1:], targets)
    assert torch.equal(whole.read_inputs([1], 2)[0], inputs[1])
    for drawn in (whole.read_targets([3], 1), other.read_targets([3], 2)):
        assert not torch.isclose(drawn, targets[:1]).any()
    # Reading does not change the states of the run's generators.
    assert (random.random(), np.random.rand(), torch.rand(())) == before


def test_who_needs_both_reads_an_item_once(mine):
    source = open_data(settings(f"{mine}.both", "data.size=5"))
    read = source.train.items.read
    read.clear()
    reading = BatchReader(source.train, inputs=True, targets=True).read(ReadRequest([4, 2], 0))
    assert read == [4, 2]
    assert torch.equal(reading.inputs[:, 1:], reading.targets)


def test_who_needs_the_one_reads_the_one_where_it_can_be_read_apart(mine):
    train = open_data(settings(f"{mine}.Apart", "data.validation_fraction=0")).train
    inputs, targets = train.read_inputs([0, 1]), train.read_targets([0, 1])
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs[:, 0].long(), targets)


def test_no_items_have_the_shape_of_some(mine):
    train = open_data(settings(f"{mine}.Items")).train
    assert train.read_inputs([]).shape == (0, 4)
    assert train.read_targets([]).shape == (0, 3)


def test_items_that_are_no_pairs_need_a_collate(mine):
    with pytest.raises(DataError, match=r"not a pair .*data\.collate"):
        open_data(settings(f"{mine}.dicts"))
    words = (f"data.collate={mine}.pairs_of_dicts", "data.validation_fraction=0", "data.size=3")
    source = open_data(settings(f"{mine}.dicts", *words))
    inputs = source.train.read_inputs(range(3))
    assert inputs["x"].shape == (3, 2)
    assert source.loss == "classification"
    assert source.train.read_inputs([])["x"].shape == (0, 2)


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (
            "number",
            DataError,
            r"expected an object with __len__.*got int",
        ),
        ("loader", DataError, r"got DataLoader; return its data set"),
        ("Stream", DataError, r"got Stream;"),
        ("arrays", DataError, r"two arrays .*TensorDataset"),
        ("dicts", DataError, r"\(item\['x'\], item\['y'\]\)"),
        ("texts", DataError, r"\(item\['input_ids'\], item\['labels'\]\)"),
        ("triples", DataError, r"not a pair .*but a list of length 3"),
        ("pictures", DataError, r"TypeError: .*Picture.*return tensors"),
        ("fails", ConfigError, r"data\._target_=users_items\.fails.*ValueError: no such folder"),
        ("Failing", DataError, r"reading item \d of users_items\.Failing.*KeyError: 'lost'"),
        ("missing", ConfigError, r"has no attribute 'missing'"),
    ],
)
def test_what_fails_is_named_with_the_users_frames(mine, target, kind, message):
    with pytest.raises(kind, match=message) as raised:
        open_data(settings(f"{mine}.{target}"))
    own = ("pictures", "Failing")  # the user's code failed, possibly for a temporary reason
    assert exit_code_of(raised.value) == (1 if target in own else 2)
    if target == "Failing":
        trace = raised.value.__cause__.__traceback__
        names = []
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert names[-2:] == ["__getitem__", "helper"]


def test_without_a_target_it_is_said_what_to_give():
    with pytest.raises(ConfigError, match=r"_target_.*my\.module\.dataset"):
        compose_config(["model={_target_:my.build}", "data=own"])


def test_a_plan_reads_one_item_for_the_shapes(mine):
    sample = microbatch(settings(f"{mine}.Items"), 6)
    assert (sample.inputs.shape, sample.targets.shape) == ((6, 4), (6, 3))
    assert sample.loss == "mean_squared_error"


def test_settings_are_written_as_they_are_given(mine):
    data = settings(f"{mine}.Items", "data.size=7")
    assert data.written() == {
        "_target_": f"{mine}.Items",
        "size": 7,
        "collate": None,
        "validation_fraction": 0.05,
        "workers": 0,
        "prefetch": 2,
    }


def test_other_items_are_other_data(mine):
    train = compose_config().train
    kinds = [settings(f"{mine}.Items", *words) for words in ((), ("data.workers=2",))]
    kinds += [settings(f"{mine}.Items", "data.size=9"), settings(f"{mine}.both", "data.size=10")]
    first, same, smaller, other = (identify(open_data(each), each, train) for each in kinds)
    assert first == same
    assert first["samples"] != smaller["samples"]
    assert first["kind"] != other["kind"]


def test_a_share_that_leaves_nothing_is_refused(mine):
    with pytest.raises(DataError, match=r"too few samples.*data\.validation_fraction=0"):
        open_data(settings(f"{mine}.Items", "data.size=1"))
    check_config(compose_config(["model={_target_:my.b}", f"data._target_={mine}.Items"]), 1)


@pytest.mark.slow
def test_processes_that_read_ahead_give_the_same(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    train = open_data(settings(f"{mine}.Items", "data.size=20"), seed=3).train
    reader = BatchReader(train, inputs=True, targets=True)
    requests = [
        ReadRequest([1, 5, 2], 0),
        ReadRequest([], 0),
        ReadRequest([7], 4),
        ReadRequest([0, 3], 1),
    ]
    readings = open_readers(reader, iter(requests), 2, 2, 60.0)
    before = torch.get_rng_state()
    try:
        found = list(readings)
    finally:
        readings.close()
    assert len(found) == len(requests)
    for reading, request in zip(found, requests, strict=True):
        same = reader.read(request)
        assert reading.used == request.indices
        assert torch.equal(reading.inputs, same.inputs)
        assert torch.equal(reading.targets, same.targets)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_what_fails_in_a_process_is_told_with_the_users_frames(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    items = sys.modules.get(mine) or __import__(mine)
    source = open_data(settings(f"{mine}.both", "data.size=5"))
    object.__setattr__(source.train, "items", items.Failing())
    readings = open_readers(
        BatchReader(source.train, True, True), [ReadRequest([1], 0)], 1, 2, 60.0
    )
    try:
        with pytest.raises(DataError, match=r"(?s)item 1 .*KeyError: 'lost'.*in helper"):
            next(readings)
    finally:
        readings.close()


@pytest.mark.slow
def test_a_data_set_that_cannot_be_handed_over_is_said(mine):
    source = open_data(settings(f"{mine}.both", "data.size=5"))
    source.train.items.draw = lambda: 3
    readings = open_readers(
        BatchReader(source.train, True, True), [ReadRequest([1], 0)], 1, 2, 60.0
    )
    with warnings.catch_warnings(), pytest.raises(DataError, match=r"cannot be pickled.*workers=0"):
        warnings.simplefilter("error")  # regression: torch warned before the error was raised
        next(readings)
    readings.close()


def test_an_item_that_does_not_fit_the_others_is_named(mine):
    """Regression: the message named a range of items, most of which were not in the batch."""
    train = open_data(settings(f"{mine}.ragged", "data.validation_fraction=0")).train.whole
    with pytest.raises(DataError) as failure:
        train.read_inputs([3, 9, 7, 1, 5])
    text = str(failure.value)
    assert "collating items 3, 9, 7, 1, 5 of " in text
    assert "(item 3 is (float32[5], int), item 7 is (float32[6], int))" in text
    assert "data.collate" in text
