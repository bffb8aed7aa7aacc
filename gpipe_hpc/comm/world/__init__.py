"""How processes and threads become ranks: launcher, rendezvous, mesh, worlds."""
