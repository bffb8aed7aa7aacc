"""Files of data that are cut short while they are read end in a message, not in SIGBUS."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

# In a process of its own: a regression would end this one.
READER = """
import json, os, sys
from gpipe_hpc.errors import DataError
from gpipe_hpc.data import open_data
from gpipe_hpc.config import compose_config

for path, words in json.loads(sys.argv[1]):
    train = open_data(compose_config(words).data, 0).train
    last = [train.num_samples - 1]
    train.read_inputs(last), train.read_targets(last)
    os.truncate(path, os.path.getsize(path) // 2)
    for read in (train.read_inputs, train.read_targets):
        try:
            read(last)
        except DataError as error:
            print(error, flush=True)
"""
NUMBERS = 100_000
VOCABULARY = ["data.vocab_size=65536"]


def bare(folder):
    np.arange(NUMBERS, dtype=np.uint16).tofile(folder / "t.bin")
    return "t.bin", ["data=tokens", f"data.paths=[{folder}/t.bin]", "data.seq_len=16", *VOCABULARY]


def npy_tokens(folder):
    np.save(folder / "t.npy", np.arange(NUMBERS, dtype=np.uint16))
    return "t.npy", ["data=tokens", f"data.paths=[{folder}/t.npy]", "data.seq_len=16", *VOCABULARY]


def megatron(folder):
    np.arange(NUMBERS, dtype=np.uint16).tofile(folder / "t.bin")
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    counts = (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    lengths = np.array([NUMBERS], "<i4").tobytes() + np.array([0], "<i8").tobytes()
    (folder / "t.idx").write_bytes(head + counts + lengths + np.array([0, 1], "<i8").tobytes())
    return "t.bin", ["data=tokens", f"data.paths=[{folder}/t.bin]", "data.seq_len=16", *VOCABULARY]


def text(folder):
    (folder / "t.txt").write_bytes(b"some words " * NUMBERS)
    return "t.txt", ["data=text", f"data.paths=[{folder}/t.txt]", "data.seq_len=16"]


def arrays(folder, name, save):
    save(folder / name)
    return name, [
        "data=arrays",
        "model=mlp",
        "model.widths=[4,4]",
        f"data.inputs={folder}/{name}",
        f"data.targets={folder}/{name}",
        *(["data.inputs_key=x", "data.targets_key=x"] if not name.endswith("npy") else []),
    ]


X = np.arange(4.0 * NUMBERS, dtype=np.float32).reshape(NUMBERS, 4)
KINDS = {
    "raw tokens": bare,
    "npy tokens": npy_tokens,
    "Megatron's": megatron,
    "text": text,
    "npy": lambda folder: arrays(folder, "x.npy", lambda path: np.save(path, X)),
    "npz": lambda folder: arrays(folder, "x.npz", lambda path: np.savez(path, x=X)),
    "safetensors": lambda folder: arrays(
        folder, "x.safetensors", lambda path: save_file({"x": torch.from_numpy(X)}, path)
    ),
}


def test_a_file_that_is_cut_short_is_named(tmp_path):
    """The process ended by SIGBUS, without a message."""
    tasks = []
    for number, make in enumerate(KINDS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        name, words = make(folder)
        tasks.append([str(folder / name), words])
    done = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(tasks)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    expected = [f"data: {path} was truncated" for path, _ in tasks for _ in range(2)]
    assert [line[: len(start)] for line, start in zip(told, expected, strict=True)] == expected
