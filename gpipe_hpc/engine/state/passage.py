"""What goes with the runs of layers: what a first forward notes, and what its R makes of that."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple, Protocol

from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.engine.state.buffers import NO_BUFFERS, Before, Returned
from gpipe_hpc.engine.state.keyed import Drawing, Drawn, Keyed
from gpipe_hpc.engine.state.layer import LayerState
from gpipe_hpc.engine.state.sketch import Sketch, difference, sketch_of
from gpipe_hpc.engine.state.sources import ProcessMarks
from gpipe_hpc.errors import ModelError


class Trace(NamedTuple):
    """What a forward of one layer leaves for its R."""

    before: Before
    drawn: Drawn
    output: Sketch | None


_NO_TRACE: Final = Trace(NO_BUFFERS, Drawn(), None)  # of a layer that was idle


class Passage(Protocol):
    """What goes with the runs of the layers of a segment, or of the loss, on one micro-batch.

    `looks`: also at layers that have no state, as far as is known.
    """

    @property
    def looks(self) -> bool:
        """Say whether it looks at every layer."""

    def start(self, first: int) -> ProcessMarks | None:
        """Return where a run from layer `first` on starts Python's and NumPy's generators.

        None: each layer has its own key.
        """

    def begin(self, state: LayerState) -> None:
        """Take notice that a layer is about to run."""

    def end(self, state: LayerState, output: Nest, drawn: Drawn) -> None:
        """Take notice that it has run."""

    def fail(self, error: Exception) -> None:
        """Take notice that it has failed."""

    def close(self, states: Sequence[LayerState], drawing: Drawing, keyed: Keyed) -> None:
        """Take notice that all of them have run."""


class Evaluation:
    """Let layers change what they like, as in plain torch."""

    looks = False

    def start(self, first: int) -> ProcessMarks | None:
        """Let each layer have its own key."""
        return None

    def begin(self, state: LayerState) -> None:
        """Do nothing."""

    def end(self, state: LayerState, output: Nest, drawn: Drawn) -> None:
        """Do nothing."""

    def fail(self, error: Exception) -> None:
        """Do nothing."""

    def close(self, states: Sequence[LayerState], drawing: Drawing, keyed: Keyed) -> None:
        """Do nothing."""


EVALUATION: Final = Evaluation()


class Forward:
    """A forward of training, after which no R comes."""

    looks = False

    def __init__(self) -> None:
        self._before: Before | None = None
        self.returned: list[Returned] = []

    def start(self, first: int) -> ProcessMarks | None:
        """Let each layer have its own key."""
        return None

    def begin(self, state: LayerState) -> None:
        """Let the layer work on copies of the buffers that it changes."""
        self._before = state.buffers.begin(returns=False)

    def end(self, state: LayerState, output: Nest, drawn: Drawn) -> None:
        """Learn which those are."""
        assert self._before is not None, "begun"
        before = state.buffers.end(self._before, returns=False)
        self.returned += state.buffers.returned(before, output, returns=False)

    def fail(self, error: Exception) -> None:
        """Do nothing: a step that failed is not gone on with."""

    def close(self, states: Sequence[LayerState], drawing: Drawing, keyed: Keyed) -> None:
        """Warn if others draw from torch's generators: no R would show the harm.

        Raises ModelError if a layer has written to the buffer of another.
        """
        for each in self.returned:
            each.refuse_writes()
        if not keyed.was_disturbed:
            return
        for state in states:
            if state.draws.torch:
                state.tell(
                    "draws from torch's default generator, from which something else has drawn "
                    "amid a step (another thread, or a hook of a backward), expected nothing else, "
                    "as what the layer draws then depends on timing; give the other one a "
                    "torch.Generator of its own"
                )
                return


class Returning:
    """A forward that an R will run again. `tries`: outputs are to be compared then."""

    def __init__(self, *, tries: bool) -> None:
        self._tries = self.looks = tries
        self._before: Before | None = None
        self.returned: list[Returned] = []
        self.traces: dict[int, Trace] = {}
        self.starts: dict[int, ProcessMarks] = {}

    def start(self, first: int) -> ProcessMarks | None:
        """Let each layer have its own key."""
        return None

    def begin(self, state: LayerState) -> None:
        """Let the layer work on copies of the buffers that it changes."""
        self._before = state.buffers.begin(returns=True)

    def end(self, state: LayerState, output: Nest, drawn: Drawn) -> None:
        """Note what R has to start from, and has to come to."""
        assert self._before is not None, "begun"
        before = state.buffers.end(self._before, returns=True)
        self.returned += state.buffers.returned(before, output, returns=True)
        # Whether a layer draws from the process-wide ones is not known for sure.
        compares = self._tries or drawn.python is not None or drawn.numpy is not None
        sketch = sketch_of(output) if compares else None
        self.traces[state.index] = Trace(before, drawn, sketch)

    def fail(self, error: Exception) -> None:
        """Do nothing: a step that failed is not gone on with."""

    def close(self, states: Sequence[LayerState], drawing: Drawing, keyed: Keyed) -> None:
        """Note where Python's and NumPy's generators stood if a layer drew from them unkeyed.

        Raises ModelError if a layer has written to the buffer of another.
        """
        for each in self.returned:
            each.refuse_writes()
        if drawing.unkeyed is not None and states:
            self.starts[states[0].index] = drawing.unkeyed


class Again:
    """An R: everything as the forward found it, and nothing changed by it."""

    def __init__(self, forward: Returning) -> None:
        self._traces: Mapping[int, Trace] = forward.traces
        self.looks = forward.looks
        self._starts = forward.starts
        self._block = ExitStack()
        self._differs = False

    def start(self, first: int) -> ProcessMarks | None:
        """Return where the forward started, if it was drawn without keys."""
        return self._starts.get(first)

    def begin(self, state: LayerState) -> None:
        """Put the buffers as the forward found them."""
        before = self._traces.get(state.index, _NO_TRACE).before
        if state.buffers.matters(before):
            self._block.enter_context(state.buffers.again(before))

    def end(self, state: LayerState, output: Nest, drawn: Drawn) -> None:
        """Put the present buffers back, and compare the runs."""
        self._block.close()
        trace = self._traces.get(state.index, _NO_TRACE)
        apart = 0.0
        if trace.output is not None and not self._differs:
            apart = difference(trace.output, sketch_of(output))
        if state.draws.torch and _is_moved(trace.drawn.torch, drawn.torch):
            raise _other_numbers(state, "torch's", "torch.Generator()")
        if apart and _is_moved(trace.drawn.python, drawn.python):
            raise _other_numbers(state, "Python's", "random.Random()")
        if apart and _is_moved(trace.drawn.numpy, drawn.numpy):
            raise _other_numbers(state, "NumPy's", "numpy.random.default_rng()")
        if trace.output is None or self._differs:
            return
        self._differs = apart > 0  # what comes after it is given something else
        if self._differs:
            state.tell(
                f"gave another output (by {apart:.1e} of its size) when it was run again on the "
                f"same input, buffers and random numbers, expected the same, as gradients are "
                f"those of the second run and later layers had the first; keep in buffers what a "
                f"forward changes, or use recompute=never"
            )

    def fail(self, error: Exception) -> None:
        """Put the present buffers back."""
        self._block.__exit__(type(error), error, error.__traceback__)

    def close(self, states: Sequence[LayerState], drawing: Drawing, keyed: Keyed) -> None:
        """Do nothing."""


def _is_moved(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other


def _other_numbers(state: LayerState, whose: str, remedy: str) -> ModelError:
    return ModelError(
        f"{state.where}: drew other random numbers when it was run again, expected those of its "
        f"forward, as gradients are those of the second run; another thread draws from {whose} "
        f"default generator in between: give it one of its own, {remedy}; or the layer draws by "
        f"what changes from run to run: keep that in a buffer"
    )
