"""Other systems' own names over Spillway's engine: change the import, and keep the code.

An adapter translates names, units and the shapes of calls. It copies nothing, orders nothing and decides nothing.
"""
