"""A plan as a page, as a trace and as text: pure functions over records."""
