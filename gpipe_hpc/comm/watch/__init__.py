"""Every rank is watched by a few others, so that no silence goes unnoticed.

Each rank starts a small helper process, its watcher. Watchers of neighbouring ranks are connected,
send one another a beat a second, and pass news on to all. A watcher needs neither torch nor its
rank's interpreter lock: a rank that computes for minutes without letting go is not taken for a
stopped one, as the watcher asks the kernel how its rank is.

`neighbours` says who watches whom, `lines` how messages travel, `talk` how two watchers know that
they belong together, `neighbourhood` how they find and lose one another, `own_process` how a
watcher looks at its rank, `doing` and `link` what it knows of its rank and of a neighbour,
`silence` what a silence means, `news` what has been passed on, `watcher` what it does. The rank's
own side are `helper` (starts the watcher), `introduction` (how watchers find each other), `pulse`
(what the rank does) and `stacks`.
"""
