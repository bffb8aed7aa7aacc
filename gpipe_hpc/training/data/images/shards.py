"""Tar files of images and labels, as WebDataset makes them, read at random by offset.

A sample is what stands side by side under one name up to its first dot: an image (.jpg, .jpeg or
.png) and its class, a number in .cls or in an object in .json. Other members are passed over.
Nothing is ever extracted: names in a tar file lead nowhere.
"""

import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.config import ImageShardsConfig
from gpipe_hpc.errors import DataError
from gpipe_hpc.training.data.corruption import CorruptTally, tolerance
from gpipe_hpc.training.data.images.coded import (
    SUFFIXES,
    coded_source,
    corrupt,
    split,
)
from gpipe_hpc.training.data.images.source import Classes, ImageSource, checked_classes
from gpipe_hpc.training.data.names import Names
from gpipe_hpc.training.data.paths import expand, unreadable

_BLOCK: Final = 512
_MAX_LABEL_BYTES: Final = 2**20


class Entry(NamedTuple):
    """Where an image lies in its shard, and its class."""

    name: str
    offset: int
    num_bytes: int
    label: int


@dataclass(frozen=True)
class ShardStore:
    """Images by shard and offset, and their classes."""

    paths: tuple[Path, ...]
    shards: npt.NDArray[np.int32]
    spans: npt.NDArray[np.int64]  # [images, 2]: offset, bytes
    names: Names
    labels: Classes

    def where(self, index: int) -> str:
        """Return the shard of an image and its name in it."""
        return f"{self.paths[self.shards[index]]}: {self.names[index]}"

    def coded(self, index: int, max_bytes: int) -> bytes:
        """Return the bytes of an image; DataError if they cannot be read."""
        path = self.paths[self.shards[index]]
        offset, num_bytes = map(int, self.spans[index])
        if num_bytes > max_bytes:
            raise corrupt(self.where(index), f"{num_bytes} bytes, more than {max_bytes}")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content: bytes = file.read(num_bytes)
        except OSError as error:
            raise unreadable(path, error) from error
        if len(content) != num_bytes:
            raise DataError(
                f"data: {path} has changed, expected {num_bytes} bytes from {offset} on, got "
                f"{len(content)}; keep data files as they are while a run reads them"
            )
        return content

    def pick(self, kept: npt.NDArray[np.bool_]) -> "ShardStore":
        """Return a store of those images that are marked."""
        return ShardStore(
            self.paths,
            self.shards[kept],
            self.spans[kept],
            self.names.pick(kept),
            self.labels[kept],
        )

    def digest(self) -> str:
        """Return a short text of shards, names, places and classes."""
        shards = Names(path.name for path in self.paths)
        return f"{self.names.digest(self.labels)}/{shards.digest(self.spans)}"


@dataclass
class _Group:
    """Members under one name, by what follows its first dot."""

    name: str
    members: dict[str, tarfile.TarInfo] = field(default_factory=dict)


class _UnusableError(Exception):
    """A group of members that makes no sample."""


def open_image_shards(config: ImageShardsConfig, seed: int = 0) -> ImageSource:
    """Return the images of tar files, in the order of the files and of what is in them.

    Reads all headers and labels once. Raises DataError for a pattern without files, a class out of
    range, and where more is corrupt than data.corrupt bears.
    """
    tally = CorruptTally(tolerance(config))
    store, wrong = _store(expand(config.paths, (".tar",)), config, tally)
    if config.validation_paths:
        held, more = _store(expand(config.validation_paths, (".tar",)), config, tally)
        return coded_source(config, store, held, seed, wrong | more)
    train, validation = split(store, config.validation_percent)
    return coded_source(config, train, validation, seed, wrong)


def _store(
    paths: Sequence[Path], config: ImageShardsConfig, tally: CorruptTally
) -> tuple[ShardStore, dict[str, str]]:
    """Return what is in the shards, and by name what is wrong with the rest."""
    entries: list[Entry] = []
    counts: list[int] = []
    wrong: dict[str, str] = {}
    for path in paths:
        found, complaints = _index(path, config)
        tally.add(complaints, says=False)
        entries += found
        counts.append(len(found))
        wrong |= complaints
    store = ShardStore(
        tuple(paths),
        np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        np.array([(each.offset, each.num_bytes) for each in entries], np.int64).reshape(-1, 2),
        Names(each.name for each in entries),
        np.array([each.label for each in entries], np.int64),
    )
    return store, wrong


def _index(path: Path, config: ImageShardsConfig) -> tuple[list[Entry], dict[str, str]]:
    entries: list[Entry] = []
    wrong: dict[str, str] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for group in _groups(_members(tar, file)):
                try:
                    entries += _entry(tar, group, config)
                except _UnusableError as error:
                    where = f"{path}: {group.name}"
                    wrong[where] = _complaint(where, str(error))
    except (tarfile.TarError, EOFError) as error:
        wrong[str(path)] = _complaint(str(path), f"{type(error).__name__}: {error}")
    except OSError as error:
        raise unreadable(path, error) from error
    labels = np.array([each.label for each in entries], np.int64)
    checked_classes(labels, config.num_classes, str(path))
    return entries, wrong


def _members(tar: tarfile.TarFile, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield what is in a tar file; raise ReadError where it breaks off."""
    num_bytes = os.fstat(file.fileno()).st_size
    while (member := tar.next()) is not None:
        if member.size < 0 or member.offset_data + member.size > num_bytes:
            raise tarfile.ReadError(
                f"{member.name} has {member.size} bytes from {member.offset_data} on, more than "
                f"the file's {num_bytes}"
            )
        if member.isreg():
            yield member
    # The library takes a damaged header, or none, for the end; the true end is a block of zeros.
    file.seek(tar.offset)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise tarfile.ReadError(f"no header and no end of the archive at byte {tar.offset}")


def _groups(members: Iterable[tarfile.TarInfo]) -> Iterator[_Group]:
    """Yield neighbours that share their name up to the first dot of its last part."""
    group = _Group("")
    for member in members:
        folder, slash, last = member.name.rpartition("/")
        stem, dot, suffix = last.partition(".")
        if (name := folder + slash + stem) != group.name:
            yield group
            group = _Group(name)
        group.members.setdefault(dot + suffix.lower(), member)
    yield group


def _entry(tar: tarfile.TarFile, group: _Group, config: ImageShardsConfig) -> list[Entry]:
    """Return the sample of a group, or nothing where it has neither image nor class."""
    images = [member for suffix, member in group.members.items() if suffix in SUFFIXES]
    if not images and ".cls" not in group.members:
        return []
    if len(images) != 1:
        raise _UnusableError(f"{len(images)} images ({', '.join(group.members)})")
    (image,) = images
    if image.issparse():
        raise _UnusableError("a sparse file")
    return [Entry(group.name, image.offset_data, image.size, _label(tar, group, config))]


def _label(tar: tarfile.TarFile, group: _Group, config: ImageShardsConfig) -> int:
    is_bare = ".cls" in group.members
    member = group.members.get(".cls" if is_bare else ".json")
    if member is None:
        raise _UnusableError(f"no class ({', '.join(group.members)})")
    file = tar.extractfile(member)
    assert file is not None, f"{member.name} is a regular file"
    text = file.read(_MAX_LABEL_BYTES)
    try:
        label = json.loads(text)
        label = label if is_bare else label[config.label_key]
    except (ValueError, KeyError, TypeError, RecursionError):
        label = None
    if type(label) is not int or not -(2**63) <= label < 2**63:
        shown = text[:40].decode("utf-8", "backslashreplace")
        raise _UnusableError(f"no class in {member.name}: {shown!r}")
    return label


def _complaint(where: str, got: str) -> str:
    return (
        f"data: {where} is corrupt, expected an image and its class, got {got}; repair it, or pass "
        f"over such with data.corrupt=skip"
    )
