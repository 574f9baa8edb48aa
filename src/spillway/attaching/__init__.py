"""``spillway.attach``: checkpoints and offloads the blocks of a model that is not edited.

``attached`` has the verb and its handle. ``call`` replaces a module's call, ``model`` that of the model and ``block``
that of a block. ``validation`` refuses other models. With a budget, ``collector`` profiles steps and applies a plan,
``controller`` finds the plan, ``ranks`` share it, and ``pipeline`` finds those of several stages.
"""

from spillway.attaching.attached import Attached, attach, attached_to, policy_named

__all__ = ["Attached", "attach", "attached_to", "policy_named"]
