"""Names of other offloading systems over Spillway's engine: change the import and keep the code.

An adapter translates names, units and the shapes of calls. Copies, their order and all decisions are the engine's.
"""
