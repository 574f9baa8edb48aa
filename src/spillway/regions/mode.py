"""What the modes that see a region's operators have in common."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, those of higher order too, and what a compiled function is as one."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without a wrapper against Dynamo around each operator: see ``dynamo.py``."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a compiled function does inside is one operator's business."""
        return True
