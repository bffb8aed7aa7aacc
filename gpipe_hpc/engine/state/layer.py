"""What is known of the state that layers change: of one, and of those that run together."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from torch import nn

from gpipe_hpc.engine.state.buffers import Found, Home, Lasting, LayerBuffers
from gpipe_hpc.engine.state.keyed import Drawing, Drawn, Draws, Keyed, Known
from gpipe_hpc.engine.state.sources import own_generators

log = logging.getLogger("gpipe_hpc.pipeline")

_EVERY: Final = 4


class LayerState:
    """What is known of one layer's state: its buffers, and what it draws from.

    `index` is that of `layer` in the model, and `where` its name in messages.
    """

    def __init__(
        self,
        index: int,
        layer: nn.Module,
        where: str,
        keyed: Keyed,
        lasting: Lasting,
        sharing: Sequence[tuple[str, Home]] = (),
        elsewhere: Mapping[str, int] | None = None,
    ) -> None:
        self.index, self.where = index, where
        self.layer = layer
        self._keyed, self._lasting, self._elsewhere = keyed, lasting, elsewhere
        self._known = [id(generator) for generator in keyed.generators]
        self._is_told = False
        self.renew(sharing)

    def renew(self, sharing: Sequence[tuple[str, Home]]) -> None:
        """Find out anew: nothing has run yet, or the layer has other modules than before."""
        self.buffers = LayerBuffers(self.layer, self.where, self._lasting, sharing, self._elsewhere)
        self._draws = {True: Draws(), False: Draws()}
        for draws in self._draws.values():
            draws.own = own_generators(self.layer, self._known)
        self._keyed.num_learned += 1

    @property
    def draws(self) -> Draws:
        """Return what it draws from in the mode that it is in."""
        return self._draws[self.layer.training]

    def seed(self, drawing: Drawing, key: int, *, checks: bool) -> AbstractContextManager[object]:
        """Seed the generators for a run of the layer; return the block to run it in.

        `checks`: find out whether it has begun to draw from torch's.
        """
        draws = self.draws
        return drawing.seed(draws, key, checks=checks or draws.is_suspected)

    def end(self, drawing: Drawing) -> Drawn:
        """End a run of the layer; return how much it drew."""
        draws = self.draws
        is_new = not draws.is_known
        drawn = drawing.end(draws)
        if is_new:  # some make their generator in their first forward
            draws.own = own_generators(self.layer, self._known)
        return drawn

    def tell_of_backward(self, found: Sequence[Found]) -> None:
        """Warn if buffers that forwards change have changed in a backward too."""
        changed = self.buffers.changes(found)
        if changed:
            self.tell(
                f"buffer {changed} was changed in a backward, expected in forwards alone, as each "
                f"micro-batch has a copy of its own; if torch.utils.checkpoint in the layer runs "
                f"its forward again there, leave that to recompute=always"
            )

    def tell(self, message: str) -> None:
        """Warn of the layer, once."""
        if not self._is_told:
            self._is_told = True
            log.warning("%s: %s", self.where, message)


class Roll:
    """Which of the layers that run together have state, as far as is known.

    Looked up once, and anew only when a run has found something out: when a layer draws from what
    it was not known to, when one that had no buffers has one, or when one changes its mode.
    `turn`: the place of a layer that the run at hand looks at anew; -1 for none.
    """

    __slots__ = (
        "_empty",
        "_keyed",
        "_layers",
        "_num_learned",
        "_num_runs",
        "idle",
        "known",
        "modes",
        "states",
        "turn",
    )

    def __init__(self, states: Sequence[LayerState], keyed: Keyed) -> None:
        self.states = tuple(states)
        self._keyed = keyed
        self._layers = [state.layer for state in states]
        self._num_learned, self._num_runs = -1, 0
        self._empty: list[Home] = []  # where an idle layer would have its buffers
        self.modes: tuple[bool, ...] = ()
        self.known = Known()
        self.idle: tuple[bool, ...] = ()  # which have no buffers and draw nothing
        self.turn = -1

    def call(self) -> None:
        """Be up to date for a run."""
        modes = tuple([layer.training for layer in self._layers])
        is_known = self._num_learned == self._keyed.num_learned and modes == self.modes
        if not is_known or any(self._empty):
            self._look_up(modes)
        # Now and then one layer is looked at anew: it may have begun to draw from torch's.
        self._num_runs += 1
        rounds, left = divmod(self._num_runs, _EVERY)
        self.turn = -1 if left or not modes else rounds % len(modes)

    def _look_up(self, modes: tuple[bool, ...]) -> None:
        self.modes, self._num_learned = modes, self._keyed.num_learned
        self.known = Known.of(tuple([state.draws for state in self.states]))
        self.idle = tuple([s.draws.are_none and not s.buffers.exist for s in self.states])
        idle = [state for state, is_idle in zip(self.states, self.idle, strict=True) if is_idle]
        self._empty = [home for state in idle for home in state.buffers.homes]
