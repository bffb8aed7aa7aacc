"""One GPU: ours beside the plainest good loop of PyTorch, step by step in one run.

    python experiments/h200/one_gpu.py                          # 1.3 billion parameters
    python experiments/h200/one_gpu.py --size tiny --device cpu # tries the script

Prints a JSON object: the matrix rate, and for each contestant step times, MFU and peak memory.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_hpc import Pipeline
from gpipe_hpc.models import build_gpt, build_layer, token_cross_entropy
from gpipe_hpc.planning.counted import count_model
from gpipe_hpc.planning.forecast import forecast

SEED = 0
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Size:
    num_layers: int
    width: int
    num_heads: int
    seq_len: int
    vocab_size: int
    samples: int  # of one micro-batch
    microbatches: int
    matrix: int  # width of the matrices that the rate is measured with

    def layers(self) -> list[Any]:
        return build_gpt(
            vocab_size=self.vocab_size,
            block_size=self.seq_len,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            width=self.width,
        )

    def flops(self, num_parameters: int) -> float:
        """Return those of a step by 6N and attention, as papers count them for MFU.

        The embedding is a lookup: its parameters are no part of N.
        """
        tokens = self.samples * self.microbatches * self.seq_len
        multiplied = num_parameters - self.width * (self.vocab_size + self.seq_len)
        attention = 12 * self.num_layers * self.width * self.seq_len
        return tokens * (6.0 * multiplied + attention)


SIZES = {
    "full": Size(24, 2048, 16, 1024, 50304, 4, 8, 8192),
    "tiny": Size(2, 64, 4, 32, 128, 2, 4, 256),
}


class Contestant:
    """Parameters with their optimizer, and how to do forward and backward of a step."""

    name: str
    parameters: dict[str, nn.Parameter]
    run: Callable[[], object]

    def begin(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.base_bytes = allocated(device)

    def end(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        is_fused = self.device.type == "cuda"
        values = list(parameters.values())
        self.optimizer = torch.optim.AdamW(values, lr=LEARNING_RATE, fused=is_fused)

    def step(self) -> None:
        self.run()
        self.optimizer.step()


class Plain(Contestant):
    """Gradient accumulation over layers that are compiled one by one, under autocast."""

    def __init__(self, size: Size, inputs: Tensor, targets: Tensor, backend: str) -> None:
        self.begin("plain", inputs.device)
        specs = size.layers()
        modules = [build_layer(s, index=i, seed=SEED) for i, s in enumerate(specs)]
        whole = nn.ModuleList(modules).to(inputs.device)
        for module in whole:
            module.compile(backend=backend)
        weight = targets.numel()

        def run() -> None:
            self.optimizer.zero_grad()
            parts = zip(
                inputs.chunk(size.microbatches), targets.chunk(size.microbatches), strict=True
            )
            for value, target in parts:
                with torch.autocast(inputs.device.type, torch.bfloat16):
                    for module in whole:
                        value = module(value)
                    total, _ = token_cross_entropy(value, target)
                torch.autograd.backward(total / weight)

        self.run = run
        self.end({f"layers.{name}": p for name, p in whole.named_parameters()})


class Ours(Contestant):
    """A pipeline of one rank, whose stages are virtual."""

    def __init__(
        self, size: Size, inputs: Tensor, targets: Tensor, backend: str, stages: int
    ) -> None:
        self.begin(f"ours, {stages} stages" if stages > 1 else "ours", inputs.device)
        virtual = {"stages_per_rank": stages}
        self.pipe = Pipeline(
            size.layers(),
            token_cross_entropy,
            stages=1,
            microbatches=size.microbatches,
            schedule="interleaved" if stages > 1 else "one_f_one_b",
            schedule_options=virtual if stages > 1 else {},
            recompute="never",
            precision="bfloat16",
            compile=backend,
            seed=SEED,
            device=inputs.device.type,
        )
        self.run = lambda: self.pipe.step(inputs, targets)
        self.end(dict(self.pipe.named_parameters()))

    def planned_bytes(self, size: Size, example: tuple[Tensor, Tensor]) -> int:
        count = count_model(
            size.layers(),
            *example,
            token_cross_entropy,
            device_type=self.device.type,
            precision="bfloat16",
        )
        return (
            forecast(count, self.pipe.partition.counts, self.pipe.schedule, 2).ranks[0].total_bytes
        )


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    finish(device)
    begin_s = time.perf_counter()
    run()
    finish(device)
    return time.perf_counter() - begin_s


def matrix_rate(width: int, device: torch.device) -> float:
    """Return FLOP/s of a bfloat16 matrix product, the median of 20."""
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in "ab")
    times = [seconds(lambda: left @ right, device) for _ in range(25)]
    return 2 * width**3 / statistics.median(times[5:])


def difference(left: Contestant, right: Contestant) -> float:
    """Return the norm of the gradients' difference over that of the left ones."""
    error = norm = 0.0
    for name, parameter in left.parameters.items():
        other = right.parameters[name].grad
        assert parameter.grad is not None and other is not None, f"{name}: no gradient"
        error += float((parameter.grad - other).double().square().sum())
        norm += float(parameter.grad.double().square().sum())
    return (error / norm) ** 0.5


def waits_of(contestant: Contestant) -> int | None:
    """Return how often a step waits for the device, as torch sees it; None on a CPU."""
    if contestant.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            contestant.run()
        return sum("synchroniz" in str(each.message) for each in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measured(each: Contestant, times: list[float], size: Size, rate: float) -> dict[str, Any]:
    step_s = statistics.median(times)
    num_parameters = sum(p.numel() for p in each.parameters.values())
    return {
        "step_s": step_s,
        "quartiles_s": statistics.quantiles(times, n=4)[::2],
        "mfu": size.flops(num_parameters) / step_s / rate,
        "waits_for_the_device": waits_of(each),
    }


def peak_bytes(each: Contestant) -> int | None:
    if each.device.type != "cuda":
        return None
    before = allocated(each.device)
    torch.cuda.reset_peak_memory_stats(each.device)
    each.step()
    finish(each.device)
    # What others hold meanwhile is not its own.
    own = sum(3 * p.nbytes for p in each.parameters.values()) + sum(
        p.grad.nbytes for p in each.parameters.values() if p.grad is not None
    )
    return torch.cuda.max_memory_allocated(each.device) - before + own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--stages", type=int, default=4, help="virtual ones of the third contestant"
    )
    args = parser.parse_args()
    size, device = SIZES[args.size], torch.device(args.device)
    torch.manual_seed(SEED)
    shape = (2, size.samples * size.microbatches, size.seq_len)
    inputs, targets = torch.randint(0, size.vocab_size, shape).to(device)
    contestants = [
        Plain(size, inputs, targets, args.backend),
        Ours(size, inputs, targets, args.backend, 1),
        Ours(size, inputs, targets, args.backend, args.stages),
    ]
    plain, *ours = contestants
    for each in contestants:
        each.run()
    errors = {each.name: difference(plain, each) for each in ours}
    for each in contestants:
        seconds(each.step, device)
    times: dict[str, list[float]] = {each.name: [] for each in contestants}
    for number in range(args.rounds):
        turn = number % len(contestants)
        for each in contestants[turn:] + contestants[:turn]:
            times[each.name].append(seconds(each.step, device))
    rate = matrix_rate(size.matrix, device)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "matrix_flops_per_s": rate,
    }
    for each in contestants:
        found[each.name] = measured(each, times[each.name], size, rate)
        found[each.name]["peak_bytes"] = peak_bytes(each)
    example = inputs[: size.samples].to("meta"), targets[: size.samples].to("meta")
    for each in ours:
        found[each.name]["gradient_error"] = errors[each.name]
        found[each.name]["planned_bytes"] = each.planned_bytes(size, example)
        of_plain = zip(times[each.name], times[plain.name], strict=True)
        found[each.name]["over_plain"] = statistics.median(own / its for own, its in of_plain)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
