"""`python -m gpipe_hpc.report`: what a run did, where its time went, what would make it faster.

`record` reads what a run has left, `accounting` divides a step's time, `pace` and `findings` say
what to change, `sections` puts all together; `html` and `markdown` write it down.
"""
