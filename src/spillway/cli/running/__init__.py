"""``spillway run``, ``profile`` and ``bench``: a user's own script, unmodified, in this process.

``script`` runs it as Python would. ``observer`` sees its optimizer steps, and ``models`` its calls of modules;
``options`` says what is attached to each model, and ``result`` what happened. ``managed`` and ``bench`` use them.
"""

import spillway.requirements  # noqa: F401  (first: it says so if torch is too old for what follows)
