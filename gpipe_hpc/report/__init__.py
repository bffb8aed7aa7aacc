"""`python -m gpipe_hpc.report`: what a run did, where its time went, what would make it faster.

`record` reads a run's files, `accounting` divides a step's time, `pace` and `findings` give advice,
`sections` combines them; `html` and `markdown` write the page.
"""
