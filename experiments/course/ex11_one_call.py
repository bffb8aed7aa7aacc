# %% [markdown]
# # 11. Data, model and hybrid parallelism by one call
#
# *Counted, and losses compared on your machine. Ten seconds.*
#
# There are three ways to use four ranks. *Data parallelism*: four replicas, each with the whole
# model and a quarter of the batch. *Model parallelism*: one pipeline of four stages, each with a
# quarter of the model. *Hybrid*: two replicas of a pipeline with two stages. *HyPar-Flow* (Awan
# et al., 2020) gave all three by one call, without changes to the model. Here the call is
# `Pipeline(layers, loss, stages=..., replicas=...)`.
#
# ## Predict
#
# 1. We train the same model on the same batches in all three ways. Do the losses after 20 steps
#    agree to 1 digit, to 3 digits, or to 10 digits?
# 2. Replicas have to add up their gradients (exercise 2). In the hybrid way, how much does a rank
#    send for that compared with the data-parallel way: as much, a half, or a third?

# %%
import torch
from torch import nn

from experiments.course.charts import bars
from experiments.course.page import answer, check, picture, predict
from gpipe_hpc import LayerSpec, Pipeline, run_on_threads

mine = predict("Digits that agree; what a hybrid rank sends compared with a data-parallel one:")

# %% [markdown]
# ## Run
#
# `run_on_threads` runs four ranks as threads of this process. The function `train` is the same
# for all three ways. `pipe.share` is the part of the batch that belongs to this replica. A
# `LayerSpec` says how to build a layer: each rank builds only the layers of its own stage, and
# the first weights depend on the seed and the layer alone. `pipe.step` runs forward and backward,
# and adds up the gradients of the replicas. It replaces the old gradients, so `zero_grad` is not
# needed, and returns the loss of the whole batch on every rank.

# %%
LAYERS = [LayerSpec(nn.Linear, 32, 32, dtype=torch.float64) for _ in range(8)]


def train(world, stages, replicas):
    pipe = Pipeline(
        LAYERS,
        nn.functional.mse_loss,
        stages=stages,
        replicas=replicas,
        microbatches=4,
        partition="uniform",
        world=world,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)  # every rank draws the same batches
    losses = []
    for _ in range(20):
        inputs = torch.randn(32, 32, generator=generator, dtype=torch.float64)
        part = pipe.share(len(inputs))  # the samples of this replica
        losses.append(float(pipe.step(inputs[part], inputs[part].cumsum(1) / 8).loss))
        optimizer.step()
    num_parameters = sum(each.numel() for each in pipe.parameters())
    return losses, 2 * (replicas - 1) / replicas * num_parameters


ways = {"data": (1, 4), "model": (4, 1), "hybrid": (2, 2)}
found = {
    name: run_on_threads(4, lambda world, way=way: train(world, *way))[0]
    for name, way in ways.items()
}
found["one process"] = train(None, 1, 1)
for name, (losses, _) in found.items():
    print(f"{name:12} first loss {losses[0]:.12f}, last loss {losses[-1]:.12f}")

# %% [markdown]
# ## The picture, in words
#
# A bar for each way: how many numbers rank 0 sends in a step to add up gradients, by the formula
# of exercise 2 for the parameters that it holds. The bar of data parallelism is the longest. The
# hybrid bar is a third of it. Model parallelism and one process have no bar, since there is only
# one replica.

# %%
sent = {name: numbers for name, (_, numbers) in found.items()}
picture("11_one_call", bars("Sent in a step to add up gradients", "numbers", sent))

# %% [markdown]
# ## The answer

# %%
expected = found["one process"][0][-1]
for name, (losses, _) in found.items():
    check(f"last loss, {name}", losses[-1], expected, tolerance=1e-10)
check("hybrid over data", sent["hybrid"] / sent["data"], 1 / 3)
answer("the losses agree to 10 digits and more; a hybrid rank sends a third", mine)

# %% [markdown]
# All three ways compute the same sum over the same samples, only in another order. In float64 the
# order changes the result in about the 15th digit. In the hybrid way a rank holds half of the
# parameters, and there are 2 replicas instead of 4: 2 x (1 / 2) x P / 2 numbers instead of 2 x (3
# / 4) x P, which is a third. In exchange, the stages of the pipeline send activations to each
# other, and the pipeline has a bubble (exercise 5).
#
# ## Change one thing
#
# Write `schedule="one_f_one_b"` into the call of `Pipeline`. Which numbers change? (None of those
# printed here: the schedule changes the order of work, not the training.)
#
# ## If the number does not come out
#
# Losses do not depend on how busy the machine is, on the number of cores or on `git`. If your own
# model gives losses that differ in the first digits, look for something that depends on the other
# samples of a batch: BatchNorm, for example, sees smaller batches on each replica. With float32
# instead of float64 the losses agree to about 7 digits.
