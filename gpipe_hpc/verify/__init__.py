"""`python -m gpipe_hpc.verify`: compare a run in its layout with one plain process.

`plain` is a plain training loop that imports nothing of the engine; `watching` records what layers
make of each micro-batch; `comparing` says how close two numbers are; `judging` compares each step;
`run` combines them.
"""
