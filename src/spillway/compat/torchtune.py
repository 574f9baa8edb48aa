"""torchtune's ``OffloadActivations``, which torchtitan has too, over Spillway's engine.

``docs/compat/torchtune.md`` maps each name and lists the differences.

NOTE [ Hooks of an output head ]

The hooks are functions of this module, so that a hooked model can be copied and pickled, and so that a second call
finds the hooks of the first. After an exception, torch calls the hook behind the head, perhaps without the hook before
it. So the hook behind leaves only a context that was entered for this module.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

from torch.nn import Module
from torch.torch_version import TorchVersion

from spillway._torch import hooks_of, is_wrapper, top_hooks
from spillway.errors import UnsupportedError, UsageError
from spillway.offloading import keep, keep_tensor, offload
from spillway.policies import Devices, Keep, Policy
from spillway.session import Session
from spillway.types import Decision, SavedTensor
from spillway.units import parse_bytes, parse_share

__all__ = ["NoOpManager", "OffloadActivations", "get_act_offloading_ctx_manager"]

_log = logging.getLogger(__name__)

_STASH = 5
"""torchtune's default stash size, which stands for the session's whole in-flight limit."""
_NF4_SINCE = "0.6.0.dev20240917"
"""The first torchao whose NF4 tensors torchtune can offload."""
_HEADS = (
    *("output", "output.linear", "lm_head", "decoder.output", "decoder.output.linear"),
    *("language_model.lm_head", "head"),
)
_INNER = ("module", "_fsdp_wrapped_module", "_orig_mod", "base_model.model")
"""Attributes of the inner model in DDP, FSDP, ``torch.compile`` and PEFT."""


class OffloadActivations(offload):
    """Offloads tensors that autograd saves on an accelerator to CPU memory, and reloads them in backward.

    :class:`~spillway.offload` by other names. The attributes ``use_pin_memory``, ``use_streams``,
    ``max_fwd_stash_size``, ``min_tensor_size_bytes`` and ``virtual_memory_safe_pct`` may be set; they apply from the
    next time the context is entered.

    Args:
        use_pin_memory: CPU memory is always pinned. ``False`` only disables the warning below.
        use_streams: ``False``: an in-flight limit of 0, whatever the stash size, so that no copy overlaps compute.
        max_fwd_stash_size: tensors whose memory is held during their copy, at least 1. Each is a fifth of the session's
            in-flight limit, so 5 is all of it.
        min_offload_size: do not offload tensors of fewer bytes.
        tier: ``None``: offload an accelerator's tensors to CPU memory, and keep the CPU's. ``"host"`` or ``"disk"``:
            offload all tensors there, also the CPU's.
        session: ``None``: the default one.

    Raises:
        UsageError: for an invalid argument.
        UnsupportedError: when an NF4 tensor of a torchao that is too old is saved.

    Warns:
        UserWarning: if ``use_pin_memory`` and more than ``virtual_memory_safe_pct`` (60 %) of the system's memory is in
            use when backward first reloads a tensor.

    Example:
        >>> context = OffloadActivations()
        >>> with context:  # doctest: +SKIP
        ...     loss = model(batch)
        >>> loss.backward()  # doctest: +SKIP
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        max_fwd_stash_size: int = _STASH,
        min_offload_size: int = 1024,
        *,
        tier: str | None = None,
        session: Session | None = None,
    ) -> None:
        self.use_pin_memory = use_pin_memory
        self.use_streams = use_streams
        self.max_fwd_stash_size = max_fwd_stash_size
        self.min_tensor_size_bytes = min_offload_size
        self.virtual_memory_safe_pct: float = 60
        self._has_checked_memory = False
        super().__init__(
            min_bytes=min_offload_size,
            # "disk" would create its file at the CPU's first tensor, also if that tensor is kept.
            tier="host" if tier is None else tier,
            window=self._share_of_window(),
            policy=_on_accelerators if tier is None else _refuse_old_nf4,
            on_backward=self._check_memory,
            session=session,
        )

    def __enter__(self) -> Self:
        # Users may have set attributes.
        self._min_bytes = parse_bytes(self.min_tensor_size_bytes, what="min_tensor_size_bytes")
        self._window = parse_share(self._share_of_window(), what="window")
        return super().__enter__()

    def _share_of_window(self) -> str:
        size = self.max_fwd_stash_size
        if not isinstance(size, int) or size < 1:
            raise UsageError(
                f"max_fwd_stash_size: got {size!r}, expected at least 1, since a tensor's memory is held during its "
                f"copy; say use_streams=False to hold as little as possible"
            )
        return f"{size * 100 // _STASH if self.use_streams else 0}%"

    def _check_memory(self) -> None:
        """At the first backward, warn if too much memory is in use."""
        if self._has_checked_memory:
            return
        self._has_checked_memory = True
        if not self.use_pin_memory:
            return
        import psutil  # not at the top: it is slow to import

        percent = psutil.virtual_memory().percent
        if percent > self.virtual_memory_safe_pct:
            warnings.warn(
                f"{percent} % of the system's memory is in use, more than {self.virtual_memory_safe_pct} %, and "
                f"offloaded tensors are pinned, so they cannot be swapped out; offload less (min_offload_size), or "
                f"give a session a host_budget",
                UserWarning,
                stacklevel=2,
            )


class NoOpManager(keep):
    """:class:`spillway.keep` by another name: keeps tensors that autograd saves inside; the innermost context wins."""


def get_act_offloading_ctx_manager(
    model: Module,
    enable_activation_offloading: bool = True,
    *,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    max_fwd_stash_size: int = _STASH,
    min_offload_size: int = 1024,
    warn_if_no_head: bool = True,
    tier: str | None = None,
    session: Session | None = None,
) -> OffloadActivations | nullcontext[None]:
    """A context for training steps that offloads all but the model's output head.

    The head is found by name: ``output``, ``lm_head``, ``head``, ``output.linear`` (if tied), the ``output`` of a
    ``decoder``, the ``lm_head`` of a ``language_model``; also inside of DDP, ``torch.compile`` and PEFT. It gets hooks,
    once, which do nothing outside of contexts. Local parts of distributed parameters are kept too.

    With ``enable_activation_offloading=False`` the context does nothing, and there are no hooks. With
    ``warn_if_no_head=False`` there is no warning. Other arguments are those of :class:`OffloadActivations`.

    Raises:
        UsageError: for an invalid argument.

    Warns:
        UserWarning: if no head is found. Its saved tensors are then offloaded too.

    Example:
        >>> context = get_act_offloading_ctx_manager(model, True)  # doctest: +SKIP
    """
    if not enable_activation_offloading:
        return nullcontext()
    context = OffloadActivations(
        use_pin_memory, use_streams, max_fwd_stash_size, min_offload_size, tier=tier, session=session
    )
    for parameter in model.parameters():
        # A saved view of its local part has no reference to it.
        if is_wrapper(parameter):
            keep_tensor(parameter, session=session)
    keep_head(model, _HEADS, warn_if_no_head=warn_if_no_head)
    return context


def keep_head(model: Module, heads: Sequence[str], *, warn_if_no_head: bool) -> None:
    """Keep the tensors that the first of these heads saves from now on. See NOTE [ Hooks of an output head ]."""
    found = _head_of(model, heads)
    if found is not None:
        keep_saved_by(*found)
    elif warn_if_no_head:
        warnings.warn(
            f"{type(model).__name__} has no output head by one of the names {', '.join(heads)}, so its saved tensors "
            f"are offloaded and reloaded at once; call the head within NoOpManager()",
            UserWarning,
            stacklevel=3,
        )


def keep_saved_by(name: str, module: Module) -> None:
    """Keep the tensors that a module saves from now on."""
    if _enter_head not in hooks_of(module)[0].values():
        module.register_forward_pre_hook(_enter_head, prepend=True)
        module.register_forward_hook(_leave_head, always_call=True)
        _log.debug("%s (%s): its saved tensors are not offloaded", name, type(module).__name__)


def _refuse_old_nf4(saved: SavedTensor) -> Decision:
    """A policy that offloads everything, but raises for NF4 tensors of an old torchao."""
    kind = saved.part_of
    if kind is not None and kind.__name__ == "NF4Tensor" and kind.__module__.split(".")[0] == "torchao":
        version = getattr(sys.modules.get("torchao"), "__version__", _NF4_SINCE)
        if TorchVersion(version) < _NF4_SINCE:
            raise UnsupportedError(
                f"NF4 tensors of torchao {version} cannot be offloaded; update torchao to {_NF4_SINCE} or later, or "
                f"save them within NoOpManager()"
            )
    return Decision.OFFLOAD


_on_accelerators: Policy = Devices("cpu", Keep(), _refuse_old_nf4)


def _head_of(model: Module, heads: Sequence[str]) -> tuple[str, Module] | None:
    """The name and the module of a model's output head."""
    for name in heads:
        head = _attribute(model, name)
        if isinstance(head, Module):
            return name, head
    for name in _INNER:
        inner = _attribute(model, name)
        if isinstance(inner, Module) and inner is not model:
            found = _head_of(inner, heads)
            if found is not None:
                return f"{name}.{found[0]}", found[1]
    return None


def _attribute(model: Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


_of_thread = threading.local()


def _entered() -> list[tuple[Module, NoOpManager]]:
    """Heads that the calling thread is inside of, with their contexts."""
    return vars(_of_thread).setdefault("heads", [])  # type: ignore[no-any-return]


def _enter_head(head: Module, args: Any) -> None:
    # Without hooks of a context there is nothing to keep tensors from.
    if top_hooks(True) is not None:
        manager = NoOpManager()
        manager.__enter__()
        _entered().append((head, manager))


def _leave_head(head: Module, args: Any, output: Any) -> None:
    entered = _entered()
    if entered and entered[-1][0] is head:
        entered.pop()[1].__exit__()
