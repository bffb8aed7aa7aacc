"""Runs on small files: every kind of data, resuming, corrupt samples, and who reads what."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from gpipe_hpc import run_on_threads
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.data import ShuffledSampler, open_data
from gpipe_hpc.data.array_files import StoredArray
from gpipe_hpc.errors import CheckpointError, DataError
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer import session as session_module
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.signals import StopRequest
from gpipe_hpc.trainer.start import data as start_data
from gpipe_hpc.trainer.start import open_session
from tests.support import losses

COMMON = (
    "pipeline.partition=uniform",
    "train.batch_size=6",
    "train.validate_every=0",
    "train.validate_batches=1",
    "train.steps=2",
    "checkpoint.every=0",
    "lr.warmup_steps=0",
    "optimizer.lr=0.01",
)
CONVOLUTIONS = (
    "model=vgg16",
    "model.num_convs=[1,1]",
    "model.width=2",
    "model.hidden=4",
    "model.dropout=0",
)
TOKENS = ("model=gpt", "model.num_layers=1", "model.width=8", "model.num_heads=2", "data.seq_len=8")
MLP = ("model=mlp", "model.widths=[64,8,10]")
CODED = (
    *("data.height=8", "data.width=8", "data.resize=10", "data.num_classes=3", "data.workers=1"),
    *CONVOLUTIONS,
)
TEXTS = [f"document number {number}" for number in range(30)]


class NoisyItems:
    """Data set whose items have random noise."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((64,), index / 10) + 0.1 * torch.randn(64), index % 10


def prepare(files, kind: str, root: Path) -> tuple[str, ...]:
    """Write small files of a kind; return settings for the files and for a suitable model."""
    match kind:
        case "idx" | "fashion_mnist":
            files.write_idx(root, packed=kind == "fashion_mnist")
            return (f"data.path={root}", "data.height=8", "data.width=8", *CONVOLUTIONS)
        case "cifar10" | "cifar100":
            getattr(files, f"write_{kind}")(root)
            return (f"data.path={root}", *CONVOLUTIONS)
        case "digits":
            return CONVOLUTIONS
        case "image_folder":
            return (f"data.path={files.write_folder(root)}", *CODED)
        case "image_shards":
            files.write_shards(root, 2, 20)
            return (f"data.paths=[{root}]", "data.validation_percent=20", *CODED)
        case "jsonl":
            files.write_jsonl(root / "a.jsonl", TEXTS)
            return (f"data.paths=[{root}/*]", "data.validation_percent=20", *TOKENS)
        case "tokens":
            (root / "a.bin").write_bytes((np.arange(900, dtype="<u2") % 97).tobytes())
            return (f"data.paths=[{root}]", "data.vocab_size=97", *TOKENS)
        case "text":
            (root / "a.txt").write_text("some text " * 100)
            return (f"data.paths=[{root}/a.txt]", *TOKENS)
        case "python_source":
            for number in range(9):
                (root / f"{number}.py").write_text(f"number = {number}\n" * 30)
            return (f"data.root={root}", "data.validation_percent=40", *TOKENS)
        case "arrays":
            np.save(root / "x.npy", np.random.default_rng(0).random((40, 64)))
            np.save(root / "y.npy", np.arange(40) % 10)
            return (f"data.inputs={root}/x.npy", f"data.targets={root}/y.npy", *MLP)
        case "own":
            return (f"data._target_={__name__}.NoisyItems", *MLP)
        case "synthetic":
            return TOKENS
        case "synthetic_vectors":
            return ("model=mlp",)
        case "synthetic_masks":
            return ("model=unet_tiny", "data.height=16", "data.width=16")
        case "synthetic_images":
            return ("data.height=8", "data.width=8", "data.num_classes=3", *CONVOLUTIONS)
    pytest.fail(f"no small files are written here for data={kind}")


def train(config: Config, num_ranks: int = 1) -> None:
    check_config(config, num_ranks)
    codes = run_on_threads(num_ranks, lambda world: run_training(config, world, StopRequest()))
    assert codes == [0] * num_ranks
    assert not [each.name for each in threading.enumerate() if each.name.startswith("reader")]


def lines(run: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl about steps and validations, without those about saves."""
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in told if line.keys() & {"loss", "validation_loss"}]


CONF = Path(__file__).resolve().parents[2] / "conf" / "data"


KINDS = sorted(path.stem for path in CONF.glob("*.yaml"))
# Slow tests: these formats have other tests, or a similar kind runs in the fast tests.
LATER = ("cifar100", "fashion_mnist", "synthetic", "synthetic_vectors", "text", "python_source")
MARKS = dict.fromkeys(LATER, pytest.mark.slow)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in KINDS])
def test_every_kind_trains_two_steps_and_validates(files, tmp_path, kind):
    (tmp_path / "data").mkdir()
    settings = prepare(files, kind, tmp_path / "data")
    config = compose_config([f"data={kind}", *COMMON, *settings, f"run.dir={tmp_path}/run"])
    train(config, 2)
    first, second, last = lines(tmp_path / "run")
    assert first["loss"] > 0 and second["loss"] > 0 and first["loss"] != second["loss"]
    assert last["validation_loss"] > 0
    assert ("corrupt_samples" in first) is False


class Read:
    """Recorder of the training images of each replica by step; all pixels of image i are i."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_step: dict[int, dict[int, list[int]]] = {}
        original = session_module.Session.next_batch

        def next_batch(session):
            batch = original(session)
            if batch.inputs is not None:
                images = (batch.inputs.mean((1, 2, 3)) * 255).round().int().tolist()
                step = self.by_step.setdefault(session.pipe.steps_done, {})
                step[session.pipe.replica] = images
            return batch

        monkeypatch.setattr(session_module.Session, "next_batch", next_batch)

    def samples(self, *steps: int) -> list[int]:
        """Return the sample indices of these steps, in order of replicas."""
        taken = (self.by_step[step] for step in steps)
        return [index for step in taken for replica in sorted(step) for index in step[replica]]


def changed(config: Config, *settings: str) -> Config:
    """Return a copy of a config with other settings, which is faster than composing a new one."""
    copy = deepcopy(config)
    for setting in settings:
        name, _, value = setting.partition("=")
        section, _, field = name.partition(".")
        vars(getattr(copy, section))[field] = yaml.safe_load(value)
    return copy


@pytest.fixture
def numbered(files, tmp_path: Path) -> Callable[..., Config]:
    """Return a function from settings to a config for 20 images that show their index."""
    files.write_idx(tmp_path / "data", 20, 6)
    size = ("data.height=8", "data.width=8", "data.mean=[0]", "data.std=[1]", "train.steps=9")
    where = f"data.path={tmp_path}/data"
    config = compose_config(["data=idx", *COMMON, *CONVOLUTIONS, *size, where])
    return lambda run, *settings: changed(config, f"run.dir={tmp_path}/{run}", *settings)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_run_resumes_in_mid_epoch_with_other_replicas(numbered, tmp_path, monkeypatch, workers):
    """An epoch has steps of 6, 6, 6 and 2 samples; the first run stops after two of them."""
    reader = f"data.workers={workers}"
    whole = Read(monkeypatch)
    train(numbered("whole"))
    parts = Read(monkeypatch)
    train(numbered("parts", reader, "train.stop_at=2"))
    train(numbered("parts", reader, "train.stop_at=5", "pipeline.replicas=2"), 2)
    train(numbered("parts", reader, "pipeline.stages=2"), 2)
    assert sorted(parts.samples(0, 1, 2, 3)) == list(range(20))
    assert sorted(parts.samples(4, 5, 6, 7)) == list(range(20))
    assert parts.samples(*range(9)) == whole.samples(*range(9))
    assert parts.samples(*range(4)) == ShuffledSampler(20, 20, seed=0).batch(0)[0]
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert [line["position"] for line in lines(tmp_path / "parts") if "position" in line] == [
        *(6, 12, 18, 20, 26, 32, 38, 40, 46)
    ]


def test_run_on_synthetic_data_resumes_with_other_workers(tmp_path):
    """`checkpoint.resume=auto` was refused: "the content of the data"."""
    config = compose_config(["data=synthetic_vectors", *MLP, *COMMON, "train.steps=3"])
    train(changed(config, f"run.dir={tmp_path}/whole"))
    parts = f"run.dir={tmp_path}/parts"
    train(changed(config, parts, "train.stop_at=2", "data.workers=1"))
    train(changed(config, parts, "data.prefetch=3"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["arrays", "own"])
def test_own_data_go_on_in_mid_epoch_in_another_layout(files, tmp_path, kind):
    """Random augmentations of items are the same on every rank and after a restart."""
    (tmp_path / "data").mkdir()
    words = [*prepare(files, kind, tmp_path / "data"), "train.steps=9", "train.batch_size=16"]
    config = compose_config([f"data={kind}", *COMMON, *words])
    train(changed(config, f"run.dir={tmp_path}/whole"))
    parts = f"run.dir={tmp_path}/parts"
    train(changed(config, parts, "train.stop_at=4", "pipeline.replicas=2"), 2)
    train(changed(config, parts, "pipeline.stages=2"), 2)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize("change", ["train.batch_size=5", "train.seed=1"])
def test_other_order_than_the_checkpoints_is_refused_or_begun_anew(
    numbered, tmp_path, monkeypatch, change
):
    """Regression: a changed order was accepted; some samples were repeated, others skipped."""
    train(numbered("first", "train.stop_at=2"))
    resume = f"checkpoint.resume={tmp_path}/first"
    with pytest.raises(CheckpointError, match=f"{change.replace('=', ': was [06], is ')}.*=new"):
        train(numbered("refused", change, resume))
    anew = numbered("anew", change, resume, "checkpoint.data=new", "train.stop_at=4")
    read = Read(monkeypatch)
    train(anew)
    sampler = ShuffledSampler(20, anew.train.batch_size, anew.train.seed)
    expected = sampler.batch(0)[0] + sampler.batch(sampler.batch(0)[1])[0]
    assert read.samples(2, 3) == expected
    # A second start with the same command resumes the new order.
    again = changed(anew, "checkpoint.resume=auto", "train.stop_at=5")
    train(again)
    assert lines(tmp_path / "anew")[-2]["position"] == 3 * sampler.batch_size
    train(numbered("any", change, resume, "checkpoint.data=any", "train.stop_at=3"))
    assert lines(tmp_path / "any")[0]["position"] == 12 + sampler.batch_size


def test_refused_data_leave_the_run_as_it_was(numbered, tmp_path):
    """Regression: later checkpoints were moved away before the data was checked."""
    train(numbered("run", "train.stop_at=4", "checkpoint.every=2", "checkpoint.keep=9"))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(kept) == 2
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/{kept[0]}"
    with pytest.raises(CheckpointError, match=r"checkpoint\.data=new"):
        train(numbered("run", "train.batch_size=5", back))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == kept


def test_validation_alone_takes_other_data(numbered, tmp_path):
    train(numbered("first", "train.stop_at=2"))
    resume = f"checkpoint.resume={tmp_path}/first"
    train(numbered("alone", "train.steps=0", "train.batch_size=3", resume))
    assert "validation_loss" in lines(tmp_path / "alone")[-1]


@pytest.mark.slow
def test_augmented_images_do_not_depend_on_layout_or_readers(files, tmp_path):
    """Losses are bitwise equal for two stages and for two workers, and close with replicas."""
    files.write_cifar10(tmp_path / "data")
    common = ("data=cifar10", *COMMON, *CONVOLUTIONS, f"data.path={tmp_path}/data")
    layouts = {
        "one": ((), 1),
        "stages": (("pipeline.stages=2",), 2),
        "readers": (("data.workers=2", "data.prefetch=1"), 1),
        "grid": (("pipeline.stages=2", "pipeline.replicas=2", "pipeline.microbatches=4"), 4),
    }
    for name, (settings, num_ranks) in layouts.items():
        layout = (*settings, "train.steps=5", f"run.dir={tmp_path}/{name}")
        train(compose_config([*common, "train.batch_size=8", *layout]), num_ranks)
    expected = losses(tmp_path / "one")
    assert len(set(expected)) == 5
    for name in ("stages", "readers"):
        assert losses(tmp_path / name) == expected
    assert losses(tmp_path / "grid") == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def damaged(files, tmp_path: Path) -> Callable[..., Config]:
    """Return a function from settings to a config for 12 images, three of which are damaged."""
    root = files.write_folder(tmp_path / "data")
    for name in ("train/n00/001.png", "train/n02/002.JPEG", "train/n02/003.png"):
        (root / name).write_bytes(b"\x89PNG but no more")
    size = (f"data.path={root}", "data.workers=0", "train.batch_size=5", "train.steps=6")
    config = compose_config(["data=image_folder", *COMMON, *CODED, *size])
    return lambda run, *settings: changed(config, f"run.dir={tmp_path}/{run}", *settings)


@pytest.mark.slow
def test_corrupt_images_are_replaced_alike_on_every_layout(damaged, tmp_path, caplog):
    """Ranks that read targets use the same replacements; a wrong class would change the loss."""
    skip = ("data.corrupt=skip", "train.validate_every=3")
    layouts = {
        "one": ((), 1),
        "stages": (("pipeline.stages=3", "data.workers=1"), 3),
        "grid": (("pipeline.stages=2", "pipeline.replicas=2"), 4),
        "chimera": (("pipeline.schedule=chimera",), 2),
    }
    for name, (settings, num_ranks) in layouts.items():
        train(damaged(name, *skip, *settings), num_ranks)
    expected = losses(tmp_path / "one")
    for name in layouts:
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5), name
        counts = [x["corrupt_samples"] for x in lines(tmp_path / name) if "loss" in x]
        assert counts[0] <= counts[1] <= counts[2] == counts[-1] == 3
    assert "skipped 3 corrupt samples" in caplog.text
    assert "corrupt sample 3 of at most 100: data: " in caplog.text


def test_target_of_a_replaced_image_is_that_of_its_substitute(damaged):
    """The last stage reads the targets of the images that replace the damaged ones."""
    config = damaged("run", "data.corrupt=skip")
    data = open_data(config.data).train
    names = list(data.store.names)
    # Replacements by index: 1 -> 2; 10 -> 11 -> 0, since 11 is damaged too.
    assert [names[i] for i in (1, 10, 11)] == ["n00/001.png", "n02/002.JPEG", "n02/003.png"]
    seen = []

    def body(world):
        run = RunIdentity(Path(config.run.dir), "name", False)
        session = open_session(config, world, run, None)
        for _ in range(3):
            planned = session.sampler.batch(session.position)
            batch = session.next_batch()
            seen.append((world.rank, planned[0], batch.targets))
            session.position = planned[1]
        session.close()

    run_on_threads(2, body)
    substitutes = {1: 2, 10: 0, 11: 0}
    checked = 0
    for rank, indices, targets in seen:
        if rank == 0:
            assert targets is None
            continue
        used = [substitutes.get(index, index) for index in indices]
        assert targets.tolist() == [index // 4 for index in used]
        checked += used != indices
    assert checked


@pytest.mark.slow
def test_count_of_corrupt_images_is_kept_over_a_resumption(damaged, tmp_path):
    train(damaged("run", "data.corrupt=skip", "train.stop_at=3"))
    before = lines(tmp_path / "run")[2]["corrupt_samples"]
    assert before == 3
    train(damaged("run", "data.corrupt=skip"), 2)
    assert [x["corrupt_samples"] for x in lines(tmp_path / "run") if x["step"] > 3 and "loss" in x]
    assert lines(tmp_path / "run")[-2]["corrupt_samples"] == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_image_stops_the_run_and_is_named(damaged, workers):
    with pytest.raises(DataError, match=r"/n0\d/00\d\.\w+ is corrupt"):
        train(damaged("run", f"data.workers={workers}"), 2)
    assert not [each.name for each in threading.enumerate() if each.name.startswith("reader")]


def test_more_corrupt_images_than_borne_stop_the_run(damaged):
    with pytest.raises(DataError, match=r"data\.max_corrupt=2"):
        train(damaged("run", "data.corrupt=skip", "data.max_corrupt=2"), 2)


def test_only_ranks_that_use_a_thing_read_it(files, tmp_path, monkeypatch):
    """The first rank decodes images, the last reads classes, the middle one opens nothing.

    Rank 0 also reads the targets of one micro-batch, to plan memory.
    """
    calls: list[tuple[str, str]] = []

    def note(what: str) -> None:
        rank = threading.current_thread().name.removesuffix(" at work")
        calls.append((rank, what))

    class Watched:
        def __init__(self, dataset):
            self.dataset = dataset

        def __getattr__(self, name):
            found = getattr(self.dataset, name)
            if name.startswith("read_"):
                note(name)
            return found

    def opened(*arguments):
        note("open")
        source = open_data(*arguments)
        return type(source)(Watched(source.train), Watched(source.validation), source.num_classes)

    monkeypatch.setattr(start_data, "open_data", opened)
    root = files.write_folder(tmp_path / "data")
    settings = (*CODED, "data.workers=0", f"data.path={root}", "pipeline.stages=3")
    train(compose_config(["data=image_folder", *COMMON, *settings, f"run.dir={tmp_path}/run"]), 3)
    assert calls.count(("rank0", "read_targets")) == 1
    assert set(calls) - {("rank0", "read_targets")} == {
        ("rank0", "open"),
        ("rank0", "read_inputs"),
        ("rank2", "open"),
        ("rank2", "read_targets"),
    }


def test_of_arrays_the_first_rank_reads_inputs_and_the_last_targets(files, tmp_path, monkeypatch):
    """Only rank 0 also reads single rows of both arrays, to identify the data."""
    calls: list[tuple[str, str]] = []
    read = StoredArray.rows

    def noted(array, indices):
        if len(indices) > 1:
            rank = threading.current_thread().name.removesuffix(" at work")
            calls.append((rank, array.path.name))
        return read(array, indices)

    monkeypatch.setattr(StoredArray, "rows", noted)
    (tmp_path / "data").mkdir()
    words = (*prepare(files, "arrays", tmp_path / "data"), "model.widths=[64,8,8,10]")
    config = compose_config(["data=arrays", *COMMON, *words, "pipeline.stages=3"])
    train(changed(config, f"run.dir={tmp_path}/run"), 3)
    assert set(calls) == {("rank0", "x.npy"), ("rank2", "y.npy")}


@pytest.mark.slow
def test_data_that_take_long_to_open_end_no_run(files, tmp_path, monkeypatch):
    """Regression: rank 0 indexed data and counted tokens within collectives, which timed out.

    Opening takes longer here than the time limit of a collective.
    """
    original = start_data.open_data

    def opened(*arguments):
        time.sleep(5)
        source = original(*arguments)
        baseline = source.baseline
        monkeypatch.setattr(type(source), "baseline", lambda _: time.sleep(5) or baseline())
        return source

    monkeypatch.setattr(start_data, "open_data", opened)
    (tmp_path / "a.txt").write_text("some text " * 100)
    settings = ("data=text", *COMMON, f"data.paths=[{tmp_path}/a.txt]", *TOKENS)
    config = compose_config([*settings, f"run.dir={tmp_path}/run"])
    check_config(config, 2)
    codes = run_on_threads(2, lambda world: run_training(config, world, StopRequest()), timeout_s=4)
    assert codes == [0, 0] and len(losses(tmp_path / "run")) == 2


def test_ranks_that_see_other_files_do_not_start(files, tmp_path, monkeypatch):
    """Ranks whose copies of the data differ raise an error at the start."""
    root = files.write_folder(tmp_path / "data")
    original = start_data.open_data

    def opened(config, seed, spare):
        if threading.current_thread().name.startswith("rank1"):
            config.path = str(files.write_folder(tmp_path / "other", per_class=5))
        return original(config, seed, spare)

    monkeypatch.setattr(start_data, "open_data", opened)
    settings = (*CODED, f"data.path={root}", f"run.dir={tmp_path}/run")
    with pytest.raises(ValueError, match="expected the same data on every rank"):
        train(compose_config(["data=image_folder", *COMMON, *settings]), 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_that_reads_ahead_leaves_at_once_when_told_to(start, tiny, until, number):
    command = start(*tiny, "train.steps=100000", "run.dir=run", "data.workers=2")
    until(lambda: re.search(r"step +\d+/100000", command.output), 60, "steps were done")
    command.signal(number)
    assert command.wait(20).code == 75


ITEMS = """
class Items:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((64,), float(index)), index % 10
"""


@pytest.mark.slow
def test_processes_that_read_outlive_the_signal_that_stops_the_run(start, until, tmp_path):
    """Regression: a signal to all processes of a job ended the workers and failed the last step."""
    (tmp_path / "users_items.py").write_text(f"import torch\n\n{ITEMS}")
    words = ("data=own", "data._target_=users_items.Items", "data.workers=2", "train.steps=100000")
    command = start(*MLP, *COMMON[:-4], *words, "run.dir=run")
    until(lambda: re.search(r"step +\d+/100000", command.output), 90, "steps were done")
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    readers = [
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(readers) == 2
    for reader in readers:
        os.kill(reader, signal.SIGTERM)
    command.signal(signal.SIGTERM)
    command.wait(30)
    assert command.code == 75, command.output
    until(lambda: not any(Path(f"/proc/{reader}").exists() for reader in readers), 20, "all ended")
