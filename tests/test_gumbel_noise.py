"""The counter-based noise: published Philox answers, the same bits in C++, and the right distributions."""

import numpy
import pytest
import torch
from eagle_kernels import gumbel_noise, reference, uniform_noise
from eagle_kernels.reference.gumbel_noise import philox_4x32
from helpers import assert_exact, assert_refused

LEVEL = 1e-6  # probability of a false alarm, were the seeds not fixed


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    words = lambda text: tuple(torch.tensor(int(word, 16)) for word in text.split())  # noqa: E731
    assert philox_4x32(words(key), words(counter)) == words(expected)


def random_keys(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    positions = torch.randint(0, 2**40, (count,))
    seeds[:3] = torch.tensor([0, -1, 2**63 - 1])
    positions[:3] = torch.tensor([0, 1, 2**32])
    return seeds, positions


@pytest.mark.parametrize("stream", [0, 3, 17, 2**20])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 63, 64, 1001, 49152])
def test_same_bits_as_the_reference(num_tokens: int, stream: int, isa: str) -> None:
    seeds, positions = random_keys(7)
    assert_exact(
        gumbel_noise(seeds, positions, num_tokens, stream=stream),
        reference.gumbel_noise(seeds, positions, num_tokens, stream=stream),
    )
    assert_exact(
        uniform_noise(seeds, positions, num_tokens, stream=stream),
        reference.uniform_noise(seeds, positions, num_tokens, stream=stream),
    )


def test_depends_on_nothing_but_its_key(isa: str) -> None:
    seeds, positions = random_keys(9)
    noise = gumbel_noise(seeds, positions, 1000)
    assert_exact(gumbel_noise(seeds[4:6], positions[4:6], 17), noise[4:6, :17])
    assert noise.unique().numel() > 0.99 * noise.numel()
    for other in (
        gumbel_noise(seeds + 1, positions, 1000),
        gumbel_noise(seeds, positions + 1, 1000),
        gumbel_noise(seeds + 2**32, positions, 1000),
        gumbel_noise(seeds, positions + 2**32, 1000),
        gumbel_noise(seeds, positions, 1000, stream=1),
    ):
        assert other.ne(noise).float().mean() > 0.99


def test_close_to_the_exact_logarithms() -> None:
    """Against fp64 logarithms of the same words, recovered from the uniform stream's generator."""
    seeds, positions = random_keys(3)
    index = torch.arange(25000)[None]
    words = torch.stack(
        torch.broadcast_tensors(
            *philox_4x32(
                (seeds[:, None] & 0xFFFFFFFF, seeds[:, None] >> 32 & 0xFFFFFFFF),
                (index, positions[:, None] & 0xFFFFFFFF, positions[:, None] >> 32, torch.zeros_like(index)),
            )
        ),
        dim=-1,
    ).reshape(3, -1)
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))
    error = (reference.gumbel_noise(seeds, positions, 100000).double() - exact).abs()
    assert (error <= 2.0**-22 * exact.abs().clamp(min=1.0)).all()


def test_distributions() -> None:
    from scipy import stats  # not at the top: the tests of the Triton kernel import this file on machines without scipy

    seeds, positions = torch.arange(400), torch.arange(400) * 7
    gumbel = gumbel_noise(seeds, positions, 500).flatten().double().numpy()
    uniform = uniform_noise(seeds, positions, 500, stream=2).flatten().double().numpy()
    assert stats.kstest(gumbel, "gumbel_r").pvalue > LEVEL
    assert stats.kstest(uniform, "uniform").pvalue > LEVEL
    assert stats.kstest(gumbel * 1.05, "gumbel_r").pvalue < LEVEL  # the test can tell
    lags = [numpy.corrcoef(gumbel[:-lag], gumbel[lag:])[0, 1] for lag in (1, 2, 3, 4, 500)]
    assert numpy.abs(lags).max() < 5 / numpy.sqrt(gumbel.size)
    assert 0 < uniform.min() and uniform.max() < 1


def test_uniform_noise_never_reaches_one(isa: str) -> None:
    """The upper 24 bits of this word are all ones: (2^24 - 1/2) / 2^24 would round up to 1."""
    key = torch.tensor([189]), torch.tensor([0])
    for op in (uniform_noise, reference.uniform_noise):
        assert 0.999999 < op(*key, 96552, stream=2)[0, 96551] < 1


def test_bad_input_is_named() -> None:
    seeds, positions = random_keys(4)
    for name, arguments in [
        ("seeds", (seeds.int(), positions)),
        ("positions", (seeds, positions.int())),
        ("positions", (seeds, positions[:3])),
        ("positions", (seeds, positions.to("meta"))),
    ]:
        assert_refused(name, lambda: gumbel_noise(*arguments, 10))
        assert_refused(name, lambda: uniform_noise(*arguments, 10, stream=2))
