"""Caches of keys and values, which language models make in training, too, where their configuration says so.

NOTE [ Caches in training ]

A block writes its keys and values into such a cache, and would write them a second time when it runs again. Training
has no use for one: models of transformers make it since ``config.use_cache`` is there for generating. So while an
attached model is called in training, it is switched off, as transformers' own trainer and checkpointing do. What the
model gives then has no ``past_key_values``, and gradients are bit for bit those of the model without a cache. In
evaluation, and afterwards, the configuration is what it was.

Whoever asks for one in the call itself (``model(..., use_cache=True)``) hears that it cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

_FLAG = "use_cache"


class Caches:
    """Those of a model, by the configurations of its parts: a decoder may have one of its own.

    Args:
        model: whose.
    """

    def __init__(self, model: Module) -> None:
        found = (getattr(module, "config", None) for module in model.modules())
        self._configs: list[Any] = list({id(each): each for each in found if hasattr(each, _FLAG)}.values())

    @contextmanager
    def off(self) -> Iterator[bool]:
        """Inside, none is made; gives whether there would be one. See NOTE [ Caches in training ]."""
        on = [config for config in self._configs if getattr(config, _FLAG) is True]
        for config in on:
            setattr(config, _FLAG, False)
        try:
            yield bool(on)
        finally:
            for config in on:
                setattr(config, _FLAG, True)
