# %% [markdown]
# # 9. The split backward and zero bubble
#
# *Simulated: the same numbers on every machine. Five seconds.*
#
# The backward of a layer does two things. It computes the gradient of the layer's input (I),
# which the layer before it needs; at the border of two stages, the rank before is waiting for it.
# It also computes the gradient of the layer's weights (W), which nobody needs before the end of
# the step. Until now both were one action, B = I + W. The *zero bubble* schedules (Qi et al.,
# 2024) split it: a rank runs I at once, and keeps W for a moment in which it would idle.
#
# ## Predict
#
# There are K = 4 ranks and M = 8 micro-batches, F = I = W = 1 unit. 1F1B (exercise 8) takes 33
# units, of which each rank idles (K - 1) (F + I + W) = 9. How many units does a rank idle if
# weight gradients fill gaps? The schedule `zb_h1` may not keep more activations than 1F1B does,
# so it cannot start more forwards early.

# %%
from experiments.course.charts import bars
from experiments.course.page import answer, check, draw, picture, predict, simulate

mine = predict("Idle units of a rank with zb_h1:")

# %% [markdown]
# ## Run
#
# `zb_h2` may keep more activations than `zb_h1`. `zb_v` puts two stages on each rank, in the
# shape of a V: rank 0 holds the first and the last stage.

# %%
K, M, F, I, W = 4, 8, 1, 1, 1
layout = (
    f"pipeline.stages={K} pipeline.microbatches={M} pipeline.recompute=never "
    f"draw.costs.weight_gradient={W}"
)
steps = {"one_f_one_b": simulate(f"{layout} pipeline.schedule=one_f_one_b")}
steps["zb_h1"] = draw("09_zb_h1", f"{layout} pipeline.schedule=zb_h1")
steps["zb_h2"] = simulate(f"{layout} pipeline.schedule=zb_h2")
steps["zb_v"] = simulate(f"{layout} pipeline.schedule=zb_v")

# %% [markdown]
# ## The pictures, in words
#
# The first picture shows `zb_h1`. Forwards, input gradients and weight gradients are three kinds
# of boxes. At the start the ranks wait as before. At the end, where 1F1B idles while the last
# backwards travel to rank 0, the ranks now run the weight gradients that they have kept, so the
# right edge has no gaps. The second picture has a bar for each schedule, the idle units of a
# rank: 9 for 1F1B, 3 for `zb_h1` and `zb_h2`, 1.5 for `zb_v`.

# %%
idle = {name: step.makespan - M * (F + I + W) for name, step in steps.items()}
picture("09_idle", bars("Idle units of a rank in a step", "units", idle))

# %% [markdown]
# ## The answer

# %%
check("idle units with 1F1B", idle["one_f_one_b"], (K - 1) * (F + I + W))
check("idle units with zb_h1", idle["zb_h1"], (K - 1) * (F + I - W))
for name, most in {"one_f_one_b": K, "zb_h1": K, "zb_h2": 2 * K - 1, "zb_v": K}.items():
    stages_per_rank = 2 if name == "zb_v" else 1  # the command counts micro-batches of one stage
    kept = max(steps[name].peak_activations) / stages_per_rank
    check(f"micro-batches kept with {name}", kept, most)
answer(f"{idle['zb_h1']:g} units instead of {idle['one_f_one_b']:g}; zb_v: {idle['zb_v']:g}", mine)

# %% [markdown]
# At the end of the step the gradient of the last micro-batch passes through K - 1 ranks. Each of
# these hops takes I instead of I + W, and a weight gradient that was kept fills the wait: (K - 1)
# (F + I - W) = 3 units. A micro-batch whose W waits is still kept: with `zb_h1` each rank keeps
# 4, with 1F1B they keep 4, 3, 2 and 1. `zb_h2` starts more forwards before the first backward and
# keeps up to 7. With `zb_h2` no rank idles between its first and its last action. But rank 3
# begins 3 forwards after rank 0, and at the end of the step all wait for the last rank: 3 units.
# (In the paper rank 0 begins the next step meanwhile.) `zb_v` has the memory of 1F1B. Its stages,
# and so its forwards, are half as long: 1.5 units.
#
# ## Change one thing
#
# Weight gradients need not take as long as input gradients. Set `W = 0.5` in the cell under
# *Run*. How many units does a rank idle with `zb_h1`? (3 x 1.5 = 4.5: there is less work to fill
# the gaps. The step takes 24.5 units, of which 8 x 2.5 = 20 are work.)
#
# ## If the number does not come out
#
# Nothing is measured here, so a busy machine or a single core changes nothing, and `git` is not
# used. If you predicted 0, you expected W to fill the gap at the start too: there is no backward
# yet whose weight gradient could run. In papers "bubble" sometimes means idle time over work and
# sometimes over total time; here we count units.
