"""What is saved is what is loaded: `extra`, optimizer states, the optimizer itself, the model."""

import collections
import copy
import datetime
import enum
import io
import json
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import CheckpointError

X, Y = torch.linspace(-1, 1, 48).reshape(8, 6), torch.linspace(1, 0, 24).reshape(8, 3)


def pipeline(world=None, **keywords):
    torch.manual_seed(0)
    return Pipeline([nn.Linear(6, 8), nn.Linear(8, 3)], nn.MSELoss(), world=world, **keywords)


class Decay:
    """A rate that keeps a state of its own, which LambdaLR saves."""

    def __init__(self):
        self.seen = {}

    def __call__(self, step):
        self.seen[step] = self.seen.get(step, 0) + 1
        return 0.5 ** len(self.seen)


SCHEDULERS = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [2, 4])],
        [3],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.MultiStepLR(o, [5])]
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_if_uninterrupted(tmp_path, name):
    """Keys became texts in JSON: MultiStepLR missed every milestone that was left."""

    def make(world):
        pipe = pipeline(world)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
        return pipe, optimizer, SCHEDULERS[name](optimizer)

    def train(pipe, optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            pipe.step(X, Y)
            optimizer.step()
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        return rates

    def first(world):
        made = pipe, optimizer, scheduler = make(world)
        rates = train(*made, 4)
        pipe.save(tmp_path / "kept", optimizer, {"scheduler": scheduler.state_dict()})
        return rates

    def second(world):
        made = pipe, optimizer, scheduler = make(world)
        scheduler.load_state_dict(pipe.load(tmp_path / "kept", optimizer)["scheduler"])
        return train(*made, 4)

    expected = run_on_threads(2, lambda world: train(*make(world), 8))[0]
    assert len(set(expected)) > 1
    assert run_on_threads(2, first)[0] + run_on_threads(2, second)[0] == expected


class Phase(enum.IntEnum):
    """What JSON keeps as a number, which is equal and of another type."""

    WARM = 1


class Name(str):
    """What JSON keeps as a text, which is equal and of another type."""

    def __str__(self):
        return "as enumerations, something else than its text"


Point = collections.namedtuple("Point", "x y")


class Mode(enum.Enum):
    """What no file can hold without its class."""

    FAST = "fast"


EXACT = {
    "int keys": {1: "a", "1": "b", None: 0.5},
    "tuples": (1, (2, [3, ()])),
    "counter": collections.Counter({2: 1, 5: 3}),
    "set": {1, "a", (2, 3)},
    "frozen": frozenset({b"x"}),
    "deque": collections.deque([1, {2: 3}], maxlen=4),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "bytes": b"\x00\xff",
    "array of bytes": bytearray(b"ab"),
    "complex": 1 - 2j,
    "numbers": [math.inf, -math.inf, -0.0, 5e-324, 2**70, True, None, 1, 1.0],
    "numpy": [np.float32(0.1), np.int64(3), np.bool_(True), np.float64(0.1)],
    "like our own form": {"tuple": [1], "dict": [[1, 2]], "tensor": "a", "on_cpu": True},
    "text": "\ud800 \n é",
    "version": torch.__version__,
    5: "a key that is a number",
    ("a", 1): "a key that is a tuple",
}


def described(value):
    """Return a value with all its types."""
    match value:
        case dict():
            items = [(described(k), described(v)) for k, v in value.items()]
            return type(value), items
        case set() | frozenset():
            return type(value), sorted(map(repr, value))
        case list() | tuple() | collections.deque():
            return type(value), getattr(value, "maxlen", 0), [described(each) for each in value]
    return type(value), repr(value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_extra_comes_back_as_it_was_given(tmp_path, ranks):
    def body(world):
        pipe = pipeline(world)
        pipe.save(tmp_path / "kept", extra=EXACT | {"nan": math.nan})
        return pipe.load(tmp_path / "kept")

    for found in run_on_threads(ranks, body):
        assert math.isnan(found.pop("nan"))
        assert found.keys() == EXACT.keys()
        for key, value in EXACT.items():
            assert described(found[key]) == described(value), key


@pytest.mark.parametrize(
    "extra",
    [
        collections.Counter({2: 1, "a": 3}),
        collections.OrderedDict([(5, "b"), ("a", (1,))]),
        collections.Counter(),
        {},
    ],
)
def test_extra_itself_keeps_its_type(tmp_path, extra):
    """A Counter came back as a dict."""
    pipe = pipeline()
    pipe.save(tmp_path / "kept", extra=extra)
    found = pipe.load(tmp_path / "kept")
    assert type(found) is type(extra) and found == extra


def test_no_extra_is_loaded_as_an_empty_dict(tmp_path):
    pipe = pipeline()
    pipe.save(tmp_path / "kept", extra=None)
    assert pipe.load(tmp_path / "kept") == {}


@pytest.mark.parametrize(
    "extra",
    [
        *(5, 0, "ab", [("a", 1)], [], ("a", 1), Point(1, 2), torch.ones(2)),
        *(datetime.date(2026, 1, 2), Mode.FAST),
    ],
)
def test_extra_that_is_no_dict_is_refused(tmp_path, extra):
    """Some ended in a TypeError without a remedy, pairs came back as a dict, 0 as {}."""

    def body(world):
        name = type(extra).__qualname__
        with pytest.raises(CheckpointError, match=f"extra: expected a dict.*{name}.*pass a dict"):
            pipeline(world).save(tmp_path / "kept", extra=extra)
        return "refused"

    assert run_on_threads(2, body) == ["refused"] * 2
    assert list(tmp_path.iterdir()) == []


def test_arrays_in_extra_come_back_as_they_were(tmp_path):
    """As the state of NumPy's generator has one."""
    state = np.random.RandomState(3).get_state()
    table = np.arange(6, dtype=">i2").reshape(2, 3)
    pipe = pipeline()
    pipe.save(tmp_path / "kept", extra={"state": state, "table": table, "none": np.zeros((0, 2))})
    found = pipe.load(tmp_path / "kept")
    again = np.random.RandomState()
    again.set_state(found["state"])
    expected = np.random.RandomState(3).normal(size=4)
    assert again.normal(size=4).tolist() == expected.tolist()
    assert found["table"].dtype == table.dtype and found["table"].tolist() == table.tolist()
    assert found["none"].shape == (0, 2)


def test_plain_extra_is_plain_json_in_the_manifest(tmp_path):
    """Older versions, and scripts, read it there."""
    extra = {"position": 3, "rates": [0.1, None], "names": {"a": True}}
    pipeline().save(tmp_path / "kept", extra=extra)
    facts = json.loads((tmp_path / "kept" / "gpipe_hpc.json").read_text())
    assert facts["extra"] == extra and "typed" not in facts


def endless():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (torch.ones(2), r"torch.Tensor at extra\['a'\]\['b'\]\[1\]"),
        (Mode.FAST, r"Mode at extra\['a'\]\['b'\]\[1\]"),
        (print, r"builtin_function_or_method at extra"),
        (np.array([object()]), r"numpy.ndarray at extra"),
        (endless(), "more than 100 levels at extra"),
        (datetime.datetime(2026, 1, 2), r"datetime.datetime at extra\['a'\]\['b'\]\[1\]"),
    ],
)
def test_extra_that_would_change_is_refused_by_its_path(tmp_path, value, where):
    def body(world):
        with pytest.raises(CheckpointError, match=f"saved and loaded exactly.*{where}"):
            pipeline(world).save(tmp_path / "kept", extra={"a": {"b": [1, value]}})
        return "refused"

    assert run_on_threads(2, body) == ["refused"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "plain", "where"),
    [
        (Phase.WARM, 1, r"extra\['a'\]\[1\]: a .*Phase is saved as a plain int"),
        ({Phase.WARM: 1}, {1: 1}, r"extra\['a'\]\[1\], key <Phase.WARM: 1>: a .*plain int"),
        (Name("a"), "a", r"extra\['a'\]\[1\]: a .*Name is saved as a plain str"),
        (np.str_("a"), "a", r"extra\['a'\]\[1\]: a numpy.str_ is saved as a plain str"),
        (Point(1, 2), (1, 2), r"extra\['a'\]\[1\]: a .*Point is saved as a plain tuple"),
        (torch.Size([2]), (2,), r"extra\['a'\]\[1\]: a torch.Size is saved as a plain tuple"),
        (collections.defaultdict(list, a=[1]), {"a": [1]}, r"extra\['a'\]\[1\]: a .*plain dict"),
    ],
)
def test_a_subclass_is_saved_as_what_it_extends_with_a_warning(tmp_path, value, plain, where):
    """A run that keeps its history in a defaultdict must not end at its first checkpoint."""
    pipe = pipeline()
    with pytest.warns(UserWarning, match=where):
        pipe.save(tmp_path / "kept", extra={"a": [0, value]})
    found = pipe.load(tmp_path / "kept")["a"][1]
    assert found == plain and type(found) is type(plain)


def test_another_mapping_is_saved_as_a_dict_with_a_warning(tmp_path):
    pipe = pipeline()
    with pytest.warns(UserWarning, match=r"extra: a collections.defaultdict is saved as a plain d"):
        pipe.save(tmp_path / "kept", extra=collections.defaultdict(int, a=1))
    assert type(pipe.load(tmp_path / "kept")) is dict


class Keeping(torch.optim.SGD):
    """Keeps for each parameter what is no tensor."""

    def __init__(self, parameters, kept):
        super().__init__(parameters, lr=0.1)
        self.kept = kept

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = copy.deepcopy(self.kept)


@pytest.mark.parametrize(
    "kept",
    [np.arange(3.0), {"a": np.ones((2, 2), np.float32)}, (1, {2: 3}), collections.deque([1.5], 2)],
)
def test_optimizer_states_that_are_no_tensors_come_back(tmp_path, kept):
    """Replicas compare what they have, and two arrays have no one truth value."""

    def body(world):
        pipe = pipeline(world, replicas=2, stages=1)
        optimizer = pipe.optimizer(lambda own: Keeping(own, kept))
        part = pipe.share(len(X))
        pipe.step(X[part], Y[part])
        optimizer.step()
        pipe.save(tmp_path / "kept", optimizer)
        again = pipe.optimizer(lambda own: Keeping(own, None))
        pipe.load(tmp_path / "kept", again)
        return [again.state[parameter]["kept"] for parameter in pipe.parameters()]

    for states in run_on_threads(2, body):
        assert len(states) == 4
        for found in states:
            assert type(found) is type(kept) and repr(found) == repr(kept)


def test_an_optimizer_state_that_no_file_can_hold_is_refused_by_name(tmp_path):
    def body(world):
        pipe = pipeline(world)
        optimizer = Keeping(pipe.parameters(), [torch.ones(2), torch.ones(2)])
        pipe.step(X, Y)
        optimizer.step()
        with pytest.raises(CheckpointError, match=r"torch.Tensor at .*optimizer.layers.0.*\[0\]"):
            pipe.save(tmp_path / "kept", optimizer)
        return "refused"

    assert run_on_threads(2, body) == ["refused"] * 2
    assert list(tmp_path.iterdir()) == []


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def trained(world, make, **keywords):
    pipe = pipeline(world, **keywords)
    optimizer = pipe.optimizer(make)
    part = pipe.share(len(X))
    pipe.step(X[part], Y[part])
    optimizer.step()
    return pipe, optimizer


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_without_optimizer_is_told_where_one_wants_it(tmp_path, caplog, ranks):
    """Adam began again with steps of full size, and nothing was said."""

    def body(world):
        pipe, optimizer = trained(world, torch.optim.Adam)
        pipe.save(tmp_path / "kept")
        pipe.load(tmp_path / "kept", optimizer)
        return len(optimizer.state)

    assert run_on_threads(ranks, body) == [0] * ranks
    (told,) = warnings_of(caplog)
    assert "was saved without an optimizer" in told and str(tmp_path / "kept") in told


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda own: torch.optim.SGD(own, lr=0.1)])
@pytest.mark.parametrize("outer", [{}, {"shard": "flat"}])
def test_a_checkpoint_with_its_optimizer_says_nothing(tmp_path, caplog, make, outer):
    """SGD has no state, but its groups were saved; nor do weights alone need an optimizer."""

    def body(world):
        pipe, optimizer = trained(world, make, replicas=2, stages=1, outer=outer)
        pipe.save(tmp_path / "kept", optimizer)
        pipe.load(tmp_path / "kept", optimizer)
        pipe.save(tmp_path / "weights")
        pipe.load(tmp_path / "weights")

    run_on_threads(2, body)
    assert warnings_of(caplog) == []


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


USES = {
    "run": lambda model: model(X),
    "run within another": lambda model: nn.Sequential(nn.Identity(), model)(X),
    "state_dict": lambda model: model.state_dict(),
    "a copy's state_dict": lambda model: copy.deepcopy(model).state_dict(),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize("use", USES)
def test_a_model_that_looks_whole_and_is_not_is_told_once(caplog, use):
    """`model(x)` on a rank mixed trained weights with the first ones."""
    models = [sequential() for _ in range(2)]

    def body(world):
        pipe = Pipeline(models[world.rank], nn.MSELoss(), stages=2, microbatches=2, world=world)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        models[world.rank](X)  # before the first step it is what it was
        for _ in range(2):
            pipe.step(X, Y)
            optimizer.step()
        pipe.evaluate(X, Y), pipe.predict(X)

    run_on_threads(2, body)
    assert warnings_of(caplog) == []
    for rank, stale in enumerate(["layers 2 ", "layers 0 "]):
        caplog.clear()
        for _ in range(2):
            USES[use](models[rank])
        (told,) = warnings_of(caplog)
        assert stale in told and "export_safetensors" in told


def test_a_load_makes_the_model_stale_as_a_step_does(tmp_path, caplog):
    models = [sequential() for _ in range(2)]

    def body(world):
        pipe = Pipeline(models[world.rank], nn.MSELoss(), world=world)
        pipe.load(pipe.save(tmp_path / "kept"))

    run_on_threads(2, body)
    models[0](X)
    assert len(warnings_of(caplog)) == 1


def test_a_second_pipeline_of_a_stale_model_is_told(caplog):
    """Another cut takes layers that this rank has not trained; the same cut does not."""
    models = [sequential() for _ in range(2)]

    def body(world):
        for partition in ([1, 2], [1, 2], [2, 1], [3]):
            pipe = Pipeline(
                models[world.rank],
                nn.MSELoss(),
                stages=len(partition),
                partition=partition,
                world=world,
            )
            pipe.step(X, Y)
            if partition == [2, 1]:  # moves a layer without weights
                assert warnings_of(caplog) == []

    run_on_threads(2, body)
    assert len(warnings_of(caplog)) == 2


def test_pickles_of_a_watched_model_need_nothing_of_ours(caplog):
    models = [sequential() for _ in range(2)]

    def body(world):
        Pipeline(models[world.rank], nn.MSELoss(), world=world).step(X, Y)

    run_on_threads(2, body)
    file = io.BytesIO()
    torch.save(models[0], file)
    assert b"gpipe_hpc" not in file.getvalue()
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(X), models[0](X))


@pytest.mark.parametrize("shared", [True, False])
def test_a_model_that_is_whole_says_nothing(caplog, shared):
    """Ranks that are threads and share one model train all of it; a replica has all of it."""
    one = sequential()
    keywords = {"stages": 2} if shared else {"stages": 1, "replicas": 2}

    def body(world):
        model = one if shared else sequential()
        pipe = Pipeline(model, nn.MSELoss(), world=world, **keywords)
        pipe.step(X[:4], Y[:4])
        model(X), model.state_dict()

    run_on_threads(2, body)
    assert warnings_of(caplog) == []
