# %% [markdown]
# # 10. GEMS and bidirectional pipelines
#
# *Simulated: the same numbers on every machine. Five seconds.*
#
# Very large images leave room for the activations of a single micro-batch. Then GPipe does not
# work: it needs several of them at the same time. *GEMS* (Jain et al., 2020) places the model
# twice, in opposite directions. Rank 0 holds the first stage of copy A and the last stage of copy
# B; on the last rank it is the reverse. As soon as the last rank has run its backward of copy A,
# the forward of the next micro-batch starts there, in copy B. It follows the backward from rank
# to rank, so a rank holds the activations of one micro-batch at a time. *Chimera* (Li and
# Hoefler, 2021) uses the same placement, but lets both copies run at full speed, as two pipelines
# that flow against each other.
#
# ## Predict
#
# There are D = 4 ranks, F = 1 and B = 2 units. One micro-batch alone needs D (F + B) = 12 units,
# so two of them, one after the other, need 24. GEMS runs one pair of micro-batches after another.
# How many units does it need for each further pair, if the second forward overlaps with the first
# backward? Choose: 24, 18 or 12.

# %%
from experiments.course.charts import bars
from experiments.course.page import answer, check, draw, picture, predict, simulate

mine = predict("Units that GEMS needs for each further pair:")

# %% [markdown]
# ## Run

# %%
layout = "pipeline.stages=4 pipeline.recompute=never"
gems = draw("10_gems", f"{layout} pipeline.schedule=gems pipeline.microbatches=8")
longer = simulate(f"{layout} pipeline.schedule=gems pipeline.microbatches=16")
chimera = draw("10_chimera", f"{layout} pipeline.schedule=chimera pipeline.microbatches=4")
gpipe = simulate(f"{layout} pipeline.schedule=gpipe pipeline.microbatches=4")

# %% [markdown]
# ## The pictures, in words
#
# The first picture shows GEMS. Most of it is grey, since a wave of forwards travels down the
# ranks and a wave of backwards travels back. While the backward wave of the first copy travels
# from rank 3 to rank 0, the forward wave of the second copy follows it. The lower part shows that
# no rank ever keeps more than one micro-batch. The second picture shows Chimera with 4
# micro-batches: two staircases that cross, one from rank 0 down and one from rank 3 up, fill each
# other's gaps. The last picture compares the share of idle time.

# %%
idle = {
    "GEMS, 8 micro-batches": 100 * gems.bubble,
    "GPipe, 4 micro-batches": 100 * gpipe.bubble,
    "Chimera, 4 micro-batches": 100 * chimera.bubble,
}
picture("10_idle", bars("Bubble", "% of the total time", idle))

# %% [markdown]
# ## The answer

# %%
D, F, B = 4, 1, 2
pair = (longer.makespan - gems.makespan) / 4  # 8 further micro-batches are 4 pairs
check("units for a pair with GEMS", pair, 4 * D + 2)
check("micro-batches kept with GEMS", max(gems.peak_activations), 1)
check("units of Chimera for 4 micro-batches", chimera.makespan, D * F + (2 * D - 2) * B)
check("units of GPipe for 4 micro-batches", gpipe.makespan, (4 + D - 1) * (F + B))
answer(
    f"{pair:g} units for a pair with GEMS instead of 24; Chimera: {chimera.makespan:g} for 4", mine
)

# %% [markdown]
# In GEMS a pair takes two backward waves of D B = 8 units each. Each forward wave follows a
# backward wave and ends one unit after it. So a pair needs 2 (D B + F) = 4 D + 2 = 18 units
# instead of 24. Each rank works 2 (F + B) = 6 of these units, so the bubble tends to 1 - 6 / 18 =
# 67 %, but the memory does not grow with the number of micro-batches: GEMS is for the case in
# which nothing else fits. If more than one micro-batch fits, Chimera needs 16 units where GPipe
# needs 21. Both GEMS and Chimera hold the weights of the model twice, and at the end of a step
# the two copies must add up their gradients; the simulation takes that as free.
#
# ## Change one thing
#
# Take Chimera with 8 micro-batches. Is it twice as long? Type this in a terminal:
#
# ```sh
# python -m gpipe_hpc.draw pipeline.schedule=chimera pipeline.stages=4 \
#     pipeline.microbatches=8 pipeline.recompute=never
# ```
#
# It takes 30 units, not 32: the next 4 micro-batches start before the first 4 have ended.
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core changes nothing, and `git` is not
# used. If you predicted 12 for a pair, you let both micro-batches run at the same time; then a
# rank would have to keep two. Chimera needs an even number of ranks, since its two directions
# meet in the middle.
