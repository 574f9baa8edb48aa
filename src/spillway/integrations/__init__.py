"""What users of other systems need beside the engine: one module for each."""
