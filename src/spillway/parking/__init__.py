"""Parameters, gradients and optimizer state that leave the device for a phase of a program, and return afterwards.

Top down: ``parked.py`` has the public calls, ``found.py`` the tensors of models, ``storages.py`` one storage and its
copies, ``guards.py`` the errors for parked tensors.
"""
