# %% [markdown]
# # 1. One device and its roofline
#
# *Measured on your machine. Twenty seconds.*
#
# A device has two limits: how many floating-point operations (FLOP) it computes in a second, and
# how many bytes it moves to and from memory in a second (its *bandwidth*). A computation that
# does few FLOP for each byte waits for memory. The number of FLOP for each byte is called its
# *arithmetic intensity* I. The best possible rate, in FLOP per second, is `min(peak, I x
# bandwidth)`. Drawn over I, this is a slope and then a flat line: the *roofline* (Williams et
# al., 2009).
#
# ## Predict
#
# A linear layer multiplies a batch of b vectors by a weight matrix of 4096 x 4096 numbers of 4
# bytes. It takes 2 x 4096 x 4096 x b FLOP. It must read the weights, 67 MB, once, whatever b is.
# So I is about b / 2 FLOP per byte. Take a core that computes 60 GFLOP in a second (G is 10^9)
# and moves 12 GB in a second. What share of its peak does it reach with b = 1: about all, about a
# half, or about a tenth? At which b does the slope end? (The exercise measures your own machine.)

# %%
import time

import torch
from torch import nn

from experiments.course.charts import lines
from experiments.course.page import answer, check, picture, predict, quartiles, spread

mine = predict("Share of the peak with b = 1, and b where the slope ends:")

# %% [markdown]
# ## Run
#
# We measure the peak with a large matrix product, the bandwidth with a copy (bytes read and bytes
# written), and then the layer, each in 7 rounds.

# %%
THREADS = 1
torch.set_num_threads(THREADS)


def rates(work, call):
    """Return what is done in a second in each of 7 rounds; a first one does not count."""
    found = []
    for _ in range(8):
        began = time.perf_counter()
        call()
        found.append(work / (time.perf_counter() - began))
    return found[1:]


a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
peaks = rates(2 * 1024**3, lambda: a @ b)
source, target = torch.ones(16 * 1024**2), torch.empty(16 * 1024**2)
bandwidths = rates(2 * 64 * 1024**2, lambda: target.copy_(source))
print(f"peak: {spread(peaks, 'GFLOP/s', 1e-9)}; memory: {spread(bandwidths, 'GB/s', 1e-9)}")

layer, reached, intensity = nn.Linear(4096, 4096, bias=False), {}, {}
with torch.no_grad():
    for batch in (1, 4, 16, 64, 256):
        inputs = torch.randn(batch, 4096)
        flop, num_bytes = 2 * 4096**2 * batch, 4 * (4096**2 + 2 * batch * 4096)
        intensity[batch] = flop / num_bytes
        reached[batch] = rates(flop, lambda x=inputs: layer(x))
        print(f"batch {batch:3}: {spread(reached[batch], 'GFLOP/s', 1e-9)}")

# %% [markdown]
# ## The picture, in words
#
# Both axes are logarithmic: FLOP per byte to the right, GFLOP/s up. The line is the roofline of
# the measured peak and bandwidth: a slope, then flat. Five markers show the layer with batches of
# 1 to 256. The first one lies near the slope, far below the flat part. Those in the middle lie
# below the corner of the line, since no program reaches both limits at once. The last one lies
# near the flat part.

# %%
peak, bandwidth = quartiles(peaks)[1], quartiles(bandwidths)[1]
at = sorted([2**k / 4 for k in range(11)] + [peak / bandwidth])  # with the corner itself
roof = [(i, 1e-9 * min(peak, i * bandwidth)) for i in at]
points = [(intensity[n], 1e-9 * quartiles(reached[n])[1]) for n in reached]
chart = {"roofline": roof, "measured": points}
picture(
    "01_roofline",
    lines("Roofline of one core", "FLOP per byte", "GFLOP/s", chart, log=True, dots=["measured"]),
)

# %% [markdown]
# ## The answer

# %%
check("FLOP per byte with b = 1", intensity[1], 0.5, tolerance=0.01)
ridge = 2 * peak / bandwidth
share = quartiles(reached[1])[1] / peak
by_roofline = intensity[1] * bandwidth / peak
answer(
    f"{share:.0%} of the peak with b = 1 (by the roofline {by_roofline:.0%}); "
    f"the slope ends near b = {ridge:.0f}",
    mine,
)

# %% [markdown]
# With b = 1 the core does 2 FLOP for every 4 bytes that it reads, so it waits for memory nearly
# all the time. The core of the question reaches 0.5 x 12 = 6 GFLOP/s, a tenth of its peak. The
# slope ends where I x bandwidth = peak, that is at b = 2 x peak / bandwidth; for the core of the
# question at b = 10. Far beyond it, larger batches bring no more FLOP in a second. This decides
# how small micro-batches may be (exercise 5): if they are too small, they waste the device.
#
# ## Change one thing
#
# Set `THREADS = 2`. Does the peak double? Does the bandwidth? (With two idle cores the peak nearly
# doubles. The bandwidth grows less, since both cores share the memory. So the slope ends at a
# larger b. If the two are threads of one core, or other programs run, neither grows much, and the
# bandwidth may even fall.)
#
# ## If the number does not come out
#
# Everything here is measured, so nothing is checked but the formula. A busy machine lowers all
# rates and moves the quartiles apart: close other programs and run it again. A single core is
# enough for one thread. `git` is not needed. On a processor whose cache holds 67 MB, the weights
# come from the cache, and the first markers lie above the slope. Markers may also lie above the
# line because the roof and the layer are measured one after the other, and because the layer only
# reads, which can be faster than a copy. Laptops slow down as they get warm, so rates fall after
# some minutes.
