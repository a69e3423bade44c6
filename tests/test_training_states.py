"""States of the target that a drafter learns from: those of decoding, cached or made as they are needed."""

from __future__ import annotations


import numpy as np
import pytest
import torch
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.errors import EagleError
from eagle_engine.training.batches import Batches
from eagle_engine.training.conversations import LeftOut
from eagle_engine.training.dataset import TokenData, build_data
from eagle_engine.training.target_states import LiveStates, cache_states
from eagle_engine.transformers_model import load_model
from test_training_data import conversation
from tiny_targets import save_directory


@pytest.mark.parametrize("case", ["llama", "llama-llama3-rope-head-dim", "mistral-window", "mixtral", "qwen2", "qwen3-tied"])
def test_states_are_those_that_decoding_hands_over(tmp_path, case):
    """The trainer's features and likeliest tokens, padded in a batch, against the engine's target."""
    from eagle_engine.target import TargetModel

    save_directory(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    target = TargetModel.from_checkpoint(checkpoint, torch.float32, 64, progress=False)
    source = LiveStates(load_model(checkpoint, torch.float32), (0, 1), torch.float32)
    conversations = [np.arange(3, 20), np.arange(30, 35)]
    for ids, states in zip(conversations, source.of(conversations)):
        c = target.config
        tokens = torch.from_numpy(ids)[None]
        kv = torch.zeros(c.num_layers, 2, 4, 16, c.num_kv_heads, c.head_dim)
        features = target.forward(tokens, torch.arange(len(ids))[None], kv, torch.zeros(1, dtype=torch.int32), torch.arange(4, dtype=torch.int32)[None])
        torch.testing.assert_close(states.features, features[0], rtol=1e-3, atol=1e-4)
        assert torch.equal(states.best, target.logits(features[0]).argmax(-1))
        torch.testing.assert_close(states.states[:, : c.hidden_size], target.embed(tokens)[0], rtol=1e-5, atol=1e-6)


def tiny_data(count: int = 40) -> TokenData:
    return build_data([conversation(str(i), [3 + i, 4], [5 + i % 7] * (2 + i % 9)) for i in range(count)], 64, 0.2, LeftOut())


def test_cached_states_are_the_live_ones_and_survive_a_kill(tmp_path, monkeypatch):
    from eagle_engine.training import target_states

    monkeypatch.setattr(target_states, "_SHARD_TOKENS", 50)
    save_directory(tmp_path / "t", "llama")
    source = LiveStates(load_model(open_checkpoint(tmp_path / "t"), torch.float32), (1, 1), torch.float32)
    data = tiny_data()
    directory, description = tmp_path / "states", {"target": "t"}
    written = []

    class Killed(BaseException):
        pass

    def save_and_die(tensors, path):
        save(tensors, path)
        written.append(path)
        if len(written) == 3:
            raise Killed

    save = target_states.save_file
    monkeypatch.setattr(target_states, "save_file", save_and_die)
    with pytest.raises(Killed):
        cache_states(lambda layers: source, directory, data, (1, 1), description, False)
    assert len(list(directory.glob("*.safetensors"))) == 2 and not list(directory.glob("*.partial"))
    monkeypatch.setattr(target_states, "save_file", save)
    states = cache_states(lambda layers: source, directory, data, (1, 1), description, False)
    for number in range(len(data)):
        (live,) = source.of([data.tokens[data.offsets[number] : data.offsets[number + 1]]])
        cached = states.of_conversation(number)
        torch.testing.assert_close(cached.states, live.states)
        torch.testing.assert_close(cached.features, live.features)
        assert torch.equal(cached.best, live.best)
    # Nothing is missing: the target is not needed again.
    cache_states(lambda layers: pytest.fail("loaded"), directory, data, (1, 1), description, False)
    only_features = cache_states(lambda layers: pytest.fail("loaded"), directory, data, (), description, False).of_conversation(3)
    assert torch.equal(only_features.states, states.of_conversation(3).features)
    with pytest.raises(EagleError, match="states of another captured layers"):
        cache_states(lambda layers: source, directory, data, (0, 1), description, False)
    with pytest.raises(EagleError, match="states of another target"):
        cache_states(lambda layers: source, directory, data, (1, 1), {"target": "u"}, False)
    with pytest.raises(EagleError, match="states of another data"):
        cache_states(lambda layers: source, directory, tiny_data(41), (1, 1), description, False)


def test_too_little_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    from eagle_engine.training import target_states

    save_directory(tmp_path / "t", "llama")
    source = LiveStates(load_model(open_checkpoint(tmp_path / "t"), torch.float32), (), torch.float32)
    monkeypatch.setattr(target_states.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(EagleError, match=r"need 0\.0 GB in .* GB are free: use fewer conversations, or states 'live'"):
        cache_states(lambda layers: source, tmp_path / "states", tiny_data(), (), {}, False)
    assert not list((tmp_path / "states").glob("*.safetensors"))


def test_states_that_overflow_are_refused(tmp_path):
    save_directory(tmp_path / "t", "llama")
    model = load_model(open_checkpoint(tmp_path / "t"), torch.float32)
    with torch.no_grad():
        model.model.norm.weight *= 1e6
    with pytest.raises(EagleError, match="are not finite in float16; use another states_dtype"):
        cache_states(lambda layers: LiveStates(model, (), torch.float16), tmp_path / "states", tiny_data(), (), {}, False)


def test_a_batch_is_its_conversations_side_by_side(tmp_path):
    """Every field of every conversation stands where the others do, positions and documents begin anew with each, and what is left of a row is padding."""
    save_directory(tmp_path / "t", "llama")
    data = tiny_data()
    states = cache_states(lambda layers: LiveStates(load_model(open_checkpoint(tmp_path / "t"), torch.float32), (0, 1), torch.float32), tmp_path / "states", data, (0, 1), {}, False)
    rows = [[3, 17, 8], [21], [5, 4]]
    batch = Batches(data, states, max_length=64, batch_size=3, seed=0).collate(rows)
    assert batch.tokens.shape == (3, 64)
    for i, row in enumerate(rows):
        at = 0
        for document, number in enumerate(row):
            span, size = slice(data.offsets[number], data.offsets[number + 1]), int(data.lengths[number])
            here = (i, slice(at, at + size))
            assert batch.tokens[here].tolist() == data.tokens[span].tolist() and batch.supervised[here].tolist() == data.supervised[span].tolist()
            assert batch.position_ids[here].tolist() == list(range(size)) and batch.documents[here].tolist() == [document] * size
            expected = states.of_conversation(number)
            assert all(torch.equal(getattr(batch, name)[here], getattr(expected, name)) for name in ("states", "features", "best"))
            at += size
        rest = (i, slice(at, None))
        assert (batch.documents[rest] == -1).all() and not batch.supervised[rest].any()
