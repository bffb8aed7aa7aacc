# %% [markdown]
# # 4. Overlap of computation and communication
#
# *Simulated: the same numbers on every machine. Ten seconds.*
#
# A backward pass computes gradients from the last layer to the first. The gradients of the last
# layers are complete long before the pass ends. *S-Caffe* (Awan et al., 2017) uses this: it adds
# up the gradients of a layer over the replicas while the backward pass goes on with earlier
# layers. Today most systems first collect the gradients of several layers in a *bucket*. A bucket
# is sent as soon as all its gradients are complete.
#
# ## Predict
#
# On each replica the forward takes 1 unit, the backward 2 units, and the all-reduce of all
# gradients also takes 2 units. Without overlap a step takes 1 + 2 + 2 = 5 units. How many units
# does it take with 4 buckets of the same size, whose gradients are complete after each quarter of
# the backward? Can it be 3?

# %%
from experiments.course.charts import lines
from experiments.course.page import answer, check, draw, picture, predict, simulate

mine = predict("Units of a step with 4 buckets:")

# %% [markdown]
# ## Run

# %%
REDUCTION = 2
layout = (
    "pipeline.stages=1 pipeline.microbatches=1 pipeline.recompute=never "
    f"draw.costs.reduction={REDUCTION}"
)
blocking = simulate(f"{layout} draw.buckets=4 outer.overlap=false").makespan
steps = {n: simulate(f"{layout} draw.buckets={n}").makespan for n in (1, 2, 8, 16)}
steps[4] = draw("04_overlap", f"{layout} draw.buckets=4").makespan

# %% [markdown]
# ## The pictures, in words
#
# The first picture has one row: a forward box, a backward box, and grey at the end, in which the
# rank waits for the last bucket. The thin bar below the row is the reductions of the four
# buckets, one right after the other. It starts at 1.5 units, when a quarter of the backward is
# done, and sticks out at the end by one reduction of half a unit. The second picture is a curve:
# the time of a step over the number of buckets. It starts at 5 units, falls steeply at first, and
# comes close to 3 units.

# %%
curve = [(n, steps[n]) for n in sorted(steps)]
chart = lines("Time of a step", "buckets", "units", {"with overlap": curve})
picture("04_buckets", chart)

# %% [markdown]
# ## The answer

# %%
check("units without overlap", blocking, 1 + 2 + REDUCTION)
for n, makespan in steps.items():
    by_compute = 1 + 2 + REDUCTION / n  # the last bucket waits for its gradients
    by_link = 1 + 2 / n + REDUCTION  # or the link is never idle after the first bucket
    check(f"units with {n} buckets", makespan, max(by_compute, by_link))
answer(f"{steps[4]:g} units with 4 buckets, {blocking:g} without overlap", mine)

# %% [markdown]
# With n buckets, the reductions of all but the last bucket run while the backward still computes.
# (A *reduction* is the all-reduce of one bucket.) The last bucket is complete only at the end of
# the backward, so its reduction, 2 / n units, cannot be hidden. The step never takes 3 units, but
# with many buckets it comes close. In practice buckets cannot be arbitrarily small: every message
# costs some time of its own, however few bytes it has (exercise 3). Usual sizes are 10 to 100 MB;
# PyTorch's `DistributedDataParallel` takes 25 MB by default.
#
# ## Change one thing
#
# Make the network slower: `REDUCTION = 4`. How long is the step with 4 buckets? (5.5 units: the
# reductions take longer than the backward, so they run one after the other from 1.5 units on: 1.5
# + 4. Overlap hides 1.5 units of the 4, and no number of buckets could hide more than 2. The
# curve now comes close to 5 units.)
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core changes nothing, and `git` is not
# needed. If you predicted 3, you hid the last bucket too: nothing is left to compute while it
# travels. On a laptop a measured run shows little of this, since its "network" is the memory, and
# copying takes the same cores that compute.
