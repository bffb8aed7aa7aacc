"""The promise as a command: a user's own run in its layout against one plain process.

`plain` is the training loop that anybody would write, and imports nothing of the engine; `watching`
records what layers make of each micro-batch; `comparing` says how near two numbers are; `judging`
holds each step against the plain one; `run` brings them together.
"""
