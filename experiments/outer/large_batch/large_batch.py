"""Accuracy on Fashion-MNIST with batches of 64 and 512 samples, by method, with three seeds.

    OMP_NUM_THREADS=1 nice -n 10 python experiments/outer/large_batch/large_batch.py

Every method sees each training sample equally often, except AdaScale, which determines the number
itself. Finished runs are kept in --out and not repeated. The last validation of a run uses all
10,000 test images.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import nn

from gpipe_hpc import LayerSpec, run_on_threads
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest

HERE = Path(__file__).resolve().parent
SAMPLES, SMALL, LARGE = 60_000, 64, 512
ONE = "pipeline.microbatches=1"

COMMON = (
    "model=own",
    "model._target_=large_batch.perceptron",
    "data=fashion_mnist",
    "data.augment=none",
    "lr.min_ratio=0",
    "train.clip_norm=null",
    "train.validate_every=0",
    "train.validate_batches=null",
    "train.num_threads=1",
    "checkpoint.every=0",
    "checkpoint.keep=1",
    "checkpoint.resume=auto",
    "pipeline.partition=uniform",
    "pipeline.recompute=never",
    "trace.steps=0",
)
SGD = ("optimizer=sgd", "optimizer.lr=0.05", "lr.warmup_steps=0")


def perceptron() -> list[LayerSpec]:
    """Return a perceptron for images of 28 x 28 pixels: 235,146 parameters."""
    sizes = (784, 256, 128, 10)
    layers = [LayerSpec(nn.Flatten)]
    for inputs, outputs in pairwise(sizes):
        layers += [LayerSpec(nn.Linear, inputs, outputs), LayerSpec(nn.ReLU)]
    return layers[:-1]


def contestants(epochs: int) -> dict[str, tuple[str, ...]]:
    """Return the settings of each method, by name."""

    def steps(batch_size: int) -> int:
        return epochs * -(-SAMPLES // batch_size)

    small, large = steps(SMALL), steps(LARGE)
    eight = (f"train.batch_size={LARGE}", "pipeline.microbatches=4")
    base = f"lr.base_batch_size={SMALL}"
    as_many, warm = f"train.steps={large}", f"lr.warmup_steps={large // 10}"
    # The batch, 284 samples on average, grows during a quarter of the samples.
    growing = epochs * SAMPLES // 4 // 284
    return {
        "batch 64": (*SGD, f"train.batch_size={SMALL}", f"train.steps={small}", ONE),
        # As many samples as AdaScale's run used.
        "batch 64 for twice as long": (
            *SGD,
            f"train.batch_size={SMALL}",
            f"train.steps={2 * small}",
            ONE,
        ),
        "batch 512 at the same rate": (*SGD, *eight, as_many),
        "linear scaling with warm-up": (*SGD[:2], *eight, as_many, base, warm, "lr.start_ratio=1"),
        "linear scaling of 0.02": (
            *("optimizer=sgd", "optimizer.lr=0.02"),
            *(*eight, as_many, base, warm, "lr.start_ratio=1"),
        ),
        "AdaScale": (*SGD, *eight, f"train.steps={small}", base, "lr.scaling=adascale"),
        "LARS": ("optimizer=lars", "optimizer.lr=10", *eight, as_many, warm),
        "LAMB": ("optimizer=lamb", "optimizer.lr=0.01", *eight, as_many, warm),
        "ramp from 64": (
            *SGD,
            *eight,
            base,
            "train.batch_ramp.start=64",
            "train.batch_ramp.increment=64",
            f"train.batch_ramp.steps={growing}",
            f"train.steps={growing + 3 * large // 4}",
        ),
    }


def train(settings: tuple[str, ...], seed: int, folder: Path) -> dict[str, float]:
    """Train unless done; return accuracy, loss, steps, samples and seconds."""
    summary = folder / "result.json"
    if not summary.exists():
        began_s = time.perf_counter()
        config = compose_config([*settings, f"train.seed={seed}", f"run.dir={folder}"])
        check_config(config, 1)
        codes = run_on_threads(1, lambda world: run_training(config, world, StopRequest()))
        assert codes == [0], codes
        lines = [json.loads(each) for each in (folder / "metrics.jsonl").read_text().splitlines()]
        stepped = [line for line in lines if "loss" in line]
        ended = next(line for line in reversed(lines) if "validation_loss" in line)
        found = {
            "accuracy": ended["validation_accuracy"],
            "loss": ended["validation_loss"],
            "steps": stepped[-1]["step"],
            "epochs": stepped[-1]["position"] / SAMPLES,
            "seconds": time.perf_counter() - began_s,
        }
        summary.write_text(json.dumps(found))
    result: dict[str, float] = json.loads(summary.read_text())
    return result


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| | steps | epochs | accuracy, % | its seeds | against batch 64 |",
        "|---|---:|---:|---:|---|---:|",
    ]
    base = statistics.mean(100 * each["accuracy"] for each in next(iter(found.values())))
    for name, runs in found.items():
        accuracies = [100 * each["accuracy"] for each in runs]
        seeds = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        steps = statistics.mean(each["steps"] for each in runs)
        epochs = statistics.mean(each["epochs"] for each in runs)
        mean = statistics.mean(accuracies)
        lines.append(
            f"| {name} | {steps:.0f} | {epochs:.1f} | {mean:.2f} | {seeds} | {mean - base:+.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train all methods with all seeds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/large_batch"))
    parser.add_argument("--only", default="", help="names of contestants, with commas")
    parser.add_argument("settings", nargs="*", help="settings of gpipe_hpc.train on top")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    torch.set_num_threads(1)
    chosen = contestants(given.epochs)
    if given.only:
        chosen = {name: chosen[name] for name in given.only.split(",")}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for place, name in product(range(given.seeds), chosen):
        seed = given.first_seed + place
        folder = given.out / f"{name.replace(' ', '_')}_{seed}"
        settings = (*COMMON, *chosen[name], *given.settings)
        found[name].append(train(settings, seed, folder))
        print(f"{name}, seed {seed}: {found[name][-1]}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
