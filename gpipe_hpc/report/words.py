"""Numbers as a report shows them."""

from typing import Final

LEAST_S: Final = 1e-9
"""Seconds: what is shorter is no time."""


def time_text(seconds: float | None) -> str:
    """Return seconds in s, ms or us; less than a nanosecond, what rounding leaves, as none.

    A dash where they are not known.
    """
    if seconds is None:
        return "-"
    size = abs(seconds)
    if size < LEAST_S:
        return "0 s"
    if size >= 1:
        return f"{seconds:.3g} s" if size < 1000 else f"{seconds:,.0f} s"
    return f"{1e3 * seconds:.3g} ms" if size >= 1e-3 else f"{1e6 * seconds:.3g} us"


def percent(share: float | None) -> str:
    """Return a share in percent; a dash where it is not known."""
    return "-" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with so many digits; a dash where it is not known."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
