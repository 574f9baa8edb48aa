"""What checkpointed functions read and hang on: arguments, Python state, settings, random generators, tensors."""
