"""Start of a run: state to resume from, data, pipeline, and the session with all of them."""

from gpipe_hpc.trainer.start.building import loss_of
from gpipe_hpc.trainer.start.opening import open_session

__all__ = ["loss_of", "open_session"]
