"""What is said at the start of a run that trades exactness for speed."""

import logging

from gpipe_hpc.engine.outer.settings import Outer

log = logging.getLogger("gpipe_hpc.pipeline")


def say_inexact(outer: Outer) -> None:
    """Say which choices make a run differ from one process; nothing of exact ones."""
    if outer.compress != "none":
        log.info(
            "outer.compress=%s: not exact. Replicas send compressed gradients and add what was "
            "lost to the next step's; tied parameters are summed whole. outer.compress=none is "
            "exact",
            outer.compress,
        )
