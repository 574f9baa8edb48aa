"""Loss functions that hold little: see NOTE [ What a loss holds ] in ``cross_entropy.py``."""
