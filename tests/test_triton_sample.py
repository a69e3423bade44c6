"""The Triton kernels noise, sample, filter_probs and draw_children under the interpreter: the reference's bits."""

import random

import eagle_kernels
import pytest
import torch
from eagle_kernels import reference
from eagle_kernels.triton import sample as launchers
from eagle_kernels.triton.noise import noise
from eagle_kernels.triton.sample import draw_children, filter_probs, sample
from gpu_mode import kernels_are_compiled
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, strided_copy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gumbel_noise import random_keys
from test_sample import make_logits, make_parameters, make_penalties, special_values

pytestmark = pytest.mark.usefixtures("checked_launches")
NAN = float("nan")
FILTERS = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_mask", "output_counts")
orders = pytest.mark.parametrize("order", ["hf", "vllm"])
slow = pytest.mark.slow
kinds = pytest.mark.parametrize("kind", ["random", "ties", pytest.param("equal", marks=slow), pytest.param("wide", marks=slow)])


@pytest.fixture
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More thresholds per pass and smaller blocks than a GPU gets: the same bisection in a third of the interpreter's time, over several blocks. A GPU runs what is launched."""
    if kernels_are_compiled():
        return
    monkeypatch.setattr(launchers, "_constants", lambda mode, adjust: {"MODE": mode, "ADJUST": adjust, "BLOCK": 256, "CAPACITY": 100, "NUM_THRESHOLDS": 32})


def run_sample(logits: torch.Tensor, parameters: dict[str, torch.Tensor], order: str = "hf", log_probs: torch.Tensor | None = None, **penalties: torch.Tensor) -> torch.Tensor:
    out = torch.full(logits.shape[:1], -7)
    sample(logits, *parameters.values(), order == "vllm", *(penalties.get(name) for name in PENALTIES), out, log_probs)
    return out


def run_filter(logits: torch.Tensor, parameters: dict[str, torch.Tensor], order: str = "hf") -> torch.Tensor:
    out = torch.full(logits.shape, NAN)
    filter_probs(logits, *(parameters[name] for name in FILTERS), order == "vllm", out)
    return out


def run_children(logits: torch.Tensor, parameters: dict[str, torch.Tensor], count: int, lanes: int = 1, order: str = "hf") -> torch.Tensor:
    out = torch.full((logits.shape[0], count), -7)
    draw_children(logits, *parameters.values(), lanes, order == "vllm", out)
    return out


def only(parameters: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: parameters[name] for name in names}


@pytest.mark.parametrize("stream", [0, 3, 17, 2**20])
@pytest.mark.parametrize("count", [1, 4, 63, 1024, 2051])
def test_noise(count: int, stream: int) -> None:
    seeds, positions = random_keys(4)
    for uniform, expected in ((False, reference.gumbel_noise), (True, reference.uniform_noise)):
        out = torch.full((4, count), NAN)
        noise(seeds, positions, stream, uniform, out)
        assert_exact(out, expected(seeds, positions, count, stream=stream))


@orders
@kinds
@pytest.mark.parametrize("vocab_size", [pytest.param(1, marks=slow), 5, pytest.param(65, marks=slow), 600])
def test_sample(vocab_size: int, kind: str, order: str, few_passes: None) -> None:
    logits, parameters = make_logits(4, vocab_size, kind), make_parameters(4, vocab_size)
    assert_exact(run_sample(strided_copy(logits), parameters, order), reference.sample(logits, **parameters, order=order))


@pytest.mark.parametrize("kind", ["random", pytest.param("ties", marks=slow)])
def test_sample_as_it_is_launched(kind: str) -> None:
    """With the GPU's own block and thresholds, over several blocks."""
    logits, parameters = make_logits(4, 4100, kind), make_parameters(4, 4100)
    parameters |= {"temperature": torch.full((4,), 0.8), "top_k": torch.tensor([50, 0, 3, 0], dtype=torch.int32)}
    parameters |= {"top_p": torch.tensor([0.9, 0.95, 1.0, 1.0]), "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0])}
    assert_exact(run_sample(logits, parameters), reference.sample(logits, **parameters))


@pytest.mark.parametrize("capacity", [1, 64, 512])
def test_the_list_changes_nothing(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaked and flat rows with cuts of every kind: from the list where it can hold what matters, from the whole row where it cannot."""
    monkeypatch.setattr(launchers, "_constants", lambda mode, adjust: {"MODE": mode, "ADJUST": adjust, "BLOCK": 256, "CAPACITY": capacity, "NUM_THRESHOLDS": 32})
    logits = make_logits(5, 500, "random") * torch.tensor([0.01, 0.3, 1.0, 3.0, 3.0])[:, None]
    parameters = make_parameters(5, 500) | {"temperature": torch.ones(5), "top_k": torch.tensor([0, 40, 0, 30, 0], dtype=torch.int32)}
    parameters |= {"top_p": torch.tensor([0.9, 1.0, 0.5, 0.8, 1.0]), "min_p": torch.tensor([0.0, 0.0, 0.01, 0.02, 1e-4])}
    order = random.choice(["hf", "vllm"])
    assert_exact(run_filter(logits, parameters, order), reference.filter_probs(logits, **only(parameters, *FILTERS), order=order))


@pytest.mark.parametrize("vocab_size", [64, 65])
def test_a_full_list(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens near the maximum as the list holds, and one more."""
    monkeypatch.setattr(launchers, "_constants", lambda mode, adjust: {"MODE": mode, "ADJUST": adjust, "BLOCK": 256, "CAPACITY": 64, "NUM_THRESHOLDS": 32})
    parameters = make_parameters(2, vocab_size) | {"temperature": torch.ones(2), "top_k": torch.tensor([9, 0], dtype=torch.int32), "top_p": torch.tensor([1.0, 0.9]), "min_p": torch.zeros(2)}
    logits = make_logits(2, vocab_size, "equal")
    assert_exact(run_filter(logits, parameters), reference.filter_probs(logits, **only(parameters, *FILTERS)))


@pytest.mark.parametrize("distance", [5.5, 6.0, 7.0, 11.5, 12.0, 13.0])
def test_cuts_at_the_edge_of_a_reach(distance: float, few_passes: None) -> None:
    """Two tokens at the maximum, what decides the cut at a distance from it, the rest far away: the list must hold all three."""
    logits = torch.full((3, 40), -20.0)
    logits[:, [7, 30]], logits[:, 11] = 0.0, -distance
    parameters = make_parameters(3, 40) | {"temperature": torch.ones(3), "top_k": torch.tensor([3, 0, 0], dtype=torch.int32)}
    parameters |= {"top_p": torch.tensor([1.0, 1 - 1e-7, 1.0]), "min_p": torch.tensor([0.0, 0.0, 1e-6])}
    probs = run_filter(logits, parameters)
    assert probs[[0, 2], 11].gt(0).all()
    assert_exact(probs, reference.filter_probs(logits, **only(parameters, *FILTERS)))


@settings(max_examples=8)
@given(rows=st.lists(st.lists(special_values, min_size=7, max_size=7), min_size=1, max_size=4), seed=st.integers(0, 2**31), order=st.sampled_from(["hf", "vllm"]))
def test_special_values(few_passes: None, rows: list[list[float]], seed: int, order: str) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    logits, parameters = torch.tensor(rows), make_parameters(len(rows), 7)
    assert_exact(run_sample(logits, parameters, order), reference.sample(logits, **parameters, order=order))
    assert_exact(run_filter(logits, parameters, order), reference.filter_probs(logits, **only(parameters, *FILTERS), order=order))


@pytest.mark.parametrize("names", [(name,) for name in PENALTIES[:4]] + [PENALTIES], ids=lambda names: "+".join(names) if len(names) < 6 else "all")
def test_penalties(names: tuple[str, ...], few_passes: None) -> None:
    logits, parameters, penalties = make_logits(6, 300, "random"), make_parameters(6, 300), make_penalties(6, 300)
    chosen = only(penalties, *names, *(("prompt_mask", "output_counts") if names[0] != "logit_bias" else ()))
    assert_exact(run_sample(logits, parameters, **chosen), reference.sample(logits, **parameters, **chosen))


def test_filters_of_huge_logits(few_passes: None) -> None:
    for size in (1e6, 1e8, 3e38):
        logits = torch.zeros(4, 7)
        logits[:, 6] = size
        parameters = make_parameters(4, 7) | {"temperature": torch.ones(4), "top_k": torch.tensor([2, 0, 0, 2], dtype=torch.int32)}
        parameters |= {"top_p": torch.tensor([1.0, 0.9, 1.0, 0.9]), "min_p": torch.tensor([0.0, 0.0, 0.05, 0.05])}
        assert run_sample(logits, parameters).tolist() == [6] * 4


def test_filters_of_tied_tokens_keep_the_smaller_ids(few_passes: None) -> None:
    parameters = make_parameters(5, 300) | {"temperature": torch.ones(5), "top_k": torch.tensor([3, 0, 0, 0, 0], dtype=torch.int32), "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])}
    parameters |= {"top_p": torch.tensor([1.0, 0.5, 0.502, 0.0, 1.0])}
    assert run_filter(torch.zeros(5, 300), parameters).gt(0).sum(-1).tolist() == [3, 150, 151, 1, 300]


def test_filters_that_keep_nothing(few_passes: None) -> None:
    """min_p above 1: no token, as on the CPU."""
    logits, parameters = make_logits(4, 30, "random"), make_parameters(4, 30) | {"temperature": torch.ones(4), "min_p": torch.full((4,), 1.5)}
    for order in ("hf", "vllm"):
        assert run_sample(logits, parameters, order).tolist() == [-1] * 4 == eagle_kernels.sample(logits, **parameters, order=order).tolist()
        assert run_children(logits, parameters, 2, order=order).tolist() == [[-1, -1]] * 4
        assert run_filter(logits, parameters, order).eq(0).all()


def test_log_probs(few_passes: None) -> None:
    inf = float("inf")
    logits, parameters, penalties = make_logits(8, 301, "random"), make_parameters(8, 301), make_penalties(8, 301)
    logits[5], logits[6, 3], logits[7, 9] = -inf, NAN, inf
    log_probs = torch.full((8,), NAN)
    tokens = run_sample(logits, parameters, log_probs=log_probs, **penalties)
    expected_tokens, expected = reference.sample(logits, **parameters, **penalties, return_log_probs=True)
    assert_exact(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-6)


@orders
@kinds
@pytest.mark.parametrize("vocab_size", [1, pytest.param(65, marks=slow), 600])
def test_filter_probs(vocab_size: int, kind: str, order: str, few_passes: None) -> None:
    logits, parameters = make_logits(4, vocab_size, kind), make_parameters(4, vocab_size)
    assert_exact(run_filter(strided_copy(logits), parameters, order), reference.filter_probs(logits, **only(parameters, *FILTERS), order=order))


@kinds
@pytest.mark.parametrize("vocab_size, count, lanes", [pytest.param(1, 1, 1, marks=slow), (5, 5, 3), (8, 64, 1), (600, 10, 4)])
def test_draw_children(vocab_size: int, count: int, lanes: int, kind: str, few_passes: None) -> None:
    logits, parameters = make_logits(4, vocab_size, kind), make_parameters(4, vocab_size)
    order = random.choice(["hf", "vllm"])
    assert_exact(run_children(logits, parameters, count, lanes, order), reference.draw_children(logits, **parameters, count=count, lanes=lanes, order=order))


def test_draw_children_of_special_rows(few_passes: None) -> None:
    inf = float("inf")
    logits = torch.tensor([[0, NAN, 1], [-inf, -inf, -inf], [0, inf, inf], [-inf, -inf, 2], [-inf, 1, 2]])
    parameters = make_parameters(5, 3) | {"temperature": torch.full((5,), 0.7), "top_k": torch.zeros(5, dtype=torch.int32), "top_p": torch.ones(5), "min_p": torch.zeros(5)}
    for temperature in (0.7, 0.0):
        parameters["temperature"][:] = temperature
        assert_exact(run_children(logits, parameters, 3), reference.draw_children(logits, **parameters, count=3))


def test_rows_do_not_depend_on_their_company(few_passes: None) -> None:
    logits, parameters = make_logits(4, 300, "random"), make_parameters(4, 300)
    for op in (run_sample, run_filter, lambda logits, parameters: run_children(logits, parameters, 6)):
        together = op(logits, parameters)
        for rows in (slice(0, 1), slice(1, 3)):
            assert_exact(op(logits[rows], {name: tensor[rows] for name, tensor in parameters.items()}), together[rows])


def test_empty() -> None:
    logits, parameters = torch.empty(0, 9), make_parameters(0, 9)
    assert run_sample(logits, parameters).shape == (0,) and run_filter(logits, parameters).shape == (0, 9) and run_children(logits, parameters, 2).shape == (0, 2)
    noise(parameters["seeds"], parameters["positions"], 0, False, torch.empty(0, 5))


def test_bad_input_is_named() -> None:
    logits, parameters, penalties = make_logits(4, 33, "random"), make_parameters(4, 33), make_penalties(4, 33)
    arguments = {"logits": logits} | parameters | penalties | {"out": torch.zeros(4, dtype=torch.int64), "log_probs": torch.zeros(4)}
    call = lambda **tensors: sample(min_p_first=False, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), first="logits")
    for name in list(parameters) + list(penalties):
        assert_refused(name, lambda: call(**(arguments | {name: arguments[name][:3]})))
    assert_refused("logits", lambda: call(**(arguments | {"logits": logits[:, :0]})))
    filters = {"logits": logits} | only(parameters, *FILTERS) | {"out": torch.empty(4, 33)}
    assert_bad_tensors_refused(lambda **tensors: filter_probs(min_p_first=False, **tensors), filters, list(filters), first="logits")
    children = {"logits": logits} | parameters | {"out": torch.empty(4, 3, dtype=torch.int64)}
    call = lambda lanes=1, **tensors: draw_children(lanes=lanes, min_p_first=False, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, children, list(children), first="logits")
    for count in (0, 65):
        assert_refused("count", lambda: call(**(children | {"out": torch.empty(4, count, dtype=torch.int64)})))
    assert_refused("lanes", lambda: call(lanes=0, **children))
    keys = only(parameters, "seeds", "positions") | {"out": torch.empty(4, 5)}
    call = lambda **tensors: noise(stream=0, uniform=True, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, keys, list(keys), first="seeds")
    assert_refused("positions", lambda: call(**(keys | {"positions": keys["positions"][:3]})))
