"""When the buckets of a rank leave: in the table's order, some within the last backward."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gpipe_hpc.engine.backward.calls import OwnHook
from gpipe_hpc.engine.recorder import Recorder
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.errors import ModelError
from gpipe_hpc.schedule import Action, Op

Place = tuple[int, int]
"""A stage and the number of one of its buckets."""


class Departures:
    """Starts the reductions of one rank's list, one after the other, as the list has them.

    A bucket starts when its action comes, or within the stage's last backward (`watching`) as soon
    as all its gradients have come, but never ahead of one that stands before it: all copies start
    theirs in one order. `row` is the rank's list; `before` is called for a stage ahead of its
    buckets.
    """

    def __init__(
        self,
        row: Sequence[Action],
        stages: Mapping[int, Stage],
        recorder: Recorder,
        before: Callable[[int, int], None],
    ) -> None:
        self._reductions = [action for action in row if action.op is Op.REDUCE_GRAD]
        self._stages = stages
        self._recorder = recorder
        self._before = before
        self._order: list[Place] = []
        self._num_started = 0
        # How often the backward of a micro-batch adds to each parameter: more often than once where
        # a layer's own checkpointing runs backwards within it. Known from the steps before.
        self._known: Counter[nn.Parameter] = Counter()
        self._seen: dict[int, Counter[nn.Parameter]] = {}

    def begin(self) -> None:
        """Begin a step: its buckets are made."""
        self._num_started = 0
        self._seen = {stage: Counter() for stage in self._stages}
        self._order = [place for action in self._reductions for place in self._places(action)]

    def _places(self, action: Action) -> list[Place]:
        if action.bucket is not None:
            return [(action.stage, action.bucket)]
        count = self._stages[action.stage].gradients.num_buckets
        return [(action.stage, number) for number in range(count)]

    def reach(self, action: Action) -> None:
        """Start what an action of the list is for, unless it has left before."""
        for place in self._places(action):
            if place in self._order[self._num_started :]:
                assert self._order[self._num_started] == place, f"{place} is out of turn"
                self._start_next()

    def _start_next(self) -> None:
        stage, number = self._order[self._num_started]
        self._num_started += 1
        self._before(stage, number)
        start = self._recorder.mark()
        for pending in self._stages[stage].gradients.start_reduction(number):
            self._recorder.add_beside(Action(Op.REDUCE_GRAD, stage, number), start, pending)

    @contextmanager
    def watching(self, stage: int, *, is_last: bool) -> Iterator[None]:
        """Return a block for a backward of a stage's last micro-batch.

        In the one that is the last, its buckets may leave; an ``I`` ahead of it brings some
        gradients, too. Raises ModelError if a gradient changes after its bucket has left.
        """
        gradients, seen, known = self._stages[stage].gradients, self._seen[stage], self._known

        def has_come(parameter: nn.Parameter) -> bool:
            return seen[parameter] >= known[parameter] > 0

        def came(number: int, parameter: nn.Parameter) -> None:
            seen[parameter] += 1
            if is_last and has_come(parameter):
                awaited[number].discard(parameter)
                self._start_ready(stage, awaited)

        numbered = {n: gradients.parameters_of(n) for n in range(gradients.num_buckets)}
        awaited = {n: {p for p in each if not has_come(p)} for n, each in numbered.items()}
        hooks = [
            _hooked(parameter, partial(came, n, parameter))
            for n, each in numbered.items()
            for parameter in each
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        left = [number for at, number in self._order[: self._num_started] if at == stage]
        late = [parameter for number in left for parameter in gradients.late(number)]
        if late:
            raise ModelError(
                f"{self._name(stage, late[0])}: expected a gradient that is whole after "
                f"{known[late[0]]} additions of a micro-batch, as in the steps before, got more "
                f"after its bucket had left to be summed over replicas; use outer.overlap=false"
            )
        if is_last:
            known |= seen

    def _start_ready(self, stage: int, awaited: Mapping[int, set[nn.Parameter]]) -> None:
        """Start those at the head of the order whose gradients have all come."""
        while self._num_started < len(self._order):
            at, number = self._order[self._num_started]
            if at != stage or awaited[number]:
                return
            self._start_next()

    def _name(self, stage: int, parameter: nn.Parameter) -> str:
        named = self._stages[stage].named_parameters()
        return next(name for name, each in named.items() if each is parameter)


def _hooked(parameter: nn.Parameter, call: Callable[[], None]) -> RemovableHandle:
    """Let autograd call this whenever it has added to a parameter's gradient."""
    register: Callable[[Callable[[Tensor], None]], RemovableHandle] = (
        parameter.register_post_accumulate_grad_hook
    )
    return register(OwnHook(call))
