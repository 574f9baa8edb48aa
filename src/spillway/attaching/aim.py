"""For how many bytes plans are made, so that steps are within a budget."""

from __future__ import annotations

from collections.abc import Callable

from spillway.errors import BudgetError
from spillway.planning.planner import aim_at
from spillway.units import format_bytes

_MOST_ROUNDS = 8
_SLACK = 1 << 20


class Aim:
    """A little less than the budget, and ever less for as long as steps are over it.

    Args:
        budget: bytes that may be allocated on the device.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._rounds = 0
        self.nbytes = aim_at(budget)

    def leaves(self, foreseen: int) -> int:
        """Bytes by which a step may be larger than foreseen, and within the budget, for all that is known."""
        return self._budget - aim_at(self._budget) + self.nbytes - foreseen

    def reset(self) -> None:
        """What was over it says nothing of what comes."""
        self._rounds, self.nbytes = 0, aim_at(self._budget)

    def back_off(self, peak: int, replan: Callable[[], object], note: Callable[[str], object]) -> None:
        """Plan for so much less as a step was too much.

        Args:
            peak: of the step.
            replan: makes a plan for :attr:`nbytes`, and puts it in force.
            note: takes down what is done.

        Raises:
            BudgetError: if there is no such plan, or there were many, and none was met. Then the one that there is
                stays in force, for who goes on all the same.
        """
        before = self._rounds, self.nbytes
        self._rounds += 1
        if self._rounds > _MOST_ROUNDS:
            raise BudgetError(
                f"budget: got {format_bytes(self._budget)}, and steps of {format_bytes(peak)} after {_MOST_ROUNDS} "
                f"plans, expected a budget that is met; the model's steps differ too much: give a larger budget",
                budget=self._budget,
                least=peak,
            )
        # A step's peak moves a little, with what is just on its way: the more often it was over, the more is left.
        self.nbytes = max(self.nbytes - (peak - self._budget + _SLACK) * 2 ** max(self._rounds - 2, 0), 0)
        note(f"planned anew for {format_bytes(self.nbytes)}")
        try:
            replan()
        except BudgetError as error:
            missing = error.least - self.nbytes
            self._rounds, self.nbytes = before
            raise BudgetError(
                f"budget: got {format_bytes(self._budget)}, and a step of {format_bytes(peak)} where less was "
                f"predicted, expected {format_bytes(missing)} more, since no plan is that much smaller; give a budget "
                f"of {format_bytes(self._budget + missing)}, or allow more to leave or to be computed again",
                budget=self._budget,
                least=self._budget + missing,
            ) from error
