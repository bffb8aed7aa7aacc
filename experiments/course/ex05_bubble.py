# %% [markdown]
# # 5. The pipeline bubble by hand
#
# *Simulated: the same numbers on every machine. Five seconds. Take a pencil.*
#
# A model that is too big for one device is cut into K *stages*. Each stage is placed on a device
# of its own. The process that computes there is called a *rank*. A batch of samples is cut into M
# *micro-batches*. A rank runs the forward pass (F) of a micro-batch as soon as it has the output
# of the rank before it. After its last forward it runs the backward passes (B), from the last
# micro-batch to the first. The last rank begins with them, and gradients travel back to the first
# rank. This order is called *GPipe* (Huang et al., 2019). The *bubble* is the time in which ranks
# have nothing to do, divided by all the time they have.
#
# ## Predict
#
# Take K = 4 stages and M = 8 micro-batches. On each stage a forward of one micro-batch takes 1
# unit of time, a backward takes 2 units. Sending takes no time. Draw the rows of the four ranks
# on paper. How many units does the step take, and what share of that is idle?

# %%
from experiments.course.page import answer, check, draw, predict

mine = predict("How many units does the step take?")

# %% [markdown]
# ## Run
#
# The command simulates the step and draws it. It takes F = 1 and B = 2 by itself; the cell names
# them for the check only.

# %%
K, M, F, B = 4, 8, 1, 2
settings = f"pipeline.stages={K} pipeline.microbatches={M} pipeline.recompute=never"
step = draw("05_bubble", settings)

# %% [markdown]
# ## The picture, in words
#
# Each row is a rank, and time runs to the right. The forwards form a staircase: rank 1 starts one
# unit after rank 0, rank 2 one unit after rank 1, rank 3 last. The backwards form a second
# staircase from rank 3 down to rank 0. Grey is idle time. Rank 0 idles in the middle, rank 3 at
# both ends, but each rank idles for 9 units. The lower part shows how many micro-batches a rank
# keeps in memory; exercise 6 is about that.
#
# ## The answer

# %%
check("units of the step", step.makespan, (M + K - 1) * (F + B))
check("bubble", step.bubble, (K - 1) / (M + K - 1), tolerance=0.002)
answer(f"{step.makespan:g} units, of which {step.bubble:.1%} are idle", mine)

# %% [markdown]
# The last rank cannot start before K - 1 forwards have run on the ranks before it. From then on
# it needs M forwards. So the forwards take M + K - 1 slots of 1 unit, and for the same reason the
# backwards take M + K - 1 slots of 2 units: 11 x 3 = 33. A rank works in M of the M + K - 1
# slots, so the bubble is (K - 1) / (M + K - 1) = 3 / 11 = 27.3 %. It does not depend on F and B:
# add `draw.costs.backward=4` to the printed command, and it prints 27.3 % again.
#
# ## Change one thing
#
# Set `M = 16` in the cell under *Run*, so that M = 4 K. The authors of GPipe call the bubble
# negligible from there on. What is it? (3 / 19 = 15.8 %: smaller, but still about a sixth of the
# time.)
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core changes nothing, and `git` is not
# needed. If you predicted 24, you counted the work of one rank (8 x 3) and left out the time in
# which it waits. If you predicted 36, you counted M + K slots. If you run the command by hand
# without `pipeline.recompute=never`, it prints 40, because then some forwards run a second time
# (exercise 7).
