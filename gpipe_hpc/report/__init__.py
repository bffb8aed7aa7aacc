"""`python -m gpipe_hpc.report`: describe a run, the time of its steps, and how to speed them up.

`record` reads a run's files, `accounting` divides a step's time, `pace` and `findings` give advice,
`sections` combines them; `html` and `markdown` write the page.
"""
