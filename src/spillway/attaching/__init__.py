"""``spillway.attach``: regions around the blocks of a model that nobody edits.

``attached`` is the call and what it gives back. ``call`` is a module's call, taken over: ``model`` that of the model,
``block`` that of a block, with ``forward`` to stand in for the block's own while hooks run. ``refusals`` says what
cannot be attached to.
"""

from spillway.attaching.attached import Attached, attach, attached_to, policy_named

__all__ = ["Attached", "attach", "attached_to", "policy_named"]
