"""A bucket whose sum and whose parameters are divided over the copies of their stage."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.engine.outer.bucket import Bucket, Room
from gpipe_hpc.engine.outer.division import Division, pieces_of, starts_of
from gpipe_hpc.engine.outer.held import Held, Row
from gpipe_hpc.engine.outer.ways import Way
from gpipe_hpc.engine.sums.dividing import Divisor
from gpipe_hpc.errors import ConfigError


class ShardedBucket:
    """Parameters of one dtype and their gradients in two flat buffers, divided over the copies.

    Each copy has an equal part of both, its shard. The gradients are summed so that each copy gets
    its shard of the sum; what it updates by that, the others get when the parameters are gathered.
    From now on the parameters are views of the one buffer. `named`: in the order of their memory.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], group: Group) -> None:
        sizes = [parameter.numel() for parameter in named.values()]
        first = next(iter(named.values()))
        begins = starts_of(sizes)
        division = Division(begins[-1], group.size)
        self._named, self._group = dict(named), group
        self._own = slice(*division.span(group.position))
        self._values = torch.zeros(division.padded, dtype=first.dtype, device=first.device)
        self._gradients = torch.zeros_like(self._values)
        starts = dict(zip(named, begins, strict=False))
        self._places = {n: slice(starts[n], starts[n] + p.numel()) for n, p in named.items()}
        with torch.no_grad():
            for name, parameter in named.items():
                view = self._values[self._places[name]].view_as(parameter)
                view.copy_(parameter)
                parameter.data = view
        self.held: dict[str, Held] = {}
        self._held_at: dict[str, slice] = {}
        for piece in pieces_of(dict(zip(named, sizes, strict=True)), division, group.position):
            at = slice(starts[piece.name] + piece.start, starts[piece.name] + piece.stop)
            self._held_at[piece.name] = at
            own = nn.Parameter(self._values[at])
            row = Row(division, starts[piece.name])
            self.held[piece.name] = Held(own, named[piece.name], piece.start, row)
        self._trained: list[str] = []
        self._bucket = Bucket({}, self._room())
        self._used: dict[str, bool] = {}
        self._gathering: Pending | None = None

    def _room(self) -> Room:
        return Room(self._gradients, [self._gradients[self._places[n]] for n in self._trained])

    @property
    def whole(self) -> list[nn.Parameter]:
        """Return the parameters whose shards these are."""
        return list(self._named.values())

    def refuse_other_memory(self) -> None:
        """Raise ConfigError for a parameter that was given other memory: no update reaches it."""
        for name, parameter in self._named.items():
            # A parameter without elements has no memory to lose.
            if (
                parameter.numel()
                and parameter.data_ptr() != self._values[self._places[name]].data_ptr()
            ):
                raise ConfigError(
                    f"outer.shard=flat: expected the memory of {name} to be the buffer that its "
                    f"parts are gathered in, got other memory (p.data was set); copy into "
                    f"it instead, as p.data.copy_(...), or use outer.shard=none"
                )

    def begin(self) -> None:
        """Begin a step; parameters may have been frozen or unfrozen."""
        self.refuse_other_memory()
        trained = [name for name, p in self._named.items() if p.requires_grad]
        if trained != self._trained:
            self._trained = trained
            self._bucket = Bucket({name: self._named[name] for name in trained}, self._room())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return those that are trained in this step."""
        return self._bucket.parameters

    def clear(self) -> None:
        """Set all gradients to zero and hand views of them to the parameters that are trained."""
        self._bucket.clear()

    def own(self) -> None:
        """Do nothing: the memory is the bucket's."""

    def used(self) -> list[bool]:
        """Return for each trained parameter whether a micro-batch of this replica used it."""
        return self._bucket.used()

    def late(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients have changed since the start."""
        return self._bucket.late()

    def start_reduction(self, way: Way | None) -> Pending | None:
        """Start summing: each copy gets its shard of the sum. Returns what is under way."""
        return self._bucket.start_reduction(way)

    def wait(self) -> None:
        """Return when this copy's shard of the sum is there; it is what the others have not."""
        self._bucket.wait()
        for parameter in self._named.values():
            parameter.grad = None
        for name, held in self.held.items():
            held.parameter.grad = self._gradients[self._held_at[name]]

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Wait for the shard of the sum, divide it, and hand it to what an optimizer steps on.

        The parameters themselves have no gradient then: nobody has all of it.
        """
        self.wait()
        divisor.divide([self._gradients[self._own]])
        self._used = dict(zip(self._trained, used, strict=True))
        for name, held in self.held.items():
            if not self._used.get(name, False):
                held.parameter.grad = None

    def drop(self) -> None:
        """Let go of the step's gradients; all copies do so."""
        self._used = {}
        for held in self.held.values():
            held.parameter.grad = None

    def whole_gradients(self) -> dict[str, torch.Tensor | None]:
        """Gather copies of the gradients from all copies, which call it together.

        None for a parameter that no replica used.
        """
        gathered = self._gradients.clone()
        for name, held in self.held.items():
            if held.parameter.grad is not None:  # maybe another tensor, put there since
                gathered[self._held_at[name]] = held.parameter.grad
        self._group.start_all_gather(gathered).wait()
        return {
            name: gathered[at].view_as(self._named[name]) if self._used.get(name) else None
            for name, at in self._places.items()
        }

    def start_gathering(self) -> Pending:
        """Start gathering the parameters, each copy's shard from that copy.

        Again if an optimizer's step calls that of its base class: torch runs the hooks of both.
        """
        self.wait_for_parameters()
        self._gathering = self._group.start_all_gather(self._values)
        return self._gathering

    def wait_for_parameters(self) -> None:
        """Return when all parameters are there."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            gathering.wait()
