"""A user's own script, unmodified, in this process: ``spillway run``, ``profile`` and ``bench``.

``script`` runs it as Python would. ``models`` sees its optimizer steps and its calls of modules; ``options`` says what
is attached to each model, and ``result`` what happened. ``managed`` uses them.
"""

import spillway

spillway._require_torch()
