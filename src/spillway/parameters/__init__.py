"""Parameters that are in CPU memory, and on the device only while their block runs.

``streamable`` says which they can be, ``homes`` has their memory, ``streamed`` the blocks and the model.
"""
