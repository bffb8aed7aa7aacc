"""How a run starts: what it goes on from, its data, its pipeline, and the session of all that."""

from gpipe_hpc.trainer.start.building import loss_of
from gpipe_hpc.trainer.start.opening import open_session

__all__ = ["loss_of", "open_session"]
