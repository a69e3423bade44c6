"""Recorded ops: a replay does what the ops did, on what the tensors hold now."""

import eagle_kernels
import pytest
import torch
from eagle_kernels import linear, pack_weight, record, rms_norm, silu_mul
from helpers import assert_exact


def test_replay_reads_the_tensors_as_they_are_now(isa):
    x, residual = torch.randn(5, 48), torch.randn(5, 48)
    weight, norm, bias = pack_weight(torch.randn(64, 48)), torch.randn(48), torch.randn(64)

    def layer(x, residual):
        return silu_mul(linear(rms_norm(x, norm, 1e-5, residual), weight, bias))

    with record() as recording:
        out = layer(x, residual)
    assert len(recording) == 3
    for _ in range(3):
        x.copy_(torch.randn(5, 48))
        residual.copy_(torch.randn(5, 48))
        expected_residual = residual.clone()
        expected = layer(x, expected_residual)
        recording.replay()
        assert_exact(out, expected)
        assert_exact(residual, expected_residual)


def test_a_recording_keeps_its_tensors():
    weight = pack_weight(torch.randn(64, 48))
    x = torch.randn(1, 48)
    with record() as recording:
        out = linear(linear(x, weight)[:, :48], weight)  # the tensor in between has no other owner
    expected = out.clone()
    del weight
    garbage = [torch.full((1, 64), float("nan")) for _ in range(100)]
    out.zero_()
    recording.replay()
    assert_exact(out, expected)
    del garbage


def test_ops_that_cannot_be_recorded_are_refused():
    seeds = torch.zeros(1, dtype=torch.int64)
    with record() as recording, pytest.raises(RuntimeError, match="noise: cannot be recorded"):
        eagle_kernels.gumbel_noise(seeds, seeds, 4)
    assert len(recording) == 0
    eagle_kernels.gumbel_noise(seeds, seeds, 4)


def test_only_one_recording_at_a_time():
    with record(), pytest.raises(RuntimeError, match="open already"), record():
        pass
    with record():
        pass
