"""Small files that anybody may have changed: one error with the path, and nothing half done."""

import copy
import hashlib
import json
import os
import pickle
import shutil
import threading

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.config import compose_config
from gpipe_hpc.draw import draw
from gpipe_hpc.errors import CheckpointError, GpipeError, RunFolderError
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner.cluster_file import read_cluster
from tests.support import train_here

MANIFEST = "gpipe_hpc.json"


class Keeping(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.kept = {"n": 3, "t": (torch.ones(2), [None, 0.5])}

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def trained(steps=1, world=None):
    torch.manual_seed(0)
    layers = [LayerSpec(Keeping, 3, 3), LayerSpec(nn.BatchNorm1d, 3), LayerSpec(nn.Linear, 3, 3)]
    pipe = Pipeline(layers, nn.MSELoss(), microbatches=2, recompute="never", world=world)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    inputs = torch.arange(12.0).reshape(4, 3)
    for _ in range(steps):
        pipe.step(inputs, inputs.flip(0))
        optimizer.step()
    return pipe, optimizer


def state_of(pipe, optimizer):
    found = [p.detach().clone() for p in pipe.parameters()]
    found += [b.clone() for s in pipe.stages.values() for b in s.named_buffers().values()]
    for parameter in pipe.parameters():
        found += [value.clone() for value in optimizer.state[parameter].values()]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return found, (options, pipe.steps_done, pipe.loss_weight)


def is_same(one, other):
    return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "kept"
    pipe, optimizer = trained(2)
    pipe.save(folder, optimizer, {"position": 7, "typed": {1: (2,)}})
    return folder, state_of(pipe, optimizer)


def forged(folder, facts):
    """Write a manifest with the digest of its own bytes, as somebody would who means it."""
    body = json.dumps({k: v for k, v in facts.items() if k != "digest"}, indent=1)
    body = body.removesuffix("\n}").encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / MANIFEST).write_bytes(body + b',\n "digest": "%s"\n}\n' % digest)


def places(value, at=()):
    """Yield the place of each value; of lists, and of what is kept by parameter, of the first."""
    if at:
        yield at
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    is_alike = isinstance(value, list) or any("layers." in str(key) for key in value)
    for key, each in items[:2] if is_alike else items:
        if isinstance(each, dict | list):
            yield from places(each, (*at, key))
        else:
            yield (*at, key)


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


CHANGES = {
    "null": None,
    "true": True,
    "negative": -5,
    "huge": 10**400,
    "fraction": 0.37,
    "infinite": float("inf"),
    "text": "other",
    "list": [],
    "list of lists": [[1], {"a": 2}],
    "object": {"other": 1},
    "deep": deep(300),
}


@pytest.mark.parametrize("change", [*CHANGES, "without"])
def test_a_single_change_of_a_manifest_loads_right_or_changes_nothing(tmp_path, saved, change):
    """Some ended in tracebacks, and some of those came when weights were already overwritten."""
    folder, right = saved
    facts = json.loads((folder / MANIFEST).read_text())
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    pipe, optimizer = trained()
    before = state_of(pipe, optimizer)
    num_refused = num_loaded = 0
    for at in sorted(set(places(facts)), key=repr):
        if at == ("digest",):
            continue
        changed = json.loads(json.dumps(facts))
        holder = changed
        for key in at[:-1]:
            holder = holder[key]
        if change == "without":
            del holder[at[-1]]
        else:
            holder[at[-1]] = CHANGES[change]
        forged(broken, changed)
        try:
            pipe.load(broken, optimizer)
        except CheckpointError as error:
            assert str(broken) in str(error), at
            assert is_same(state_of(pipe, optimizer), before), at
            num_refused += 1
        else:
            # What was changed is not loaded, or may be any such value.
            found = state_of(pipe, optimizer)
            assert all(map(torch.equal, found[0], right[0])), at
            free = ("steps_done", "loss_weight", "extra", "options", "num_layers", "typed")
            assert found[1] == right[1] or set(at) & set(free), at
            inputs = torch.arange(12.0).reshape(4, 3)
            pipe.step(inputs, inputs)
            optimizer.step()
            num_loaded += 1
            pipe, optimizer = trained()
    assert num_refused > 20 and num_loaded > 0


def doubling(levels):
    """Return a pickle whose key is a tuple of tuples, each of which has the one before twice."""
    raw = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE
    return (
        raw
        + (pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2) * levels
        + (pickle.NONE + pickle.SETITEM + pickle.STOP)
    )


METADATA = {
    "doubling": doubling(60),
    "wide": pickle.dumps({tuple(range(5000)): None}, 2),
    "deep": pickle.PROTO + b"\x02" + pickle.EMPTY_LIST * 10**6 + pickle.APPEND * (10**6 - 1) + b".",
    "a set": pickle.dumps({1, 2}),
    "bytes": pickle.dumps(b"x" * 100),
    "an instance": b"(ios\nsystem\n.",
    "persistent": b"Pabc\n.",
    "extension": b"\x80\x02\x82\x01.",
    "long": pickle.PROTO + b"\x02" + pickle.LONG4 + b"\xff\xff\xff\x7f" + b".",
    "a frame": pickle.PROTO + b"\x04" + pickle.FRAME + b"\xff" * 8,
    "recursive": pickle.PROTO + b"\x02]q\0h\0a.",
    "empty": b"",
    "truncated": pickle.dumps({"a": 1})[:-3],
}


@pytest.mark.parametrize("content", METADATA)
def test_a_list_of_tensors_that_torch_would_not_write_is_refused(tmp_path, saved, content):
    """130 bytes took for ever to be hashed."""
    folder, _ = saved
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    raw = METADATA[content]
    (broken / ".metadata").write_bytes(raw)
    facts = json.loads((folder / MANIFEST).read_text())
    digests = [hashlib.sha256(raw).hexdigest()] if raw else []
    facts["files"][".metadata"] = {"bytes": len(raw), "sha256": digests}
    forged(broken, facts)
    pipe, optimizer = trained()
    before = state_of(pipe, optimizer)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        pipe.load(broken, optimizer)
    assert is_same(state_of(pipe, optimizer), before)


def forged_list(folder, broken, change):
    """Write a list of tensors that `change` was applied to, and a manifest that fits it."""
    metadata = FileSystemReader(folder).read_metadata()
    facts = json.loads((folder / MANIFEST).read_text())
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    change(metadata, places, facts["tensors"])
    raw = pickle.dumps(metadata)
    (broken / ".metadata").write_bytes(raw)
    facts["files"][".metadata"] = {"bytes": len(raw), "sha256": [hashlib.sha256(raw).hexdigest()]}
    forged(broken, facts)


def moved(name, field, value):
    def change(metadata, places, tensors):
        setattr(places[name], field, value(getattr(places[name], field)))

    return change


def exchanged(one, other, *fields):
    def change(metadata, places, tensors):
        for field in fields:
            own = getattr(places[one], field)
            setattr(places[one], field, getattr(places[other], field))
            setattr(places[other], field, own)

    return change


def described_as(name, dtype, shape, is_listed=True):
    def change(metadata, places, tensors):
        entry = metadata.state_dict_metadata[name]
        shapes = torch.Size(entry.size if shape is None else shape)
        entry.properties.dtype = dtype
        entry.size = shapes
        entry.chunks[0].sizes = shapes
        entry.chunks[0].offsets = torch.Size([0] * len(shapes))
        if is_listed:
            tensors[name] = {"shape": list(shapes), "dtype": str(dtype).removeprefix("torch.")}

    return change


WEIGHT, BIAS = "model.layers.0.weight", "model.layers.2.bias"
MOMENT, STATE = "optimizer.layers.0.weight.exp_avg", "state.layers.0._extra_state.0"
CHANGED = {
    "offset": [
        *(lambda n: n + 1, lambda n: n - 1, lambda n: n + 64, lambda n: 0, lambda n: 10**9),
        *(lambda n: 2**70, lambda n: -1, lambda n: float(n), lambda n: None, lambda n: "0"),
    ],
    "length": [
        *(lambda n: n + 1, lambda n: n - 1, lambda n: n // 2, lambda n: 2 * n, lambda n: 1),
        *(lambda n: 0, lambda n: -n, lambda n: 10**9, lambda n: 2**70, lambda n: None),
    ],
    "relative_path": [
        *(lambda f: ".metadata", lambda f: MANIFEST, lambda f: "nothing", lambda f: ""),
        *(lambda f: "..", lambda f: "../" + f, lambda f: None, lambda f: 3, lambda f: "\0"),
        lambda f: {"__0_0.distcp": "__1_0.distcp", "__1_0.distcp": "__0_0.distcp"}[f],
    ],
}
PAIRS = ((WEIGHT, BIAS), (BIAS, STATE), (STATE, MOMENT))  # of equal shapes only the weights tell
FORGED = {
    **{
        f"{name}: {field} {i}": moved(name, field, value)
        for name in (WEIGHT, BIAS, MOMENT, STATE)
        for field, values in CHANGED.items()
        for i, value in enumerate(values)
    },
    **{
        f"{one}, {other}: {fields}": exchanged(one, other, *fields)
        for one, other in PAIRS
        for fields in (
            *(("offset",), ("length",), ("relative_path",), ("offset", "length")),
            ("offset", "length", "relative_path"),
        )
    },
    **{
        f"{name}: {dtype} {shape} {is_listed}": described_as(name, dtype, shape, is_listed)
        for name in (WEIGHT, BIAS, MOMENT, STATE)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int32)
        for shape in (None, [1], [9], [2, 2], [10**9], [2**40, 2**40])
        for is_listed in (True, False)
    },
}


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    """Return a checkpoint whose tensors lie in two files, and the state that it holds."""
    folder = tmp_path_factory.mktemp("two") / "kept"

    def body(world):
        pipe, optimizer = trained(2, world)
        pipe.save(folder, optimizer, {"position": 7})

    run_on_threads(2, body)
    pipe, optimizer = trained()
    pipe.load(folder, optimizer)
    return folder, state_of(pipe, optimizer)


def test_a_forged_list_of_tensors_loads_right_or_changes_nothing(tmp_path, saved_by_two):
    """Weights were half overwritten when the first place with another content was read."""
    folder, right = saved_by_two
    assert {"__0_0.distcp", "__1_0.distcp"} < {each.name for each in folder.iterdir()}
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    pipe, optimizer = trained()
    before = state_of(pipe, optimizer)
    wrong = []
    for what, change in FORGED.items():
        forged_list(folder, broken, change)
        try:
            pipe.load(broken, optimizer)
        except CheckpointError as error:
            if str(broken) not in str(error) or not is_same(state_of(pipe, optimizer), before):
                wrong.append((what, str(error)))
        else:
            if not is_same(state_of(pipe, optimizer), right):
                wrong.append((what, "loaded"))
            pipe, optimizer = trained()
    assert not wrong, wrong
    forged_list(folder, broken, lambda *_: None)
    pipe.load(broken, optimizer)
    assert is_same(state_of(pipe, optimizer), right)


def in_time(action, seconds=20.0):
    """Run what could wait without end in a thread; return what it raised."""
    found = []

    def body():
        try:
            action()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return found[0] if found else None


MANIFESTS = {
    "bytes": b"\x80\xff",
    "deep": b"[" * 10**6,
    "many values": b"[" + b"0," * 20_000_000 + b"0]",
    "digits": b'{"steps_done": ' + b"9" * 6000 + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("content", [*MANIFESTS, "a pipe", "a folder", "a device"])
def test_a_manifest_that_is_none_is_refused_in_time(tmp_path, saved, content):
    folder, _ = saved
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / MANIFEST).unlink()
    if content == "a pipe":
        os.mkfifo(broken / MANIFEST)
    elif content == "a folder":
        (broken / MANIFEST).mkdir()
    elif content == "a device":
        (broken / MANIFEST).symlink_to("/dev/zero")
    else:
        (broken / MANIFEST).write_bytes(MANIFESTS[content])
    pipe, optimizer = trained()
    error = in_time(lambda: pipe.load(broken, optimizer))
    assert isinstance(error, CheckpointError) and str(broken) in str(error)


HOSTILE = {
    "aliases in a doubling tree": "a0: &a0 [1, 1]\n"
    + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "an anchor": "hosts: &a 2\n",
    "deep lists": "hosts: " + "[" * 10**5,
    "deep keys": "".join("  " * i + "a:\n" for i in range(300)),
    "a date": "hosts: 2026-01-01\nlinks: 2026-01-01 10:00:00\nmeasured: 2026-01-01\n",
    "a tag": "hosts: !!python/object/apply:os.system [true]\n",
    "a tagged number": "hosts: !!int '1'\n",
    "digits": "hosts: " + "9" * 6000 + "\n",
    "hexadecimal": "hosts: 0x" + "f" * 6000 + "\n",
    "sixties": "hosts: " + "59:" * 50_000 + "59\n",
    "a key twice": "hosts: 1\nhosts: 2\n",
    "a list as a key": "? [a, b]\n: 1\n",
    "a carriage return": "hosts: 1\rlinks: 2\r",
    "bytes": b"\xff\xfe\x00",
    "zeros": b"\0" * 1000,
    "a text": "hosts",
    "empty": "",
    "two documents": "a: 1\n---\nb: 2\n",
    "large": b"#" * (8 * 2**20 + 1),
}
FILES = ("plan.links", "plan.prices", "plan.calibration")


def planned(*words):
    words = ["model=mlp", "data=synthetic_vectors", "plan.flops_per_s=1e12", *words]
    return make_plan(compose_config(words))


def assert_refused(action, path):
    error = in_time(action)
    assert isinstance(error, GpipeError), error
    assert str(path) in str(error) and len(str(error)) < 2000
    return str(error)


@pytest.mark.parametrize("setting", FILES)
@pytest.mark.parametrize("content", [*HOSTILE, "a pipe", "a folder"])
def test_a_file_of_a_plan_that_is_hostile_is_refused_in_time(tmp_path, setting, content):
    """Some took gigabytes or hung, some ended in tracebacks."""
    path = tmp_path / "file.yaml"
    if content == "a pipe":
        os.mkfifo(path)
    elif content == "a folder":
        path.mkdir()
    else:
        raw = HOSTILE[content]
        path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    assert_refused(lambda: planned("pipeline.stages=2", f"{setting}={path}"), path)


LINKS = {
    "hosts": 2,
    "ranks_per_host": 1,
    "links": {
        "within": {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9},
        "between": {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9},
        "ranks": [{"source": 0, "destination": 1, "latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9}],
    },
    "slow_ranks": {1: 1.5},
}


@pytest.mark.parametrize("change", CHANGES)
def test_single_changes_of_links_are_refused_or_planned(tmp_path, change):
    path = tmp_path / "links.yaml"
    for at in places(LINKS):
        changed = copy.deepcopy(LINKS)
        holder = changed
        for key in at[:-1]:
            holder = holder[key]
        holder[at[-1]] = copy.deepcopy(CHANGES[change])
        path.write_text(yaml.safe_dump(changed))
        error = in_time(lambda: read_cluster(path))
        assert error is None or isinstance(error, GpipeError), (at, error)


@pytest.mark.parametrize(
    "text",
    [
        "hosts: 300000000\nranks_per_host: 1\n",
        "hosts: 10\nranks_per_host: 300000000\n",
        "hosts: [300000000, 1]\n",
    ],
)
def test_more_ranks_than_anybody_has_are_refused(tmp_path, text):
    path = tmp_path / "links.yaml"
    path.write_text(text + yaml.safe_dump({"links": LINKS["links"]}))
    assert "at most 1,000,000 ranks" in assert_refused(lambda: read_cluster(path), path)


def drawn(path):
    words = ["pipeline.stages=1", "pipeline.microbatches=1", "pipeline.schedule=file"]
    return draw(compose_config([*words, f"pipeline.options.path={path}"]))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_table_may_have_the_line_ends_of_any_system(tmp_path, end):
    path = tmp_path / "table.csv"
    path.write_bytes(f"0F0,0B0{end}".encode())
    assert drawn(path)


@pytest.mark.parametrize(
    "text",
    [
        "0F0," + "x" * 200_000,
        "0F0,0B" + "9" * 6000,
        "9" * 6000 + "F0",
        "999999999F0,0B0",
        "0F999999999,0B0",
        "0F0,0B0\nskips,0>" + "9" * 6000,
        '"0F0\n0B0',
        "0F0,\0,0B0",
        "(" * 10_000,
        "\xff",
        "",
    ],
)
def test_a_table_that_is_hostile_is_refused_in_time(tmp_path, text):
    """Carriage returns and long cells ended in tracebacks."""
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode("latin-1"))
    assert_refused(lambda: drawn(path), path)


LOCKS = {
    "bytes": b"\xff\xfe",
    "deep": b"[" * 10**6,
    "a list": b"[]",
    "a text for a process": b'{"pid": "text"}',
    "a large process": b'{"pid": 1' + b"0" * 100 + b"}",
    "a path as token": b'{"token": "../../x"}',
    "digits": b"9" * 6000,
}
OWNER = {
    "token": "ab",
    "host": "elsewhere",
    "machine": "another",
    "pid": 1,
    "pid_started": 0,
    "job": None,
    "since": "now",
}


@pytest.mark.parametrize("content", [*LOCKS, "a pipe", "a folder", "a link", "a link to nothing"])
def test_a_damaged_lock_ends_in_one_message_or_is_taken_over(tmp_path, content):
    """A pipe hung, a link to nothing and a text in place of a number ended in tracebacks."""
    lock = tmp_path / "run" / "LOCK"
    lock.parent.mkdir()
    is_file = content in LOCKS
    if content == "a pipe":
        os.mkfifo(lock)
    elif content == "a folder":
        lock.mkdir()
    elif not is_file:
        lock.symlink_to(tmp_path if content == "a link" else tmp_path / "nothing")
    else:
        raw = LOCKS[content]
        changed = json.loads(raw) if raw.startswith(b"{") else None
        lock.write_bytes(raw if changed is None else json.dumps(OWNER | changed).encode())
        # Nobody has touched it for long, so whoever it was is dead.
        os.utime(lock, (1.0, 1.0))
    words = ["model=mlp", "data=synthetic_vectors", "train.steps=1", "train.batch_size=4"]
    run = tmp_path / "run"
    error = in_time(lambda: train_here(1, *words, f"run.dir={run}"), 60)
    if is_file:
        assert error is None
        assert json.loads((run / "summary.json").read_text())["last_step"] == 1
        assert not lock.exists()
    else:
        assert isinstance(error, RunFolderError) and "LOCK" in str(error), error
        assert os.path.lexists(lock)


@pytest.mark.parametrize("kind", ["a pipe", "a folder"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_a_run_does_not_wait_for_a_file_of_an_earlier_start(tmp_path, kind, name):
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / name) if kind == "a pipe" else (run / name).mkdir()
    words = ["model=mlp", "data=synthetic_vectors", "train.steps=1", "train.batch_size=4"]
    assert_refused(lambda: train_here(1, *words, f"run.dir={run}"), run)
