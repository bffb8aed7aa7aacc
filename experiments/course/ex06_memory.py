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
# second order, *1F1B* (one forward, one backward), starts a backward as soon as it can and
# releases the activations of that micro-batch.
#
# ## Predict
#
# We raise M from 2 to 16. The batch stays at 32 samples. What happens to the activations on the
# fullest rank with GPipe: are they an eighth, the same, or eight times as many? And with 1F1B?

# %%
from experiments.course.charts import bars
from experiments.course.page import answer, check, picture, planned, predict, run

mine = predict("Activations with GPipe: an eighth, the same, or eight times?")

# %% [markdown]
# ## Run
#
# The command `plan` builds no model. It counts what each rank would keep, by the shapes of the
# tensors.

# %%
STAGES = 2
found = {}
for schedule in ("gpipe", "one_f_one_b"):
    for microbatches in (2, 16):
        text = run(
            "gpipe_hpc.plan",
            *(
                "model=gpt",
                "data=synthetic",
                f"pipeline.stages={STAGES}",
                "pipeline.recompute=never",
            ),
            *(f"pipeline.schedule={schedule}", f"pipeline.microbatches={microbatches}"),
            lines=r"^rank|^ +\d+  \d+ +[\d,]+  .*B$",
        )
        found[schedule, microbatches] = planned(text)[0]["activations"] / 1e6

# %% [markdown]
# ## The picture, in words
#
# Four bars, one for each order and each M. Both bars of GPipe have the same length. The bar of
# 1F1B with M = 2 is a little shorter. The bar of 1F1B with M = 16 is about an eighth of that.

# %%
rows = {f"{schedule}, M = {m}": megabytes for (schedule, m), megabytes in found.items()}
picture("06_memory", bars("Activations on the first rank", "MB", rows))

# %% [markdown]
# ## The answer

# %%
check("GPipe: M = 16 over M = 2", found["gpipe", 16] / found["gpipe", 2], 1, tolerance=0.01)
kept = {m: found["one_f_one_b", m] for m in (2, 16)}
share = (min(STAGES, 16) / 16) / (min(STAGES, 2) / 2)  # kept micro-batches, each 1 / M of the batch
check("1F1B: M = 16 over M = 2", kept[16] / kept[2], share, tolerance=0.02)
gpipe = {m: found["gpipe", m] for m in (2, 16)}
answer(
    f"GPipe keeps {gpipe[2]:.1f} MB with M = 2 and {gpipe[16]:.1f} MB with M = 16; "
    f"1F1B keeps {kept[2]:.1f} MB and {kept[16]:.1f} MB",
    mine,
)

# %% [markdown]
# With GPipe all 32 samples have run forward before the first backward starts. Whether they do so
# in 2 pieces or in 16, the rank keeps the activations of 32 samples. So micro-batches shrink the
# bubble (exercise 5), but by themselves they save no memory. With 1F1B the first of two ranks
# keeps at most 2 micro-batches and the second rank keeps 1. Smaller micro-batches then need less
# memory.
#
# ## Change one thing
#
# Set `STAGES = 4`. How many micro-batches does the first rank keep with 1F1B and M = 16, and by
# which factor does its memory shrink now, compared with M = 2? (It keeps four, as many as there
# are stages: 4 / 16 of the batch instead of all of it, so by 4.)
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core only makes the command slower, and
# `git` is not used. The count is of the tensors that torch keeps for the backward. Another
# version of torch may keep others, and then the megabytes differ; the ratios should not.
