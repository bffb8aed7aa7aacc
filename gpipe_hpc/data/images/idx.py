"""IDX files: what MNIST and its kin come in.

Two zero bytes, the type of a number (8: a byte), the number of dimensions, each dimension as a
big-endian 32-bit number, then the numbers themselves.
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
    """Four files in the format of MNIST."""

    path: Annotated[str | None, Level.EVERYDAY] = None
    """Folder of the files."""

    train_images: str = "train-images-idx3-ubyte"
    """File within path; NAME.gz is read if NAME does not exist."""

    train_labels: str = "train-labels-idx1-ubyte"
    """File within path."""

    validation_images: str = "t10k-images-idx3-ubyte"
    """File within path."""

    validation_labels: str = "t10k-labels-idx1-ubyte"
    """File within path."""

    channels: int = field(default=1, kw_only=True)
    height: int = field(default=28, kw_only=True)
    width: int = field(default=28, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
        super().check()
        if not self.path:
            raise refuse("data.path", "a folder", self.path, "as data.path=/where/the/files/are")

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Return what `open_idx` does."""
        return open_idx(self, seed)


@dataclass
class FashionMnistConfig(IdxConfig):
    """Fashion-MNIST, as Debian packs it."""


_UBYTE: Final = 8
_MAX_INFLATION: Final = 1032  # deflate makes no file smaller than its 1032nd part
_PIECE: Final = 2**20
_DEBIAN: Final = (
    "install it with apt-get install dataset-fashion-mnist, or set data.path to where its four "
    "files are"
)


@dataclass
class IdxFile:
    """One IDX file of bytes; its header is read at once, its numbers when first wanted.

    A plain file is mapped, a compressed one (.gz) held in memory.
    """

    path: Path
    shape: tuple[int, ...]
    _bytes: npt.NDArray[np.uint8] | None = field(default=None, init=False, repr=False)

    @classmethod
    def open(cls, path: Path, num_dimensions: int) -> "IdxFile":
        """Return the file behind its header; DataError where it is not what it says it is."""
        try:
            with _stream(path) as stream:
                header = stream.read(4 + 4 * num_dimensions)
            num_bytes = path.stat().st_size
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(path, error) from error
        expected = bytes((0, 0, _UBYTE, num_dimensions))
        if header[:4] != expected or len(header) != 4 + 4 * num_dimensions:
            raise UnfitDataError(
                f"data: {path} is no IDX file of bytes in {num_dimensions} dimensions, expected it "
                f"to start with {expected.hex(' ')}, got {header[:4].hex(' ')!r}; check its name"
            )
        shape = tuple(map(int, np.frombuffer(header, ">u4", offset=4)))
        # Before anything of this size is allocated: the header may say what it likes.
        wanted, packed = len(header) + math.prod(shape), _is_packed(path)
        fits = wanted <= num_bytes * _MAX_INFLATION if packed else wanted == num_bytes
        if not fits:
            raise DataError(
                f"data: {path} is not as long as its header says, expected {wanted} bytes for "
                f"{'x'.join(map(str, shape))}, got a file of {num_bytes}; fetch it anew"
            )
        return cls(path, shape)

    def read(self) -> npt.NDArray[np.uint8]:
        """Return the numbers; DataError where they are fewer or more than the header says."""
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
            # In pieces: no more is allocated than there is, whatever the header says.
            content = bytearray()
            while piece := stream.read(min(_PIECE, wanted + 1 - len(content))):
                content += piece
            if len(content) != wanted:
                length = "fewer" if len(content) < wanted else "more"
                raise ValueError(f"{length} than the {wanted} bytes of its header")
        return np.frombuffer(content, np.uint8).reshape(self.shape)


@dataclass(frozen=True)
class IdxStore:
    """A file of images and the file of their classes."""

    images: IdxFile
    labels: IdxFile
    num_classes: int

    @property
    def num_images(self) -> int:
        """Return how many there are."""
        return self.images.shape[0]

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return these images, [images, 1, height, width]."""
        return self.images.read()[list(indices), None]

    def classes(self) -> Classes:
        """Return the classes of all images; DataError where one is none."""
        labels = self.labels.read().astype(np.int64)
        return checked_classes(labels, self.num_classes, str(self.labels.path))

    def digest(self) -> str:
        """Return a short text that is equal where the images are."""
        return f"{self.images.path.name}/{self.labels.path.name}/{self.images.shape}"


def open_idx(config: IdxConfig, seed: int = 0) -> ImageSource:
    """Return four IDX files as training and validation images.

    Raises DataError for a file that is missing or damaged, or of other sizes than the settings say.
    """
    is_debian = isinstance(config, FashionMnistConfig)
    where = folder("data.path", config.path or "", _DEBIAN if is_debian else "correct it")
    train = _open_pair(config, where, config.train_images, config.train_labels)
    validation = _open_pair(config, where, config.validation_images, config.validation_labels)
    return stored_source(config, train, validation, seed)


def _open_pair(config: IdxConfig, where: Path, images: str, labels: str) -> IdxStore:
    store = IdxStore(
        IdxFile.open(_find(config, where, images), 3),
        IdxFile.open(_find(config, where, labels), 1),
        config.num_classes,
    )
    size, expected = store.images.shape[1:], (config.height, config.width)
    if size != expected or config.channels != 1:
        raise UnfitDataError(
            f"data: {store.images.path} has images of another size, expected channels, height and "
            f"width {(config.channels, *expected)}, got {(1, *size)}; set data.channels, "
            f"data.height and data.width to these"
        )
    if store.images.shape[0] != store.labels.shape[0]:
        raise UnfitDataError(
            f"data: {store.labels.path} is not for {store.images.path}, expected "
            f"{store.images.shape[0]} labels, got {store.labels.shape[0]}; take the matching one"
        )
    return store


def _find(config: IdxConfig, where: Path, name: str) -> Path:
    for path in (where / name, where / f"{name}.gz"):
        if path.is_file():
            return path
    remedy = _DEBIAN if isinstance(config, FashionMnistConfig) else "correct data.path or its name"
    raise MissingDataError(
        f"data: no such file, expected {name} or {name}.gz in {where}, got neither; {remedy}"
    )


def _is_packed(path: Path) -> bool:
    return path.suffix == ".gz"


def _stream(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if _is_packed(path) else path.open("rb")
