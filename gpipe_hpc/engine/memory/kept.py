"""What a stage keeps of a micro-batch between its forward and its backward."""

from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from gpipe_hpc.engine.backward.splitting import Deferred
from gpipe_hpc.engine.layers.segment import Segment
from gpipe_hpc.engine.memory.offload import HostCopy
from gpipe_hpc.engine.stages.routes import State
from gpipe_hpc.engine.state.passage import Returning


class KeptSegment(NamedTuple):
    """What is kept of the run of one segment."""

    segment: Segment
    state: State | None  # what R starts from; None where nothing will be recomputed
    leaves: list[torch.Tensor]  # the input's tensors that require a gradient
    edges: list[GradientEdge | None]  # where backward enters, one for each gradient to come
    starts: list[tuple[GradientEdge, torch.Tensor]]  # losses of its layers
    returning: Returning | None = None  # what R is to go by; None where there is none to come
    promised: tuple[bool, ...] = ()  # of an R's outputs: which a gradient comes for
    versions: tuple[int, ...] = ()  # of the state's tensors: nobody may write into them

    def is_written(self) -> bool:
        """Say whether somebody wrote into what R starts from."""
        tensors = self.state.tensors() if self.state is not None else []
        return any(t._version != v for t, v in zip(tensors, self.versions, strict=True))


class Kept(NamedTuple):
    """What is kept of one micro-batch."""

    segments: list[KeptSegment]
    num_leaves: list[int]  # the gradients that each source is given back
    num_samples: int
    deferred: Deferred | None = None  # what takes weight gradients in place of autograd
    host: HostCopy | None = None  # where it goes between OFFLOAD and FETCH
    shares_casts: bool = True  # of weights, with all micro-batches of the step
