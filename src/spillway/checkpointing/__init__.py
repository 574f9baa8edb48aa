"""The recompute engine: a checkpointed function runs without modes, and runs again in backward."""
