"""What is said at the start of a run that trades exactness for speed."""

import logging

from gpipe_hpc.engine.outer.settings import Outer

log = logging.getLogger("gpipe_hpc.pipeline")


def say_inexact(outer: Outer) -> None:
    """Say which choices make a run differ from one process; nothing of exact ones."""
    if outer.compress != "none" and not outer.is_apart:
        log.info(
            "outer.compress=%s: not exact. Replicas send compressed gradients and add what was "
            "lost to the next step's; tied parameters are summed whole. outer.compress=none is "
            "exact",
            outer.compress,
        )


def say_apart(outer: Outer) -> None:
    """Say that replicas train by themselves, and when they meet."""
    parts = f", in {outer.parts} parts in turn" if outer.parts > 1 else ""
    behind = f", arriving {outer.behind} steps later" if outer.behind else ""
    log.info(
        "outer.every=%d: not exact. Replicas train by themselves; every %d steps their parameters "
        "are averaged%s%s, and an outer SGD of rate %g with momentum %g steps on how far they have "
        "gone%s. outer=allreduce is exact",
        outer.every,
        outer.every,
        parts,
        behind,
        outer.lr,
        outer.momentum,
        "" if outer.compress == "none" else f", sent as {outer.compress}",
    )
