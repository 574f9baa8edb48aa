"""Autograd's side: which bytes a saved tensor is made of, and what autograd holds in place of it. Moves nothing."""

from spillway.saved_tensors.hooks import ForwardScope, unscoped_scope

__all__ = ["ForwardScope", "unscoped_scope"]
