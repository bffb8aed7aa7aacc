"""One array in a file: .npy, an array of an .npz archive, or a tensor of a .safetensors file.

Rows are read through memory maps, so an array may be larger than memory. Only compressed arrays
(`np.savez_compressed`) are decompressed as a whole, at first use. Nothing is unpickled.
"""

import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpipe_hpc.batches import as_tensor
from gpipe_hpc.data.paths import refuse_short, unreadable
from gpipe_hpc.errors import DataError, MissingDataError, UnfitDataError

_NPY: Final = b"\x93NUMPY"
_ZIP: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = struct.Struct("<26x2H")  # of a zip member: lengths of name and extra field
_SAVE_ANEW: Final = "save it again with np.save('x.npy', array)"


@dataclass(frozen=True)
class StoredArray:
    """An array in a file; `load` maps or decompresses it at first use."""

    path: Path
    key: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor] = field(repr=False, compare=False)
    is_mapped: bool = field(default=True, repr=False, compare=False)

    @cached_property
    def _mapped(self) -> tuple[Tensor, BinaryIO, int]:
        """Return the array, its open file and the file's size when it was mapped."""
        file = self.path.open("rb", buffering=0)
        return self.load(), file, os.fstat(file.fileno()).st_size

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return a copy of the given rows; raise DataError if the file can no longer be read."""
        with _readable(self.path, DataError):
            numbers, file, size = self._mapped
            if self.is_mapped:
                refuse_short(self.path, size, os.fstat(file.fileno()).st_size)
            return numbers[torch.as_tensor(indices, dtype=torch.int64)]

    def __str__(self) -> str:
        name = self.path.name if self.key is None else f"{self.path.name}:{self.key}"
        sizes = ", ".join(map(str, self.shape))
        return f"{name} {str(self.dtype).removeprefix('torch.')}[{sizes}]"


def open_array(
    path: str, key: str | None, which: str, what: str, *, is_given: bool = True
) -> StoredArray:
    """Open the array that `data.<which><what>` names, without reading its rows.

    Args:
        path: the file.
        key: the value of data.<what>_key, which selects an array of an archive; if None, the only
            array or the one named `what` is used.
        which: "" for training, "validation_" for validation.
        what: "inputs" or "targets".
        is_given: whether the setting names a file; if not, `path` is the file of the inputs.

    Raises:
        DataError: if the file or the array does not exist; the message lists the existing arrays.
    """
    setting = f"data.{which}{what}"
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingDataError(
            f"data: {setting}={path!r} is not a file (working folder {Path.cwd()}); "
            f"set it to a .npy, .npz or .safetensors file"
        )
    with _readable(file):
        found = _arrays_of(file)
    if None in found:
        if key is not None or not is_given:
            remedy = f"remove data.{what}_key" if is_given else f"set {setting}"
            raise UnfitDataError(
                f"data: {setting}: {file} is a .npy file with a single unnamed array, but choosing "
                f"the {what} needs an archive (.npz, .safetensors); {remedy}"
            )
        chosen: str | None = None
    else:
        chosen = _chosen(file, [name for name in found if name is not None], key, what, is_given)
    with _readable(file):
        array = found[chosen]()
    if not array.shape:
        raise UnfitDataError(
            f"data: {array} is a scalar; the first dimension must be the samples; {_SAVE_ANEW}"
        )
    return array


def _chosen(file: Path, names: Sequence[str], key: str | None, what: str, is_given: bool) -> str:
    if key is not None and key in names:
        return key
    if key is None and what in names:
        return what
    if key is None and len(names) == 1 and is_given:
        return names[0]
    expected = f"one array, or one called {what!r}" if key is None else f"one called {key!r}"
    raise UnfitDataError(
        f"data: cannot tell which array of {file} is the {what}: expected {expected}, got "
        f"{', '.join(names) or 'none'}; choose one with data.{what}_key=NAME"
    )


_Openers = Mapping[str | None, Callable[[], StoredArray]]


def _arrays_of(path: Path) -> _Openers:
    """Return a dict from the name of each array (None if unnamed) to a function that opens it."""
    with path.open("rb") as file:
        head = file.read(len(_NPY))
    if head == _NPY:
        return {None: partial(_open_npy, path)}
    if head.startswith(_ZIP):
        return _open_npz(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    raise UnfitDataError(
        f"data: {path} is not a .npy, .npz or .safetensors file (it starts with {head!r}); "
        f"{_SAVE_ANEW}"
    )


def _open_npy(path: Path) -> StoredArray:
    # Copy-on-write: torch warns about read-only memory, and nothing writes to this array.
    load = partial(np.load, path, mmap_mode="c", allow_pickle=False)
    array: npt.NDArray[Any] = load()
    return StoredArray(path, None, array.shape, _dtype_of(array, path), lambda: _tensor(load()))


def _open_npz(path: Path) -> _Openers:
    with zipfile.ZipFile(path) as archive:
        members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
    if not members:
        raise UnfitDataError(
            f"data: {path} is an archive without NumPy arrays, such as torch.save writes, not a "
            f".npy, .npz or .safetensors file; save it again with np.save('x.npy', tensor.numpy())"
        )
    found: dict[str | None, Callable[[], StoredArray]] = {}
    for each in members:
        name = each.filename.removesuffix(".npy")
        found[name] = partial(_open_member, path, name, each)
    return found


def _open_member(path: Path, name: str, member: zipfile.ZipInfo) -> StoredArray:
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        shape, by_columns, dtype = _npy_header(stream, path)
        start = stream.tell()
    if member.file_size - start != math.prod(shape) * dtype.itemsize:
        raise UnfitDataError(
            f"data: {path}:{name} is damaged: expected {math.prod(shape) * dtype.itemsize} bytes "
            f"after its header, got {member.file_size - start}; create it again"
        )
    empty: npt.NDArray[Any] = np.empty(0, dtype)
    order: Literal["F", "C"] = "F" if by_columns else "C"

    def load() -> Tensor:
        if member.compress_type != zipfile.ZIP_STORED:
            with np.load(path, allow_pickle=False) as archive:
                return _tensor(archive[name])
        offset = _start_of(path, member) + start
        return _tensor(np.memmap(path, dtype, "c", offset, shape, order=order))

    is_mapped = member.compress_type == zipfile.ZIP_STORED
    return StoredArray(path, name, shape, _dtype_of(empty, path), load, is_mapped)


def _npy_header(stream: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise UnfitDataError(
        f"data: {path} contains an array of unsupported .npy version {version}; {_SAVE_ANEW}"
    )


def _start_of(path: Path, member: zipfile.ZipInfo) -> int:
    """Return the offset of an uncompressed member's data in the archive."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        of_name, of_extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(member.header_offset + _LOCAL_HEADER.size + of_name + of_extra)


def _open_safetensors(path: Path) -> _Openers:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
    return {name: partial(_open_tensor, path, name) for name in names}


def _open_tensor(path: Path, name: str) -> StoredArray:
    def load() -> Tensor:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    mapped = load()
    return StoredArray(path, name, tuple(mapped.shape), mapped.dtype, load)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return as_tensor(array, "data")


def _dtype_of(array: npt.NDArray[Any], path: Path) -> torch.dtype:
    try:
        return as_tensor(np.empty(0, array.dtype), f"data: {path}").dtype
    except DataError as error:
        raise UnfitDataError(str(error)) from error.__cause__


@contextmanager
def _readable(path: Path, kind: type[DataError] = UnfitDataError) -> Iterator[None]:
    """Context that converts OSError to DataError, and errors from invalid content to `kind`."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, SafetensorError) as error:
        raise kind(
            f"data: {path} is damaged or contains something other than arrays of numbers "
            f"({type(error).__name__}: {error}); {_SAVE_ANEW}"
        ) from error
