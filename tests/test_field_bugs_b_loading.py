"""Faults that were reported about engines that run EAGLE, as catalogued in README.md: weights of drafters. The number in a test's name is that of catalogue B."""

import numpy as np
import pytest
import torch
from drafter_files import LAYOUTS, write_drafter
from eagle_engine import EagleError
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_checkpoint import read_drafter
from eagle_engine.drafter_format import parse_drafter_config
from eagle_engine.training.export import draft_vocab_of, export
from eagle_engine.training.model import TrainableDrafter, initialise
from eagle_kernels import embedding
from helpers import assert_exact
from tiny_engines import drafter_config, eagle3_config, random_tensors, tiny_target

VOCAB = 83


def head_of(target) -> torch.Tensor:
    """[V, H], row by row through the model."""
    return torch.stack([target.logits(row[None])[0] for row in torch.eye(48)]).T


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b21_a_drafter_without_its_head_is_not_loaded(tmp_path, layout):
    """EAGLE-3's head is its own: without it there is no drafter, in whatever layout, rather than one that guesses at random."""
    raw = eagle3_config(tiny_target("llama", num_hidden_layers=7))
    tensors = random_tensors(raw)
    read_drafter(write_drafter(tmp_path / "whole", *LAYOUTS[layout](raw, tensors)))
    del tensors["lm_head.weight"]
    with pytest.raises(EagleError, match="missing tensor lm_head.weight"):
        read_drafter(write_drafter(tmp_path / "headless", *LAYOUTS[layout](raw, tensors)))


def test_b21_an_eagle1_drafter_without_a_head_takes_the_targets(tmp_path):
    target = tiny_target("llama")
    raw = drafter_config(target, architectures=["LlamaForCausalLMEagle"])
    drafter = Drafter.from_directory(write_drafter(tmp_path / "d", raw, random_tensors(raw)), target, max_positions=64)
    features = torch.randn(4, 48)
    assert_exact(drafter.logits(features), target.logits(features))


@pytest.mark.parametrize("case", ["llama", "llama-tied-biases-linear"], ids=["untied", "tied"])
@pytest.mark.parametrize("own", [(), ("embed_tokens.weight",), ("lm_head.weight",), ("embed_tokens.weight", "lm_head.weight")], ids=lambda names: "+".join(name.split(".")[0] for name in names) or "nothing")
@pytest.mark.parametrize("version", [1, 3])
def test_b29_a_drafters_own_embedding_and_head_stay_its_own(tmp_path, version, own, case):
    """What the file has is used and what it has not is the target's, for targets with one matrix for both and with two; and the target keeps its own."""
    target = tiny_target(case, num_hidden_layers=7)
    raw = drafter_config(target) if version == 1 else eagle3_config(target, draft_vocab_size=VOCAB)
    before = [target.embed(torch.arange(VOCAB)), head_of(target)]
    tensors = random_tensors(raw)
    tensors |= {name: torch.randn(VOCAB, 48) for name in own}
    drafter = Drafter.from_directory(write_drafter(tmp_path / "d", raw, tensors), target, max_positions=64)
    assert_exact(embedding(torch.arange(VOCAB), drafter.embedding), tensors.get("embed_tokens.weight", before[0]))
    features = torch.randn(5, 48)
    normed = features if version == 1 else features * (features.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors["norm.weight"]
    torch.testing.assert_close(drafter.logits(features), normed @ tensors.get("lm_head.weight", before[1]).T, rtol=1e-4, atol=1e-4)
    assert_exact(target.embed(torch.arange(VOCAB)), before[0])
    assert_exact(head_of(target), before[1])


EXPORTS = {"eagle-1": drafter_config, "eagle-3": eagle3_config, "narrow": lambda target: eagle3_config(target, hidden_size=32, target_hidden_size=48)}


@pytest.mark.parametrize("kind", EXPORTS)
def test_b30_an_exported_drafter_is_whole_and_says_its_vocabulary(tmp_path, kind):
    """What the trainer writes is read again tensor for tensor: no embedding but one that was trained, and the draft vocabulary by the tokens that were counted."""
    target = tiny_target("llama", num_hidden_layers=7)
    config = parse_drafter_config(EXPORTS[kind](target))
    trained, counts = TrainableDrafter(config), np.arange(VOCAB) % 7
    initialise(trained, seed=1)
    vocabulary = draft_vocab_of(counts, 57) if config.has_own_vocab else None
    export(tmp_path / "d", config, trained.named_weights(), "float32", vocabulary, counts)
    again, tensors = read_drafter(tmp_path / "d")
    assert again.expected_tensors() == config.expected_tensors() and ("embed_tokens.weight" in tensors) == (kind == "narrow")
    for name, weight in trained.named_weights().items():
        assert_exact(tensors[name], weight.detach())
    drafter = Drafter.from_directory(tmp_path / "d", target, max_positions=64)
    if kind == "eagle-1":
        assert drafter.embedding is target.embedding and drafter.draft_to_target is None
    else:
        likeliest = sorted(range(VOCAB), key=lambda token: (-counts[token], token))[:57]
        assert drafter.draft_to_target.tolist() == sorted(likeliest)


BROKEN = {
    "no-d2t": (lambda tensors: tensors.pop("d2t"), "missing tensor d2t"),
    "no-t2d": (lambda tensors: tensors.pop("t2d"), "missing tensor t2d"),
    "zero-d2t": (lambda tensors: tensors["d2t"].zero_(), "d2t is all zero"),
    "ids-for-offsets": (lambda tensors: tensors["d2t"].add_(torch.arange(57)), "d2t: "),
    "twice": (lambda tensors: tensors["d2t"][1:2].sub_(1 + tensors["d2t"][1] - tensors["d2t"][0]), "d2t: token"),
    "another-t2d": (lambda tensors: tensors["t2d"].logical_not_(), "t2d marks 26 tokens"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_b30_a_draft_vocabulary_that_was_lost_on_export_is_noticed(tmp_path, fault):
    raw = eagle3_config(tiny_target("llama", num_hidden_layers=7))
    tensors = random_tensors(raw)
    edit, message = BROKEN[fault]
    edit(tensors)
    with pytest.raises(EagleError, match=message):
        read_drafter(write_drafter(tmp_path / "d", raw, tensors))
