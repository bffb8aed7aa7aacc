"""One array in a file: .npy, an array of an .npz archive, or a tensor of a .safetensors file.

Rows are read through memory maps, so an array may be larger than memory. Only what NumPy has
compressed (`np.savez_compressed`) has to be unpacked whole, when it is first read. Nothing is
unpickled.
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
_LOCAL_HEADER: Final = struct.Struct("<26x2H")  # of a zip member: the lengths of name and extra
_SAVE_ANEW: Final = "save it anew, as np.save('x.npy', array)"


@dataclass(frozen=True)
class StoredArray:
    """An array that lies in a file; `load` maps it, or unpacks it, at its first use."""

    path: Path
    key: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor] = field(repr=False, compare=False)
    is_mapped: bool = field(default=True, repr=False, compare=False)

    @cached_property
    def _mapped(self) -> tuple[Tensor, BinaryIO, int]:
        """Return the numbers, and the open file behind them with its size."""
        file = self.path.open("rb", buffering=0)
        return self.load(), file, os.fstat(file.fileno()).st_size

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return these rows, a copy; DataError if the file cannot be read any more."""
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
    """Return what `data.<which><what>` names; `key` (data.<what>_key) chooses from an archive.

    Without a key an archive's only array is taken, or the one called `what`. `is_given`: whether
    the file was named for this, or is that of the inputs. Raises DataError that says what is there
    instead.
    """
    setting = f"data.{which}{what}"
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingDataError(
            f"data: {setting} names no file, expected .npy, .npz or .safetensors, got {path!r} in "
            f"{Path.cwd()}; correct it"
        )
    with _readable(file):
        found = _arrays_of(file)
    if None in found:
        if key is not None or not is_given:
            remedy = f"leave data.{what}_key out" if is_given else f"set {setting}"
            raise UnfitDataError(
                f"data: {setting}: {file} holds one array without a name, expected an archive "
                f"(.npz, .safetensors) to choose the {what} from, got .npy; {remedy}"
            )
        chosen: str | None = None
    else:
        chosen = _chosen(file, [name for name in found if name is not None], key, what, is_given)
    with _readable(file):
        array = found[chosen]()
    if not array.shape:
        raise UnfitDataError(
            f"data: {array} is a single number, expected a first dimension of samples; {_SAVE_ANEW}"
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
        f"data: {file} does not say which array is the {what}, expected {expected}, got "
        f"{', '.join(names) or 'none'}; choose one with data.{what}_key=NAME"
    )


_Openers = Mapping[str | None, Callable[[], StoredArray]]


def _arrays_of(path: Path) -> _Openers:
    """Return how to open each array of a file by its name; a single one has None."""
    with path.open("rb") as file:
        head = file.read(len(_NPY))
    if head == _NPY:
        return {None: partial(_open_npy, path)}
    if head.startswith(_ZIP):
        return _open_npz(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    raise UnfitDataError(
        f"data: {path} is no file of arrays, expected .npy, .npz or .safetensors, got one that "
        f"starts with {head!r}; {_SAVE_ANEW}"
    )


def _open_npy(path: Path) -> StoredArray:
    # Copy on write: torch warns of memory that may only be read, and nobody writes here.
    load = partial(np.load, path, mmap_mode="c", allow_pickle=False)
    array: npt.NDArray[Any] = load()
    return StoredArray(path, None, array.shape, _dtype_of(array, path), lambda: _tensor(load()))


def _open_npz(path: Path) -> _Openers:
    with zipfile.ZipFile(path) as archive:
        members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
    if not members:
        raise UnfitDataError(
            f"data: {path} is an archive without arrays, as torch.save writes one, expected .npy, "
            f".npz or .safetensors; save it anew, as np.save('x.npy', tensor.numpy())"
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
            f"data: {path}:{name} is damaged, expected {math.prod(shape) * dtype.itemsize} bytes "
            f"behind its header, got {member.file_size - start}; make it anew"
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
    raise UnfitDataError(f"data: {path} holds an array of version {version}; {_SAVE_ANEW}")


def _start_of(path: Path, member: zipfile.ZipInfo) -> int:
    """Return where the bytes of a member that is not compressed begin in the archive."""
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
    """Return a block whose errors of reading a file become DataError, of what it holds a `kind`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, SafetensorError) as error:
        raise kind(
            f"data: {path} is damaged or holds other things than numbers, expected arrays of "
            f"numbers, got {type(error).__name__}: {error}; {_SAVE_ANEW}"
        ) from error
