"""Log files, one per rank; each line names rank and stage."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from gpipe_hpc.comm.watchdog.output_streams import print_line, reporting_lost_streams
from gpipe_hpc.errors import os_remedy
from gpipe_hpc.trainer.writers import METRICS_FILE

log = logging.getLogger("gpipe_hpc.train")

_WIPE: Final = "\r\x1b[2K"  # to the start of the line, all of it erased


class ScreenHandler(logging.StreamHandler[TextIO]):
    """Logging handler for standard error that clears a progress line before each message.

    Rank 0 may show its progress line on the same terminal, so every rank clears the current line;
    rank 0 then draws the progress line again.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stderr)
        has_codes = os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
        self._wipe = _WIPE if has_codes and self.stream.isatty() else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message with the control sequence that clears the line, if needed."""
        return self._wipe + super().format(record)


class LogFile(logging.FileHandler):
    """Logging handler for a file that reports only its first write error, without a traceback.

    The run continues, since messages are also printed and the disk may have space again later.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an OSError once on standard error; pass other errors to logging."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            remedy = os_remedy(error) or "check its folder"
            told = f"gpipe_hpc: log: cannot write {self.baseFilename}: {error}; {remedy}"
            print_line(told)

    def close(self) -> None:
        """Close the file; buffered data that cannot be written is lost."""
        with suppress(OSError):
            super().close()


@contextmanager
def rank_log(
    run_dir: Path, rank: int, stages: Sequence[int], *, level: int = logging.INFO
) -> Iterator[Path]:
    """Write log messages and warnings within the context to ``<run_dir>/logs/rank<rank>.log``.

    Warnings and errors are also written to standard error, on rank 0 all messages from `level` on.
    Each line names the rank and its stages. Yields the path of the file.
    """
    path = run_dir / "logs" / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    held = ",".join(map(str, stages)) or "-"
    form = logging.Formatter(
        f"%(asctime)s %(levelname)s rank {rank} stage {held} %(name)s: %(message)s"
    )
    file = LogFile(path)
    screen = ScreenHandler()
    screen.setLevel(level if rank == 0 else logging.WARNING)
    root, package = logging.getLogger(), logging.getLogger("gpipe_hpc")
    before, shown = package.level, warnings.showwarning
    package.setLevel(level)
    for handler in (file, screen):
        handler.setFormatter(form)
        root.addHandler(handler)
    logging.captureWarnings(True)

    def tell_lost(words: str) -> None:
        log.warning(
            "%s; the run continues without it: see %s and %s",
            *(words, run_dir / METRICS_FILE, path),
        )

    try:
        with reporting_lost_streams(tell_lost):
            yield path
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = shown
        package.setLevel(before)
        for handler in (file, screen):
            root.removeHandler(handler)
            handler.close()
