"""A plan as a page, as a trace and as text: pure functions over records. And the statistics of all ranks as a table."""
