"""Which device is meant: what users write, and the one that it stands for."""

from __future__ import annotations

import torch

from spillway.errors import UsageError


def which_device(device: torch.device | str | None = None) -> torch.device:
    """The device that is meant, with an index unless it is the CPU.

    Args:
        device: with an index, or the current one of its type; ``None``: the current accelerator, or else the CPU.

    Raises:
        UsageError: for something that is no device, or that is not there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f'device: got {device!r}, expected a device such as "cuda:0", or None') from error
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        raise UsageError(f"device: got {device}, expected {accelerator or 'the CPU'}, which is here, or None")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise UsageError(f"device: got {device}, expected an index below {count}, as many as are here")
    return torch.device(device.type, index)
