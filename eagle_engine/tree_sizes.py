"""Which tree the next step grows: the one that promises the most tokens per second, by what steps cost on this machine and by what trees have brought lately."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_engine.cost_profile import CostProfile
from eagle_engine.step_pace import StepPace
from eagle_engine.tree_shape import TreeShape

RECENT = 0.15  # weight of the last look in a request's own estimate
LASTING = 0.05  # and in the estimate that all requests share, which new ones start from: the mean of the first 1 / LASTING looks, then a slow average
TRUSTED_DRAFTS = 4.0  # drafts for which the drafter's confidence is taken at its word before outcomes correct it
TRUST_DECAY = 0.99  # per look: at large batches a step brings many
FORGOTTEN = 1 - 1 / 1024  # per step of plain decoding: probes are few, and a run of bad luck would keep drafting off for thousands of steps
FIRST_PROBE, LAST_PROBE = 32, 512  # steps of plain decoding before the drafter is tried again, doubled each time it does not pay
COMPARE = 64  # steps with drafts after which one of another size, or none, shows what it costs by now: the one that was compared least of those whose promise is nearly as good
CLOSE, CLOSE_TO_PLAIN = 1.06, 1.2  # nearly: by this factor
SETTLED = 16  # steps with drafts in a row after which probing starts from FIRST_PROBE again
DEEP_LOOKS = 8  # at the deepest trees in the beginning, one per sequence and step: a single one may mislead for a thousand steps
FEW_LOOKS = 3  # after which these end when drafting does not promise to pay
REFRESH = 128  # steps with drafts after which a deep tree is grown again, for what is known of it
KEPT = 8  # steps for which a choice stands while the same sequences run, once drafting has settled: before, every outcome counts
STEADY_ROWS = 64  # rows of context over which it does
AFFORDABLE = 2.5  # plain steps that a tree may cost which is grown for what it tells
NEAR = 1.01  # of trees whose promises differ by less, the cheapest is grown: costs are surer than gains
MARGIN = 1.06  # by which drafting must promise to beat plain decoding: a gain smaller than this is lost in what the estimates do not see
STAYS = 1.02  # and once it is on: estimates waver by a few percent, and each time it goes off by mistake costs FIRST_PROBE steps


class Candidate(NamedTuple):
    """One shape in one decision.

    tokens   expected per step, over all sequences
    seconds  cost of a step
    """

    shape: TreeShape
    tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Decision:
    """Why a step has the tree that it has.

    reason      "best": most tokens per second, or nearly; "first", "probe", "refresh": grown to learn what it brings; "off": no tree promises more than plain decoding;
                "compare": of another size, or none, to learn what it costs by now
    candidates  what was compared: trees of which something is known, and plain decoding
    """

    shape: TreeShape
    reason: str
    batch: int
    context: float
    candidates: list[Candidate] = field(default_factory=list)


class TreeSizes:
    """Chooses a shape for each step, for all running sequences together. Everything it knows is known one step late, and the text does not depend on it.

    The expected number of accepted drafts of a shape is the sum of path confidences over its nodes, as `tree_gains` reads it off the pool of the step before, kept per request and for all; what of it came
    true (`trust`) corrects it. Of a shape deeper than the last tree nothing new is known: it is expected to bring what it brought before, in proportion to what the last tree brought, then and now.

    shapes  the first is plain decoding
    """

    def __init__(self, shapes: Sequence[TreeShape], profile: CostProfile) -> None:
        self.shapes, self.profile = tuple(shapes), profile
        self._paces = [StepPace(len(self.shapes)) for _ in profile.batches]
        self._paced = -1  # which of them the last step told
        self.decision: Decision | None = None
        self.num_steps = dict.fromkeys(range(len(self.shapes)), 0)
        # By the confidence of the executed tree, in drafts (rounded down to halves): steps, sum of the expected, sum of the accepted.
        self.by_confidence: dict[float, list[float]] = {}
        self._shared: list[float | None] = [None] * (len(self.shapes) - 1)
        self._num_looks = [0] * (len(self.shapes) - 1)
        self._expected = self._accepted = 0.0
        self._plain_steps, self._probe_after, self._drafted_in_a_row, self._since_deep = 0, FIRST_PROBE, 0, 0
        self._since_compared, self._num_compared = 0, [0] * len(self.shapes)
        self._last, self._left, self._deep = 0, 0, 0  # the last choice, steps for which it stands, the tree that tells most
        self._made_for: tuple[list, int] | None = None  # the sequences, by what is known of them, and the context that it stands for

    @property
    def trust(self) -> float:
        """Drafts accepted for each that the drafter's confidence promised."""
        return (self._accepted + TRUSTED_DRAFTS) / (self._expected + TRUSTED_DRAFTS)

    def pace(self, batch: int) -> StepPace:
        """What corrects the profile at this batch size."""
        return self._paces[self._place(batch)]

    def _place(self, batch: int) -> int:
        return min(bisect_left(self.profile.batches, batch), len(self._paces) - 1)

    @property
    def wants_gains(self) -> bool:
        """Whether the step that was chosen last is to measure what other trees would have brought: the next choice is made anew."""
        return self._last > 0 and self._left == 0

    def choose(self, gains: Sequence[list[float | None]], context: float) -> int:
        """Index of the shape for the next step.

        gains    one list per running sequence, as `observe` returned it; [] for a new one
        context  mean number of committed rows
        """
        batch = len(gains)
        # Looking and deciding cost a few percent of a step; what they find turns out much the same a few steps later. While nothing is drafted nothing new is learned at all.
        if self._stands_for(gains, context) and (self._plain_steps < self._probe_after if self._last == 0 else self._left > 0):
            self._left -= 1
            self._count(self._last, self.decision.reason)
            return self._last
        pace = self.pace(batch)
        costs = [self.profile.seconds(i, batch, context) * pace.ratio(i) for i in range(len(self.shapes))]
        # What tells most: the deepest tree that does not cost too much here, of these the cheapest.
        self._deep = deep = max((i for i in range(1, len(costs)) if costs[i] <= AFFORDABLE * costs[0]), key=lambda i: (self.shapes[i].max_depth, -costs[i]), default=costs.index(min(costs[1:]), 1))
        candidates = self._candidates(gains, costs)
        drafting = [i for i, candidate in enumerate(candidates) if i > 0 and candidate is not None]
        if not drafting:
            index, reason = deep, "first"
        else:
            most = max(candidates[i].tokens_per_second for i in drafting)
            best = min((i for i in drafting if NEAR * candidates[i].tokens_per_second >= most), key=lambda i: (costs[i], -candidates[i].tokens))
            pays = candidates[best].tokens_per_second > (STAYS if self._last > 0 else MARGIN) * candidates[0].tokens_per_second
            index, reason = (best, "best") if pays else (0, "off")
            if not pays and self._plain_steps >= self._probe_after:
                index, reason = min(drafting, key=lambda i: costs[i]), "probe"  # the cheapest look at how sure the drafter is
            elif self._num_looks[deep - 1] < (DEEP_LOOKS if pays else FEW_LOOKS):
                index, reason = deep, "first"
            elif pays and self._since_deep >= REFRESH:
                index, reason = deep, "refresh"
            elif pays and pace.is_told and self._since_compared >= COMPARE:
                near = [i for i in (0, *drafting) if i != best and (CLOSE if i > 0 else CLOSE_TO_PLAIN) * candidates[i].tokens_per_second >= candidates[best].tokens_per_second]
                if near:
                    index, reason = min(near, key=lambda i: self._num_compared[i]), "compare"
                    self._num_compared[index] += 1
        self._count(index, reason)
        if reason != "compare":
            self._last = index
        self._left = KEPT - 1 if reason == "best" and self._drafted_in_a_row >= SETTLED else 0
        self._made_for = (list(gains), int(context) // STEADY_ROWS) if reason in ("best", "off") else None
        self.decision = Decision(self.shapes[index], reason, batch, context, [candidate for candidate in candidates if candidate is not None])
        return index

    def _stands_for(self, gains: Sequence[list[float | None]], context: float) -> bool:
        """Whether the last choice was made for these very lists: `observe` returns another one when something has been learned, and new sequences have their own."""
        if self._made_for is None:
            return False
        lists, rows = self._made_for
        return rows == int(context) // STEADY_ROWS and len(lists) == len(gains) and all(a is b for a, b in zip(lists, gains))

    def _count(self, index: int, reason: str) -> None:
        self.num_steps[index] += 1
        self._since_compared = self._since_compared + 1 if reason in ("best", "refresh") else 0
        if reason == "compare":
            return  # nothing else is learned
        if index == 0:
            self._plain_steps, self._drafted_in_a_row = self._plain_steps + 1, 0
            self._expected, self._accepted = FORGOTTEN * self._expected, FORGOTTEN * self._accepted
            return
        if reason == "probe":
            self._probe_after = min(2 * self._probe_after, LAST_PROBE)
        self._plain_steps, self._drafted_in_a_row = 0, self._drafted_in_a_row + 1
        if self._drafted_in_a_row == SETTLED:
            self._probe_after = FIRST_PROBE
        self._since_deep = 0 if index == self._deep else self._since_deep + 1

    def took(self, index: int, batch: int, context: float, seconds: float) -> None:
        """Take what a step of this shape took. Where nobody measures it, as with captured steps, the profile stands as it is."""
        place = self._place(batch)
        if place != self._paced:
            self._paced = place
            self._paces[place].forget_last()
        self._paces[place].observe(index, seconds, self.profile.seconds(index, batch, context))

    def observe(self, index: int, before: list[float | None], measured: list[float], accepted: int) -> list[float | None]:
        """Take the outcome of a step for one sequence; what is known of it from now on: drafts per step of each shape with drafts, None where nobody has grown one so deep.

        index     shape of the step
        before    what was known
        measured  expected drafts of each shape with drafts, below 0: not known; all of them where the step did not look
        accepted  drafts that were accepted
        """
        if index == 0 or measured[index - 1] < 0:
            return before
        expected = measured[index - 1]
        self._expected = TRUST_DECAY * self._expected + expected
        self._accepted = TRUST_DECAY * self._accepted + accepted
        place = self.by_confidence.setdefault(int(2 * expected) / 2, [0, 0.0, 0.0])
        for i, value in enumerate((1, expected, accepted)):
            place[i] += value
        known = [value if value >= 0 else None for value in measured]
        self._share(known, index - 1)
        ratio = known[index - 1] / max(self._shared[index - 1], 1e-6)
        told = [value if value is not None or shared is None else ratio * shared for value, shared in zip(known, self._shared)]
        old = before or self._shared
        return [b if a is None else a + RECENT * (b - a) for a, b in zip(old, told)]

    def _share(self, known: list[float | None], executed: int) -> None:
        """Take one look into what all requests share. executed: place of the last tree, which is known."""
        before = self._shared[executed]
        for i, value in enumerate(known):
            if value is not None:
                self._num_looks[i] += 1
                self._shared[i] = value if self._num_looks[i] == 1 else self._shared[i] + max(LASTING, 1 / self._num_looks[i]) * (value - self._shared[i])
        if before:
            grown = self._shared[executed] / before
            self._shared = [
                min(shared * grown, shape.max_depth) if value is None and shared is not None else shared for value, shared, shape in zip(known, self._shared, self.shapes[1:])
            ]

    def _candidates(self, gains: Sequence[list[float | None]], costs: list[float]) -> list[Candidate | None]:
        """None: of such a tree nothing is known yet."""
        trust, batch = self.trust, len(gains)
        found: list[Candidate | None] = []
        for i, shape in enumerate(self.shapes):
            if i > 0 and self._shared[i - 1] is None:
                found.append(None)
                continue
            expected = [own[i - 1] if own and own[i - 1] is not None else self._shared[i - 1] for own in gains] if i > 0 else []
            found.append(Candidate(shape, batch + sum(min(trust * value, shape.max_depth) for value in expected), costs[i]))
        return found
