"""Measures a machine and a model: the numbers that the planner plans with."""
