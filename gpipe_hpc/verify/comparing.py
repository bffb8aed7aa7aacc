"""Compare two trainings: bitwise equal, equal except for rounding, or different."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor


class Verdict(IntEnum):
    """Result of comparing two tensors."""

    EXACT = 0
    ROUNDING = 1
    DIFFERENT = 2


@dataclass
class TensorComparison:
    """Result of comparing all tensors of one kind: their number and the largest difference."""

    what: str
    count: int = 0
    verdict: Verdict = Verdict.EXACT
    distance: float = 0.0  # largest difference relative to the largest magnitude
    where: str = ""  # name of the first tensor with the worst verdict
    num_off: int = 0

    def add(self, name: str, ours: Tensor | None, theirs: Tensor | None, bound: float) -> None:
        """Compare a tensor with its reference; `bound` is the largest rounding difference."""
        self.count += 1
        verdict, distance = compare(ours, theirs, bound)
        self.num_off += verdict is not Verdict.EXACT
        if verdict > self.verdict:
            self.verdict, self.where, self.distance = verdict, name, distance
        elif verdict is self.verdict:
            self.distance = max(self.distance, distance)

    def __str__(self) -> str:
        """Format the result for the report."""
        if not self.count:
            return "none"
        if self.verdict is Verdict.EXACT:
            return f"bitwise equal ({self.count})"
        off = f"{self.num_off} of {self.count}, by at most {self.distance:.1e} of their size"
        if self.verdict is Verdict.ROUNDING:
            return f"equal except for rounding ({off})"
        return f"DIFFERENT ({off}; first {self.where})"


def compare(ours: Tensor | None, theirs: Tensor | None, bound: float) -> tuple[Verdict, float]:
    """Compare a tensor with its reference; return verdict and largest relative difference.

    `bound` is the largest absolute difference that rounding explains. The returned difference is
    relative to the largest magnitude in `theirs`.
    """
    if ours is None or theirs is None:
        return (Verdict.EXACT, 0.0) if ours is theirs else (Verdict.DIFFERENT, float("inf"))
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Verdict.DIFFERENT, float("inf")
    if _equal(ours, theirs):
        return Verdict.EXACT, 0.0
    if not (ours.is_floating_point() or ours.is_complex()):
        return Verdict.DIFFERENT, float("inf")
    wide = torch.complex128 if ours.is_complex() else torch.float64
    difference = float((ours.to(wide) - theirs.to(wide)).abs().max())
    size = float(theirs.to(wide).abs().max())
    distance = difference / size if size else float("inf")
    # A comparison with NaN is False, which gives DIFFERENT.
    return (Verdict.ROUNDING if difference <= bound else Verdict.DIFFERENT), distance


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    if torch.equal(ours, theirs):
        return True
    return ours.is_floating_point() and bool(torch.isclose(ours, theirs, 0, 0, True).all())


@dataclass
class VerifyReport:
    """Results of all comparisons over all steps, one line per kind of tensor."""

    heading: str
    lines: dict[str, TensorComparison] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    first: str = ""  # location of the first difference

    def line(self, what: str) -> TensorComparison:
        """Return the result for one kind of tensor, added if it is new."""
        return self.lines.setdefault(what, TensorComparison(what))

    @property
    def is_same(self) -> bool:
        """Return whether no tensor differs by more than rounding."""
        return all(each.verdict is not Verdict.DIFFERENT for each in self.lines.values())

    def __str__(self) -> str:
        """Return the report as text."""
        width = max((len(what) for what in self.lines), default=0)
        rows = [f"  {what:<{width}}  {each}" for what, each in self.lines.items()]
        verdict = "the same training" if self.is_same else f"NOT the same training: {self.first}"
        return "\n".join([self.heading, *rows, *self.notes, verdict])


def add_all(
    line: TensorComparison,
    ours: Mapping[str, Tensor | None],
    theirs: Mapping[str, Tensor | None],
    bounds: Mapping[str, float],
) -> None:
    """Compare tensors by name in `line`; a name missing in `theirs` counts as a difference."""
    for name, tensor in ours.items():
        if name not in theirs:
            line.add(name, tensor, None, 0.0)
        else:
            line.add(name, tensor, theirs[name], bounds.get(name, 0.0))
