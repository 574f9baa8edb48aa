"""From a profile and a budget to a plan: pure functions over records."""
