"""How the time of steps compares with the profile while an engine runs: a machine that others use too is not always the one that was measured, and a few rounds of measuring leave errors of a few percent."""

from __future__ import annotations

import math

COMPARED = 4  # steps after a change of the tree that are compared with those before it
RECENT = 0.3  # weight of the last step among those before
PRIOR, LEAST_WEIGHT = 4, 0.05  # comparisons that the profile counts for, and the weight of one when there have been many
CLIP, LIMIT = 0.25, 0.2  # logarithms: of one comparison, and of what all of them may come to


class StepPace:
    """By how much the steps of each shape have become dearer than the profile says, relative to plain decoding, for batches of one size.

    What slows down all steps alike does not matter to a choice, and comes and goes. So only neighbours in time are compared: the first steps after a change of the shape with the last ones before it. A comparison of two trees
    moves them apart or together, as ratings of players are moved by a game (Elo); one with plain decoding, which stays where it is, moves all trees.
    """

    def __init__(self, num_shapes: int) -> None:
        # Logarithms: of all trees, in the place of plain decoding, and of each beside the others.
        self._ratings = [0.0] * num_shapes
        self._num_compared = [0] * num_shapes
        self.is_told = False  # whether steps are measured at all
        self.forget_last()

    def forget_last(self) -> None:
        """The next step is no neighbour of the last one."""
        self._index, self._other = -1, -1  # the shape of the last step, and the one before it
        self._now = self._before = 0.0  # logarithms of seconds over the profile's: of the steps with the last shape, and of those before
        self._since = COMPARED

    def ratio(self, index: int) -> float:
        """Factor on the profile's seconds."""
        return math.exp(self._log(index))

    def _log(self, index: int) -> float:
        return 0.0 if index == 0 else min(max(self._ratings[0] + self._ratings[index], -LIMIT), LIMIT)

    def observe(self, index: int, seconds: float, expected: float) -> None:
        """Take what one step of a shape took, and what the profile says."""
        self.is_told = True
        value = math.log(seconds / expected)
        if index != self._index:
            self._since = 0 if self._index >= 0 else COMPARED
            self._index, self._other, self._before, self._now = index, self._index, self._now, value
        self._now += RECENT * (value - self._now)
        if self._since < COMPARED:
            self._since += 1
            self._compare(index, self._other, min(max(value - self._before, -CLIP), CLIP))

    def _compare(self, index: int, other: int, told: float) -> None:
        error = told - (self._log(index) - self._log(other))
        if index > 0 and other > 0:
            self._move(index, 0.5 * error)
            self._move(other, -0.5 * error)
        else:
            self._move(0, error if index > 0 else -error)

    def _move(self, place: int, error: float) -> None:
        self._num_compared[place] += 1
        self._ratings[place] += error * max(LEAST_WEIGHT, 1 / (self._num_compared[place] + PRIOR))
