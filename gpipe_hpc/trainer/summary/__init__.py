"""Report of a run when it ends: ``summary.json`` and a table on the screen.

`ledger` collects statistics of steps, `figures` the measurements of a rank; `compose` builds the
summary, and `table` formats it as text.
"""
