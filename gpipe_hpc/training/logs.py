"""A log file for each rank; every line names rank and stage."""

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def rank_log(
    run_dir: Path, rank: int, stages: Sequence[int], *, level: int = logging.INFO
) -> Iterator[Path]:
    """Send what is logged or warned within the block to ``<run_dir>/logs/rank<rank>.log``.

    Warnings and worse also go to standard error, from rank 0 everything from `level` up. A rank
    names all stages that it holds. Yields the path of the file.
    """
    path = run_dir / "logs" / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    held = ",".join(map(str, stages)) or "-"
    form = logging.Formatter(
        f"%(asctime)s %(levelname)s rank {rank} stage {held} %(name)s: %(message)s"
    )
    file = logging.FileHandler(path, encoding="utf-8")
    screen = logging.StreamHandler(sys.stderr)
    screen.setLevel(level if rank == 0 else logging.WARNING)
    root, package = logging.getLogger(), logging.getLogger("gpipe_hpc")
    before, shown = package.level, warnings.showwarning
    package.setLevel(level)
    for handler in (file, screen):
        handler.setFormatter(form)
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield path
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = shown
        package.setLevel(before)
        for handler in (file, screen):
            root.removeHandler(handler)
            handler.close()
