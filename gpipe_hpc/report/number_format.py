"""Format numbers for reports."""

from typing import Final

LEAST_S: Final = 1e-9
"""Shorter times are shown as 0 s."""


def time_text(seconds: float | None) -> str:
    """Format seconds in s, ms or us; a dash for None, 0 s below a nanosecond."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    if size < LEAST_S:
        return "0 s"
    if size >= 1:
        return f"{seconds:.3g} s" if size < 1000 else f"{seconds:,.0f} s"
    return f"{1e3 * seconds:.3g} ms" if size >= 1e-3 else f"{1e6 * seconds:.3g} us"


def percent(share: float | None) -> str:
    """Format a share in percent; a dash for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with a number of significant digits; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
