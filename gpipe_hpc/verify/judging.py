"""Comparison of each training step of a layout with the plain training, on rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gpipe_hpc.batches import cut, lists_of, num_samples_of, put_together, share_of, unwrapped
from gpipe_hpc.config import build_target
from gpipe_hpc.models import LayerSpec, layer_name, normalise_layers
from gpipe_hpc.optim.lr import set_lr
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.pytree import Nest, flatten, map_tensors, tensors_of, unflatten
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.start import loss_of
from gpipe_hpc.verify.comparing import TensorComparison, Verdict, VerifyReport, add_all
from gpipe_hpc.verify.plain import AUTOCAST, PlainLayout, PlainStep, PlainTraining
from gpipe_hpc.verify.watching import Observations, TensorKind

Facts = dict[str, Any]
"""Results that a rank reports of a step, see `run_step`."""

Piece = tuple[Nest, Nest, int]
"""Inputs, targets and the number of samples of a micro-batch."""

_SLACK: Final = 16  # in units in the last place (ulp) of the largest sum
_ONE_SUM: Final = 32  # factor on this if one kernel sums a whole batch
_OTHER_KERNELS: Final = 4096  # in ulp, if layers run different kernels than the plain training


@dataclass(frozen=True)
class Part:
    """A shard of an optimizer's state: elements from `start` of the flattened parameter's."""

    start: int
    tensor: Tensor


class LayoutComparison:
    """Comparison of a layout with the plain training, which it runs; results are in `report`."""

    def __init__(self, config: Config, session: Session, start: Sequence[Facts]) -> None:
        pipe = session.pipe
        self._config = config
        self._mesh = pipe.mesh
        layers = normalise_layers(build_target("model", config.model))
        self.layer_names = [layer_name(layer) for layer in layers]
        loss_fn = loss_of(config, session.facts, layers)
        self._plain = PlainTraining(
            layers,
            loss_fn,
            PlainLayout(
                tuple(pipe.layout.of(replica).schedule for replica in range(pipe.mesh.replicas)),
                tuple(pipe.partition.counts),
            ),
            seed=config.train.seed,
            precision=config.train.precision,
            buffers=config.pipeline.buffers,
            device=pipe.world.device,
        )
        self._optimizer = build_optimizer(self._plain.parameters.items(), config.optimizer)
        self.report = VerifyReport(_heading(config, pipe))
        self.observed = Observations()
        self._pieces: list[Piece] = []
        self._uncut: list[Piece] = []  # the undivided batch of each replica
        self._targets: list[Nest] = []  # of each replica, with marks of tensors that are not split
        self._order_effect = 0.0
        self._outputs: list[Nest] = []  # outputs of the model, by global micro-batch
        self._whole: list[tuple[float, float | None]] = []  # loss by step: in pieces, and at once
        self._begin(start, all(isinstance(layer, LayerSpec) for layer in layers))

    def _begin(self, start: Sequence[Facts], is_described: bool) -> None:
        """Copy the layout's initial weights; those of LayerSpecs must equal the plain ones."""
        weights = _merged(start, "weights")
        if is_described:
            line = self.report.line("initial weights")
            own = {name: p.detach().cpu() for name, p in self._plain.parameters.items()}
            add_all(line, weights, own, {})
        self._plain.take_over(weights, _merged(start, "buffers"))

    @property
    def first_line(self) -> str:
        """Return the name of the first line of the report that differs, or ""."""
        differing = (
            w for w, each in self.report.lines.items() if each.verdict is Verdict.DIFFERENT
        )
        return next(differing, "")

    @property
    def first_name(self) -> str:
        """Return the name of the first tensor that differs in that line, or ""."""
        return self.report.lines[self.first_line].where if self.first_line else ""

    def step(self, facts: Sequence[Facts]) -> bool:
        """Run the same step in the plain training; return whether all steps agree so far."""
        first = facts[0]
        self._pieces = self._cut(facts)
        self.observed = Observations()
        self._outputs = []
        plain = self._plain.train(
            self._pieces,
            _seed(first["loss_weight"]) * first["loss_scale"],
            watcher=self._watch,
        )
        self._whole.append((plain.main, self._whole_loss()))
        self._compare_losses(facts, plain)
        self._compare_gradients(facts, plain)
        self._compare_update(facts)
        return self.report.is_same

    def _watch(self, layer: int, g: int, nest: Nest) -> None:
        self.observed.watch(TensorKind.OUTPUT, layer, g, nest)
        if layer == len(self.layer_names) - 1:
            self._outputs.append(map_tensors(lambda tensor: tensor.detach(), nest))

    def _whole_loss(self) -> float | None:
        """Return the loss of the whole batch in one call, or None if it cannot be computed."""
        sizes = [size for *_, size in self._pieces if size]
        try:
            outputs = _joined(list(zip(self._outputs, sizes, strict=True)))
            return self._plain.whole_loss(outputs, put_together(self._targets, "targets"))
        except Exception:  # outputs that cannot be concatenated, or an error in the user's loss
            return None
        finally:
            self._outputs = []

    def _compare_whole(self) -> None:
        """Compare the loss summed over micro-batches with that of the whole batch."""
        low = AUTOCAST.get(self._config.train.precision)
        slack = _ONE_SUM * self._slack if low is None else 4 * torch.finfo(low).eps
        line = TensorComparison("loss of the whole batch at once")
        for step, (pieces, whole) in enumerate(self._whole):
            if whole is not None:
                name = f"step {step + 1}: {pieces:.6g} in micro-batches, {whole:.6g} at once"
                line.add(name, _number(pieces), _number(whole), slack * abs(whole))
        if line.verdict is Verdict.DIFFERENT:
            self.report.lines[line.what] = line
            self.report.notes.append(
                "The loss depends on the number of micro-batches, because it is not a mean over "
                "samples (ignored targets, class weights, a sum, pairs of samples). Let the loss "
                "return (sum, weight)."
            )

    def end(
        self, loss: float, states: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> None:
        """Compare an evaluation, and the state that a checkpoint restores."""
        self._compare_whole()
        plain = self._plain.evaluate(self._pieces)
        self._number("loss of an evaluation", loss, plain)
        if len(self._pieces) > len(self._uncut):
            self._compare_uncut(plain)
        line = self.report.line("restored checkpoint")
        kept = _whole_state([saved for saved, _ in states])
        # A layout that is measured or searched may place layers differently the second time.
        for rank, (_, loaded) in enumerate(states):
            for name, value in loaded.items():
                expected = kept.get(name)
                if isinstance(value, Part) and isinstance(expected, Tensor):
                    expected = expected[value.start :][: len(value.tensor)]
                    value = value.tensor
                line.add(f"{name} (rank {rank})", *_as_tensors(value, expected), 0.0)
        for name in kept.keys() - set().union(*(loaded for _, loaded in states)):
            line.add(f"{name} (no rank)", *_as_tensors(None, kept[name]), 0.0)
        if self._order_effect:
            self.report.notes.append(
                f"Both runs sum micro-batches in the order of the table; the order from first to "
                f"last would change gradients by at most {self._order_effect:.1e} of their size."
            )
        if not self.report.is_same:
            self.report.first = f"first seen in {self.first_line} ({self.first_name})"

    def _cut(self, facts: Sequence[Facts]) -> list[Piece]:
        """Return the global micro-batches, split from each rank's batch as the rank does."""
        pieces: list[Piece] = []
        self._uncut, self._targets = [], []
        given = [self._by_replica(facts, what) for what in ("inputs", "targets")]
        counts = self._plain.layout.portions.counts
        for inputs, targets, count in zip(*given, counts, strict=True):
            total = num_samples_of(inputs, "inputs")
            slices = [share_of(total, count, m, 1) for m in range(count)]
            sizes = [each.stop - each.start for each in slices]
            nests = cut(inputs, count, "inputs"), cut(targets, count, "targets")
            pieces += zip(*nests, sizes, strict=True)
            self._uncut.append((unwrapped(inputs), unwrapped(targets), total))
            if total:
                self._targets.append(targets)
        return pieces

    def _compare_uncut(self, loss: float) -> None:
        """Add a note to the report if the loss changes when a replica's batch is not split."""
        try:
            uncut = self._plain.evaluate(self._uncut)
        except Exception as error:  # user layers may raise anything
            shown = f"{type(error).__name__}: {error}"
            self.report.notes.append(
                f"Only split batches were compared; the unsplit batch raises {shown}"
            )
            return
        bound = self._cut_slack * abs(uncut)
        if abs(uncut - loss) <= bound:
            return
        self.report.notes.append(
            f"The loss of an evaluation depends on the number of micro-batches: it is {loss:.9g} "
            f"with the batch split, {uncut:.9g} without. {self._first_dependent_layer()} A tensor "
            f"shared by all samples may have been split with them (mark it: gpipe_hpc.whole), a "
            f"layer may mix samples, or the loss may not be a mean over samples."
        )

    def _first_dependent_layer(self) -> str:
        """Return a sentence that names the first layer whose output depends on the split."""
        ours, theirs = (self._by_layer(pieces) for pieces in (self._pieces, self._uncut))
        for layer, name in enumerate(self.layer_names):
            pairs = zip(ours[layer], theirs[layer], strict=True)
            for one, other in pairs:
                bound = self._cut_slack * float(other.abs().max()) if other.numel() else 0.0
                if one.shape != other.shape or float((one - other).abs().max()) > bound:
                    return f"The first layer that depends on it is layers.{layer} ({name})."
        return "Outputs of layers do not depend on it."

    def _by_layer(self, pieces: Sequence[Piece]) -> list[list[Tensor]]:
        """Return the floating-point outputs of each layer for all samples, concatenated."""
        found: list[list[list[Tensor]]] = [[] for _ in self.layer_names]

        def watch(layer: int, g: int, nest: Nest) -> None:
            tensors = [each for each in tensors_of(nest) if each.is_floating_point()]
            found[layer].append([each.detach().double().cpu() for each in tensors if each.dim()])

        self._plain.evaluate(pieces, watch)
        return [
            [torch.cat([part.flatten() for part in column]) for column in zip(*parts, strict=False)]
            for parts in found
        ]

    def _by_replica(self, facts: Sequence[Facts], what: str) -> list[Nest]:
        given = []
        for replica in range(self._mesh.replicas):
            ranks = self._mesh.pipeline_ranks(replica)
            given.append(next(facts[r][what] for r in ranks if facts[r][what] is not None))
        return given

    def _compare_losses(self, facts: Sequence[Facts], plain: PlainStep) -> None:
        for each in facts:
            self._number("loss", each["loss"], plain.loss)
        line = self.report.line("loss of each micro-batch")
        pairs = zip(facts[0]["microbatch_losses"], plain.microbatch_losses, strict=True)
        for g, (ours, theirs) in enumerate(pairs):
            line.add(f"micro-batch {g}", _number(ours), _number(theirs), self._slack * abs(theirs))

    def _compare_gradients(self, facts: Sequence[Facts], plain: PlainStep) -> None:
        bounds = {n: self._slack * float(m.max()) for n, m in plain.magnitudes.items() if m.numel()}
        line = self.report.line("gradients")
        theirs = dict.fromkeys(plain.gradients) if plain.is_skipped else plain.gradients
        for each in facts:
            add_all(line, each["gradients"], theirs, bounds)
        for name, gradient in plain.gradients.items():
            if gradient is not None and gradient.numel():
                apart = (gradient - plain.in_order[name]).abs().max()
                size = gradient.abs().max()
                if size > 0:
                    self._order_effect = max(self._order_effect, float(apart / size))

    def _compare_update(self, facts: Sequence[Facts]) -> None:
        """Clip and update the plain weights with the gradients of the layout."""
        own = _merged(facts, "gradients")
        parameters = self._plain.parameters
        for name, parameter in parameters.items():
            given = own[name]
            parameter.grad = None if given is None else given.to(parameter.device, copy=True)
        clip = self._config.train.clip_norm
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip)
            self._number("gradient norm", facts[0]["norm"], float(norm))
            line = self.report.line("gradients after clipping")
            clipped = {n: p.grad if p.grad is None else p.grad.cpu() for n, p in parameters.items()}
            bounds = {n: self._bound(g) for n, g in clipped.items() if g is not None}
            for each in facts:
                add_all(line, each["clipped"], clipped, bounds)
        set_lr(self._optimizer, facts[0]["lr"])
        self._optimizer.step()
        line = self.report.line("weights after the optimizer")
        weights = {name: p.detach().cpu() for name, p in parameters.items()}
        for each in facts:
            add_all(line, each["weights"], weights, {n: self._bound(w) for n, w in weights.items()})
        line = self.report.line("buffers")
        for rank, each in enumerate(facts):
            strand = self._mesh.replica_of(rank), self._mesh.stage_rank_of(rank)
            buffers = {n: b.cpu() for n, b in self._plain.named_buffers(strand).items()}
            bounds = {n: 4 * self._bound(b) for n, b in buffers.items()}
            add_all(line, each["buffers"], buffers, bounds)

    def _number(self, what: str, ours: float, theirs: float) -> None:
        bound = self._slack * abs(theirs)
        self.report.line(what).add(what, _number(ours), _number(theirs), bound)

    @property
    def _cut_slack(self) -> float:
        """Return the relative rounding bound if layers run different kernels."""
        kernels = AUTOCAST.get(self._config.train.precision)
        if kernels is not None:
            return 4 * torch.finfo(kernels).eps
        return self._slack * _OTHER_KERNELS / _SLACK

    @property
    def _slack(self) -> float:
        """Return the largest rounding error relative to the magnitudes that were summed."""
        # Gradients are accumulated in the dtype of the weights, for any precision of forwards.
        kinds = {p.dtype for p in self._plain.parameters.values()} or {torch.float32}
        eps = max(torch.finfo(dtype).eps for dtype in kinds)
        train = self._config.train
        if train.compile:
            kernels = AUTOCAST.get(train.precision)
            return _OTHER_KERNELS * eps if kernels is None else 4 * torch.finfo(kernels).eps
        return _SLACK * eps

    def _bound(self, tensor: Tensor) -> float:
        if not tensor.numel() or not tensor.is_floating_point():
            return 0.0
        return self._slack * float(tensor.detach().abs().max())


def _heading(config: Config, pipe: Any) -> str:
    total = sum(info.num_elements for info in pipe.all_parameters)
    portions = pipe.layout.portions
    each = portions.most if portions.are_equal else ", ".join(map(str, portions.counts))
    return (
        f"verify: {pipe.num_layers} layers, {total:,} parameters; {pipe.schedule.name}, "
        f"{pipe.mesh.stages} ranks a pipeline, {pipe.schedule.num_stages} stages, "
        f"{pipe.mesh.replicas} replica(s), {each} micro-batches, recompute "
        f"{config.pipeline.recompute}, {config.train.precision}; against one plain process:"
    )


def _merged(facts: Sequence[Facts], what: str) -> dict[str, Any]:
    """Merge named values of all ranks; the first rank that has a name wins."""
    merged: dict[str, Any] = {}
    for each in facts:
        merged = each[what] | merged
    return merged


def _seed(weight: float) -> Tensor:
    """Return the initial gradient of backward: the power of two below 1 / weight, float64[]."""
    number = torch.tensor(weight if weight > 0 else 1.0, dtype=torch.float64)
    return torch.ldexp(torch.ones_like(number), -torch.frexp(number).exponent)


def _joined(outputs: Sequence[tuple[Nest, int]]) -> Nest:
    """Concatenate outputs along samples; each has one row, or several, per sample."""
    flat = [flatten(nest, lists_of(size)) for nest, size in outputs]

    def joined(column: Sequence[Any]) -> Any:
        if all(type(each) in (list, tuple) for each in column):
            return type(column[0])(value for each in column for value in each)
        has_rows = all(isinstance(each, Tensor) and each.dim() for each in column)
        return torch.cat(list(column)) if has_rows else column[0]

    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten([joined(column) for column in columns], flat[0][1])


def _number(value: float | None) -> Tensor:
    return torch.tensor(float("nan") if value is None else value, dtype=torch.float64)


def _whole_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of all ranks by name, with shards put together."""
    whole: dict[str, Any] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for state in reversed(states):  # if replicas may differ, a checkpoint has the first one's
        for name, value in state.items():
            if isinstance(value, Part):
                parts.setdefault(name, {})[value.start] = value.tensor
            else:
                whole[name] = value
    for name, of_starts in parts.items():
        whole[name] = torch.cat([of_starts[start] for start in sorted(of_starts)])
    return whole


def _as_tensors(ours: Any, theirs: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return two values as tensors to compare; other values become 1 if equal, else 0, and 1."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours, theirs
    return torch.tensor(int(_alike(ours, theirs))), torch.tensor(1)


def _alike(ours: Any, theirs: Any) -> bool:
    mine, tree = flatten(ours)
    others, other_tree = flatten(theirs)
    if tree != other_tree:
        return False
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
        for a, b in zip(mine, others, strict=True)
    )
