"""Functions that write small data files of every supported format."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(
    folder: Path, num_train: int = 20, num_validation: int = 6, size: int = 8, packed: bool = False
) -> SimpleNamespace:
    """Write MNIST's four files; all pixels of image i are i, and its class is i % 10."""
    made = SimpleNamespace(folder=folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", num_train), ("t10k", num_validation)):
        numbers = np.arange(count)
        images = np.repeat(numbers, size * size).reshape(count, size, size)
        for what, array in (("images-idx3", images), ("labels-idx1", numbers % 10)):
            path = folder / f"{split}-{what}-ubyte"
            content = idx_bytes(array)
            if packed:
                path, content = Path(f"{path}.gz"), gzip.compress(content)
            path.write_bytes(content)
            setattr(made, f"{split}_{what.split('-')[0]}", path)
    return made


def write_cifar10(folder: Path, num_records: int = 4) -> list[np.ndarray]:
    """Write the six files of CIFAR-10 with random pixels; return the pixels of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    parts = []
    for number, name in enumerate(names):
        pixels = random_pixels(num_records, 3, 32, 32, seed=number)
        labels = (np.arange(num_records) + number) % 10
        records = np.concatenate([labels[:, None].astype(np.uint8), pixels.reshape(-1, 3072)], 1)
        (folder / name).write_bytes(records.tobytes())
        parts.append(pixels)
    return parts


def write_cifar100(folder: Path, num_records: int = 6) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "test.bin"):
        fine = np.arange(num_records) * 7 % 100
        labels = np.stack([fine // 5, fine], 1).astype(np.uint8)  # coarse first
        pixels = random_pixels(num_records, 3072)
        (folder / name).write_bytes(np.concatenate([labels, pixels], 1).tobytes())


def coded(
    value: int | np.ndarray, size: tuple[int, int] = (24, 20), form: str = "JPEG", mode: str = "RGB"
) -> bytes:
    """Encode an image of one gray value, or an array; `size` is (width, height)."""
    if isinstance(value, np.ndarray):
        image = Image.fromarray(value)
    else:
        image = Image.new(mode, size, value if mode == "L" else (value,) * 3)
    stream = io.BytesIO()
    image.save(stream, form)
    return stream.getvalue()


def write_folder(root: Path, num_classes: int = 3, per_class: int = 4) -> Path:
    """Write train/ and val/ with a folder for each class; every second image is a PNG."""
    for split in ("train", "val"):
        for label in range(num_classes):
            folder = root / split / f"n{label:02}"
            folder.mkdir(parents=True)
            for number in range(per_class):
                form, suffix = (("JPEG", ".JPEG"), ("PNG", ".png"))[number % 2]
                value = 20 * label + 5 * number
                (folder / f"{number:03}{suffix}").write_bytes(coded(value, form=form))
    return root


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_shards(root: Path, num_shards: int = 2, per_shard: int = 6, num_classes: int = 3) -> Path:
    """Write 00.tar, 01.tar, ...; classes are in .cls files, for odd samples in .json files."""
    for shard in range(num_shards):
        members: list[tuple[str, bytes]] = []
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            label = number % num_classes
            members.append((f"{number:06}.jpg", coded(10 * number)))
            if number % 2:
                members.append((f"{number:06}.json", json.dumps({"label": label}).encode()))
            else:
                members.append((f"{number:06}.cls", b"%d\n" % label))
        write_tar(root / f"{shard:02}.tar", members)
    return root


def write_jsonl(path: Path, texts: Sequence[Any], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def files() -> SimpleNamespace:
    """Return the functions that write data files."""
    functions: dict[str, Callable[..., Any]] = {
        "idx_bytes": idx_bytes,
        "write_idx": write_idx,
        "write_cifar10": write_cifar10,
        "write_cifar100": write_cifar100,
        "coded": coded,
        "write_folder": write_folder,
        "write_tar": write_tar,
        "write_shards": write_shards,
        "write_jsonl": write_jsonl,
    }
    return SimpleNamespace(**functions)
