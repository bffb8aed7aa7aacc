"""What a user reads of a traceback: it begins at frames of his own, and ours are left out.

Ours say nothing that the message does not. `GPIPE_HPC_TRACEBACK=full` in the environment keeps
them, and the errors of connections that led to the report of another rank.
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
    """Return where a package lies, without loading it."""
    found = find_spec(package)
    return str(Path(found.origin).parent) + os.sep if found and found.origin else os.devnull


_OURS: Final = str(Path(__file__).parents[2]) + os.sep
_PACKAGE: Final = __name__.partition(".")[0]
_TORCHS: Final = _folder_of("torch")
_PYTHONS: Final = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES: Final = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_OF_LAYERS: Final = (ActionError, ModelError)


def shows_all_frames() -> bool:
    """Say whether the environment asks for whole tracebacks."""
    return os.environ.get(TRACEBACK_VARIABLE, "").lower() == "full"


class OwnFramesLeftOut:
    """A block out of which errors come without our frames, nor those above the user's first."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            leave_out_own_frames(error)


def leave_out_own_frames(error: BaseException) -> None:
    """Cut the tracebacks of an error and of what caused it.

    What was raised in here begins at the first frame of the user's, without those of torch: how it
    calls a layer's forward says nothing. Where none is his, nothing is left of one of our messages,
    nor of what such a message was made of. What none of this is true of, as a broken invariant of
    ours, keeps its whole traceback.
    """
    if shows_all_frames():
        return
    above: BaseException | None = None
    for each in list(_chain(error)):
        if above is not None and above.__cause__ is None and isinstance(each, GpipeError):
            # What we tried before, and then tried again, is not what failed.
            above.__suppress_context__ = True
            return
        # A layer may be a library's; what one says of a file it cannot read is in our message.
        counts_installed = not isinstance(above, GpipeError) or isinstance(above, _OF_LAYERS)
        is_within = isinstance(above, GpipeError) or _passes_here(each.__traceback__)
        frames = list(_users(each.__traceback__, counts_installed, keeps_torchs=not is_within))
        is_ours = isinstance(each, GpipeError)
        if frames or is_ours or isinstance(each, KeyboardInterrupt):
            each.__traceback__ = _linked(frames)
        is_bug = isinstance(above, _OF_LAYERS) and not is_ours and _ends_here(each.__traceback__)
        if isinstance(above, GpipeError) and not frames and not is_bug:
            above.__cause__, above.__suppress_context__ = _cause(each), True
        else:
            above = each


def users_line(error: BaseException) -> str:
    """Return the file's name and line of the user's innermost frame, as ``script.py:12``.

    That of a package which he has installed only where none is his own; "" where none is either.
    """
    frames = [each for each in _frames(error.__traceback__) if not _is_generated(each)]
    for counts_installed in (False, True):
        for each in reversed(frames):
            name = each.tb_frame.f_code.co_filename
            if _is_users(name, counts_installed):
                return f"{Path(name).name}:{each.tb_lineno}"
    return ""


def join_cause(error: BaseException) -> None:
    """Let one of our messages and its cause be shown as one, which ends the process.

    The frames of the cause stand below those of the message, which repeats what the cause says.
    """
    last = error
    while isinstance(last, GpipeError) and not shows_all_frames():
        cause = error.__cause__
        if cause is None:
            return
        both = [*_frames(error.__traceback__), *_frames(cause.__traceback__)]
        error.__traceback__ = _linked(both)
        error.__cause__, error.__context__ = cause.__cause__, cause.__context__
        error.__suppress_context__ = cause.__suppress_context__  # set by a cause, too
        last = cause


def users_traceback(error: BaseException) -> str:
    """Return the user's own frames behind an error that a command says, as Python shows them.

    Those of its cause if it is one of our messages; of a fault of ours the whole, else nothing.
    """
    leave_out_own_frames(error)
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
    """Yield an error and what is shown as its causes."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = _cause(following)


def _ends_here(trace: TracebackType | None) -> bool:
    """Say whether the innermost frame is ours, not that of a library that we or a layer called."""
    files = [each.tb_frame.f_code.co_filename for each in _frames(trace)]
    return bool(files) and files[-1].startswith(_OURS)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _passes_here(trace: TracebackType | None) -> bool:
    """Say whether any frame is ours."""
    return any(each.tb_frame.f_code.co_filename.startswith(_OURS) for each in _frames(trace))


def _users(
    trace: TracebackType | None, counts_installed: bool, *, keeps_torchs: bool
) -> Iterator[TracebackType]:
    """Yield the frames from the first that is the user's; none of ours.

    `counts_installed`: that may be in an installed package, too. `keeps_torchs`: torch's below it.
    """
    is_below = False
    left_out = (_OURS,) if keeps_torchs else (_OURS, _TORCHS)
    for each in _frames(trace):
        name = each.tb_frame.f_code.co_filename
        is_below = is_below or _is_users(name, counts_installed)
        if is_below and not name.startswith(left_out):
            yield each


def _is_generated(each: TracebackType) -> bool:
    """Say whether a frame is of what `dataclass` or `namedtuple` has written for our classes."""
    module = str(each.tb_frame.f_globals.get("__name__", ""))
    is_ours = module.startswith(("namedtuple_", f"{_PACKAGE}."))
    return is_ours and each.tb_frame.f_code.co_filename == "<string>"


def _is_users(file: str, counts_installed: bool) -> bool:
    if file.startswith((_OURS, _TORCHS, "<frozen ")):
        return False
    if file.startswith(_PACKAGES):
        return counts_installed
    return not file.startswith(_PYTHONS)


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    linked: TracebackType | None = None
    for each in reversed(frames):
        # A signal may come before a frame has reached its first line: then it is at none.
        number = each.tb_lineno or each.tb_frame.f_code.co_firstlineno
        linked = TracebackType(linked, each.tb_frame, each.tb_lasti, number)
    return linked
