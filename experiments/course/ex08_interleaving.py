# %% [markdown]
# # 8. 1F1B and interleaving
#
# *Simulated: the same numbers on every machine. Five seconds.*
#
# Two orders are used by most systems that train language models. *1F1B* starts a backward as soon
# as it can, so a rank alternates between one forward and one backward. *Interleaving* (Narayanan
# et al., 2021) cuts the model into more stages than there are ranks: with v stages a rank, rank 0
# of 4 ranks holds the stages 0, 4, 8 and so on. Each stage is then v times smaller and takes 1 /
# v of the time.
#
# ## Predict
#
# There are 4 ranks and M = 8 micro-batches. A rank's whole share of the model takes F = 1 and B =
# 2 units for a micro-batch. GPipe takes 33 units, of which a rank idles 9, and keeps 8
# micro-batches in memory (exercise 5).
#
# 1. How many units does 1F1B take, and how many micro-batches does rank 0 keep?
# 2. How many units does interleaving with v = 2 take?

# %%
from experiments.course.page import answer, check, draw, predict

mine = predict("Units of 1F1B, micro-batches that rank 0 keeps, units with v = 2:")

# %% [markdown]
# ## Run

# %%
layout = "pipeline.stages=4 pipeline.microbatches=8 pipeline.recompute=never"
one_f_one_b = draw("08_one_f_one_b", f"{layout} pipeline.schedule=one_f_one_b")
interleaved = {}
for v in (2, 4):
    schedule = f"pipeline.schedule=interleaved pipeline.options.stages_per_rank={v}"
    interleaved[v] = draw(f"08_interleaved_{v}", f"{layout} {schedule}")

# %% [markdown]
# ## The pictures, in words
#
# In the first picture, 1F1B, rank 3 runs F0 B0 F1 B1 and so on without a gap. Rank 0 runs four
# forwards first, then waits for the first backward, and then alternates. The idle time has moved,
# but there is as much of it as in exercise 5. In the second and third picture the boxes are
# shorter, in 2 or 4 tints: one for each stage that a rank holds. The staircases at the beginning
# and the end have smaller steps, so they cover less time.
#
# ## The answer

# %%
K, M, F, B = 4, 8, 1, 2
check("units of 1F1B", one_f_one_b.makespan, (M + K - 1) * (F + B))
check("micro-batches that rank 0 keeps with 1F1B", one_f_one_b.peak_activations[0], K)
for v, step in interleaved.items():
    check(f"units with v = {v}", step.makespan, M * (F + B) + (K - 1) * (F + B) / v)
    kept = step.peak_activations[0] / v  # the picture counts micro-batches of one small stage
    check(f"micro-batches that rank 0 keeps with v = {v}", kept, K * (1 + (K - 1) / (K * v)))
answer(
    f"1F1B takes {one_f_one_b.makespan:g} units and keeps 4 micro-batches instead of 8; "
    f"v = 2 takes {interleaved[2].makespan:g} units, v = 4 takes {interleaved[4].makespan:g}",
    mine,
)

# %% [markdown]
# 1F1B is not faster than GPipe. It keeps at most K micro-batches, however many there are, because
# each backward frees the memory that the next forward takes. Interleaving fills and drains the
# pipeline in steps of (F + B) / v instead of F + B, so the idle time becomes (K - 1) (F + B) / v:
# 4.5 units for v = 2. It has two prices. Rank 0 keeps 5.5 micro-batches instead of 4. (The
# picture counts 11, each on a stage of half the size.) And with v = 2 a micro-batch crosses from
# rank to rank 7 times in each direction instead of 3 times. The simulation takes these transfers
# as free.
#
# ## Change one thing
#
# Let a transfer take 0.25 units. Which is the fastest now: v = 1 (1F1B), v = 2 or v = 4? This
# command prints the times of all schedules; type it in a terminal:
#
# ```sh
# python -m gpipe_hpc.draw draw.format=table pipeline.stages=4 pipeline.microbatches=8 \
#     draw.costs.send=0.25
# ```
#
# They take 37, 32 and 33.75 units (column *step time*, rows `one_f_one_b` and `interleaved`; here
# `pipeline.stages` is the number of ranks): v = 2 is the fastest of these three, since v = 4
# spends more on transfers than it saves. 1F1B takes more than 33 + 6 x 0.25 = 34.5 units: rank 0
# has only 4 micro-batches under way, and a round trip takes 12 + 6 x 0.25 = 13.5, so it finishes
# one every 13.5 / 4 = 3.375 units.
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core changes nothing, and `git` is not
# needed. If you predicted 24 for v = 2, you left out idle time. If you predicted 16.5, you
# divided the work by v as well: a stage takes half as long, but a rank has two of them. In its
# original form interleaving needs M to be a multiple of the number of ranks; gpipe_hpc takes any
# M.
