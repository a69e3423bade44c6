"""sample and filter_probs: the reference's tokens, the right distribution, Hugging Face's filters."""

import itertools
import random

import pytest
import torch
from eagle_kernels import filter_probs, reference, sample
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, strided_copy
from hypothesis import given
from hypothesis import strategies as st

# Each chi-square test raises a false alarm with this probability; seeds are fixed, so a passing test keeps passing.
LEVEL = 1e-5

orders = pytest.mark.parametrize("order", ["hf", "vllm"])


def make_parameters(num_rows: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Another combination of parameters for every row, the neutral and the extreme ones among them."""
    pick = lambda values: [random.choice(values) for _ in range(num_rows)]  # noqa: E731
    return {
        "temperature": torch.tensor(pick([0.0, 0.1, 0.7, 1.0, 1.5, 5.0])),
        "top_k": torch.tensor(pick([0, 0, 1, 2, 5, vocab_size, vocab_size + 7]), dtype=torch.int32),
        "top_p": torch.tensor(pick([1.0, 1.0, 0.01, 0.3, 0.9, 0.999])),
        "min_p": torch.tensor(pick([0.0, 0.0, 0.001, 0.05, 0.5, 1.0])),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,)),
        "positions": torch.randint(0, 100000, (num_rows,)),
    }


def make_penalties(num_rows: int, vocab_size: int) -> dict[str, torch.Tensor]:
    return {
        "logit_bias": torch.where(torch.rand(num_rows, vocab_size) < 0.1, torch.randn(num_rows, vocab_size) * 3, 0.0),
        "repetition_penalty": torch.rand(num_rows) * 1.5 + 0.5,
        "presence_penalty": torch.randn(num_rows),
        "frequency_penalty": torch.randn(num_rows) * 0.3,
        "prompt_mask": torch.rand(num_rows, vocab_size) < 0.2,
        "output_counts": (torch.randint(0, 8, (num_rows, vocab_size)) - 4).clamp(min=0).int(),
    }


def make_logits(num_rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size) * 3
    if kind == "ties":  # few different values, and both zeros
        logits = logits.round() * torch.where(torch.rand(num_rows, vocab_size) < 0.5, 1.0, -1.0)
    if kind == "equal":
        logits = torch.full_like(logits, 1.25)
    if kind == "wide":
        logits = logits * 50
    return logits


@orders
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "wide"])
@pytest.mark.parametrize("vocab_size", [1, 2, 5, 63, 64, 65, 1000])
def test_matches_reference(vocab_size: int, kind: str, order: str, isa: str) -> None:
    logits, parameters = make_logits(40, vocab_size, kind), make_parameters(40, vocab_size)
    assert_exact(sample(logits, **parameters, order=order), reference.sample(logits, **parameters, order=order))


@orders
@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize(
    "names",
    [
        ["logit_bias"],
        ["repetition_penalty", "prompt_mask"],
        ["repetition_penalty", "output_counts"],
        ["presence_penalty", "output_counts"],
        ["frequency_penalty", "output_counts"],
        ["logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_mask", "output_counts"],
    ],
    ids=lambda names: "+".join(names) if len(names) < 6 else "all",
)
def test_penalties_match_reference(names: list[str], kind: str, order: str, isa: str) -> None:
    logits, parameters, penalties = make_logits(40, 50, kind), make_parameters(40, 50), make_penalties(40, 50)
    chosen = {name: penalties[name] for name in names}
    tokens = sample(logits, **parameters, **chosen, order=order)
    assert_exact(tokens, reference.sample(logits, **parameters, **chosen, order=order))
    assert tokens.ne(sample(logits, **parameters, order=order)).any()


def test_vocabulary_of_a_real_model(isa: str) -> None:
    logits, parameters = make_logits(4, 49153, "random"), make_parameters(4, 49153)
    assert_exact(sample(logits, **parameters), reference.sample(logits, **parameters))
    parameters |= {"temperature": torch.ones(4), "top_k": torch.zeros(4, dtype=torch.int32), "min_p": torch.zeros(4)}
    for top_p in (0.9, 1.0):
        parameters["top_p"] = torch.full((4,), top_p)
        assert_exact(sample(logits, **parameters), reference.sample(logits, **parameters))


special_values = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, 3e38, -3e38, 1e-40, float("inf"), -float("inf"), float("nan")])


@given(
    rows=st.lists(st.lists(special_values, min_size=7, max_size=7), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    order=st.sampled_from(["hf", "vllm"]),
)
def test_special_values_match_reference(isa: str, rows: list[list[float]], seed: int, order: str) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    logits, parameters = torch.tensor(rows), make_parameters(len(rows), 7)
    assert_exact(sample(logits, **parameters, order=order), reference.sample(logits, **parameters, order=order))


def neutral(num_rows: int, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "temperature": torch.full((num_rows,), temperature),
        "top_k": torch.zeros(num_rows, dtype=torch.int32),
        "top_p": torch.ones(num_rows),
        "min_p": torch.zeros(num_rows),
        "seeds": torch.arange(num_rows),
        "positions": torch.arange(num_rows) * 3,
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_an_answer(temperature: float, isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[0, nan, 1], [nan, nan, nan], [-inf, -inf, -inf], [inf, nan, 0], [0, inf, inf], [-inf, -inf, 2]],
        dtype=torch.float32,
    )
    assert sample(logits, **neutral(6, temperature)).tolist() == [-1, -1, -1, -1, 1, 2]


def test_greedy_takes_the_smaller_id(isa: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -0.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    parameters = neutral(3, 0.0) | {"top_k": torch.tensor([1, 2, 0], dtype=torch.int32), "top_p": torch.full((3,), 1e-3)}
    assert sample(logits, **parameters).tolist() == [1, 0, 0]


def test_filters_of_tied_tokens_keep_the_smaller_ids(isa: str) -> None:
    num_rows = 300
    logits = torch.zeros(num_rows, 8)
    for change, kept in [
        ({"top_k": torch.full((num_rows,), 3, dtype=torch.int32)}, {0, 1, 2}),
        ({"top_p": torch.full((num_rows,), 0.5)}, {0, 1, 2, 3}),
        ({"top_p": torch.full((num_rows,), 0.51)}, {0, 1, 2, 3, 4}),
        ({"top_p": torch.full((num_rows,), 0.0)}, {0}),
        ({"min_p": torch.full((num_rows,), 1.0)}, set(range(8))),
    ]:
        assert set(sample(logits, **(neutral(num_rows) | change)).tolist()) == kept


@pytest.mark.parametrize("size", [1e6, 3e7, 1e8, 1e12, 3e38])
def test_filters_of_huge_logits(size: float, isa: str) -> None:
    """Where the distance of neighbouring fp32 numbers exceeds any distance that matters, the maximum must still be kept."""
    rows = 6
    logits = torch.zeros(rows, 7)
    logits[:, 6] = size
    for names in itertools.product([False, True], repeat=3):
        change = {"top_k": torch.full((rows,), 2, dtype=torch.int32), "top_p": torch.full((rows,), 0.9), "min_p": torch.full((rows,), 0.05)}
        chosen = {name: tensor for on, (name, tensor) in zip(names, change.items()) if on}
        assert sample(logits, **(neutral(rows) | chosen)).tolist() == [6] * rows


def test_log_probs_are_of_the_raw_logits(isa: str) -> None:
    logits, parameters, penalties = make_logits(40, 501, "random"), make_parameters(40, 501), make_penalties(40, 501)
    tokens, log_probs = sample(logits, **parameters, **penalties, return_log_probs=True)
    assert_exact(tokens, sample(logits, **parameters, **penalties))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)
    _, reference_log_probs = reference.sample(logits, **parameters, **penalties, return_log_probs=True)
    torch.testing.assert_close(log_probs, reference_log_probs, rtol=1e-6, atol=1e-6)


def test_log_probs_of_special_rows(isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0, nan, 1], [-inf, -inf, -inf], [0, inf, inf], [-inf, -inf, 2]], dtype=torch.float32)
    _, log_probs = sample(logits, **neutral(4), return_log_probs=True)
    _, expected = reference.sample(logits, **neutral(4), return_log_probs=True)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=0, equal_nan=True)


def test_strided_out_and_empty(isa: str) -> None:
    logits, parameters, penalties = make_logits(9, 33, "random"), make_parameters(9, 33), make_penalties(9, 33)
    expected = sample(logits, **parameters, **penalties)
    assert_exact(sample(strided_copy(logits), **parameters, **penalties), expected)
    out = torch.full((9,), -5)
    assert sample(logits, **parameters, **penalties, out=out) is out
    assert_exact(out, expected)
    empty = {name: tensor[:0] for name, tensor in (parameters | penalties).items()}
    assert sample(logits[:0], **empty).shape == (0,)
    assert filter_probs(logits[:0], **{name: parameters[name][:0] for name in ("temperature", "top_k", "top_p", "min_p")}).shape == (0, 33)


def test_logits_are_left_alone(isa: str) -> None:
    logits, parameters, penalties = make_logits(9, 33, "random"), make_parameters(9, 33), make_penalties(9, 33)
    before = logits.clone()
    sample(logits, **parameters, **penalties)
    assert_exact(logits, before)


FILTERS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values))
    for values in itertools.product((1.0, 0.6), (0, 4), (1.0, 0.75), (0.0, 0.12))
]


def filter_id(filters: dict[str, float]) -> str:
    return "-".join(f"{name}{value}" for name, value in filters.items())


def filter_rows(filters: dict[str, float], num_rows: int) -> dict[str, torch.Tensor]:
    dtypes = {"top_k": torch.int32}
    return {name: torch.full((num_rows,), value, dtype=dtypes.get(name, torch.float32)) for name, value in filters.items()}


def chi_square_pvalue(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Of the counts of `tokens` [n] against `probs` [V]; 0 when an impossible token was drawn."""
    counts = torch.bincount(tokens, minlength=probs.numel())
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    from scipy import stats  # not at the top: the tests of the Triton kernel import this file on machines without scipy

    expected = probs[possible].double()
    return float(stats.chisquare(counts[possible].numpy(), (expected / expected.sum() * tokens.numel()).numpy()).pvalue)


@orders
@pytest.mark.parametrize("vocab_size", [5, 8])
@pytest.mark.parametrize("filters", FILTERS, ids=filter_id)
def test_distribution(filters: dict[str, float], vocab_size: int, order: str) -> None:
    num_rows = 20000
    logits = torch.randn(1, vocab_size).mul(1.5).expand(num_rows, -1).contiguous()
    rows = filter_rows(filters, num_rows)
    probs = filter_probs(logits[:1], **{name: tensor[:1] for name, tensor in rows.items()}, order=order)[0]
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    tokens = sample(logits, **rows, seeds=seeds, positions=torch.full((num_rows,), 17), order=order)
    assert chi_square_pvalue(tokens, probs) > LEVEL
    # One seed over consecutive positions is as good as many seeds.
    tokens = sample(logits, **rows, seeds=torch.full((num_rows,), 5), positions=torch.arange(num_rows), order=order)
    assert chi_square_pvalue(tokens, probs) > LEVEL


def test_the_distribution_test_can_fail() -> None:
    num_rows, logits = 20000, torch.tensor([[1.0, 0.5, 0.0, -0.5, -1.0]])
    rows = filter_rows(FILTERS[0], num_rows)
    tokens = sample(logits.expand(num_rows, -1).contiguous(), **rows, seeds=torch.arange(num_rows), positions=torch.zeros(num_rows, dtype=torch.int64))
    right = logits[0].softmax(-1)
    assert chi_square_pvalue(tokens, right) > LEVEL
    assert chi_square_pvalue(tokens, (logits[0] / 1.1).softmax(-1)) < LEVEL
    assert chi_square_pvalue(torch.full((num_rows,), 4), torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])) == 0.0


@orders
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "wide"])
@pytest.mark.parametrize("vocab_size", [1, 5, 65, 1000])
def test_filter_probs_match_reference(vocab_size: int, kind: str, order: str, isa: str) -> None:
    logits, parameters = make_logits(40, vocab_size, kind), make_parameters(40, vocab_size)
    del parameters["seeds"], parameters["positions"]
    probs = filter_probs(logits, **parameters, order=order)
    expected = reference.filter_probs(logits, **parameters, order=order)
    assert_exact(probs, expected)
    assert probs.double().sum(-1).allclose(torch.ones(40, dtype=torch.float64), atol=1e-5)


def test_filter_probs_of_special_rows(isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0, nan, 1], [-inf, -inf, -inf], [0, inf, inf], [-inf, -inf, 2]], dtype=torch.float32)
    for temperature in (0.0, 0.7):
        rows = {name: neutral(4, temperature)[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        expected = torch.tensor([[0.0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
        assert_exact(filter_probs(logits, **rows), expected)
        assert_exact(reference.filter_probs(logits, **rows), expected)


@pytest.mark.parametrize("filters", FILTERS, ids=filter_id)
def test_filter_probs_match_hugging_face(filters: dict[str, float], isa: str) -> None:
    """On logits without ties: there Hugging Face's own filters keep more tokens."""
    from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(30, 100) * 2
    scores = TemperatureLogitsWarper(filters["temperature"])(None, logits.double())
    if filters["top_k"]:
        scores = TopKLogitsWarper(filters["top_k"])(None, scores)
    if filters["top_p"] < 1:
        scores = TopPLogitsWarper(filters["top_p"])(None, scores)
    if filters["min_p"]:
        scores = MinPLogitsWarper(filters["min_p"])(None, scores)
    expected = scores.softmax(-1)
    probs = filter_probs(logits, **filter_rows(filters, 30), order="hf")
    assert_exact(probs > 0, expected > 0)
    # Masses are whole multiples of 2^-40 of the greatest one.
    torch.testing.assert_close(probs.double(), expected, rtol=2e-6, atol=2.0**-40)


def test_the_orders_differ() -> None:
    """min_p first leaves fewer tokens over which top_p is normalised."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    rows = filter_rows({"temperature": 1.0, "top_k": 0, "top_p": 0.75, "min_p": 0.6}, 1)
    assert filter_probs(logits, **rows, order="hf").gt(0).tolist() == [[True, True, False, False]]
    rows = filter_rows({"temperature": 1.0, "top_k": 0, "top_p": 0.55, "min_p": 0.6}, 1)
    assert filter_probs(logits, **rows, order="hf").gt(0).tolist() == [[True, True, False, False]]
    assert filter_probs(logits, **rows, order="vllm").gt(0).tolist() == [[True, False, False, False]]


def test_bad_input_is_named() -> None:
    logits, parameters, penalties = make_logits(4, 33, "random"), make_parameters(4, 33), make_penalties(4, 33)
    arguments = {"logits": logits} | parameters | penalties | {"out": torch.zeros(4, dtype=torch.int64)}
    assert_bad_tensors_refused(sample, arguments, list(arguments), first="logits")
    for name in list(parameters) + list(penalties):
        assert_refused(name, lambda: sample(**(arguments | {name: arguments[name][:3]})))
    with pytest.raises(ValueError, match="order"):
        sample(**arguments, order="other")
    filters = {name: arguments[name] for name in ("logits", "temperature", "top_k", "top_p", "min_p")}
    assert_bad_tensors_refused(filter_probs, filters, list(filters), first="logits")
    with pytest.raises(ValueError, match="order"):
        filter_probs(**filters, order="other")
