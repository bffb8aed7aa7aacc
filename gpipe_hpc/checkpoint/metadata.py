"""List and read the tensors of a checkpoint without executing code from its files.

Torch lists them in ``.metadata``, a pickle, and a pickle may call any function. Here every class or
function of the pickle is replaced by an empty record type that only stores its arguments; a name
that torch does not write into checkpoints is refused. The records are then checked: only whole
tensors in files of this folder are accepted, since torch would unpickle values of other types
without restriction.
"""

import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.checkpoint.manifest import METADATA
from gpipe_hpc.small_files import open_regular, read_bytes

_MOST_BYTES: Final = 2**30
_MOST_PARTS: Final = 1000
_OF_METADATA: Final = "torch.distributed.checkpoint.metadata"
# Names that torch writes; format 1 also stored the path of the folder.
_KNOWN: Final = frozenset(
    {
        (_OF_METADATA, "Metadata"),
        (_OF_METADATA, "MetadataIndex"),
        (_OF_METADATA, "TensorStorageMetadata"),
        (_OF_METADATA, "TensorProperties"),
        (_OF_METADATA, "ChunkStorageMetadata"),
        (_OF_METADATA, "BytesStorageMetadata"),
        (_OF_METADATA, "_MEM_FORMAT_ENCODING"),
        (_OF_METADATA, "StorageMeta"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        # Python 3.11.0 to 3.11.3 pickle a member of an enum as this call; it becomes a record too.
        ("builtins", "getattr"),
    }
)


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint: shape, dtype, and location of its bytes in a file of the folder."""

    shape: torch.Size
    dtype: torch.dtype
    file: str
    offset: int
    length: int


def listed(tensor: StoredTensor) -> dict[str, Any]:
    """Return the manifest's entry for a tensor."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def read_metadata(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the checkpoint at `path`, by name.

    Raises OSError if there is no ``.metadata``, ValueError if it contains anything but what torch
    writes for whole tensors. Nothing in it is executed.
    """
    raw = read_bytes(path / METADATA, _MOST_BYTES)
    try:
        root = _MetadataUnpickler(io.BytesIO(raw)).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{type(error).__name__}: {error or 'truncated file'}") from error
    try:
        return _stored_tensors(root)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"not a list written by torch ({error})") from error


def fill(path: Path, stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]) -> None:
    """Read tensors of the checkpoint at `path` into `targets`, by name.

    Raises OSError or ValueError if one cannot be read; the tensors before it are then already
    filled.
    """
    from gpipe_hpc.checkpoint.dcp import read_tensors

    read_tensors(path, stored, targets)


def check_readable(path: Path, stored: StoredTensor) -> None:
    """Check that a file contains a tensor at the given location, without reading its data.

    Raises OSError or ValueError otherwise.
    """
    with open_regular(path / stored.file) as file:
        try:
            with torch.serialization.skip_data():
                span = io.BufferedReader(_FileRange(file, stored.offset, stored.length))
                found = torch.load(span, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # a damaged archive may raise anything
            last = stored.offset + stored.length - 1
            raise ValueError(f"no valid tensor in bytes {stored.offset:,} to {last:,}") from error
    if (type(found), found.shape, found.dtype) != (Tensor, stored.shape, stored.dtype):
        raise ValueError(f"another shape or dtype than in {METADATA}")


class _FileRange(io.RawIOBase):
    """A range of bytes of a file, as a read-only file object."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_CUR: self._place, io.SEEK_END: self._length}.get(whence, 0)
        return self._place

    def readinto(self, buffer: Any) -> int:  # a Buffer, which has no name before Python 3.12
        room = min(len(buffer), max(0, self._length - self._place))
        found = os.pread(self._file.fileno(), room, self._start + self._place)
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)


class _PickledCall:
    """Replacement for a class or function of a pickle that only stores its arguments and state."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> "_PickledCall":
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def loaded(reader: "_MetadataUnpickler") -> None:
        load(reader)
        reader._count_tuple()

    return loaded


_TUPLES: Final = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
_OPCODES: Final = (
    *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.POP, pickle.POP_MARK),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1),
    *(pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE),
    *(pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT),
    *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, *_TUPLES),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler restricted to the names of checkpoint metadata and dtypes.

    It uses Python's implementation, since the C implementation allows neither removing opcodes nor
    counting tuples. A tuple of tuples that share their parts, sixty levels deep, takes 130 bytes
    but exponential time to hash; therefore all parts of a tuple are counted as often as they occur.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code[0]: _counted(load) if code in _TUPLES else load
        for code in _OPCODES
        for load in (pickle._Unpickler.dispatch[code[0]],)
    }

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._kinds: dict[tuple[str, str], type[_PickledCall]] = {}
        self._sizes: dict[int, int] = {}  # number of parts of each tuple, by its id()
        self._tuples: list[tuple[Any, ...]] = []  # keeps the tuples alive, so that ids are unique

    def find_class(self, module: str, name: str) -> Any:
        """Return a record type for a known name, or the torch dtype of that name."""
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which is not allowed in a list of tensors and was "
                f"not executed"
            )
        return self._kinds.setdefault((module, name), type(name, (_PickledCall,), {}))

    def _count_tuple(self) -> None:
        """Raise UnpicklingError if the tuple on top of the stack has too many nested parts."""
        made = self.stack[-1]
        size = 1 + len(made) + sum(self._sizes.get(id(part), 0) for part in made)
        if size > _MOST_PARTS:
            raise pickle.UnpicklingError(f"a tuple of more than {_MOST_PARTS} nested parts")
        self._sizes[id(made)] = size
        self._tuples.append(made)


def _stored_tensors(root: Any) -> dict[str, StoredTensor]:
    listed, places = _state(root, "Metadata", "state_dict_metadata", "storage_data")
    _expect(isinstance(listed, dict) and isinstance(places, dict), "no dictionaries of tensors")
    place_of: dict[str, Any] = {}
    for index, place in places.items():
        (name,) = _state(index, "MetadataIndex", "fqn")
        _expect(isinstance(name, str), "a name that is not a string")
        _expect(name not in place_of, "a tensor in pieces")
        place_of[name] = place
    _expect(place_of.keys() == listed.keys(), "tensors without a location")
    return {name: _stored_tensor(name, entry, place_of[name]) for name, entry in listed.items()}


def _stored_tensor(name: Any, entry: Any, place: Any) -> StoredTensor:
    _expect(isinstance(name, str), "a name that is not a string")
    names = ("properties", "size", "chunks")
    properties, size, pieces = _state(entry, "TensorStorageMetadata", *names)
    shape = _size(size)
    _expect(isinstance(pieces, list) and len(pieces) == 1, f"{name} in pieces")
    piece = _state(pieces[0], "ChunkStorageMetadata", "offsets", "sizes")
    start, length = map(_size, piece)
    _expect(length == shape and not any(start), f"only a part of {name}")
    _expect(type(properties).__name__ == "TensorProperties", f"no properties of {name}")
    dtype = properties.state[0]
    _expect(isinstance(dtype, torch.dtype), f"no dtype of {name}")
    file, offset, num_bytes = _state(place, "_StorageInfo", "relative_path", "offset", "length")
    _expect(isinstance(file, str) and Path(file).name == file, "a file outside the folder")
    _expect(type(offset) is int and type(num_bytes) is int and offset >= 0 < num_bytes, "no bytes")
    _expect(not place.state.get("transform_descriptors"), f"{name} encoded")
    return StoredTensor(shape, dtype, file, offset, num_bytes)


def _state(record: Any, kind: str, *names: str) -> tuple[Any, ...]:
    _expect(isinstance(record, _PickledCall) and type(record).__name__ == kind, f"no {kind}")
    _expect(isinstance(record.state, dict), f"an empty {kind}")
    return tuple(record.state[name] for name in names)


def _size(record: Any) -> torch.Size:
    _expect(isinstance(record, _PickledCall) and type(record).__name__ == "Size", "no size")
    sizes = tuple(record.arguments[0])
    _expect(all(type(each) is int and each >= 0 for each in sizes), "a size that is not an integer")
    return torch.Size(sizes)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
