"""Compressed sums over the copies of a stage: fewer bytes, and what is lost is sent later.

Every copy keeps what its message lost, its residual, and adds it to its next gradient (error
feedback: Seide et al. 2014; Karimireddy et al. 2019). `compressors` says which compressors there
are, each in a file of its own; `compressed` is the way that uses one; `residuals` keeps what was
lost; `beside` carries out a bucket's messages while the rank computes.
"""
