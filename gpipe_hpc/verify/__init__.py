"""`python -m gpipe_hpc.verify`: compare training in a layout with training in one plain process.

`plain` is a plain training loop that imports nothing from the engine; `watching` records the
outputs of layers for each micro-batch; `comparing` classifies differences; `judging` compares each
step; `run` combines them.
"""
