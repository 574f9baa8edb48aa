"""torchtune's ``OffloadActivations``, which torchtitan has too, over Spillway's engine.

Names, units and the shapes of calls are translated here, and nothing else. ``docs/compat/torchtune.md`` says what
becomes of each name, and what differs.

NOTE [ Hooks of a head ]

They are functions of this module, so that a model that has them can be copied and pickled, and so that a second call
finds those of the first. Torch calls the one behind the head also where something is raised in between, and then
perhaps without having called the one before it: so it leaves only what was entered for this very module.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.nn import Module
from torch.torch_version import TorchVersion

from spillway.capture.identity import is_wrapper
from spillway.errors import UnsupportedError, UsageError
from spillway.offloading import keep, keep_tensor, offload
from spillway.policies import Devices, Keep, Policy
from spillway.records import Decision, SavedTensor
from spillway.session import Session
from spillway.units import parse_bytes, parse_share

__all__ = ["NoOpManager", "OffloadActivations", "get_act_offloading_ctx_manager"]

_log = logging.getLogger(__name__)

_STASH = 5
"""The stash size that is theirs by default, and stands for the whole of the session's window."""

_NF4_SINCE = "0.6.0.dev20240917"
"""The first torchao whose NF4 tensors they can offload."""

_HEADS = (
    *("output", "output.linear", "lm_head", "decoder.output", "decoder.output.linear"),
    *("language_model.lm_head", "head"),
)
_INNER = ("module", "_fsdp_wrapped_module", "_orig_mod", "base_model.model")
"""Where the model is in what is wrapped around it: by DDP, by FSDP, by ``torch.compile``, by PEFT."""


class OffloadActivations(offload):
    """What autograd saves of an accelerator's tensors inside is in host memory until backward asks for it.

    An :class:`~spillway.offload` by other names: a context manager and a decorator, which may be entered again, nested
    and from several threads, with backward inside or outside of it. The attributes ``use_pin_memory``,
    ``use_streams``, ``max_fwd_stash_size``, ``min_tensor_size_bytes`` and ``virtual_memory_safe_pct`` may be set; what
    they say counts from the next entering on.

    Args:
        use_pin_memory: host memory is always pinned. Whether the use of memory is looked at (see *Warns*).
        use_streams: copies always have lanes of their own. ``False``: nothing is held for a copy while compute goes
            on (a window of 0), whatever the stash size.
        max_fwd_stash_size: how much may still be held while it is copied, at least 1: each is a fifth of the session's
            window, so that 5 is all of it.
        min_offload_size: leave tensors of fewer bytes where they are. Bytes.
        tier: ``None``: an accelerator's tensors go to host memory, and the CPU's stay. ``"host"`` or ``"disk"``: all
            tensors go there, the CPU's too.
        session: ``None``: the default one.

    Raises:
        UsageError: a ``ValueError``: a stash size under 1, or another argument that cannot be meant.
        UnsupportedError: a ``RuntimeError``, on saving: an NF4 tensor of a torchao that is too old.

    Warns:
        UserWarning: if ``use_pin_memory`` and more of the system's memory is used than ``virtual_memory_safe_pct``
            (60 %) when backward asks for something for the first time in the life of the object.

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
        self._looked_at_memory = False
        super().__init__(
            min_bytes=min_offload_size,
            # The disk tier would make its file when it meets the CPU's first tensor, also if that stays.
            tier="host" if tier is None else tier,
            window=self._share_of_window(),
            policy=_on_accelerators if tier is None else _refuse_old_nf4,
            on_backward=self._look_at_memory,
            session=session,
        )

    def __enter__(self) -> Self:
        # Their attributes are read anew each time, so ours are too.
        self._min_bytes = parse_bytes(self.min_tensor_size_bytes, what="min_tensor_size_bytes")
        self._window = parse_share(self._share_of_window(), what="window")
        return super().__enter__()

    def _share_of_window(self) -> str:
        size = self.max_fwd_stash_size
        if not isinstance(size, int) or size < 1:
            raise UsageError(
                f"max_fwd_stash_size: got {size!r}, expected at least 1, since what is on its way out is held "
                f"meanwhile; say use_streams=False to hold as little as can be"
            )
        return f"{size * 100 // _STASH if self.use_streams else 0}%"

    def _look_at_memory(self) -> None:
        """Backward asks for something. The first time, too much memory in use is said."""
        if self._looked_at_memory:
            return
        self._looked_at_memory = True
        if not self.use_pin_memory:
            return
        import psutil  # not at the top: it takes long, and is needed once

        percent = psutil.virtual_memory().percent
        if percent > self.virtual_memory_safe_pct:
            warnings.warn(
                f"got {percent} % of the system's memory in use, expected at most {self.virtual_memory_safe_pct} %, "
                f"since what is offloaded is pinned and cannot be swapped out; offload less (min_offload_size), or "
                f"give a session a host_budget",
                UserWarning,
                stacklevel=2,
            )


class NoOpManager(keep):
    """Inside, whatever enclosing contexts would offload stays where it is; the innermost context wins.

    One object may be entered again. It is :class:`spillway.keep` by its other name.

    Example:
        >>> with OffloadActivations():  # doctest: +SKIP
        ...     hidden = body(batch)
        ...     with NoOpManager():
        ...         loss = head(hidden)
    """


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
    """A context for training steps of a model, which leaves the model's output head alone.

    The head is found by its name: ``output``, ``lm_head``, ``head``, ``output.linear`` (of a tied one), the ``output``
    of a ``decoder``, the ``lm_head`` of a ``language_model``; also where DDP, ``torch.compile`` or PEFT are around the
    model. It gets hooks, once, which do nothing outside of contexts. See NOTE [ Hooks of a head ]. Local parts of
    distributed parameters are left alone too (by :func:`spillway.keep_tensor`).

    Args:
        model: what is trained.
        enable_activation_offloading: ``False``: a context that does nothing, and no hooks.
        use_pin_memory: as for :class:`OffloadActivations`, and so are the next three.
        use_streams: see there.
        max_fwd_stash_size: see there.
        min_offload_size: see there.
        warn_if_no_head: whether a model without a head is worth a warning.
        tier: see :class:`OffloadActivations`.
        session: see there.

    Raises:
        UsageError: an argument that cannot be meant.

    Warns:
        UserWarning: if no head is found. What it saves is offloaded like the rest.

    Example:
        >>> context = get_act_offloading_ctx_manager(model, True)  # doctest: +SKIP
    """
    if not enable_activation_offloading:
        return nullcontext()
    context = OffloadActivations(
        use_pin_memory, use_streams, max_fwd_stash_size, min_offload_size, tier=tier, session=session
    )
    for parameter in model.parameters():
        # What is saved of its local part shows no relation to it.
        if is_wrapper(parameter):
            keep_tensor(parameter, session=session)
    spare_head(model, _HEADS, warn_if_no_head=warn_if_no_head)
    return context


def spare_head(model: Module, heads: Sequence[str], *, warn_if_no_head: bool) -> None:
    """Keep the tensors that a model's output head saves, from now on. See NOTE [ Hooks of a head ].

    Args:
        model: the model, or a wrapper around it.
        heads: names that a head may have, the likeliest first.
        warn_if_no_head: whether to warn where there is none.
    """
    found = _head_of(model, heads)
    if found is not None:
        spare(*found)
    elif warn_if_no_head:
        warnings.warn(
            f"got {type(model).__name__}, expected a model with an output head by one of the names "
            f"{', '.join(heads)}; what its head saves is offloaded, and wanted back at once: call the head within "
            f"NoOpManager()",
            UserWarning,
            stacklevel=3,
        )


def _refuse_old_nf4(saved: SavedTensor) -> Decision:
    """A policy that offloads everything, or refuses."""
    kind = saved.part_of
    if kind is not None and kind.__name__ == "NF4Tensor" and kind.__module__.split(".")[0] == "torchao":
        version = getattr(sys.modules.get("torchao"), "__version__", _NF4_SINCE)
        if TorchVersion(version) < _NF4_SINCE:
            raise UnsupportedError(
                f"got an NF4 tensor to offload, of torchao {version}, expected torchao {_NF4_SINCE} or later; update "
                f"it, or save the tensor within NoOpManager()"
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


def spare(name: str, module: Module) -> None:
    """Keep the tensors that a module saves, from now on. See NOTE [ Hooks of a head ]."""
    if _enter_head not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter_head, prepend=True)
        module.register_forward_hook(_leave_head, always_call=True)
        _log.debug("what %s (%s) saves is not offloaded", name, type(module).__name__)


class _Heads(threading.local):
    """The heads that the thread is inside of."""

    def __init__(self) -> None:
        self.entered: list[tuple[Module, NoOpManager]] = []


_heads = _Heads()


def _enter_head(head: Module, args: Any) -> None:
    # Where nobody sees what is saved, there is nothing to keep it from.
    if _top_saved_tensors_default_hooks(True) is not None:
        manager = NoOpManager()
        manager.__enter__()
        _heads.entered.append((head, manager))


def _leave_head(head: Module, args: Any, output: Any) -> None:
    if _heads.entered and _heads.entered[-1][0] is head:
        _heads.entered.pop()[1].__exit__()
