# %% [markdown]
# # 6. Micro-batches and memory
#
# *Counted from the shapes of a small GPT: the same numbers on every machine. Thirty seconds.*
#
# The backward pass of a layer needs numbers that its forward pass computed. These numbers are
# called *activations*. They stay in memory from the forward to the backward of the same
# micro-batch. The batch has 32 samples in this exercise. It is cut into M micro-batches: with M =
# 2 they have 16 samples each, with M = 16 they have 2 samples each.
#
# There are two stages, each on its own rank. *GPipe* runs all forwards, then all backwards. The
# second order, *1F1B* (one forward, one backward; the setting is called `one_f_one_b`), starts a
# backward as soon as it can. It then releases the activations of that micro-batch. Before that,
# each rank runs only as many forwards ahead as there are stages from its own to the last.
#
# ## Predict
#
# We raise M from 2 to 16. The batch stays at 32 samples. What happens to the activations on the
# first rank with GPipe: are they an eighth, the same, or eight times as many? And with 1F1B?

# %%
from experiments.course.charts import bars
from experiments.course.page import answer, check, picture, planned, predict, run

mine = predict("Activations with GPipe, and with 1F1B: an eighth, the same, or eight times?")

# %% [markdown]
# ## Run
#
# The command `plan` builds no model. It counts what each rank would keep, by the shapes of the
# tensors.

# %%
STAGES = 2
kept = {}
for schedule in ("gpipe", "one_f_one_b"):
    for microbatches in (2, 16):
        text = run(
            f"gpipe_hpc.plan model=gpt data=synthetic pipeline.stages={STAGES} "
            f"pipeline.schedule={schedule} pipeline.microbatches={microbatches} "
            "pipeline.recompute=never",
            lines=r"^rank|^ +\d+  \d+ +[\d,]+  .*B$",
        )
        kept[schedule, microbatches] = planned(text)[0]["activations"] / 1e6

# %% [markdown]
# ## The picture, in words
#
# Four bars, one for each order and each M. Three of them have the same length: both of GPipe, and
# that of 1F1B with M = 2. The bar of 1F1B with M = 16 is an eighth as long.

# %%
rows = {f"{schedule}, M = {m}": megabytes for (schedule, m), megabytes in kept.items()}
picture("06_memory", bars("Activations on the first rank", "MB", rows))

# %% [markdown]
# ## The answer

# %%
check("GPipe: M = 16 over M = 2", kept["gpipe", 16] / kept["gpipe", 2], 1, tolerance=0.01)
share = (min(STAGES, 16) / 16) / (min(STAGES, 2) / 2)  # kept micro-batches, each 1 / M of the batch
less, more = kept["one_f_one_b", 16], kept["one_f_one_b", 2]
check("1F1B: M = 16 over M = 2", less / more, share, tolerance=0.02)
answer(f"GPipe keeps {kept['gpipe', 16]:.1f} MB with both; 1F1B {more:.1f} and {less:.1f} MB", mine)

# %% [markdown]
# With GPipe all 32 samples have run forward before the first backward starts. Whether they do so
# in 2 pieces or in 16, the rank keeps the activations of 32 samples. So micro-batches shrink the
# bubble (exercise 5), but by themselves they save no activations (only the workspace of a layer
# shrinks). With 1F1B the first of two ranks keeps at most 2 micro-batches. With M = 2 that is the
# whole batch; with M = 16 it is 2 of 16.
#
# ## Change one thing
#
# Set `STAGES = 4`. How many micro-batches does the first rank keep with 1F1B and M = 16, and by
# which factor does its memory shrink now, compared with M = 2? (It keeps four, as many as there
# are stages: 4 / 16 of the batch instead of all of it, so by 4. Twice as many micro-batches, each
# of half as many layers, take the same 8.4 MB as with two stages.)
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core only makes the command slower, and
# `git` is not needed. The count is of the tensors that torch keeps for the backward. Another
# version of torch may keep others, and then the megabytes differ; the ratios should not.
