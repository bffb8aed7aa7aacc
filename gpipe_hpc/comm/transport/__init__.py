"""Channels between ranks: in memory, over torch.distributed, in a host's shared memory."""
