# %% [markdown]
# # 16. Planning a 7B model for a cluster that you do not have
#
# *Counted and simulated: nearly the same numbers on every machine. Forty seconds.*
#
# A GPT of 32 blocks of width 4096, with sequences of 2,048 tokens and a vocabulary of 32,000, has
# about 7 billion parameters. We plan its training on GPUs with 80 GB. With AdamW, and forwards in
# bfloat16, a rank keeps for each parameter a float32 weight (4 bytes), its gradient (4 bytes) and
# two numbers of the optimizer (8 bytes).
#
# ## Predict
#
# 1. A block of width h has 12 h^2 + 13 h parameters. Embedding and head have 32,000 h each,
#    positions 2,048 h, and a last normalization 2 h. How many parameters does the model have?
# 2. How many GPUs does it take at least, so that weights, gradients and optimizer state fit?
# 3. We have 64 GPUs on 8 hosts. Would you use 64 replicas, one pipeline of 64 stages, or
#    something between?

# %%
import math
import re

from experiments.course.charts import bars
from experiments.course.page import answer, found, picture, predict, run

mine = predict("Parameters; GPUs at least; replicas x stages on 64:")

# %% [markdown]
# ## Run
#
# The first command looks for the least number of GPUs. The second one compares layouts of 64
# GPUs, that is, numbers of replicas, stages and micro-batches (M). Each GPU computes 150 TFLOP in
# a second in practice (T is 10^12), and moves 1.5 TB in a second to and from its memory. Links
# carry 200 GB/s within a host and 25 GB/s between hosts. To save time, both try one schedule,
# 1F1B.

# %%
GIGABYTES = 80
model = (
    "model=gpt model.num_layers=32 model.width=4096 model.num_heads=32 "
    "data=synthetic data.seq_len=2048 data.vocab_size=32000 train.batch_size=512 "
    f"train.device=cuda train.precision=bfloat16 pipeline.memory_bytes={GIGABYTES}GB"
)
cluster = (
    "plan.search=true plan.flops_per_s=1.5e14 plan.memory_bytes_per_s=1.5e12 "
    "plan.within_bytes_per_s=200e9 plan.link_bytes_per_s=25e9 pipeline.schedule=one_f_one_b"
)
fewest = run(f"gpipe_hpc.plan {model} {cluster}", lines="^the model fits")
ranking = run(
    f"gpipe_hpc.plan {model} {cluster} plan.ranks=64 plan.hosts=8",
    lines=r"^ *\d+ +[\d.]+ s |^ +step|^ +pipeline\.",
)

# %% [markdown]
# ## The picture, in words
#
# A bar for each of the best layouts that were found: the seconds of a step, the shortest first.
# The labels say how many replicas and stages there are. The best ones have 2 to 8 stages.
# Some, as 22 x 3, would need more than 64 GPUs: a pipeline that lacks a GPU sends that stage's work
# to another pipeline ([any number of ranks](../../docs/how-to/any-number-of-ranks.md)).

# %%
seconds = [float(each) for each in re.findall(r"^ *\d+ +([\d.]+) s ", ranking, re.M)]
layouts = re.findall(r"replicas=(\d+) pipeline.stages=(\d+) pipeline.microbatches=(\d+)", ranking)
rows = {
    f"{replicas} replicas x {stages} stages, M = {m}": second
    for (replicas, stages, m), second in zip(layouts, seconds, strict=True)
}
picture("16_planning", bars("A step of 512 sequences on 64 GPUs", "s", rows))

# %% [markdown]
# ## The answer

# %%
h, layers, vocabulary, positions = 4096, 32, 32_000, 2_048
P = layers * (12 * h**2 + 13 * h) + 2 * vocabulary * h + positions * h + 2 * h
least = int(found(r"fits on (\d+) ranks", fewest))
bound = math.ceil(16 * P / (GIGABYTES * 1e9))
assert bound <= least <= bound + 1, f"{least} GPUs, by the state alone {bound}"
days = 1e12 / (512 * 2048 / seconds[0]) / 86_400
answer(
    f"{P / 1e9:.2f} billion parameters, {least} GPUs at least, best here {next(iter(rows))}: "
    f"{seconds[0]:.2f} s a step, {days:.0f} days for a trillion tokens",
    mine,
)

# %% [markdown]
# 16 bytes x 6.7 billion are 107 GB: more than one GPU, less than two. So 64 replicas of one stage
# do not fit as they are. With 64 stages each stage has half a block, and the bubble is large
# unless M is. The best layouts lie between: just enough stages to fit, and the rest replicas. The
# second line of each layout says what to type to train with it.
#
# ## Change one thing
#
# Set `GIGABYTES = 40`. How many does it take at least? (The state alone needs 107 / 40, so 3. The
# command names 4: with 3 stages the first one would need 46 GB, for 11 of the 32 blocks, the
# embedding, activations, and what layers take as they run.)
#
# ## If the number does not come out
#
# Nothing is measured on a GPU, and no GPU is needed. On a busy machine or a single core the
# search may take longer than a minute, but finds the same. `git` is not used. The ranking of
# layouts that differ by a per cent may change between versions. What is not in the plan: reading
# data, the optimizer's step, and what libraries take of the memory.
