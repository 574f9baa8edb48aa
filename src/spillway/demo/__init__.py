"""What ``spillway demo`` runs: a small training, once per way, each in a process of its own.

``records`` holds the values that cross from child to parent; ``model`` and ``text`` are what is trained, on what;
``ways`` is how a step is run. ``worker`` is the child, with ``training`` and ``measure``; ``runner`` is the parent.
"""
