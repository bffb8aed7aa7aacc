"""`python -m gpipe_hpc.report`: describe a run, where its time went, and what would make it faster.

`record` reads a run's files, `accounting` divides a step's time, `pace` and `findings` give advice,
`sections` combines them; `html` and `markdown` write the page.
"""
