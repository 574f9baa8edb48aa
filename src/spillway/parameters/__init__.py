"""Parameters that are in CPU memory, and on the device only while their block runs.

``homes`` has their memory, ``streamed`` the blocks and the model.
"""

from __future__ import annotations

from spillway.parameters.streamed import StreamedBlock, StreamedModel

__all__ = ["StreamedBlock", "StreamedModel"]
