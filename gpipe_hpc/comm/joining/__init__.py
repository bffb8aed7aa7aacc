"""How processes become ranks: launcher, rendezvous, roll call, secret."""
