"""Other frameworks' training loops under the engine: ``pipelining`` for ``torch.distributed.pipelining``."""
