"""The exception family of gpipe_hpc.

Users' mistakes raise one of these; broken invariants of our own are plain asserts with a text.
Every message reads ``where: what, expected, got; remedy``.
"""

import errno
import re
from typing import Final


class GpipeError(Exception):
    """Base of everything that gpipe_hpc raises on purpose."""


class ConfigError(GpipeError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class KeywordError(ConfigError, TypeError):
    """A keyword that there is not."""


class ScheduleError(GpipeError, ValueError):
    """A schedule table that breaks a rule; names rank, action and reason."""


class PartitionError(ConfigError):
    """A cut of layers into stages that does not fit the model."""


class ModelError(GpipeError, ValueError):
    """A model that is not a sequence of layers we can place, or a layer that cannot be built."""


class DataError(GpipeError):
    """Data that is missing, unreadable or does not match what the model and schedule expect."""


class MissingDataError(DataError, ConfigError):
    """A setting that names files or a folder of data where there are none."""


class UnfitDataError(DataError, ConfigError):
    """A setting that names data of another kind, or inputs and targets that are no pairs."""


class CheckpointError(GpipeError):
    """A checkpoint that is missing, incomplete or of another model."""


class RunFolderError(GpipeError):
    """A run folder that another run holds, or that a run cannot go on in as it is asked to."""


class HalfLoadedError(GpipeError, RuntimeError):
    """Reading failed after loading had begun: a part of the model is loaded, another is not."""


class LaunchError(GpipeError, RuntimeError):
    """The ranks could not be brought together; names who is missing."""


class StalledError(GpipeError, RuntimeError):
    """Work that does nothing any more, as where a file server does not answer; says where it is."""


class ActionError(GpipeError, RuntimeError):
    """An action of the table failed on this rank; names rank, stage, micro-batch and action."""


class DeviceError(GpipeError, RuntimeError):
    """A device, or what carries its tensors, that comes to another result than it must."""


class DeviceMemoryError(ActionError):
    """Memory ran out in an action; says what was planned, what is used, and what would help."""


class PeerError(GpipeError, RuntimeError):
    """Another rank failed and this one stops because of it; carries the peer's own report.

    `is_mistake`: settings that cannot work are why, so all ranks end alike. `is_stop`: a signal
    asked it to stop, so the same command goes on.
    """

    def __init__(self, report: str, *, is_mistake: bool = False, is_stop: bool = False) -> None:
        super().__init__(report)
        self.is_mistake, self.is_stop = is_mistake, is_stop


class NonFiniteError(GpipeError, ArithmeticError):
    """A loss or a gradient norm is NaN or infinite; names step, rank and micro-batch."""


_FRAMES_OF_CPP: Final = re.compile(r"\n(?:Exception raised from |C\+\+ CapturedTraceback:)")

_REMEDIES: Final = {
    errno.ENOSPC: "its file system is full: make room there, or use another",
    errno.EDQUOT: "the quota of its file system is used up: remove files, or ask for more",
    errno.EROFS: "its file system is mounted read-only: use another folder, or mount it again",
    errno.ESTALE: "its handle is stale, as the file was replaced or its network file system was "
    "mounted again: look which, and start again",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: close some, or ask who runs it",
    errno.ENAMETOOLONG: "its name is too long: choose a shorter one",
    errno.ENOENT: "nothing is there: correct the path, or look who removed it",
    errno.ENOTDIR: "a part of the path is a file, no folder: correct the path",
    errno.EISDIR: "it is a folder, no file: correct the path",
    errno.EEXIST: "the name is taken: choose another, or remove what is there",
    errno.ELOOP: "its links lead round in a circle: correct the path",
    errno.EACCES: "this user may not: correct the permissions of it and its folders",
    errno.EPERM: "this user may not: correct its owner or attributes (lsattr)",
    errno.EIO: "the disk or its network failed: look at the machine's log (dmesg)",
    errno.EFBIG: "the file is too large for its file system or for the limit (ulimit -f)",
    errno.ENOMEM: "memory is used up: use less of it, or more machines",
    errno.ETIMEDOUT: "its file server does not answer: look at it and the network",
    errno.EHOSTDOWN: "its file server does not answer: look at it and the network",
    errno.ENOTCONN: "its file system is not connected any more: mount it again",
    errno.EBUSY: "something else uses it: wait, or look who does",
}


def is_users_mistake(error: BaseException) -> bool:
    """Say whether settings cannot work, which a schedule or a model that does not fit is, too.

    So is what another rank has refused.
    """
    if isinstance(error, PeerError):
        return error.is_mistake
    return isinstance(error, ConfigError | ModelError | PartitionError | ScheduleError)


def words_of(error: BaseException) -> str:
    """Return an error's kind and what it says, without the frames of C++ that torch adds to some.

    For a message of ours that tells what somebody else's code raised.
    """
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """Return what an error says, without the frames of C++ that torch adds to some."""
    return _FRAMES_OF_CPP.split(str(error), maxsplit=1)[0].rstrip()


def os_remedy(error: BaseException | None) -> str | None:
    """Return what to do about an error of the operating system, by its errno; None if unknown."""
    number = error.errno if isinstance(error, OSError) else None
    return None if number is None else _REMEDIES.get(number)
