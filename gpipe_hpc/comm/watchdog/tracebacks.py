"""Removal of this package's frames from tracebacks, which then start at the user's code.

These frames add nothing to the error message. With `GPIPE_HPC_TRACEBACK=full` in the environment
they stay, as well as the connection errors that led to another rank's report.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final

from gpipe_hpc.errors import ActionError, GpipeError, ModelError

TRACEBACK_VARIABLE: Final = "GPIPE_HPC_TRACEBACK"


def _folder_of(package: str) -> str:
    """Return the folder of a package without importing it."""
    found = find_spec(package)
    return str(Path(found.origin).parent) + os.sep if found and found.origin else os.devnull


_OWN: Final = str(Path(__file__).parents[2]) + os.sep
_PACKAGE: Final = __name__.partition(".")[0]
_TORCH: Final = _folder_of("torch")
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES: Final = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_LAYER_ERRORS: Final = (ActionError, ModelError)


def shows_all_frames() -> bool:
    """Return whether the environment requests complete tracebacks."""
    return os.environ.get(TRACEBACK_VARIABLE, "").lower() == "full"


class OwnFramesStripped:
    """Context manager that removes this package's frames from exceptions that leave it."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            strip_own_frames(error)


def strip_own_frames(error: BaseException) -> None:
    """Shorten the tracebacks of an error and its causes to the user's frames.

    The traceback of an error raised in this package starts at the user's first frame and omits
    torch's frames below it. If no frame is the user's, all frames are removed from this package's
    errors and their causes. Other errors, such as a violated invariant of this package, keep their
    complete traceback.
    """
    if shows_all_frames():
        return
    above: BaseException | None = None
    for each in list(_chain(error)):
        if above is not None and above.__cause__ is None and isinstance(each, GpipeError):
            # `each` is the error of an earlier attempt, not the cause.
            above.__suppress_context__ = True
            return
        # A layer may come from a library; for other errors our message repeats the library's.
        counts_installed = not isinstance(above, GpipeError) or isinstance(above, _LAYER_ERRORS)
        is_within = isinstance(above, GpipeError) or _passes_through_package(each.__traceback__)
        frames = list(
            _user_frames(each.__traceback__, counts_installed, keeps_torchs=not is_within)
        )
        is_ours = isinstance(each, GpipeError)
        if frames or is_ours or isinstance(each, KeyboardInterrupt):
            each.__traceback__ = _link_frames(frames)
        is_bug = (
            isinstance(above, _LAYER_ERRORS)
            and not is_ours
            and _ends_in_package(each.__traceback__)
        )
        if isinstance(above, GpipeError) and not frames and not is_bug:
            above.__cause__, above.__suppress_context__ = _cause(each), True
        else:
            above = each


def users_line(error: BaseException) -> str:
    """Return file name and line of the user's innermost frame, as in ``script.py:12``.

    A frame in an installed package is used only if there is no other; "" if there is no frame of
    the user.
    """
    frames = [each for each in _frames(error.__traceback__) if not _is_generated(each)]
    for counts_installed in (False, True):
        for each in reversed(frames):
            name = each.tb_frame.f_code.co_filename
            if _is_user_file(name, counts_installed):
                return f"{Path(name).name}:{each.tb_lineno}"
    return ""


def join_cause(error: BaseException) -> None:
    """Merge an uncaught error of this package and its cause into one traceback.

    The frames of the cause follow those of the error, whose message already repeats the cause.
    """
    last = error
    while isinstance(last, GpipeError) and not shows_all_frames():
        cause = error.__cause__
        if cause is None:
            return
        both = [*_frames(error.__traceback__), *_frames(cause.__traceback__)]
        error.__traceback__ = _link_frames(both)
        error.__cause__, error.__context__ = cause.__cause__, cause.__context__
        error.__suppress_context__ = cause.__suppress_context__  # setting __cause__ changes it
        last = cause


def users_traceback(error: BaseException) -> str:
    """Return the formatted user frames of an error, for commands that print the error.

    For an error of this package these are the frames of its cause. Empty if there are none;
    complete for a bug in this package.
    """
    strip_own_frames(error)
    shown = _cause(error) if isinstance(error, GpipeError) else error
    while isinstance(shown, GpipeError):
        shown = _cause(shown)
    if shown is None or shown.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(shown, chain=False))


def _cause(error: BaseException) -> BaseException | None:
    is_caused = error.__cause__ is not None or error.__suppress_context__
    return error.__cause__ if is_caused else error.__context__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the causes that Python would display."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = _cause(following)


def _ends_in_package(trace: TracebackType | None) -> bool:
    """Return whether the innermost frame belongs to this package."""
    files = [each.tb_frame.f_code.co_filename for each in _frames(trace)]
    return bool(files) and files[-1].startswith(_OWN)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _passes_through_package(trace: TracebackType | None) -> bool:
    """Return whether any frame belongs to this package."""
    return any(each.tb_frame.f_code.co_filename.startswith(_OWN) for each in _frames(trace))


def _user_frames(
    trace: TracebackType | None, counts_installed: bool, *, keeps_torchs: bool
) -> Iterator[TracebackType]:
    """Yield the frames from the user's first one on, without this package's frames.

    Args:
        trace: the traceback.
        counts_installed: whether the first frame may be in an installed package.
        keeps_torchs: whether to yield torch's frames, too.
    """
    is_below = False
    left_out = (_OWN,) if keeps_torchs else (_OWN, _TORCH)
    for each in _frames(trace):
        name = each.tb_frame.f_code.co_filename
        is_below = is_below or _is_user_file(name, counts_installed)
        if is_below and not name.startswith(left_out):
            yield each


def _is_generated(each: TracebackType) -> bool:
    """Return whether a frame is code generated by `dataclass` or `namedtuple` for this package."""
    module = str(each.tb_frame.f_globals.get("__name__", ""))
    is_ours = module.startswith(("namedtuple_", f"{_PACKAGE}."))
    return is_ours and each.tb_frame.f_code.co_filename == "<string>"


def _is_user_file(file: str, counts_installed: bool) -> bool:
    if file.startswith((_OWN, _TORCH, "<frozen ")):
        return False
    if file.startswith(_PACKAGES):
        return counts_installed
    return not file.startswith(_STDLIB)


def _link_frames(frames: list[TracebackType]) -> TracebackType | None:
    linked: TracebackType | None = None
    for each in reversed(frames):
        # A signal may interrupt a frame before its first line; its tb_lineno is then None.
        number = each.tb_lineno or each.tb_frame.f_code.co_firstlineno
        linked = TracebackType(linked, each.tb_frame, each.tb_lasti, number)
    return linked
