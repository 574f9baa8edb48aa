"""Parameters that are in CPU memory, and on the device only while their block runs. See ``streamed.py``."""

from __future__ import annotations

from spillway.parameters.streamed import StreamedBlock, StreamedModel

__all__ = ["StreamedBlock", "StreamedModel"]
