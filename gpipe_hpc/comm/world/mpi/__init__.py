"""A torch.distributed backend over MPI by mpi4py, used by `comm.backend=mpi`."""
