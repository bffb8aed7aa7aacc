"""Two ranks on one GPU over Gloo: boundaries go through pinned memory; gradients are plain ones.

torchrun --standalone --nproc_per_node 2 experiments/h200/two_ranks.py
torchrun --standalone --nproc_per_node 2 experiments/h200/two_ranks.py --device cpu
"""

import argparse

import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.comm.joining.start import start_world
from gpipe_hpc.models import build_gpt, build_layer, token_cross_entropy

SEED = 0
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "chimera")
SIZES = {"vocab_size": 64, "block_size": 16, "num_layers": 4, "num_heads": 4, "width": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    world = start_world(device=args.device, backend="gloo")
    torch.manual_seed(SEED)
    inputs, targets = torch.randint(0, SIZES["vocab_size"], (2, 8, SIZES["block_size"]))
    layers = build_gpt(**SIZES)
    expected = plain_gradients(layers, inputs.to(world.device), targets.to(world.device))
    for schedule in SCHEDULES:
        for recompute in ("never", "always"):
            pipe = Pipeline(
                layers,
                token_cross_entropy,
                stages=2,
                microbatches=4,
                schedule=schedule,
                recompute=recompute,
                seed=SEED,
                world=world,
            )
            for _ in range(2):
                pipe.step(inputs, targets)
            error = max(
                float((p.grad - expected[name]).abs().max() / expected[name].abs().max())
                for name, p in pipe.named_parameters()
                if p.grad is not None
            )
            print(f"rank {world.rank}: {schedule}, {recompute}: largest error {error:.1e}")
            assert error < 1e-4, "gradients differ from plain ones"


def plain_gradients(layers, inputs, targets):
    """Return the gradients of the mean loss by global name."""
    modules = torch.nn.ModuleList(
        build_layer(layer, index=index, seed=SEED) for index, layer in enumerate(layers)
    ).to(inputs.device)
    value = inputs
    for module in modules:
        value = module(value)
    total, weight = token_cross_entropy(value, targets)
    torch.autograd.backward(total / weight)
    return {f"layers.{name}": p.grad for name, p in modules.named_parameters()}


if __name__ == "__main__":
    main()
