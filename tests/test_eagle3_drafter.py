"""Drafters of both kinds against the published forwards, from the states of `transformers` to the logits of every node of a tree."""

import pytest
import torch
from helpers import make_paged_cache
from published_drafter import PublishedDrafter
from tiny_engines import drafter_config, eagle3_config, make_drafter, random_tensors, tiny_target
from tiny_targets import empty_cache, random_tokens, tiny_model
from torch import Tensor

FAMILIES = ["llama", "mistral-window", "mixtral", "qwen2", "qwen3-tied"]
LAYERS = 8
VARIANTS = {
    "eagle-1": (drafter_config, {}),
    "eagle-1-qkv-bias": (drafter_config, dict(bias=False, qkv_bias=True)),
    "eagle-3": (eagle3_config, {}),
    "eagle-3-whole-vocabulary": (eagle3_config, dict(draft_vocab_size=83)),
    "eagle-3-rope-and-head-dim": (eagle3_config, dict(rope_theta=700.0, head_dim=20, num_key_value_heads=1)),
    "fc-norm": (eagle3_config, dict(fc_norm=True, norm_output=False)),
    "norm-before-fc": (eagle3_config, dict(norm_before_fc=True)),
    "norm-before-residual": (eagle3_config, dict(norm_before_residual=True)),
    "norm-output": (eagle3_config, dict(norm_output=True)),
    "all-flags": (eagle3_config, dict(fc_norm=True, norm_output=True, norm_before_residual=True)),
    "narrow": (eagle3_config, dict(hidden_size=32, target_hidden_size=48)),
    "narrow-all-flags": (eagle3_config, dict(hidden_size=32, target_hidden_size=48, fc_norm=True, norm_output=True, norm_before_residual=True)),
    "wide": (eagle3_config, dict(hidden_size=64, target_hidden_size=48)),
}
# A tree of draft nodes below the last committed pair: parent of each, levels of two and three nodes; node 4 hangs on a node of another lane than its own.
PARENTS = [-1, -1, 0, 1, 0, 3, 2, 4]
LEVELS = [range(0, 2), range(2, 5), range(5, 8)]


def path(node: int) -> list[int]:
    """From the first level down to the node."""
    return [] if node < 0 else [*path(PARENTS[node]), node]


def run_tree(drafter, tokens: list[int], states: Tensor, node_tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """As a step does it: the committed pairs in two chunks, then level after level of tentative rows. Features of the pairs, features and logits of the nodes."""
    layer, length = drafter.config.layer, len(tokens)
    cache = make_paged_cache([0], length + len(PARENTS), 4, layer.num_kv_heads, layer.head_dim)
    cache.kv.fill_(float("nan"))
    committed = []
    for chunk in (slice(0, length - 3), slice(length - 3, length)):
        ids = torch.tensor([tokens[chunk]])
        positions = torch.arange(length)[None, chunk]
        committed.append(drafter.forward(ids, drafter.fuse(states[None, chunk]), positions, cache.kv, cache.seq_lens, cache.page_table)[0])
        cache.seq_lens.add_(ids.shape[1])
    root, features = committed[-1][-1], torch.empty(len(PARENTS), layer.hidden_size)
    for level in LEVELS:
        ids = torch.tensor([[node_tokens[node] for node in level]])
        parents = torch.stack([root if PARENTS[node] < 0 else features[PARENTS[node]] for node in level])
        positions = torch.tensor([[length + len(path(node)) - 1 for node in level]])
        mask = torch.tensor([[[sum(1 << ancestor for ancestor in path(node))] for node in level]])
        features[level.start : level.stop] = drafter.forward(ids, parents[None], positions, cache.kv, cache.seq_lens, cache.page_table, mask, level.start)[0]
    return torch.cat(committed), features, drafter.logits(features)


def states_of(model, drafter, tokens: list[int]) -> Tensor:
    """What `transformers` says that the drafter takes: inputs of layers 2, N // 2 and N - 3, or the feature after the final norm."""
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    chosen = [2, LAYERS // 2, LAYERS - 3] if drafter.captured_layers else [LAYERS]
    return torch.cat([hidden[i][0] for i in chosen], dim=-1)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error, scale = (actual - expected).abs().max().item(), max(1.0, expected.abs().max().item())
    assert error < 1e-4 * scale, f"largest difference {error:.2e}, largest value {scale:.2e}"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_drafter_is_the_published_one_from_the_targets_states_to_the_logits_of_a_tree(case, variant):
    """Our target's own states go in; the plain statement takes those of `transformers`. Positions go past the drafter's max_position_embeddings."""
    model, target = tiny_model(case, num_hidden_layers=LAYERS), tiny_target(case, num_hidden_layers=LAYERS)
    make, options = VARIANTS[variant]
    raw = make(target, max_position_embeddings=32, **options)
    drafter = make_drafter(target, raw)
    prompt, node_tokens = random_tokens(7, 41), random_tokens(8, len(PARENTS))
    cache = empty_cache(target.config)
    _, states = target.forward_with_states(drafter.captured_layers, torch.tensor([prompt[:-1]]), torch.arange(len(prompt) - 1)[None], cache.kv, cache.seq_lens, cache.page_table)
    committed, features, logits = run_tree(drafter, prompt[1:], states[0], node_tokens)
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    published = PublishedDrafter(raw, random_tensors(raw), embedding, head)
    theirs = states_of(model, drafter, prompt[:-1])
    assert_near(committed, published.run(prompt[1:], theirs))
    for node in range(len(PARENTS)):
        last = published.run(prompt[1:] + [node_tokens[i] for i in path(node)], theirs)[-1]
        assert_near(features[node], last)
        assert_near(logits[node], published.logits(last))


def test_the_flags_change_what_is_computed():
    """The comparison above can fail: every variant gives logits of its own on the same tensors."""
    target = tiny_target("llama", num_hidden_layers=LAYERS)
    everything = random_tensors(eagle3_config(target, fc_norm=True, norm_output=True)) | random_tensors(eagle3_config(target, norm_before_fc=True))
    embedding = torch.randn(83, 48)
    seen = []
    for name, (make, options) in VARIANTS.items():
        if make is eagle3_config and not {"hidden_size", "head_dim", "draft_vocab_size"} & options.keys():
            published = PublishedDrafter(make(target, **options), everything, embedding, embedding)
            generator = torch.Generator().manual_seed(1)
            seen.append((name, published.logits(published.run([3, 4, 5], torch.randn(2, 144, generator=generator))[-1])))
    assert len(seen) == 6
    for i, (name, logits) in enumerate(seen):
        for other, others in seen[:i]:
            assert (logits - others).abs().max() > 1e-3, f"{name} computes what {other} does"


def test_features_that_are_handed_in_are_modified_in_eagle3_alone():
    """As the docstring of Drafter.forward says: nobody else may hold them."""
    target = tiny_target("llama", num_hidden_layers=LAYERS)
    for variant, modified in (("eagle-1", False), ("eagle-3", True), ("norm-before-residual", False)):
        make, options = VARIANTS[variant]
        drafter = make_drafter(target, make(target, **options))
        cache = make_paged_cache([0], 8, 4, 2, 12)
        features = torch.randn(1, 3, 48)
        before = features.clone()
        drafter.forward(torch.tensor([[1, 2, 3]]), features, torch.arange(3)[None], cache.kv, cache.seq_lens, cache.page_table)
        assert torch.equal(features, before) != modified
