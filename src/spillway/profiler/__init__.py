"""What a machine and a model do, measured: figures that the planner plans with."""
