"""torch.distributed over MPI, by mpi4py: what `comm.backend=mpi` sends goes this way."""
