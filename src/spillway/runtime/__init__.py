"""Moves bytes between a device and the tiers, and knows nothing of autograd.

Top down: ``device.py``, ``mover.py``, ``queues.py``, ``tiers.py``, ``backend.py``.
"""
