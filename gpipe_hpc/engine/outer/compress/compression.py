"""The compressed sums of one rank: a way for each of its stages, and what a checkpoint keeps."""

from collections.abc import Collection, Iterator, Mapping

import torch

from gpipe_hpc.comm.collectives.wide import WideGroup
from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.outer.compress.beside import Beside, BesideOnThread, beside
from gpipe_hpc.engine.outer.compress.compressed import Compressed
from gpipe_hpc.engine.outer.compress.compressors import check_fits, make_compressor
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.engine.stages.stage import Stage


class Compression:
    """Makes the ways of a rank's stages and leads them through its steps.

    `seed`: the run's. `may_skip`: steps may be skipped for an overflow.
    """

    def __init__(self, outer: Outer, seed: int, *, may_skip: bool) -> None:
        self._outer, self._seed, self._may_skip = outer, seed, may_skip
        self._ways: list[tuple[Compressed, frozenset[str]]] = []
        self._jobs: dict[Group, Beside] = {}

    def way(self, stage: Stage, copies: Group, *, wide: bool = False) -> Compressed:
        """Return how the buckets of a stage are summed; ModelError if they cannot be so.

        `wide`: what is summed is in float32 at least.
        """
        named = stage.named_parameters()
        for name, parameter in named.items():
            if parameter.requires_grad and name not in stage.tied:
                least = torch.float32 if wide else parameter.dtype
                dtype = torch.promote_types(parameter.dtype, least)
                check_fits(self._outer.compress, name, dtype)
        if copies not in self._jobs:
            self._jobs[copies] = beside("compressed sums", stage.device, copies)
        way = Compressed(
            make_compressor(self._outer),
            copies,
            self._jobs[copies],
            stage=stage.index,
            seed=self._seed,
            may_skip=self._may_skip,
        )
        self._ways.append((way, frozenset(named)))
        return way

    def rest(self, copies: Group) -> None:
        """Wait until no sum of a group is under way, where its other collectives come between.

        Those of a wide group are all carried out in one row, which has to be the same on all ranks:
        a sum that a job starts, and one that the caller starts meanwhile, have no order.
        """
        jobs = self._jobs.get(copies)
        if isinstance(copies, WideGroup) and isinstance(jobs, BesideOnThread):
            jobs.start(lambda: None, ()).wait()

    def begin(self, step: int, unit: torch.Tensor) -> None:
        """Begin a step whose backward starts from `unit`."""
        for way, _ in self._ways:
            way.begin(step, unit)

    def settle(self, *, is_kept: bool) -> None:
        """End a step; one that is not kept has changed nothing."""
        for way, _ in self._ways:
            way.settle(is_kept=is_kept)

    @property
    def sent_bytes(self) -> int:
        """Return how much this rank has sent so far."""
        return sum(group.sent.num_bytes for group in self._jobs)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps."""
        return {name: tensor for way, _ in self._ways for name, tensor in way.state().items()}

    def wanted(self, stored: Collection[str]) -> Iterator[str]:
        """Yield which of the tensors of a checkpoint `restore` needs."""
        for way, parameters in self._ways:
            yield from way.wanted(stored, parameters)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with what a checkpoint kept; what it has not starts anew."""
        for way, parameters in self._ways:
            way.restore(tensors, parameters)
