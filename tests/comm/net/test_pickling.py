"""What ranks send each other is read back without running anything that a message names."""

import collections
import datetime
import decimal
import enum
import os
import pickle
import pickletools
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc import LayerSpec, Pipeline, register_boundary_type, run_on_threads, whole
from gpipe_hpc.comm.net.pickling import check_travels, dumps, loads
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.errors import ConfigError, DataError, ModelError
from gpipe_hpc.schedule import Action, Op, build

T = TypeVar("T")


class Colour(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: object
    right: object = None


Old = collections.namedtuple("Old", "x y")


@dataclass
class Open:
    x: object
    more: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted(Generic[T]):
    x: T


@register_boundary_type
class Registered:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Registered and other.x == self.x

    __hash__ = None


class Unknown:
    pass


class Derived(Registered):
    """Its parent was let through; what it does itself nobody has said."""


@dataclass
class Active:
    x: int

    def __post_init__(self):
        raise AssertionError("somebody's code ran")


class Crafty(collections.namedtuple("Base", "x")):
    def __new__(cls, x):
        raise AssertionError("somebody's code ran")


PLAIN = [
    None,
    True,
    -(2**80),
    1.5,
    2j,
    "text",
    b"bytes",
    bytearray(b"bytes"),
    (1, [2, {3: {4}}], frozenset({5})),
    range(3),
    slice(1, None, 2),
    ...,
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, a=[1]),
    collections.deque([1], maxlen=3),
    collections.Counter("aab"),
    datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC),
    datetime.timedelta(seconds=1),
    decimal.Decimal("1.10"),
    Path("runs/one"),
    Colour.RED,
    Flags.A | Flags.B,
    Pair(1, Pair(2)),
    Old(1, 2),
    Open(1, [2]),
    Slotted("x"),
    Registered(3),
    torch.bfloat16,
    torch.channels_last,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    np.float32(1.5),
    np.int64(-7),
    np.datetime64("2026-11-22"),
    np.dtype("float16"),
    build("gpipe", ranks=2, microbatches=2, recompute="never"),
    Action(Op.F, 1, 2),
    int,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_records_and_registered_classes_arrive_as_they_were(value):
    again = loads(dumps([value, value], "a test"), "a test")
    assert again == [value, value]
    assert type(again[0]) is type(value)
    if type(value) not in (int, float):  # which pickle does not remember
        assert again[0] is again[1], "one object stays one"
    check_travels(value, "a test")


@pytest.mark.parametrize("value", [Colour.RED, Flags.A | Flags.B], ids=str)
def test_members_of_enums_travel_from_any_python(value, monkeypatch):
    """Python 3.11.2 pickles them as calls of getattr, so they were refused where it sent."""

    def by_name(self, protocol):
        return getattr, (type(self), self.name)

    monkeypatch.setattr(type(value), "__reduce_ex__", by_name)
    assert loads(dumps(value, "a test"), "a test") is value


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTS = st.recursive(
    NUMBERS | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(NUMBERS, inner),
    max_leaves=20,
)


@given(NESTS)
def test_any_nest_of_plain_values_arrives_as_it_was(nest):
    again = loads(dumps(nest, "a test"), "a test")
    assert repr(again) == repr(nest)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_arrive_to_the_bit(dtype, shape):
    tensor = torch.arange(6.0)[: int(np.prod(shape))].reshape(shape).to(dtype)
    again = loads(dumps({"a": (tensor, 1)}, "a test"), "a test")["a"][0]
    assert (again.dtype, again.shape) == (dtype, tensor.shape)
    assert (
        again.numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes()
        if (dtype in (torch.float32, torch.bool, torch.complex64))
        else torch.equal(again.float(), tensor.float())
    )
    again.zero_()  # memory of its own, to be written


def test_conjugates_views_and_parameters_arrive():
    conjugated = torch.tensor([1 + 2j]).conj()
    column = torch.arange(6.0).reshape(2, 3)[:, 1]
    weight = torch.nn.Parameter(torch.ones(2))
    again = loads(dumps((conjugated, column, weight), "a test"), "a test")
    assert again[0].tolist() == [1 - 2j]
    assert again[1].tolist() == [1.0, 4.0]
    assert again[2].requires_grad and not again[1].requires_grad


def test_arrays_of_numpy_arrive():
    table = np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")])
    for array in (np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), table, np.array("text")):
        again = loads(dumps(array, "a test"), "a test")
        assert again.dtype == array.dtype
        assert again.tolist() == array.tolist()


def nothing():
    raise AssertionError("somebody's code ran")


REFUSED = [
    (Unknown(), "a value of class .*Unknown"),
    (Unknown, "the class .*Unknown"),
    ({"x": [SimpleNamespace(a=1)]}, "types.SimpleNamespace"),
    (Derived(1), "Derived"),
    (Crafty, "Crafty"),
    (Active, "Active"),
    (nothing, "the function .*nothing"),
    (os.system, "builtin_function"),
    (np.array([Unknown()]), "array of Python objects"),
    (torch.ones(2).to_sparse(), "sparse"),
    (torch.Generator(), "Generator"),
    (LayerSpec(torch.nn.Linear, 2, 2), "the class torch.nn.*Linear|LayerSpec"),
    (type("Local", (tuple,), {"_fields": (), "__qualname__": "f.<locals>.Local"})(), "Local"),
]


@pytest.mark.parametrize(("value", "got"), REFUSED, ids=lambda value: type(value).__name__)
def test_what_could_not_be_read_is_refused_where_it_is_sent(value, got):
    for send in (dumps, check_travels):
        with pytest.raises(DataError, match=rf"a test: .*{got}.*send its parts"):
            send(value, "a test")


class Payload:
    """A message as a hostile sender makes it: by plain pickle, naming what it likes."""

    def __init__(self, function, *args, state=None):
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.call


HOSTILE = [
    Payload(os.system, "true"),
    Payload(eval, "1"),
    Payload(getattr, "", "join"),
    Payload(subprocess.Popen, ["true"]),
    Payload(pickle.loads, b"N."),
    Payload(torch.load, "file"),
    Payload(__import__, "antigravity"),
    Payload(socket.socket),
    Payload(nothing),
    Payload(Unknown),
    Payload(Derived, 1),
    Payload(Active, 1),
    Payload(Crafty, 1),
    Payload(open, "/etc/passwd"),
    Payload(np.frombuffer, b""),
    Payload(Path.unlink, Path("x")),
    Payload(Secret, b"", ""),
    os.system,
    nothing,
    Unknown,
]


@pytest.mark.parametrize("value", HOSTILE[:-4], ids=lambda v: v.call[0].__name__)
def test_a_hostile_message_is_refused_and_calls_nothing(value):
    data = pickle.dumps([1, value])
    named = {str(arg) for _, arg, _ in pickletools.genops(data) if arg is not None}
    assert named, "the message names something"
    with pytest.raises(DataError, match=r"received .*\..*call gpipe_hpc.register_boundary_type"):
        loads(data, "a message of rank 1")


def names(module: str, name: str) -> bytes:
    """Return a message that names a thing by a path of its own choice."""
    return f"c{module}\n{name}\n.".encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("gpipe_hpc.comm.net.pickling", "pickle.loads"),  # by way of what a module has imported
        ("gpipe_hpc.comm.net.pickling", "sys.modules"),
        ("gpipe_hpc.comm.net.pickling", "loads"),
        ("torch", "load"),
        ("torch", "os.system"),
        ("builtins", "eval"),
        ("builtins", "object"),
        ("gpipe_hpc.comm.net.pickling", "datetime.datetime"),
        ("antigravity", "webbrowser"),
        ("this.is.no.module", "x"),
    ],
)
def test_no_path_leads_round_the_list(module, name):
    with pytest.raises(DataError, match=f"received {module}.{name}"):
        loads(names(module, name), "a message")


def test_a_message_imports_nothing():
    import sys

    sys.modules.pop("antigravity", None)
    with pytest.raises(DataError):
        loads(names("antigravity", "fly"), "a message")
    assert "antigravity" not in sys.modules


def test_damaged_bytes_are_named():
    good = dumps({"a": torch.ones(3)}, "a test")
    for data in (b"", b"\x00", good[:-4], good[:20], b"garbage"):
        with pytest.raises(DataError, match=r"a message: cannot decode a message"):
            loads(data, "a message")


def test_a_tensor_that_must_not_hide_is_refused():
    with pytest.raises(ModelError, match="no tensors here"):
        dumps({"a": Open(torch.ones(1))}, "a test", hides="no tensors here")


def test_registering_wants_a_class_that_others_find():
    class Local:
        pass

    with pytest.raises(ConfigError, match=r"at the top level of its module.*Local"):
        register_boundary_type(Local)
    with pytest.raises(ConfigError, match="written in Python"):
        register_boundary_type(socket.SocketType.__base__)


class Gives(torch.nn.Module):
    """A layer that gives a tensor and a value of somebody's class."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.value = value

    def forward(self, x):
        return self.weight * x, self.value


class Takes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, nest):
        return self.weight * nest[0] * getattr(nest[1], "x", 1)


def step(world, value):
    layers = [LayerSpec(Gives, value), LayerSpec(Takes)]
    pipe = Pipeline(layers, lambda y, t: (y - t).square().mean(), stages=2, world=world)
    return pipe.step(torch.ones(2, 1), torch.zeros(2, 1)).loss


def test_threads_refuse_at_a_boundary_what_a_cluster_would_refuse():
    """On a laptop's threads the value went through; processes then failed on the other rank."""
    with pytest.raises(Exception, match=r"stage 0.*Unknown.*register_boundary_type") as caught:
        run_on_threads(2, lambda world: step(world, Unknown()))
    assert "DataError" in str(caught.value) or isinstance(caught.value, DataError)
    assert run_on_threads(2, lambda world: step(world, Registered(2.0))) == [4.0, 4.0]


def test_threads_refuse_a_container_that_others_cannot_find():
    local = collections.namedtuple("local", "left right")

    class Wraps(Gives):
        def forward(self, x):
            return local(self.weight * x, 1)

    def body(world):
        layers = [LayerSpec(Wraps, 1), LayerSpec(Takes)]
        pipe = Pipeline(layers, lambda y, t: (y - t).square().mean(), stages=2, world=world)
        return pipe.step(torch.ones(2, 1), torch.zeros(2, 1)).loss

    with pytest.raises(Exception, match=r"stage 0.*local"):
        run_on_threads(2, body)


def test_a_part_that_every_micro_batch_gets_travels():
    """Ranks exchange batches of which parts are marked, as `verify` does."""
    sent = {"mask": whole(torch.eye(2)), "x": torch.ones(3)}
    came = loads(dumps(sent, "batch"), "batch")
    assert type(came["mask"]) is type(sent["mask"])
    assert torch.equal(came["mask"].value, torch.eye(2)) and torch.equal(came["x"], sent["x"])
