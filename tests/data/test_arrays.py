"""Tests of data=arrays: rows are read as saved, and unsuitable files are rejected."""

import re
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.config.commands import exit_code_of
from gpipe_hpc.data import identify, open_data
from gpipe_hpc.data.arrays import ArraysConfig
from gpipe_hpc.data.shapes import microbatch
from gpipe_hpc.errors import ConfigError, DataError

ROWS = 40


@pytest.fixture
def arrays():
    numbers = np.random.default_rng(0)
    return numbers.standard_normal((ROWS, 3, 2)), numbers.integers(0, 5, ROWS).astype(np.uint8)


def save(how: str, folder, x, y) -> dict[str, str]:
    """Save both arrays in a format; return the settings that name the files."""
    if how == "npy":
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        return {"inputs": str(folder / "x.npy"), "targets": str(folder / "y.npy")}
    named = {"inputs": x, "targets": y}
    if how == "safetensors":
        save_file({k: torch.from_numpy(v) for k, v in named.items()}, folder / "a.safetensors")
        return {"inputs": str(folder / "a.safetensors")}
    {"npz": np.savez, "compressed": np.savez_compressed}[how](folder / "a.npz", **named)
    return {"inputs": str(folder / "a.npz")}


@pytest.mark.parametrize("how", ["npy", "npz", "compressed", "safetensors"])
def test_rows_are_those_that_were_saved(how, tmp_path, arrays):
    x, y = arrays
    config = ArraysConfig(**save(how, tmp_path, x, y), validation_fraction=0.25)
    source = open_data(config)
    seen = []
    for part, size in ((source.train, 30), (source.validation, 10)):
        assert part.num_samples == size
        inputs, targets = part.read_inputs(range(size)), part.read_targets(range(size))
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
        for one, target in zip(inputs, targets, strict=True):
            row = int(np.argmin(np.abs(x - one.numpy()).sum((1, 2))))
            assert torch.equal(one, torch.from_numpy(x[row]).float())
            assert target == y[row]
            seen.append(row)
    assert sorted(seen) == list(range(ROWS))
    # Validation samples are spread over the file, which may be sorted.
    assert max(seen[30:]) - min(seen[30:]) > 20


def test_no_samples_have_the_shape_of_some(tmp_path, arrays):
    source = open_data(ArraysConfig(**save("npy", tmp_path, *arrays)))
    assert source.train.read_inputs([]).shape == (0, 3, 2)
    assert source.train.read_targets([]).shape == (0,)


@pytest.mark.parametrize(
    ("numbers", "dtype", "loss"),
    [
        (np.zeros(4, np.int16), torch.int64, "classification"),
        (np.zeros((4, 6), np.uint16), torch.int64, "token_cross_entropy"),
        (np.zeros((4, 6, 6), np.int32), torch.int64, "segmentation"),
        (np.zeros((4, 2), np.float64), torch.float32, "mean_squared_error"),
        (np.zeros(4, np.float16), torch.float32, "mean_squared_error"),
        (np.zeros(4, bool), torch.bool, None),
    ],
)
def test_the_targets_say_which_loss_fits(tmp_path, numbers, dtype, loss):
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    np.save(tmp_path / "y.npy", numbers)
    source = open_data(ArraysConfig(str(tmp_path / "x.npy"), str(tmp_path / "y.npy")))
    assert source.loss == loss
    assert source.train.read_targets([0]).dtype == dtype


def test_types_can_be_chosen_and_bytes_may_be_in_any_order(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(8, dtype=">f8").reshape(4, 2))
    np.save(tmp_path / "y.npy", np.asfortranarray(np.arange(8).reshape(4, 2)))
    config = ArraysConfig(
        str(tmp_path / "x.npy"),
        str(tmp_path / "y.npy"),
        inputs_dtype="stored",
        targets_dtype="bfloat16",
        validation_fraction=0.0,
    )
    train = open_data(config).train
    everything = sorted(train.read_inputs(range(4)).tolist())
    assert everything == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert train.read_inputs([0]).dtype == torch.float64
    assert sorted(train.read_targets(range(4)).tolist()) == everything
    assert train.read_targets([0]).dtype == torch.bfloat16
    assert open_data(config).validation.num_samples == 0


def test_files_for_validation(tmp_path, arrays):
    x, y = arrays
    (tmp_path / "held").mkdir()
    held = save("npy", tmp_path / "held", x[:7] + 1, y[:7])
    given = {f"validation_{name}": path for name, path in held.items()}
    source = open_data(ArraysConfig(**save("npy", tmp_path, x, y), **given))
    assert (source.train.num_samples, source.validation.num_samples) == (ROWS, 7)
    assert torch.equal(source.train.read_inputs([5])[0], torch.from_numpy(x[5]).float())
    np.save(tmp_path / "held" / "x.npy", x[:7, :2])
    with pytest.raises(DataError, match=r"40, 3, 2.*7, 2, 2"):
        open_data(ArraysConfig(**save("npy", tmp_path, x, y), **given))


def wrong(folder):
    """Yield (inputs, targets, further settings, expected message) of unsuitable data."""
    np.save(folder / "x.npy", np.zeros((4, 2)))
    np.save(folder / "y.npy", np.zeros(5))
    np.save(folder / "one.npy", np.array(3.0))
    np.save(folder / "none.npy", np.zeros((0, 2)))
    np.save(folder / "things.npy", np.array([{}, {}], object))
    np.save(folder / "texts.npy", np.array(["a", "b"]))
    np.savez(folder / "two.npz", a=np.zeros(4), b=np.zeros(4))
    (folder / "cut.npy").write_bytes((folder / "x.npy").read_bytes()[:-8])
    (folder / "text.txt").write_text("hello")
    torch.save(torch.zeros(4), folder / "saved.pt")
    (folder / "bad.npz").write_bytes((folder / "two.npz").read_bytes()[:200])
    (folder / "bad.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    x = "x.npy"
    yield (
        x,
        "y.npy",
        {},
        r"x\.npy float64\[4, 2\].*y\.npy float64\[5\]",
    )
    yield x, "nowhere.npy", {}, r"data\.targets=.*nowhere\.npy.* is not a file"
    yield "one.npy", "one.npy", {}, r"scalar.*first dimension"
    yield "none.npy", "none.npy", {}, r"no rows"
    yield x, None, {}, r"single unnamed array.*set data\.targets"
    yield x, x, {"inputs_key": "a"}, r"single unnamed array.*remove data\.inputs_key"
    yield "two.npz", x, {}, r"'inputs', got a, b"
    yield "two.npz", x, {"inputs_key": "c"}, r"'c', got a, b.*data\.inputs_key"
    yield "two.npz", None, {"inputs_key": "a"}, r"'targets', got a, b.*targets_key"
    yield "things.npy", x, {}, r"arrays of numbers"
    yield "texts.npy", x, {}, r"^data: \S*texts\.npy: .*<U1"
    yield "cut.npy", x, {}, r"damaged"
    yield "bad.npz", x, {}, r"damaged"
    yield "bad.safetensors", x, {}, r"damaged"
    yield "saved.pt", x, {}, r"torch\.save"
    yield "text.txt", x, {}, r"\.npz or \.safetensors file.*b'hello'"


@pytest.mark.parametrize("number", range(16))
def test_what_cannot_be_is_refused(tmp_path, number):
    inputs, targets, settings, message = list(wrong(tmp_path))[number]
    named = {"inputs": str(tmp_path / inputs), **settings}
    if targets is not None:
        named["targets"] = str(tmp_path / targets)
    with pytest.raises(DataError, match=message) as raised:
        open_data(ArraysConfig(**named))
    # Exit code 2 (regression: 1, the code for failures of training).
    assert exit_code_of(raised.value) == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.inputs=null", "data.inputs, expected a file"),
        ("data.inputs_dtype=float12", "data.inputs_dtype, expected one of auto"),
        ("data.validation_targets=y.npy", "data.validation_inputs, expected a file"),
        ("data.validation_fraction=1.5", "data.validation_fraction, expected 0 <= fraction < 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(word, message):
    words = ["model={_target_:my.build}", "data=arrays", "data.inputs=x.npy", word]
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(compose_config(words), 1)


@pytest.mark.parametrize("wanted", ["auto", "float32"])
@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_complex_numbers_are_refused_unless_they_are_wanted(tmp_path, arrays, what, wanted):
    """Regression: complex inputs failed in a layer or lost their imaginary parts."""
    x, y = arrays
    named = save("npy", tmp_path, x, y)
    np.save(tmp_path / "z.npy", np.zeros((ROWS, 2), np.complex64))
    named[what] = str(tmp_path / "z.npy")
    with pytest.raises(ConfigError, match=rf"data\.{what}_dtype, expected stored"):
        open_data(ArraysConfig(**named, **{f"{what}_dtype": wanted}))
    kept = open_data(ArraysConfig(**named, **{f"{what}_dtype": "stored"})).train
    assert getattr(kept, f"read_{what}")([0]).dtype == torch.complex64


def test_a_plan_knows_the_shapes(tmp_path, arrays):
    config = ArraysConfig(**save("npz", tmp_path, *arrays))
    sample = microbatch(config, 6)
    assert (sample.inputs.shape, sample.inputs.dtype) == ((6, 3, 2), torch.float32)
    assert (sample.targets.shape, sample.loss) == ((6,), "classification")


def test_the_same_arrays_elsewhere_are_the_same_data(tmp_path, arrays):
    """Copies of the arrays have the same identity; arrays with other values do not."""
    train = compose_config().train
    found = []
    for name, change in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        x, y = arrays
        config = ArraysConfig(**save("npy", tmp_path / name, x + change, y))
        found.append(identify(open_data(config), config, train))
    assert found[0] == found[1] != found[2]
