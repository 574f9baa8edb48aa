"""CUDA graphs: where a stream waits for the session's copies."""

from __future__ import annotations

from typing import Any

import torch

from spillway.session import Session


def fine_grained_offloading_forward_record(event: Any = None) -> None:
    """Record an event on the current stream, which waits for the copies out then. On the CPU, nothing.

    Args:
        event: a ``torch.Event``, or the device's own. ``None``: only wait.
    """
    _record(event, 0)


def fine_grained_offloading_backward_record(tensor: torch.Tensor, event: Any = None) -> torch.Tensor:
    """The tensor, in whose backward the event is recorded, and the current stream waits for the copies back then.

    Args:
        tensor: of the graph. On the CPU, it is given back as it is.
        event: a ``torch.Event``, or the device's own. ``None``: only wait.
    """
    return tensor if current_device().type == "cpu" else _BackwardRecord.apply(tensor, event)  # type: ignore[no-untyped-call]


class _BackwardRecord(torch.autograd.Function):
    """An identity."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: Any) -> torch.Tensor:
        ctx.event = event
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _record(ctx.event, 1)
        return (*gradients, None)


def _record(event: Any, lane: int) -> None:
    device = current_device()
    if device.type == "cpu":
        return
    if event is not None:
        event.record()
    runtime = Session.default().runtime(device)
    # The lane is part of a capture only if something was sent in it; the backend knows.
    runtime.backend.wait(runtime.backend.compute(), runtime.backend.record(runtime.mover.lanes[lane]))


def make_stream(device: torch.device) -> torch.Stream | None:
    """A new stream of an accelerator; ``None`` on the CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).Stream(device=device)
    return stream


def make_event(device: torch.device) -> torch.Event | None:
    """A new event of an accelerator; ``None`` on the CPU."""
    if device.type == "cpu":
        return None
    # Only CUDA tells events apart that a graph and other streams share.
    return torch.cuda.Event(external=True) if device.type == "cuda" else torch.Event(device)  # type: ignore[no-untyped-call]


def current_device() -> torch.device:
    """The current accelerator, or the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return torch.device("cpu")
    return torch.device(device.type, torch.accelerator.current_device_index())
