"""Creation of ranks from processes or threads: launcher, rendezvous, mesh, worlds."""
