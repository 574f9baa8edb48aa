"""Recomputed regions: the first run of a function, and the re-run in backward that executes only what is needed."""
