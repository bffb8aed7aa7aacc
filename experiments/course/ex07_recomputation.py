# %% [markdown]
# # 7. Recomputation: memory for time
#
# *Simulated and counted: the same numbers on every machine. Fifteen seconds.*
#
# Exercise 6 showed that GPipe keeps the activations of the whole batch. GPipe's second idea is to
# drop them. A rank keeps only the input of its stage for each micro-batch. Before the backward of
# a micro-batch it runs the forward again. This is called *recomputation* (R), or *activation
# checkpointing*.
#
# ## Predict
#
# There are K = 4 stages and M = 8 micro-batches, F = 1, B = 2, R = 1 units. Without recomputation
# the step takes (M + K - 1) (F + B) = 33 units (exercise 5). With recomputation each backward
# slot becomes R + B = 3 units, so one would expect (M + K - 1) (F + R + B) = 44 units. Does the
# step take 44 units, or less? Think about rank 0 while it waits for the first gradient.

# %%
from experiments.course.page import answer, check, draw, planned, predict, run, simulate

mine = predict("How many units does the step take with recomputation?")

# %% [markdown]
# ## Run
#
# We draw the step with recomputation of everything, and simulate it without.

# %%
layout = "pipeline.stages=4 pipeline.microbatches=8"
always = draw("07_recomputation", f"{layout} pipeline.recompute=always")
never = simulate(f"{layout} pipeline.recompute=never")

# %% [markdown]
# Now the memory of a small GPT with 2 stages and 16 micro-batches of 2 samples each, as exercise 6
# counted it, but on rank 1: the input of its stage is an activation. (The input of rank 0 is the
# token ids, which are far smaller.) The setting `except_last` recomputes all micro-batches except
# those whose backward is the next action: on the last rank the last one.

# %%
kept = {}
for recompute in ("never", "except_last"):
    text = run(
        "gpipe_hpc.plan model=gpt data=synthetic pipeline.stages=2 pipeline.microbatches=16 "
        f"pipeline.recompute={recompute}",
        lines=r"^rank|^ +\d+  \d+ +[\d,]+  .*B$",
    )
    kept[recompute] = planned(text)[1]["activations"]

# %% [markdown]
# ## The picture, in words
#
# Four rows, one for each rank. After its eight forwards each rank runs a first recomputation, R7,
# at once. Then all ranks but rank 3 wait for the gradient. After that, backwards and
# recomputations alternate: B7, R6, B6, R5, B5 and so on. The backwards form a staircase with
# steps of 2 units, as without recomputation.
#
# ## The answer

# %%
K, M, F, B, R = 4, 8, 1, 2, 1
check("units without recomputation", never.makespan, (M + K - 1) * (F + B))
check("units with recomputation", always.makespan, M * (F + R + B) + (K - 1) * (F + B))
samples, tokens, width, float32 = 2, 128, 128, 4
stage_input = samples * tokens * width * float32
check(
    "bytes kept by rank 1",
    kept["except_last"],
    kept["never"] / 16 + 15 * stage_input,
    tolerance=0.01,
)
answer(
    f"{always.makespan:g} units, not 44; rank 1 keeps {kept['except_last'] / 1e6:.1f} MB "
    f"of activations instead of {kept['never'] / 1e6:.1f} MB",
    mine,
)

# %% [markdown]
# A recomputation does not need the gradient from the next rank. It needs only the stage's input,
# which the rank has kept. So a rank recomputes while it would wait anyway. Each rank still has M
# recomputations to run, but the filling and draining of the pipeline costs F + B, not F + R + B,
# for each of the K - 1 hops: 8 x 4 + 3 x 3 = 41. The memory is that of 15 stage inputs, each 2
# samples x 128 tokens x 128 numbers x 4 bytes, and of all activations of one micro-batch.
#
# ## Change one thing
#
# How many units does the step take with `except_last`? Type this in a terminal:
#
# ```sh
# python -m gpipe_hpc.draw pipeline.stages=4 pipeline.microbatches=8 \
#     pipeline.recompute=except_last
# ```
#
# It takes 40 units. Rank 3 needs no recomputation of micro-batch 7, because its forward has only
# just run. On rank 3 this recomputation was not hidden, since rank 3 waits for no gradient.
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core only makes the commands slower, and
# `git` is not needed. If you predicted 44, you let the recomputation wait for the gradient:
# `torch.utils.checkpoint` and many others do so, because autograd starts the recomputation only
# when the gradient arrives. Another version of torch may keep other activations; then the
# megabytes differ by some per cent.
