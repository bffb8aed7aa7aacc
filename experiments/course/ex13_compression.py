# %% [markdown]
# # 13. Compressed gradients
#
# *Bytes are counted, losses measured over three seeds. Thirty seconds.*
#
# If the link between replicas is slow, they can send less than their gradients. *Top-k* sends
# only the k largest numbers, each with its place (another 4 bytes). *QSGD* (Alistarh et al.,
# 2017) rounds each number to a few levels, at random, so that it is right on average. *bfloat16*
# sends 2 bytes for each number. What is lost is not thrown away: each replica keeps it and adds
# it to its next gradient. This is called *error feedback*.
#
# ## Predict
#
# There are two replicas and a model of N parameters of 4 bytes. An exact all-reduce sends 4 N
# bytes from each (exercise 2). Top-k sends 1 % of the numbers. By which factor do the bytes
# shrink: 100, 50 or 25? And is the loss after 100 steps then useless, a little worse, or the
# same?

# %%
import json
import shutil

import torch
from torch import nn

from experiments.course.charts import bars
from experiments.course.page import OUT, ROOT, answer, check, picture, predict, quartiles, run
from gpipe_hpc import LayerSpec, Pipeline, run_on_threads

mine = predict("Factor, and what happens to the loss:")

# %% [markdown]
# ## Run
#
# First two processes train for three steps; `torchrun` is torch's command that starts several
# ranks. The settings that begin with `outer` are about what replicas send each other. The run
# counts what rank 0 sends, in `metrics.jsonl`.

# %%
R = 2
folder = OUT / f"13_compression_{R}"
shutil.rmtree(folder, ignore_errors=True)
run(
    f"gpipe_hpc.train model=mlp data=synthetic_vectors pipeline.stages=1 pipeline.replicas={R} "
    "outer.compress=topk outer.topk_fraction=0.01 train.steps=3 "
    f"run.dir={folder.relative_to(ROOT)}",
    ranks=R,
    lines="^step +3/|^  all",
)
steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
sent = next(step["outer_sent_bytes"] for step in steps if step["step"] == 3)

# %% [markdown]
# Then we train a smaller network for 100 steps with each way, on two ranks that are threads of
# this process.

# %%
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
teacher = torch.randn(32, 10, generator=draw)
inputs = torch.randn(4096, 32, generator=draw)
targets = (inputs.relu() @ teacher).argmax(1)
LAYERS = [LayerSpec(nn.Linear, 32, 256), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 256, 10)]


def train(world, outer, seed):
    loss_fn = nn.functional.cross_entropy
    pipe = Pipeline(LAYERS, loss_fn, stages=1, replicas=2, world=world, seed=seed, outer=outer)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(seed)
    for _ in range(100):
        batch = torch.randint(4096, (64,), generator=order)[pipe.share(64)]
        pipe.step(inputs[batch], targets[batch])
        optimizer.step()
    return float(pipe.evaluate(inputs[pipe.share(4096)], targets[pipe.share(4096)]).loss)


outers = {
    "exact, 4 bytes": {},
    "bfloat16, 2 bytes": {"compress": "bfloat16"},
    "QSGD, 1/2 byte": {"compress": "qsgd"},
    "top-k, 10 %": {"compress": "topk", "topk_fraction": 0.1},
    "top-k, 1 %": {"compress": "topk", "topk_fraction": 0.01},
}
losses = {
    name: [run_on_threads(2, lambda w, o=outer, s=s: train(w, o, s))[0] for s in range(3)]
    for name, outer in outers.items()
}

# %% [markdown]
# ## The picture, in words
#
# A bar for each way: the loss after 100 steps, the median of three seeds, with a short line from
# the first to the third quartile. The first four bars have almost the same length. The bar of
# top-k with 1 % is a little longer.

# %%
rows = {name: quartiles(values) for name, values in losses.items()}
picture("13_compression", bars("Loss after 100 steps", "nats", rows))

# %% [markdown]
# ## The answer

# %%
N = 85_002  # of model=mlp
check("bytes that a replica sends", sent, (R - 1) * 8 * 0.01 * N, tolerance=0.01)
ring = 2 * (R - 1) / R * 4 * N
exact, topk = rows["exact, 4 bytes"][1], rows["top-k, 1 %"][1]
answer(f"{ring / sent:.0f} times fewer bytes; loss {topk:.3f} instead of {exact:.3f}", mine)

# %% [markdown]
# Top-k sends 4 bytes for each number and 4 bytes for its place, so 1 % of the numbers is 2 % of
# the bytes. Error feedback is why it works: a small gradient that always points the same way adds
# up in what the replica keeps, until it is among the largest. QSGD and bfloat16 lose so little in
# each step that the losses agree to two or three digits.
#
# Compression pays only if sending takes longer than compressing: on this machine it makes steps
# slower, since the "link" is memory. It also gives up that all layouts train alike (exercise 11).
#
# ## Change one thing
#
# Set `R = 4`. By which factor do the bytes of the first run shrink now? (Each replica sends its 1
# % to three others, 3 x 0.08 N, where a ring sends 2 x (3 / 4) x 4 N = 6 N: by 25. With 100
# replicas nothing would be saved.)
#
# ## If the number does not come out
#
# The bytes never change. The losses depend on the seeds, not on how busy the machine is, on the
# number of cores or on `git`. If the command stops because a port is in use or a rank does not
# answer, the machine is very busy: run it again.
