"""Autograd's side: which bytes a saved tensor is made of, and what autograd holds in place of it. Moves nothing."""
