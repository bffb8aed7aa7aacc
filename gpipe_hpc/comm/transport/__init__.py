"""Channels between ranks: in memory, over torch.distributed, in shared memory of a host."""
