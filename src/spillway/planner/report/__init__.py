"""What was counted, as something that people read. Pure functions over records."""
