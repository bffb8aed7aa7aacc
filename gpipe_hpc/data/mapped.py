"""Cache of memory-mapped token files, limited by the number of open files."""

import errno
import resource
import threading
from collections import OrderedDict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.paths import refuse_shrunk, unreadable
from gpipe_hpc.data.token_files import TokenFile
from gpipe_hpc.errors import DataError

_FEWEST: Final = 16
_MOST: Final = 1024
_SCARCE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class MappedFiles:
    """Least-recently-used cache of memory maps of token files.

    Each map keeps a file descriptor open, and a corpus may have more files than a process may open.
    Thread-safe; a map that is still being read stays valid after it leaves the cache.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most or _default_limit()
        self._maps: OrderedDict[TokenFile, npt.NDArray[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._maps)

    def tokens(self, file: TokenFile) -> npt.NDArray[Any]:
        """Return the mapped tokens of a file; raise DataError if it is unreadable or truncated."""
        with self._lock:
            if file in self._maps:
                self._maps.move_to_end(file)
                refuse_shrunk(self._maps[file])
                return self._maps[file]
            while len(self._maps) >= self.most:
                self._maps.popitem(last=False)
            self._maps[file] = self._map(file)
            return self._maps[file]

    def _map(self, file: TokenFile) -> npt.NDArray[Any]:
        try:
            return _mapped(file)
        except OSError as error:
            if error.errno not in _SCARCE or not self._maps:
                raise unreadable(file.path, error) from error
        # Leave file descriptors to the rest of the process: halve the number of maps.
        self.most = max(1, len(self._maps) // 2)
        while len(self._maps) >= self.most:
            self._maps.popitem(last=False)
        try:
            return _mapped(file)
        except OSError as error:
            raise unreadable(file.path, error) from error


def _mapped(file: TokenFile) -> npt.NDArray[Any]:
    size = file.dtype.itemsize
    held = (file.path.stat().st_size - file.offset) // size
    if held < file.num_tokens:
        raise DataError(
            f"data: {file.path} has changed: expected at least {file.num_tokens} tokens, got "
            f"{max(0, held)}; do not modify data files while a run reads them"
        )
    return np.memmap(file.path, file.dtype, "r", file.offset, (file.num_tokens,))


def _default_limit() -> int:
    """Return the default size of the cache: a quarter of the limit of open files, within bounds."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_FEWEST, min(_MOST, soft // 4))
