"""What a run says of itself when it ends: ``summary.json`` and a table on the screen.

`ledger` notes what each step took, `figures` is what a rank tells, `compose` puts all together,
`table` says it in words.
"""
