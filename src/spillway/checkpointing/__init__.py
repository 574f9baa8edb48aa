"""The recompute engine: a checkpointed function runs without modes, and is recomputed in backward."""
