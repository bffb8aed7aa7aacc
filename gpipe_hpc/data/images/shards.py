"""Tar files of images and labels in WebDataset's format, with random access by offset.

A sample is a group of consecutive members that share their name up to its first dot: an image
(.jpg, .jpeg or .png) and its class, an integer in .cls or in a JSON object in .json. Other members
are ignored. Nothing is extracted, so member names never become paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.corruption import CorruptTally, tolerance
from gpipe_hpc.data.images.coded import CodedImagesConfig, coded_source, corrupt, split
from gpipe_hpc.data.images.source import Classes, ImageSource, checked_classes
from gpipe_hpc.data.indexing.parts import IndexPart
from gpipe_hpc.data.indexing.worker_pool import IndexingTask, in_order
from gpipe_hpc.data.indices import IndexFolders, indexed
from gpipe_hpc.data.names import Names
from gpipe_hpc.data.paths import expand, refuse_shrunk, unreadable
from gpipe_hpc.errors import DataError
from gpipe_hpc.settings import Level, Range, refuse


@dataclass
class ImageShardsConfig(CodedImagesConfig):
    """Settings for images and labels in tar files."""

    paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files, patterns or folders, for example [shards/train-*.tar]; compressed tar files are not
    supported."""

    validation_paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files, patterns or folders for validation. []: a part of paths."""

    validation_percent: Annotated[int, Range(0, 99), Level.EVERYDAY] = 5
    """Percentage of samples for validation, chosen by a hash of their name."""

    label_key: str = "label"
    """Key of the class in a .json label."""

    index_dir: Annotated[str | None, Level.CLUSTER] = field(default=None, kw_only=True)
    """Folder of the index for later runs. null: .gpipe_hpc next to the data, or run.dir."""

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if not self.paths:
            raise refuse("data.paths", "files or patterns", [], "as data.paths=[corpus/*]")

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Open the files with `open_image_shards`."""
        return open_image_shards(self, seed, spare)


_WORTH_KEEPING: Final = 2**30  # bytes of shards; smaller data is indexed again in a second


@dataclass(frozen=True)
class ShardStore:
    """Encoded images located by shard, offset and size, with their classes."""

    paths: tuple[Path, ...]
    shards: npt.NDArray[np.int32]
    spans: npt.NDArray[np.int64]  # [images, 2]: offset, bytes
    names: Names
    labels: Classes

    def where(self, index: int) -> str:
        """Return the shard that contains an image and the image's name in it, for messages."""
        return f"{self.paths[self.shards[index]]}: {self.names[index]}"

    def coded(self, index: int, max_bytes: int) -> bytes:
        """Return the encoded bytes of an image; raise DataError if they cannot be read."""
        refuse_shrunk(self.shards)
        path = self.paths[self.shards[index]]
        offset, num_bytes = map(int, self.spans[index])
        if num_bytes > max_bytes:
            raise corrupt(
                self.where(index), f"{num_bytes} bytes, more than the {max_bytes} allowed"
            )
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content: bytes = file.read(num_bytes)
        except OSError as error:
            raise unreadable(path, error) from error
        if len(content) != num_bytes:
            raise DataError(
                f"data: {path} has changed: expected {num_bytes} bytes at offset {offset}, got "
                f"{len(content)}; do not modify data files while a run reads them"
            )
        return content

    def pick(self, kept: npt.NDArray[np.bool_]) -> "ShardStore":
        """Return a store of the images selected by a boolean mask."""
        return ShardStore(
            self.paths,
            self.shards[kept],
            self.spans[kept],
            self.names.pick(kept),
            self.labels[kept],
        )

    def digest(self) -> str:
        """Return a digest of shards, names, positions and classes."""
        shards = Names(path.name for path in self.paths)
        return f"{self.names.digest(self.labels)}/{shards.digest(self.spans)}"


def open_image_shards(
    config: ImageShardsConfig, seed: int = 0, spare: Path | None = None
) -> ImageSource:
    """Open the images of tar files, in the order of the files and of their members.

    Reads all headers and labels once, unless an index from an earlier run exists.

    Args:
        config: the data settings.
        seed: seed of random augmentations.
        spare: folder for the index if the folder of the data is read-only.

    Raises:
        DataError: if a pattern matches no file, a class is out of range, or more samples are
            corrupt than data.corrupt and data.max_corrupt allow.
    """
    tally = CorruptTally(tolerance(config))
    keeping = IndexFolders(config.index_dir, spare)
    store, wrong = _store(config.paths, config, keeping, tally)
    if config.validation_paths:
        held, more = _store(config.validation_paths, config, keeping, tally)
        return coded_source(config, store, held, seed, wrong | more)
    train, validation = split(store, config.validation_percent)
    return coded_source(config, train, validation, seed, wrong)


def _store(
    patterns: Sequence[str], config: ImageShardsConfig, keeping: IndexFolders, tally: CorruptTally
) -> tuple[ShardStore, dict[str, str]]:
    """Index shards; return their images, and the error messages of unusable samples by location."""
    paths = expand(patterns, (".tar",))
    try:
        sizes = np.array([path.stat().st_size for path in paths], np.int64)
        part = indexed(
            "shards",
            paths,
            {"label_key": config.label_key},
            keeping,
            make=lambda: _scan(paths, sizes, config.label_key, tally),
            is_sound=lambda part: _is_sound(part, paths, sizes),
            is_worth_keeping=lambda _: int(sizes.sum()) >= _WORTH_KEEPING,
        )
    except OSError as error:
        raise unreadable(Path(error.filename or paths[0]), error) from error
    wrong = _complaints(part, paths)
    tally.add(wrong, says=False)
    shards, labels = part.arrays["shard"], part.arrays["label"]
    outside = np.flatnonzero((labels < 0) | (labels >= config.num_classes))
    first = paths[shards[outside[0]]] if len(outside) else ""
    return ShardStore(
        tuple(paths),
        shards,
        np.stack([part.arrays["offset"], part.arrays["num_bytes"]], axis=1),
        Names.of(part.arrays["text"], part.arrays["ends"]),
        checked_classes(labels, config.num_classes, str(first)),
    ), wrong


_COLUMNS: Final = ("offset", "num_bytes", "label", "text")


def _scan(
    paths: Sequence[Path], sizes: npt.NDArray[np.int64], label_key: str, tally: CorruptTally
) -> IndexPart:
    """Scan shards in parallel; return image columns and `wrong`, (shard, sample, error) triples."""
    tasks = [
        IndexingTask({"scan": "tar", "path": str(path), "label_key": label_key}, path, int(size))
        for path, size in zip(paths, sizes, strict=True)
    ]
    columns: dict[str, list[npt.NDArray[Any]]] = {
        "shard": [np.empty(0, np.int32)],
        "ends": [np.empty(0, np.int64)],
        "text": [np.empty(0, np.uint8)],
        **{name: [np.empty(0, np.int64)] for name in _COLUMNS[:-1]},
    }
    wrong: list[tuple[int, str, str]] = []
    length = 0  # bytes of the names so far
    for shard, part in enumerate(in_order(tasks)):
        new = [(shard, name, what) for name, what in part.facts["wrong"]]
        wrong += new
        tally.add(_complaints(IndexPart({}, {"wrong": new}), paths), says=False)
        columns["shard"].append(np.full(len(part.arrays["ends"]), shard, np.int32))
        columns["ends"].append(part.arrays["ends"] + length)
        length += len(part.arrays["text"])
        for name in _COLUMNS:
            columns[name].append(part.arrays[name])
    arrays = {name: np.concatenate(found) for name, found in columns.items()}
    return IndexPart(arrays, {"wrong": wrong})


def _is_sound(part: IndexPart, paths: Sequence[Path], sizes: npt.NDArray[np.int64]) -> bool:
    """Return whether all positions and names of a stored index lie within the shards."""
    columns = [part.arrays[name] for name in ("shard", "offset", "num_bytes", "ends", "label")]
    shard, offset, num_bytes, ends, _ = columns
    text = part.arrays["text"]
    _complaints(part, paths)
    if any(column.shape != (len(shard),) for column in columns):
        return False
    if not len(shard):
        return True
    if int(shard.min()) < 0 or int(shard.max()) >= len(sizes):
        return False
    spans = (offset >= 0) & (num_bytes >= 0) & (offset + num_bytes <= sizes[shard])
    names = (np.diff(ends, prepend=0) >= 0).all() and int(ends[-1]) <= len(text)
    return bool(spans.all() and names)


def _complaints(part: IndexPart, paths: Sequence[Path]) -> dict[str, str]:
    found = {}
    for shard, name, what in part.facts["wrong"]:
        where = f"{paths[shard]}: {name}" if name else str(paths[shard])
        found[where] = _complaint(where, what)
    return found


def _complaint(where: str, got: str) -> str:
    return (
        f"data: {where} is corrupt: expected an image and its class, got {got}; repair it, or set "
        f"data.corrupt=skip to skip such samples"
    )
