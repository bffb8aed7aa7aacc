"""The exceptions of gpipe_hpc.

User errors raise one of these classes; violated internal invariants are asserts with a text. A
message says where the error is, what is wrong, the value and what is allowed, and the remedy.
"""

import errno
import re
from typing import Final


class GpipeError(Exception):
    """Base class of all exceptions that gpipe_hpc raises on purpose."""


class ConfigError(GpipeError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class KeywordError(ConfigError, TypeError):
    """A keyword argument with an unknown name."""


class ScheduleError(GpipeError, ValueError):
    """A schedule table breaks a rule; the message names rank, action and reason."""


class PartitionError(ConfigError):
    """A partition of layers into stages does not fit the model."""


class ModelError(GpipeError, ValueError):
    """The model is not a sequence of layers, or a layer cannot be built or run in a pipeline."""


class DataError(GpipeError):
    """Data is missing, unreadable, or does not match what model and schedule expect."""


class MissingDataError(DataError, ConfigError):
    """A setting names data files or a data folder that does not exist."""


class UnfitDataError(DataError, ConfigError):
    """The data named by settings is of the wrong kind, or inputs and targets do not match."""


class CheckpointError(GpipeError):
    """A checkpoint is missing, incomplete, damaged or belongs to another model."""


class RunFolderError(GpipeError):
    """A run folder is in use by another run, or its run cannot be continued as requested."""


class HalfLoadedError(GpipeError, RuntimeError):
    """Loading a checkpoint failed part-way; the model is only partly loaded."""


class LaunchError(GpipeError, RuntimeError):
    """The ranks could not connect to each other; the message names the missing ones."""


class StalledError(GpipeError, RuntimeError):
    """An operation makes no progress, for example because a file server does not answer."""


class ActionError(GpipeError, RuntimeError):
    """An action of the schedule failed on this rank; the message names stage and micro-batch."""


class DeviceError(GpipeError, RuntimeError):
    """A device, or the transport of its tensors, computed a wrong result."""


class DeviceMemoryError(ActionError):
    """An action ran out of memory; the message shows planned and allocated memory, and remedies."""


class PeerError(GpipeError, RuntimeError):
    """Another rank failed, so this rank stops; the message contains that rank's report.

    Args:
        report: the message of the failed rank.
        is_mistake: whether the cause is invalid settings, so that all ranks exit with the same
            code.
        is_stop: whether the failed rank was stopped by a signal, so that the run can be continued
            with the same command.
    """

    def __init__(self, report: str, *, is_mistake: bool = False, is_stop: bool = False) -> None:
        super().__init__(report)
        self.is_mistake, self.is_stop = is_mistake, is_stop


class NonFiniteError(GpipeError, ArithmeticError):
    """A loss or gradient norm is NaN or infinite; the message names step, rank and micro-batch."""


_FRAMES_OF_CPP: Final = re.compile(r"\n(?:Exception raised from |C\+\+ CapturedTraceback:)")

_REMEDIES: Final = {
    errno.ENOSPC: "its file system is full: free some space, or use another",
    errno.EDQUOT: "the quota of its file system is used up: remove files, or ask for more",
    errno.EROFS: "its file system is mounted read-only: use another folder, or mount it again",
    errno.ESTALE: "its handle is stale, because the file was replaced or its network file system "
    "was mounted again: check both, and start again",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: close some, or ask its administrator",
    errno.ENAMETOOLONG: "its name is too long: choose a shorter one",
    errno.ENOENT: "it does not exist: correct the path, or check whether it was removed",
    errno.ENOTDIR: "a part of the path is a file, not a folder: correct the path",
    errno.EISDIR: "it is a folder, not a file: correct the path",
    errno.EEXIST: "the name exists already: choose another, or remove the existing file",
    errno.ELOOP: "its symbolic links form a cycle: correct the path",
    errno.EACCES: "permission denied: correct the permissions of the file and its folders",
    errno.EPERM: "not permitted: correct its owner or attributes (lsattr)",
    errno.EIO: "the disk or its network failed: check the machine's log (dmesg)",
    errno.EFBIG: "the file is too large for its file system or for the limit (ulimit -f)",
    errno.ENOMEM: "out of memory: use less, or more machines",
    errno.ETIMEDOUT: "its file server does not answer: check the server and the network",
    errno.EHOSTDOWN: "its file server does not answer: check the server and the network",
    errno.ENOTCONN: "its file system is not connected any more: mount it again",
    errno.EBUSY: "another process uses it: wait, or find that process",
}


def is_users_mistake(error: BaseException) -> bool:
    """Return whether an error means invalid settings, including an unsuitable schedule or model.

    Also true if another rank reported such an error.
    """
    if isinstance(error, PeerError):
        return error.is_mistake
    return isinstance(error, ConfigError | ModelError | PartitionError | ScheduleError)


def words_of(error: BaseException) -> str:
    """Return class name and message of an error, without the C++ frames that torch appends."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """Return the message of an error, without the C++ frames that torch appends."""
    return _FRAMES_OF_CPP.split(str(error), maxsplit=1)[0].rstrip()


def os_remedy(error: BaseException | None) -> str | None:
    """Return the remedy for an operating system error, chosen by its errno; None if unknown."""
    number = error.errno if isinstance(error, OSError) else None
    return None if number is None else _REMEDIES.get(number)
