# %% [markdown]
# # 14. Stale updates
#
# *Measured on your machine. Forty-five seconds.*
#
# In exercises 2 to 13 all replicas wait for the slowest one in each step. A *parameter server*
# keeps the parameters instead; workers read them, compute a gradient and send it back. With a
# *staleness bound* s (Ho et al., 2013) a worker may be up to s iterations ahead of the slowest
# worker. It then computes with parameters that lack some updates of the others: they are *stale*.
# With s = 0 nobody may be ahead, so all wait for the slowest in each iteration.
#
# ## Predict
#
# There are three workers. An iteration is held up for 30 ms, and in one of ten cases, at random,
# for 300 ms.
#
# 1. How long is the average hold-up of one worker? How long is the average hold-up of the slowest
#    of the three? (Three are all fast in 0.9 x 0.9 x 0.9 of the iterations.)
# 2. So by which factor, at most, can a bound of s = 4 raise the number of iterations in a second?

# %%
import re

from experiments.course.charts import bars
from experiments.course.page import answer, check, picture, predict, quartiles, run, spread

mine = predict("Two averages in ms, and the factor:")

# %% [markdown]
# ## Run
#
# Three workers and two servers, each a process, train a small network to predict the next byte of
# Python source. Each server keeps a part of the parameters. Each bound runs three times for 5
# seconds.

# %%
DELAYS = "random"
text = run(f"experiments.outer.stale --seconds 5 --delays {DELAYS} --bounds 0,4,0,4,0,4")
rate, ahead = {0: [], 4: []}, {0: [], 4: []}
for line in re.findall(rf"^\| {DELAYS} \|.*", text, re.M):
    bound, per_second, most_ahead = (float(number) for number in line.split("|")[2:5])
    rate[int(bound)].append(per_second)
    ahead[int(bound)].append(most_ahead)

# %% [markdown]
# ## The picture, in words
#
# Two bars: the iterations in a second with s = 0 and with s = 4, the median of three runs, with a
# short line from the first to the third quartile. The bar of s = 4 is longer.

# %%
rows = {f"s = {bound}": quartiles(values) for bound, values in rate.items()}
picture("14_stale_updates", bars("Iterations that all workers finished", "a second", rows))
for bound, values in rate.items():
    print(f"s = {bound}: {spread(values, 'iterations a second')}")

# %% [markdown]
# ## The answer

# %%
one = 0.9 * 30 + 0.1 * 300
slowest = 0.9**3 * 30 + (1 - 0.9**3) * 300
check("average hold-up of one worker, ms", one, 57)
check("average hold-up of the slowest, ms", slowest, 103.17)
for bound, values in ahead.items():
    assert max(values) <= bound, f"a worker was {max(values)} iterations ahead, more than {bound}"
gain = quartiles(rate[4])[1] / quartiles(rate[0])[1]
most = slowest / one if DELAYS == "random" else 1.0
answer(f"at most {most:.2f} times; here {gain:.2f} times as many iterations", mine)

# %% [markdown]
# With s = 0 an iteration takes as long as its slowest worker: 103 ms on average, besides
# computing. Workers that may run ahead wait less, and at best each takes its own 57 ms: 1.81
# times as fast. The gain here is usually smaller, because computing takes time as well and shares
# your cores, and because a bound of 4 still makes workers wait now and then.
#
# Stale parameters can make an iteration worth less. Five seconds are too short to see it, and two
# longer runs in `experiments/outer/stale/README.md` do not agree: how much it matters depends on
# the model, the rate and the bound. gpipe_hpc itself trains without stale updates, so that all
# layouts give the same result (exercise 11).
#
# ## Change one thing
#
# Set `DELAYS = "one"`: one worker is always held up for 90 ms, the others for 30 ms. Does s = 4
# help now? (No: the others run 4 iterations ahead, then wait for the slow one as before.)
#
# ## If the number does not come out
#
# The two averages and the bound are checked; the rates are measured. On a busy machine or a
# single core computing takes longer than the hold-ups, and the gain tends to 1. Write a larger
# number after `--seconds` in the cell then. `git` is not used. If the factor is above 1.81, the
# machine was busier in the runs with s = 0: look at the quartiles, and run it again.
