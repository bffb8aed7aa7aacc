"""Amounts as people read them."""

from collections.abc import Iterable, Sequence


def bytes_text(nbytes: float) -> str:
    """Return bytes with a unit of 1024: ``1.50 GiB``."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def flops_text(flops: float) -> str:
    """Return FLOPs with a unit of 1000: ``1.50 TFLOP``."""
    return _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def ranges_text(numbers: Iterable[int]) -> str:
    """Return whole numbers with neighbours folded: ``1-4, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _scaled(amount: float, base: int, units: Sequence[str]) -> str:
    step = 0
    while amount >= base and step < len(units) - 1:
        amount /= base
        step += 1
    if step == 0:
        return f"{round(amount)} {units[0]}"
    return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {units[step]}"
