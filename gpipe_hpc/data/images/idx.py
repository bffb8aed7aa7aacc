"""IDX files, the format of MNIST and similar data sets.

A file contains two zero bytes, the type of a number (8: uint8), the number of dimensions, each
dimension as a big-endian 32-bit integer, then the data.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Final, cast

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.images.augmentation import Pixels
from gpipe_hpc.data.images.source import Classes, ImageSource, checked_classes
from gpipe_hpc.data.images.stored import StoredImagesConfig, stored_source
from gpipe_hpc.data.paths import folder, refuse_shrunk, unreadable
from gpipe_hpc.errors import DataError, MissingDataError, UnfitDataError
from gpipe_hpc.settings import Level, refuse


@dataclass
class IdxConfig(StoredImagesConfig):
    """Settings for images and classes in four files of MNIST's format."""

    path: Annotated[str | None, Level.EVERYDAY] = None
    """Folder of the files."""

    train_images: str = "train-images-idx3-ubyte"
    """File in data.path with the training images; NAME.gz is read if NAME does not exist. The file
    of the labels has the same name with labels for images and idx1 for idx3."""

    validation_images: str = "t10k-images-idx3-ubyte"
    """File in data.path with the validation images, as train_images."""

    channels: int = field(default=1, kw_only=True)
    height: int = field(default=28, kw_only=True)
    width: int = field(default=28, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if not self.path:
            raise refuse("data.path", "a folder", self.path, "as data.path=/where/the/files/are")

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Open the files with `open_idx`."""
        return open_idx(self, seed)


@dataclass
class FashionMnistConfig(IdxConfig):
    """Settings for Fashion-MNIST, by default as installed by its Debian package."""


_UBYTE: Final = 8
_MAX_INFLATION: Final = 1032  # the maximum compression ratio of deflate
_PIECE: Final = 2**20
_DEBIAN: Final = (
    "install it with apt-get install dataset-fashion-mnist, or set data.path to where its four "
    "files are"
)


@dataclass
class IdxFile:
    """An IDX file of uint8; its header is read when it is opened, its data at first use.

    A plain file is memory-mapped, a compressed one (.gz) is decompressed into memory.
    """

    path: Path
    shape: tuple[int, ...]
    _bytes: npt.NDArray[np.uint8] | None = field(default=None, init=False, repr=False)

    @classmethod
    def open(cls, path: Path, num_dimensions: int) -> "IdxFile":
        """Read the header of a file; raise DataError if it is invalid or contradicts the size."""
        try:
            with _stream(path) as stream:
                header = stream.read(4 + 4 * num_dimensions)
            num_bytes = path.stat().st_size
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(path, error) from error
        expected = bytes((0, 0, _UBYTE, num_dimensions))
        if header[:4] != expected or len(header) != 4 + 4 * num_dimensions:
            raise UnfitDataError(
                f"data: {path} is not an IDX file of uint8 with {num_dimensions} dimensions: its "
                f"first bytes must be {expected.hex(' ')}, got {header[:4].hex(' ')!r}; check the "
                f"file name"
            )
        shape = tuple(map(int, np.frombuffer(header, ">u4", offset=4)))
        # Check before memory of this size is allocated, as the header may be wrong.
        wanted, packed = len(header) + math.prod(shape), _is_packed(path)
        fits = wanted <= num_bytes * _MAX_INFLATION if packed else wanted == num_bytes
        if not fits:
            raise DataError(
                f"data: {path} does not match its header: expected {wanted} bytes for "
                f"{'x'.join(map(str, shape))}, got a file of {num_bytes}; download it again"
            )
        return cls(path, shape)

    def read(self) -> npt.NDArray[np.uint8]:
        """Return the data in its shape; raise DataError if its size contradicts the header."""
        if self._bytes is None:
            offset = 4 + 4 * len(self.shape)
            try:
                if _is_packed(self.path):
                    self._bytes = self._inflate(offset)
                else:
                    self._bytes = np.memmap(
                        self.path, np.uint8, mode="r", offset=offset, shape=self.shape
                    )
            except (OSError, ValueError, EOFError, zlib.error) as error:
                raise unreadable(self.path, error) from error
        refuse_shrunk(self._bytes)
        return self._bytes

    def _inflate(self, offset: int) -> npt.NDArray[np.uint8]:
        wanted = math.prod(self.shape)
        with _stream(self.path) as stream:
            stream.read(offset)
            # In pieces, so that a wrong header cannot allocate more memory than there is data.
            content = bytearray()
            while piece := stream.read(min(_PIECE, wanted + 1 - len(content))):
                content += piece
            if len(content) != wanted:
                length = "fewer" if len(content) < wanted else "more"
                raise ValueError(f"{length} than the {wanted} bytes given in its header")
        return np.frombuffer(content, np.uint8).reshape(self.shape)


@dataclass(frozen=True)
class IdxStore:
    """Images in one IDX file and their classes in another."""

    images: IdxFile
    labels: IdxFile
    num_classes: int

    @property
    def num_images(self) -> int:
        """Return the number of images."""
        return self.images.shape[0]

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return the given images, uint8 of shape [len(indices), 1, height, width]."""
        return self.images.read()[list(indices), None]

    def classes(self) -> Classes:
        """Return the classes of all images; raise DataError if one is out of range."""
        labels = self.labels.read().astype(np.int64)
        return checked_classes(labels, self.num_classes, str(self.labels.path))

    def digest(self) -> str:
        """Return a digest of file names and shapes."""
        return f"{self.images.path.name}/{self.labels.path.name}/{self.images.shape}"


def open_idx(config: IdxConfig, seed: int = 0) -> ImageSource:
    """Open four IDX files as training and validation images.

    Raises DataError if a file is missing or damaged, or if its sizes differ from the settings.
    """
    is_debian = isinstance(config, FashionMnistConfig)
    where = folder("data.path", config.path or "", _DEBIAN if is_debian else "correct it")
    train = _open_pair(config, where, config.train_images)
    validation = _open_pair(config, where, config.validation_images)
    return stored_source(config, train, validation, seed)


def _open_pair(config: IdxConfig, where: Path, images: str) -> IdxStore:
    labels = images.replace("images", "labels").replace("idx3", "idx1")
    store = IdxStore(
        IdxFile.open(_find(config, where, images), 3),
        IdxFile.open(_find(config, where, labels), 1),
        config.num_classes,
    )
    size, expected = store.images.shape[1:], (config.height, config.width)
    if size != expected or config.channels != 1:
        raise UnfitDataError(
            f"data: {store.images.path} has images of channels, height and width {(1, *size)}, "
            f"but the settings are {(config.channels, *expected)}; set data.channels, "
            f"data.height and data.width to those of the file"
        )
    if store.images.shape[0] != store.labels.shape[0]:
        raise UnfitDataError(
            f"data: {store.labels.path} does not match {store.images.path}: expected "
            f"{store.images.shape[0]} labels, got {store.labels.shape[0]}; use the matching file"
        )
    return store


def _find(config: IdxConfig, where: Path, name: str) -> Path:
    for path in (where / name, where / f"{name}.gz"):
        if path.is_file():
            return path
    remedy = _DEBIAN if isinstance(config, FashionMnistConfig) else "correct data.path or its name"
    raise MissingDataError(f"data: neither {name} nor {name}.gz exists in {where}; {remedy}")


def _is_packed(path: Path) -> bool:
    return path.suffix == ".gz"


def _stream(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if _is_packed(path) else path.open("rb")
