"""Confidence against outcome: by hand, on drafters whose confidence is exact by construction, and where nothing can be said."""

import json
import math

import numpy as np
import pytest
import torch
from eagle_engine import SamplingParams
from eagle_engine.calibration import Calibration, calibration_report
from eagle_engine.observation import ObservedTree
from tiny_engines import KnowingDrafter, make_engine, plain_tokens, tiny_target
from tiny_targets import random_tokens


def standard_error_of_slope(x: np.ndarray, y: np.ndarray, slope: float) -> float:
    """Of a least-squares line, whatever the variance at each x (White, 1980)."""
    dx = x - x.mean()
    residuals = y - y.mean() - slope * dx
    return float(np.sqrt((dx**2 * residuals**2).sum()) / (dx**2).sum())


def test_report_by_hand():
    report = calibration_report(np.array([0.1, 0.2, 0.2, 0.7, 1.0]), np.array([0, 1, 0, 1, 1]), num_bins=2)
    assert report["bins"] == [
        {"low": 0.0, "high": 0.5, "drafts": 3, "confidence": pytest.approx(0.5 / 3), "acceptance": pytest.approx(1 / 3)},
        {"low": 0.5, "high": 1.0, "drafts": 2, "confidence": pytest.approx(0.85), "acceptance": 1.0},
    ]
    assert (report["drafts"], report["accepted"], report["confidence"], report["acceptance"]) == (5, 3, pytest.approx(0.44), pytest.approx(0.6))
    covariance, variance = (0 * 0.1 + 0.2 + 0.7 + 1.0) / 5 - 0.44 * 0.6, (0.01 + 0.04 + 0.04 + 0.49 + 1.0) / 5 - 0.44**2
    assert report["slope"] == pytest.approx(covariance / variance)
    assert report["correlation"] == pytest.approx(covariance / math.sqrt(variance * 0.24))
    assert report["binned_correlation"] == pytest.approx(1.0)
    assert report["expected_calibration_error"] == pytest.approx((3 * (1 / 3 - 0.5 / 3) + 2 * 0.15) / 5)


@pytest.mark.parametrize("factor", [1.0, 0.5], ids=["calibrated", "twice-too-sure"])
def test_slope_is_what_the_drafts_were_made_with(factor):
    rng = np.random.default_rng(1)
    confidences = rng.random(20000)
    outcomes = (rng.random(20000) < factor * confidences).astype(int)
    report = calibration_report(confidences, outcomes)
    error = standard_error_of_slope(confidences, outcomes, report["slope"])
    assert error < 0.02 and abs(report["slope"] - factor) < 4 * error
    assert report["binned_correlation"] > 0.98
    assert report["expected_calibration_error"] == pytest.approx((1 - factor) * 0.5, abs=0.02)


@pytest.mark.parametrize("noise", [0.0, 1e-6], ids=["exact", "rounding"])
def test_a_constant_confidence_has_no_correlation(noise):
    confidences = 0.25 + noise * np.random.default_rng(2).standard_normal(1000)
    report = calibration_report(confidences, np.arange(1000) % 4 == 0)
    assert report["correlation"] is report["binned_correlation"] is report["slope"] is None
    assert '"correlation": null' in json.dumps(report, allow_nan=False)
    assert (report["acceptance"], report["expected_calibration_error"]) == (0.25, pytest.approx(0.0, abs=1e-5))


def test_outcomes_that_are_all_alike_have_no_correlation():
    report = calibration_report(np.array([0.1, 0.5, 0.9]), np.array([1, 1, 1]))
    assert report["correlation"] is report["binned_correlation"] is None and report["slope"] == pytest.approx(0.0)


def test_no_drafts_and_one():
    for report in (calibration_report(np.array([]), np.array([])), Calibration().report()):
        assert report["drafts"] == report["accepted"] == 0
        assert all(report[name] is None for name in ("confidence", "acceptance", "correlation", "binned_correlation", "slope", "expected_calibration_error"))
        assert all(one["drafts"] == 0 and one["acceptance"] is None for one in report["bins"])
    one = calibration_report(np.array([0.4]), np.array([1]))
    assert (one["correlation"], one["expected_calibration_error"]) == (None, pytest.approx(0.6))


def test_the_edges_of_bins():
    report = calibration_report(np.array([0.0, 0.5, 1.0]), np.array([0, 1, 1]), num_bins=2)
    assert [one["drafts"] for one in report["bins"]] == [1, 2]


def observed_tree(**options) -> ObservedTree:
    """Root 0 with children 1 and 2, of which 2 is accepted and has children 3 and 4; 5 hangs below 1."""
    log = math.log
    fields = dict(
        tokens=[10, 11, 12, 13, 14, 15],
        parent=[-1, 0, 0, 2, 2, 1],
        depth=[0, 1, 1, 2, 2, 2],
        scores=[0.0, log(0.5), log(0.3), log(0.3 * 0.9), log(0.3 * 0.05), log(0.5 * 0.8)],
        sampled=[12, 99, 20, 99, 99, 15],
        accepted_nodes=[0, 2],
        bonus_token=20,
        position=7,
    )
    return ObservedTree(**fields | options)


def collected(tree: ObservedTree) -> tuple[list[tuple[float, int, int]], int]:
    calibration = Calibration()
    calibration.observe([0], [tree])
    assert calibration.num_steps == 1
    return [(round(c, 6), o, d) for c, o, d in zip(calibration.confidences, calibration.outcomes, calibration.depths)], calibration.num_left_out


def test_drafts_count_when_their_parent_was_accepted():
    drafts = [(0.5, 0, 1), (0.3, 1, 1), (0.9, 0, 2), (0.05, 0, 2)]
    assert collected(observed_tree()) == (drafts, 0)
    # A stop token ends the walk before its node; the drafter was right about it.
    assert collected(observed_tree(accepted_nodes=[0], bonus_token=12)) == (drafts[:2], 0)
    # No choice of the target below node 2, no token or confidence of node 1.
    assert collected(observed_tree(sampled=[12, 99, -1, 99, 99, 15])) == (drafts[:2], 2)
    assert collected(observed_tree(tokens=[10, -1, 12, 13, 14, 15])) == (drafts[1:], 1)
    assert collected(observed_tree(scores=[0.0, math.nan, *observed_tree().scores[2:]])) == (drafts[1:], 1)
    with pytest.raises(ValueError, match="rejection"):
        Calibration().observe([0], [observed_tree(sampled=None)])


def test_depths_add_up_to_the_whole():
    calibration = Calibration()
    calibration.observe([0, 1], [observed_tree(), observed_tree(accepted_nodes=[0, 1, 5])])
    report = calibration.report()
    assert report["steps"] == 2 and [one["depth"] for one in report["by_depth"]] == [1, 2]
    for name in ("drafts", "accepted"):
        assert sum(one[name] for one in report["by_depth"]) == report[name] > 0
    for i, whole in enumerate(report["bins"]):
        assert sum(one["bins"][i]["drafts"] for one in report["by_depth"]) == whole["drafts"]


class HonestDrafter(KnowingDrafter):
    """Drafts one token, sure of it by a random amount; in just that share of cases it is the true next token."""

    def __init__(self, target, text: list[int], seed: int, confidence: float | None = None) -> None:
        rng = np.random.default_rng(seed)
        vocab_size = target.config.vocab_size

        def predict(_token: int, position: int) -> torch.Tensor:
            # Above what the other tokens are left with, so that the token is the first; at most 0.98.
            sure = rng.uniform(0.05, 0.98) if confidence is None else confidence
            true = text[position + 1] if position + 1 < len(text) else 0
            draft = true if rng.random() < sure else (true + int(rng.integers(1, vocab_size))) % vocab_size
            probs = torch.full((vocab_size,), (1 - sure) / (vocab_size - 1), dtype=torch.float64)
            probs[draft] = sure
            return probs.log().float()

        super().__init__(target, predict)


def calibrated(confidence: float | None, max_depth: int = 3) -> Calibration:
    target, calibration = tiny_target("llama"), Calibration()
    params = SamplingParams(temperature=0.0, max_tokens=150)
    for seed in range(8):
        prompt = random_tokens(seed, 9)
        expected = plain_tokens(target, prompt, params)
        engine = make_engine(target, HonestDrafter(target, prompt + expected, seed, confidence), tree="chain", max_depth=max_depth)
        with engine.observing(calibration.observe):
            assert engine.generate([prompt], params)[0].token_ids == expected
    return calibration


def test_an_honest_drafter_has_slope_one():
    """Through a whole engine: chains, so that each place has one draft, whose outcome is a coin of the drafter's own."""
    calibration = calibrated(None)
    report = calibration.report()
    x, y = np.array(calibration.confidences), np.array(calibration.outcomes)
    error = standard_error_of_slope(x, y, report["slope"])
    assert report["drafts"] > 800 and error < 0.08
    assert abs(report["slope"] - 1) < 4 * error
    assert report["correlation"] > 0.3 and report["binned_correlation"] > 0.9
    assert report["expected_calibration_error"] < 0.08
    assert {one["depth"] for one in report["by_depth"]} == {1, 2, 3}


def test_a_drafter_of_constant_confidence_has_no_correlation():
    """Though its scores, sums of rounded numbers, do differ in their last digits."""
    calibration = calibrated(0.63, max_depth=8)
    report = calibration.report()
    assert report["correlation"] is report["binned_correlation"] is report["slope"] is None
    assert len(set(calibration.confidences)) > 1 and report["confidence"] == pytest.approx(0.63, abs=1e-5)
    assert report["acceptance"] == pytest.approx(0.63, abs=4 * math.sqrt(0.63 * 0.37 / report["drafts"]))
