"""What a drafter's confidence is worth: how often the target agrees with a draft, against how sure the drafter was of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eagle_engine.observation import ObservedTree

NUM_BINS = 10
# Confidences come from differences of fp32 sums of log-probabilities; where they differ by no more than this, they are one number and its rounding.
ROUNDING = 1e-4


class Calibration:
    """Collects drafts from observed trees; `observe` is an observer for `Engine.observing`.

    A draft counts when its parent was accepted (the root is), since only then the target's choice after its path is what it would emit. Its confidence is the drafter's probability of its token given
    its path, exp(score - parent's score), within the tokens that the drafter may guess. Its outcome is 1 when it is the token that the target chose there. That is the draft being accepted, but for a
    stop token: there the walk ends at the parent, and the drafter was right all the same. Left out are places where the target chose nothing (its logits were not usable) and nodes without a token or
    a confidence (padding of a vocabulary smaller than top_k, NaN).
    """

    def __init__(self) -> None:
        self.confidences: list[float] = []
        self.outcomes: list[int] = []
        self.depths: list[int] = []
        self.num_steps = 0
        self.num_left_out = 0

    def observe(self, request_ids: Sequence[int], trees: Sequence[ObservedTree]) -> None:
        for tree in trees:
            if tree.sampled is None:
                raise ValueError("calibration compares drafts with the token that the target chose, and acceptance 'rejection' does not choose one per node")
            self.num_steps += 1
            accepted, confidences = set(tree.accepted_nodes), tree.confidences
            for node in range(1, len(tree.tokens)):
                parent = tree.parent[node]
                if parent not in accepted:
                    continue
                if tree.sampled[parent] < 0 or tree.tokens[node] < 0 or math.isnan(confidences[node]):
                    self.num_left_out += 1
                    continue
                self.confidences.append(confidences[node])
                self.outcomes.append(int(tree.tokens[node] == tree.sampled[parent]))
                self.depths.append(tree.depth[node])

    def report(self) -> dict:
        """`calibration_report` of all drafts, with the number of steps and of drafts left out, and by depth."""
        confidences, outcomes, depths = np.array(self.confidences), np.array(self.outcomes), np.array(self.depths)
        by_depth = [{"depth": depth} | calibration_report(confidences[depths == depth], outcomes[depths == depth]) for depth in sorted(set(self.depths))]
        return {"steps": self.num_steps, "left_out": self.num_left_out} | calibration_report(confidences, outcomes) | {"by_depth": by_depth}


def calibration_report(confidences: np.ndarray, outcomes: np.ndarray, num_bins: int = NUM_BINS) -> dict:
    """Confidence against outcome of n drafts.

    confidences  [n] in 0..1
    outcomes     [n] 0 or 1

    drafts, accepted            n, and the sum of the outcomes
    confidence, acceptance      their means; None without drafts
    correlation                 Pearson's, of confidence and outcome, over drafts
    binned_correlation          Pearson's, of mean confidence and mean outcome, over bins with a draft, each counted once: the published claim is about these
    slope                       of the least-squares line of outcome on confidence; 1 for a calibrated drafter
    expected_calibration_error  mean over drafts of |mean outcome - mean confidence| of their bin
    bins                        num_bins of equal width: low <= confidence < high (the last one <=); low, high, drafts, and the means of its drafts, None without any

    A correlation is None where it is undefined: fewer than two points, or confidences or outcomes that are all alike (up to ROUNDING). So is the slope where the confidences are.
    """
    confidences, outcomes = np.asarray(confidences, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    place = np.clip((confidences * num_bins).astype(np.int64), 0, num_bins - 1)
    counts = np.bincount(place, minlength=num_bins)
    bins = []
    for i, count in enumerate(counts.tolist()):
        inside = place == i
        bins.append({"low": i / num_bins, "high": (i + 1) / num_bins, "drafts": count, "confidence": _mean(confidences[inside]), "acceptance": _mean(outcomes[inside])})
    used = [one for one in bins if one["drafts"]]
    mean_confidence, mean_acceptance = (np.array([one[name] for one in used]) for name in ("confidence", "acceptance"))
    return {
        "drafts": len(confidences),
        "accepted": int(outcomes.sum()),
        "confidence": _mean(confidences),
        "acceptance": _mean(outcomes),
        "correlation": pearson(confidences, outcomes),
        "binned_correlation": pearson(mean_confidence, mean_acceptance),
        "slope": None if _all_alike(confidences) else float(np.cov(confidences, outcomes, bias=True)[0, 1] / confidences.var()),
        "expected_calibration_error": sum(one["drafts"] * abs(one["acceptance"] - one["confidence"]) for one in used) / len(confidences) if used else None,
        "bins": bins,
    }


def pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """Correlation of x [n] and y [n]; None where it is undefined."""
    if _all_alike(x) or _all_alike(y):
        return None
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1.0, 1.0))


def _all_alike(values: np.ndarray) -> bool:
    return len(values) < 2 or float(np.ptp(values)) <= ROUNDING


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
