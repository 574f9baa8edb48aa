"""``spillway run``, ``profile`` and ``bench``: a user's own script, which nobody edits, in this process.

``script`` runs it as Python would. ``calls`` sees which modules it calls, ``steps`` what its optimizers step, and
``roots`` decides between them what is attached, by what ``asked`` says. ``outcome`` has what came of it as values, and
``table`` shows them. ``profiled`` and ``measured`` end the script when they know enough.
"""

import spillway.requirements  # noqa: F401  (first: it says so if torch is too old for what follows)
