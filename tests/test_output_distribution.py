"""Whole answers of tiny engines, sampled over many seeds, follow the distribution of plain sampling, enumerated exactly.

Level of each chi-square test: 1e-4 (seeds are fixed, so a pass stays a pass).
"""

import itertools
from functools import cache

import eagle_engine.step as step
import pytest
import torch
from eagle_engine import SamplingParams
from eagle_kernels import Accepted, filter_probs, reference, uniform_noise
from scipy.stats import chi2
from tiny_engines import make_engine, random_drafter, random_eagle3, tiny_target

VOCAB, LENGTH, LEVEL = 6, 3, 1e-4
PROMPT = [3, 1, 4, 1, 5]
FILTERS = [dict(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in itertools.product((0.6, 1.0), (0, 3), (1.0, 0.8), (0.0, 0.15))]
ENGINES = {
    "plain": None,
    "exact-dynamic": dict(tree="dynamic", top_k=3, max_depth=2, num_nodes=7),
    "rejection-chain": dict(tree="chain", max_depth=2, acceptance="rejection"),
    "rejection-static": dict(tree="static", choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)), acceptance="rejection"),
}


@cache
def small_target():
    return tiny_target("llama", vocab_size=VOCAB, num_hidden_layers=2)


@cache
def small_drafter():
    return random_drafter(small_target())


@cache
def exact_distribution(temperature: float, top_k: int, top_p: float, min_p: float, order: str = "hf") -> dict[tuple[int, ...], float]:
    """Probability of every answer of LENGTH tokens, from the target's filtered distribution after every prefix."""
    target = small_target()
    engine = make_engine(target, None)
    distribution = {(): 1.0}
    for _ in range(LENGTH):
        extended = {}
        for prefix, probability in distribution.items():
            rows = PROMPT + list(prefix)
            features = target.forward(torch.tensor([rows]), torch.arange(len(rows))[None], engine.state.target_cache, torch.zeros(1, dtype=torch.int32), torch.arange(50, dtype=torch.int32)[None])
            values = [torch.tensor([v], dtype=d) for v, d in ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))]
            probs = filter_probs(target.logits(features[0, -1:]), *values, order=order)[0].tolist()
            extended |= {(*prefix, token): probability * p for token, p in enumerate(probs) if p > 0}
        distribution = extended
    return distribution


def sample_answers(options: dict | None, filters: dict, count: int = 1024, first_seed: int = 0) -> list[tuple[int, ...]]:
    drafter = None if options is None else small_drafter()
    engine = make_engine(small_target(), drafter, max_batch_size=256, max_model_len=16, **(options or {}))
    params = [SamplingParams(**filters, seed=first_seed + i, max_tokens=LENGTH) for i in range(count)]
    return [tuple(output.token_ids) for output in engine.generate([PROMPT] * count, params)]


def chi_square_p_value(samples: list[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """Answers of expected count below 5 are pooled; an impossible answer gives 0."""
    counts = dict.fromkeys(distribution, 0)
    for sample in samples:
        if sample not in counts:
            return 0.0
        counts[sample] += 1
    cells, rest = [], [0.0, 0.0]
    for answer, probability in distribution.items():
        expected = probability * len(samples)
        if expected >= 5:
            cells.append((counts[answer], expected))
        else:
            rest = [rest[0] + counts[answer], rest[1] + expected]
    if rest[1] >= 1:
        cells.append(tuple(rest))
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1)) if len(cells) > 1 else 1.0


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("name", ENGINES)
def test_answers_follow_the_exact_distribution(name, filters):
    assert chi_square_p_value(sample_answers(ENGINES[name], filters), exact_distribution(**filters)) > LEVEL


@pytest.mark.parametrize("name", ["exact-dynamic", "rejection-chain"])
def test_filter_order_vllm(name):
    filters = dict(temperature=1.0, top_k=4, top_p=0.8, min_p=0.15)
    samples = sample_answers(ENGINES[name] | dict(filter_order="vllm"), filters)
    assert chi_square_p_value(samples, exact_distribution(**filters, order="vllm")) > LEVEL


@pytest.mark.parametrize("name", ["rejection-chain", "rejection-static"])
def test_drafts_are_accepted(name):
    options = ENGINES[name]
    engine = make_engine(small_target(), small_drafter(), max_model_len=100, **options)
    stats = engine.generate([PROMPT], SamplingParams(temperature=1.0, seed=1, max_tokens=80))[0].stats
    assert stats.acceptance_length > 1.2


def eagle3(draft_vocab_size: int, **options):
    """All that the target of two layers has to capture."""
    layers = dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2], eagle_aux_hidden_state_layer_id_convention="input")
    return random_eagle3(small_target(), draft_vocab_size=draft_vocab_size, **layers, **options)


PARTIAL = {
    "eagle-1": lambda: random_drafter(small_target(), draft_vocab=torch.tensor([5, 0, 3, 2])),
    "eagle-3": lambda: eagle3(4),
    "eagle-3.1-whole-vocabulary": lambda: eagle3(VOCAB, fc_norm=True, norm_output=True),
}


@pytest.mark.parametrize("name", ["rejection-chain", "rejection-static", "exact-dynamic"])
@pytest.mark.parametrize("kind", PARTIAL)
def test_with_a_vocabulary_of_the_drafters_own(kind, name):
    engine = make_engine(small_target(), PARTIAL[kind](), max_batch_size=256, max_model_len=16, **ENGINES[name])
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=LENGTH) for i in range(2048)]
    outputs = engine.generate([PROMPT] * 2048, params)
    samples = [tuple(output.token_ids) for output in outputs]
    assert sum(output.stats.acceptance_length for output in outputs) > 1.1 * len(outputs)  # drafts are accepted, and some are not
    assert chi_square_p_value(samples, exact_distribution(1.0, 0, 1.0, 0.0)) > LEVEL


def test_rejection_batch_equals_single_runs():
    options, filters = ENGINES["rejection-static"], dict(temperature=1.0, top_p=0.9)
    batch = sample_answers(options, filters, count=8)
    singles = [sample_answers(options, filters, count=1, first_seed=i)[0] for i in range(8)]
    assert batch == singles


def test_rejection_at_temperature_zero_is_greedy():
    params = SamplingParams(temperature=0.0, max_tokens=12)
    plain = make_engine(small_target(), None).generate([PROMPT], params)[0].token_ids
    for name in ("rejection-chain", "rejection-static"):
        assert make_engine(small_target(), small_drafter(), **ENGINES[name]).generate([PROMPT], params)[0].token_ids == plain


def planted_accept_rejection(fault: str):
    """The published rule with one fault, in place of the op."""

    def accept_rejection(tokens, parent, target_probs, draft_probs, seeds, positions, active, max_depth) -> Accepted:
        result = Accepted(torch.full((len(tokens), max_depth + 1), -1, dtype=torch.int32), torch.zeros(len(tokens), dtype=torch.int32), torch.zeros(len(tokens), dtype=torch.int64))
        for b in range(len(tokens)):
            node, depth = 0, 0
            result.accepted_nodes[b, 0] = 0
            while True:
                p, q = target_probs[b, node].double(), draft_probs[b, node].double()
                children = [c for c in range(tokens.shape[1]) if parent[b, c] == node]
                coins = uniform_noise(seeds[b : b + 1], positions[b : b + 1] + depth, max(1, len(children)), stream=2)[0]
                taken = None
                for coin, child in zip(coins.tolist(), children):
                    x = int(tokens[b, child])
                    if x < 0:
                        continue
                    if coin * float(q[x]) < float(p[x]):
                        taken = child
                        break
                    if fault != "residual is p":
                        p = (p - q).clamp(min=0)
                        p = p / p.sum()
                    q[x] = 0.0
                    if fault != "siblings not renormalised" and q.sum() > 0:
                        q = q / q.sum()
                if taken is None or depth == max_depth:
                    noise = reference.gumbel_noise(seeds[b : b + 1], positions[b : b + 1] + depth, VOCAB, stream=3)[0]
                    result.bonus_token[b] = (p.log() + noise).argmax()
                    result.num_accepted_drafts[b] = depth
                    break
                depth, node = depth + 1, taken
                result.accepted_nodes[b, depth] = node
        return result

    return accept_rejection


@pytest.mark.parametrize("fault, passes", [("none", True), ("residual is p", False), ("siblings not renormalised", False)])
def test_planted_faults_fail_the_same_check(monkeypatch, fault, passes):
    monkeypatch.setattr(step, "accept_rejection", planted_accept_rejection(fault))
    filters = dict(temperature=1.0)
    samples = sample_answers(ENGINES["rejection-static"], filters)
    assert (chi_square_p_value(samples, exact_distribution(1.0, 0, 1.0, 0.0)) > LEVEL) == passes
