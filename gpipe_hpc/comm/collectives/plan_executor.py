"""Executor of the plans of one group, in order, on a background thread."""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch

from gpipe_hpc.comm.collectives.agreement import Agreement
from gpipe_hpc.comm.collectives.collective_queue import CollectiveQueue, QueuedCollective
from gpipe_hpc.comm.collectives.plan import Plan, PlanPosition
from gpipe_hpc.comm.collectives.run_plan import Exchange as Swap
from gpipe_hpc.comm.collectives.run_plan import run_plan
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener


class TrafficKind(Enum):
    """Kinds of messages within a group; only messages of the same kind are kept in order."""

    CALLER = 0
    PLAN = 1
    GREETING = 2


Parts = Sequence[tuple[int, torch.Tensor]]
Exchange = Callable[[TrafficKind, Parts, Parts, WaitListener], None]
"""Sends and receives tensors with positions of ranks; blocks, reporting the ranks waited for."""

Job = Callable[[torch.Tensor, Swap], None]
"""Works in place on the flat elements of a tensor by means of exchanges."""


class PlanExecutor:
    """Executor of plans over host tensors, on a background thread.

    Args:
        ranks: world ranks of the group.
        position: index of this rank among them.
        exchange: sends and receives the tensors of one step.
        listener: receives the ranks for which a caller is waiting.
    """

    def __init__(
        self, ranks: Sequence[int], position: int, exchange: Exchange, listener: WaitListener
    ) -> None:
        self._position, self._exchange, self._listener = position, exchange, listener
        self._agreement = Agreement(PlanPosition(len(ranks), position), ranks)
        self._turns = CollectiveQueue(f"collectives of {len(ranks)} ranks")

    def start(self, plan: Plan, tensor: torch.Tensor, what: str) -> "PlanHandle":
        """Queue a plan behind all plans and jobs already queued; see `Group.start_plan`."""
        return self.start_job(
            lambda flat, swap: run_plan(plan, flat, self._position, swap), tensor, what
        )

    def start_job(self, job: Job, tensor: torch.Tensor, what: str) -> "PlanHandle":
        """Queue a job behind all plans and jobs already queued; all ranks must queue the same."""
        flat = flattened(tensor)
        turn = self._turns.start(partial(self._carry, job, flat, named(what, tensor)))
        return PlanHandle(turn, self._listener, flat, tensor)

    def _carry(self, job: Job, flat: torch.Tensor, what: str, note: WaitListener) -> None:
        self._agreement.reach(
            what, lambda out, into: self._exchange(TrafficKind.GREETING, out, into, note)
        )
        job(flat, lambda out, into: self._exchange(TrafficKind.PLAN, out, into, note))


class PlanHandle:
    """Handle of a queued or running plan."""

    def __init__(
        self,
        turn: QueuedCollective,
        listener: WaitListener,
        flat: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        self._turn, self._listener = turn, listener
        self._flat, self._tensor = flat, tensor

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` when the plan is complete, on the thread that executes it."""
        self._turn.calls.add(call)

    def wait(self) -> None:
        """Block until the plan is complete; raise the exception that ended the plan, if any."""
        self._turn.wait(self._listener)
        copy_back(self._flat, self._tensor)


def named(what: str, tensor: torch.Tensor) -> str:
    """Return a description of a collective, its number of elements and dtype."""
    return f"{what} of {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a flat host tensor, sharing its memory if possible."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)


def copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy flat elements back into the tensor they were taken from, unless both share memory."""
    own = tensor.detach()
    if own.device != flat.device or own.data_ptr() != flat.data_ptr():
        own.copy_(flat.view(tensor.shape))
