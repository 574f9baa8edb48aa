"""What the first calls of a checkpointed function taught.

NOTE [ Learning ]

The first call of each kind (types of tensors, numbers among the arguments, whether the module trains) is observed,
without a dispatch mode:

* Of each saved tensor a fingerprint is taken. The first replay is run to its end, and compared with the fingerprints.
* The version counters of inputs, buffers and other tensors that the function can reach are compared before and after,
  so that in-place writes are known. Later calls copy what is written before they begin.
* Saved tensors that share memory with an output are known by their numbers. Later calls watch their versions, as
  autograd would.

Later calls rely on it. One call in 64 is compared again, by fingerprints that the device compares on its own.
"""

from __future__ import annotations

import itertools

from spillway.errors import UnsupportedError

_EVERY = 64
"""Calls of which one is compared."""
_MOST_OBSERVED = 8
"""Calls that are observed in full before one of them was replayed."""
_numbers = itertools.count()


class Learned:
    """What is known of one kind of call of a function. See NOTE [ Learning ]."""

    __slots__ = (
        *("_calls", "_offset", "draws", "escaping", "has_other_kernels", "is_validated", "state", "takes_gradients"),
        *("unread", "written", "written_inputs"),
    )

    def __init__(self) -> None:
        self._calls = 0
        self._offset = next(_numbers)
        self.is_validated = False
        """Whether a replay was compared in full, and was right."""
        self.draws = False
        """Whether the function was seen to draw random numbers of torch's."""
        self.escaping: frozenset[int] = frozenset()
        """Numbers of saved tensors that share memory with an output or with state: somebody else may write them."""
        self.has_other_kernels = False
        """Whether it gives other bits where nothing needs a gradient: see NOTE [ Kernels without grad ]."""
        self.takes_gradients = False
        """Whether the function takes a gradient of what it computes: then it is called plainly."""
        self.unread: frozenset[str] = frozenset()
        """Names of attributes in which a reentrant function leaves a history, and which it does not read."""
        self.written_inputs: frozenset[int] = frozenset()
        """Places of inputs that the function writes in place."""
        self.written: frozenset[str] = frozenset()
        """Names of other tensors that it writes in place."""

        self.state: tuple[str, ...] = ()
        """Names of the Python state that the function changes."""

    @classmethod
    def believed(cls) -> Learned:
        """For a call within a replay, which the replay's own checks cover."""
        learned = cls()
        learned.is_validated = True
        learned._offset = 1
        return learned

    def check_capture(self, *, draws: bool) -> None:
        """A call is about to be captured into a graph, which can neither compare nor set a random generator.

        Args:
            draws: whether a replay is to draw what forward drew.

        Raises:
            UnsupportedError: where that would be needed.
        """
        if not self.is_validated or (draws and self.draws):
            raise UnsupportedError(
                "got a checkpointed function in a graph that is being captured, expected one of which a call was "
                "recomputed before, and that draws no random numbers; run a step like it in the same session first, "
                "without capturing, and keep or offload what dropout gives (save='random')"
            )

    def begins(self) -> bool:
        """A call begins; gives whether it is observed in full."""
        self._calls += 1
        return not self.is_validated and self._calls <= _MOST_OBSERVED

    def is_sampled(self) -> bool:
        """Whether this call is one of those that are compared now and then."""
        return (self._calls + self._offset) % _EVERY == 0
