# %% [markdown]
# # 12. Large batches
#
# *Measured over three seeds (losses, not times). Thirty seconds.*
#
# More replicas want larger batches, since each replica needs enough work (exercise 1). But with a
# batch that is 16 times as large, the same number of samples makes a sixteenth of the optimizer's
# steps.
#
# ## Predict
#
# A small network learns to classify vectors. It sees 16,384 samples: four times as many as there
# are. With batches of 16 samples and a learning rate of 0.01 it reaches some validation loss. Now
# the batch has 256 samples and everything else stays. Is the validation loss better, the same or
# worse? What would you do with the learning rate?

# %%
import torch
from torch import nn

from experiments.course.charts import bars
from experiments.course.page import answer, check, picture, predict, quartiles, spread
from gpipe_hpc import AdaScale, LayerSpec, Pipeline

mine = predict("Better, the same or worse?")

# %% [markdown]
# ## Run
#
# One process is enough: replicas would give the same losses (exercise 11). `linear` multiplies
# the rate by 16, like the batch (Goyal et al., 2017). `adascale` (Johnson et al., 2020) measures
# in every step how noisy the gradient is, by how much the gradients of the 4 micro-batches
# differ. If noise dominates, a large batch is worth 16 small steps; if there is none, it is worth
# one. This *gain* multiplies the rate, and the run ends when the gains add up to the number of
# small steps.

# %%
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
teacher = torch.randn(32, 10, generator=draw)
inputs = torch.randn(5120, 32, generator=draw)  # the last 1,024 are for validation
targets = (inputs.relu() @ teacher).argmax(1)
SMALL, LARGE, SAMPLES, EPOCHS = 16, 256, 4096, 4


def train(batch, rate, seed, with_adascale=False):
    layers = [LayerSpec(nn.Linear, 32, 64), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 64, 10)]
    noise_over = "microbatches" if with_adascale else None
    pipe = Pipeline(
        layers, nn.functional.cross_entropy, microbatches=4, seed=seed, noise_over=noise_over
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=rate, momentum=0.9)
    adascale = AdaScale(pipe, scale=LARGE / SMALL) if with_adascale else None
    order, gains, num_steps = torch.Generator().manual_seed(seed), [], 0
    end = SAMPLES * EPOCHS // (SMALL if adascale else batch)
    while (adascale.progress if adascale else num_steps) < end:
        part = torch.randint(SAMPLES, (batch,), generator=order)
        result = pipe.step(inputs[part], targets[part])
        if adascale:
            gains.append(adascale.update(result))
            optimizer.param_groups[0]["lr"] = gains[-1] * rate
        optimizer.step()
        num_steps += 1
    loss = float(pipe.evaluate(inputs[SAMPLES:], targets[SAMPLES:]).loss)
    return num_steps, loss, gains


ways = {
    "batch 16": (SMALL, 0.01, False),
    f"batch {LARGE}, same rate": (LARGE, 0.01, False),
    f"batch {LARGE}, linear": (LARGE, 0.01 * LARGE / SMALL, False),
    f"batch {LARGE}, adascale": (LARGE, 0.01, True),
}
found = {}
for name, (batch, rate, with_adascale) in ways.items():
    found[name] = [train(batch, rate, seed, with_adascale) for seed in range(3)]
    losses = [loss for _, loss, _ in found[name]]
    print(f"{name:21} {found[name][0][0]:4} steps  loss {spread(losses, 'nats')}")

# %% [markdown]
# ## The picture, in words
#
# A bar for each way: the validation loss, the median of three seeds, with a short line from the
# first to the third quartile. (A *nat* is the unit of PyTorch's cross-entropy, which uses the
# natural logarithm.) The bar of the large batch at the same rate is the longest by far. The bars
# of the linear rule and of AdaScale are nearly as short as that of the small batch.

# %%
rows = {name: quartiles([loss for _, loss, _ in runs]) for name, runs in found.items()}
picture("12_large_batches", bars("Validation loss", "nats", rows))

# %% [markdown]
# ## The answer

# %%
for name in ways:
    if name != f"batch {LARGE}, adascale":
        batch = ways[name][0]
        check(f"steps, {name}", found[name][0][0], SAMPLES * EPOCHS / batch)
gains = [gain for _, _, gains in found[f"batch {LARGE}, adascale"] for gain in gains]
assert all(1 <= gain <= LARGE / SMALL for gain in gains), "a gain is between 1 and batch / base"
small, same = rows["batch 16"][1], rows[f"batch {LARGE}, same rate"][1]
answer(
    f"worse: {same:.2f} nats instead of {small:.2f}; a larger rate makes up for most of it", mine
)

# %% [markdown]
# With 64 steps instead of 1,024 the weights do not get far. A rate that is 16 times as large lets
# each step go further, since the mean of 256 gradients is less noisy than the mean of 16. This
# works up to a point: a rate that is too large diverges. AdaScale decides by the measured noise.
# It takes more than 64 steps here (so it sees more samples), but far fewer than 1,024.
#
# ## Change one thing
#
# Set `LARGE = 1024`, so the linear rule multiplies the rate by 64. Does it still work? (Much less
# well: the loss is about 1.1 instead of 0.9. With only 16 steps even a large rate does not get
# far enough.)
#
# ## If the number does not come out
#
# The losses depend on the seeds, not on how busy the machine is, on the number of cores or on
# `git`. Another version of torch may round differently, which changes the third digit. Only the
# number of steps and the range of the gains are checked.
