"""Format bytes, FLOPs and ranges of numbers for messages."""

from collections.abc import Iterable, Sequence


def bytes_text(nbytes: float) -> str:
    """Return bytes with a decimal unit, for example ``8.00 GB``."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def flops_text(flops: float) -> str:
    """Return FLOPs with a decimal unit, for example ``1.50 TFLOP``."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def ranges_text(numbers: Iterable[int], most: int = 12) -> str:
    """Format integers with ranges abbreviated: ``1-4, 7-15 by 2``; at most `most` are shown."""
    left = sorted(numbers)
    runs: list[str] = []
    while left and len(runs) < most:
        step = left[1] - left[0] if len(left) > 1 else 1
        length = 1
        while length < len(left) and left[length] - left[length - 1] == step:
            length += 1
        if step > 1 and length < 3:
            length = 1
        runs.append(_run_text(left[:length], step))
        left = left[length:]
    return ", ".join([*runs, *([f"{len(left)} more"] if left else [])])


def _run_text(run: Sequence[int], step: int) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}" + (f" by {step}" if step > 1 else "")


def _scaled(amount: float, units: Sequence[str]) -> str:
    step = 0
    while amount >= 1000 and step < len(units) - 1:
        amount /= 1000
        step += 1
    if step == 0:
        return f"{round(amount)} {units[0]}"
    return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {units[step]}"
