"""The trainer's drafter and objectives against plain statements of the published formulas."""

from __future__ import annotations

import pytest
import torch
from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.model_config import ModelConfig
from eagle_engine.training.model import TrainableDrafter, initialise
from eagle_engine.training.objective import Batch, UnrolledObjective
from published_drafter import PublishedDrafter

VOCAB, HIDDEN = 37, 24
VARIANTS = {
    "eagle1": dict(version=1, bias=True),
    "eagle1-no-bias": dict(version=1),
    "eagle3": dict(version=3),
    "eagle3-fc-norm": dict(version=3, fc_norm=True),
    "eagle3-norm-before-fc": dict(version=3, norm_before_fc=True),
    "eagle3-norm-output": dict(version=3, fc_norm=True, norm_output=True),
    "eagle3-norm-before-residual": dict(version=3, norm_before_residual=True),
    "eagle3-own-vocab": dict(version=3, draft_vocab_size=20),
}


def make_config(version: int, draft_vocab_size: int = VOCAB, **flags) -> DrafterConfig:
    layer = ModelConfig("llama", HIDDEN, 40, 1, 4, 2, 6, VOCAB, 1e-5, 500.0, 64)
    return DrafterConfig(version, layer, HIDDEN, draft_vocab_size=draft_vocab_size if version == 3 else 0, **flags)


def published(config: DrafterConfig, drafter: TrainableDrafter, embedding: torch.Tensor, head: torch.Tensor) -> PublishedDrafter:
    return PublishedDrafter(config.to_dict("float32"), {name: weight.detach() for name, weight in drafter.named_weights().items()}, embedding, head)


def drafts(plain: PublishedDrafter, tokens: torch.Tensor, states: torch.Tensor, levels: int) -> torch.Tensor:
    """Predicted features [levels, H] of the levels after n true states; tokens [n + levels]."""
    n = len(states)
    return plain.run(tokens[1 : n + levels].tolist(), states)[n - 1 :] if levels else states.new_zeros(0)


def make_drafter(config: DrafterConfig, seed: int = 0) -> TrainableDrafter:
    drafter, generator = TrainableDrafter(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in drafter.named_weights().items():
            weight.copy_((1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(weight.shape, generator=generator))
    return drafter


def make_batch(config: DrafterConfig, lengths: list[list[int]], seed: int = 0) -> Batch:
    """Rows of conversations of these lengths; the second half of each is the assistant's. Padding is poisoned where it may be."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = len(lengths), max(map(sum, lengths)) + 2
    documents, positions, supervised = torch.full((rows, length), -1), torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.bool)
    for i, row in enumerate(lengths):
        at = 0
        for document, n in enumerate(row):
            documents[i, at : at + n], positions[i, at : at + n], supervised[i, at + n // 2 : at + n] = document, torch.arange(n), True
            at += n
    real = (documents >= 0)[:, :, None]
    states = torch.where(real, torch.randn(rows, length, config.fused_size, generator=generator), 1e3)
    features = torch.where(real, torch.randn(rows, length, HIDDEN, generator=generator), 1e3)
    tokens, best = (torch.randint(VOCAB, (rows, length), generator=generator) for _ in range(2))
    return Batch(tokens, positions, documents, supervised, states, features, best)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_unrolled_forward_is_drafting(variant):
    """Row t of level i has the feature that a drafter has after i levels of its own behind t true states: each conversation alone, from scratch."""
    config = make_config(**variant)
    drafter, batch, steps = make_drafter(config), make_batch(config, [[7, 5], [9]]), 3
    embedding, seen = torch.randn(VOCAB, HIDDEN), []
    plain = published(config, drafter, embedding, embedding)
    vocab = torch.arange(config.draft_vocab_size or VOCAB)
    objective = UnrolledObjective(drafter, embedding, torch.randn(len(vocab), HIDDEN), vocab, steps=steps, decay=1.0, token_weight=1.0, feature_weight=0.0)
    layer = drafter.layer
    drafter.layer = lambda *args: seen.append(layer(*args)) or seen[-1]
    with torch.no_grad():
        objective(batch)
    for row in range(2):
        for document in range(2 - row):
            at = (batch.documents[row] == document).nonzero()[:, 0]
            tokens, states = batch.tokens[row, at], batch.states[row, at]
            for t in range(len(at) - 1):
                levels = min(steps, len(at) - 1 - t)
                expected = drafts(plain, tokens, states[: t + 1], levels)
                for level in range(levels):
                    torch.testing.assert_close(seen[level][row, at[t]].double(), expected[level], rtol=1e-4, atol=1e-4)


def published_loss(plain, batch, target_head, draft_vocab, steps, decay, token_weight, feature_weight):
    """The published objective, token by token: sum over levels of decay^i times (cross-entropy over the draft vocabulary, zero where the target's choice lies outside, and smooth L1), over the number of
    positions."""
    total = 0.0
    for row in range(len(batch.tokens)):
        for document in range(int(batch.documents[row].max()) + 1):
            at = (batch.documents[row] == document).nonzero()[:, 0]
            tokens, states = batch.tokens[row, at], batch.states[row, at]
            for t in range(len(at)):
                predicted = drafts(plain, tokens, states[: t + 1], min(steps, len(at) - 1 - t))
                for i, feature in enumerate(predicted):
                    place = t + 1 + i  # the last token that the level is fed with; what follows it is learned
                    if place + 1 >= len(at) or not batch.supervised[row, at[place + 1]]:
                        continue
                    wanted = batch.features[row, at[place]].double()
                    if batch.best[row, at[place]] in draft_vocab:
                        probs = (wanted @ target_head[draft_vocab].double().T).softmax(-1)
                        logits = plain.logits(feature[None])[0]
                        total = total - decay**i * token_weight * (probs * logits.log_softmax(-1)).sum()
                    error = (feature - wanted).abs()
                    total = total + decay**i * feature_weight * torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
    return total / batch.tokens.numel()


@pytest.mark.parametrize("objective", [dict(steps=1, decay=1.0, token_weight=0.1, feature_weight=1.0), dict(steps=4, decay=0.8, token_weight=1.0, feature_weight=0.0)], ids=["published-eagle1", "published-eagle3"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_loss_is_the_published_one(variant, objective):
    config = make_config(**variant)
    drafter, batch = make_drafter(config, seed=1), make_batch(config, [[8], [4, 5]], seed=2)
    generator = torch.Generator().manual_seed(3)
    embedding, target_head = torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    size = config.draft_vocab_size if config.has_own_vocab else VOCAB
    draft_vocab = torch.randperm(VOCAB, generator=generator)[:size].sort().values
    loss, _ = UnrolledObjective(drafter, embedding, target_head[draft_vocab], draft_vocab, **objective)(batch)
    plain = published(config, drafter, embedding, target_head[draft_vocab])
    expected = published_loss(plain, batch, target_head, draft_vocab, **objective)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["eagle1", "eagle3-own-vocab", "eagle3-norm-output"])
def test_gradient(variant):
    """The gradient of the loss, against differences of the loss along a random direction."""
    config = make_config(**VARIANTS[variant])
    drafter, batch = make_drafter(config), make_batch(config, [[6, 7]])
    vocab = torch.arange(config.draft_vocab_size if config.version == 3 else VOCAB)
    generator = torch.Generator().manual_seed(4)
    embedding, head = torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(len(vocab), HIDDEN, generator=generator)
    objective = UnrolledObjective(drafter, embedding, head, vocab, steps=3, decay=0.8, token_weight=1.0, feature_weight=0.5)
    loss, _ = objective(batch)
    loss.backward()
    directions = [torch.randn(p.shape, generator=generator) for p in drafter.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(drafter.parameters(), directions))
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            for p, d in zip(drafter.parameters(), directions):
                p += sign * 1e-3 * d
            values.append(objective(batch)[0].double())
            for p, d in zip(drafter.parameters(), directions):
                p -= sign * 1e-3 * d
    torch.testing.assert_close((values[0] - values[1]) / 2e-3, slope.double(), rtol=2e-2, atol=2e-3)


def test_sums_count_what_they_say():
    """Acceptance of a drafter whose every draft is known: the target's choice at some places, another token at others."""
    config = make_config(version=1)
    batch = make_batch(config, [[10]])
    drafter = make_drafter(config)
    right = torch.zeros(12, dtype=torch.bool)
    right[[5, 6, 8]] = True
    # The feature that a level predicts is the one-hot of a token; the head is the identity.
    head = torch.eye(VOCAB, HIDDEN)
    best = torch.randint(HIDDEN, (1, 12))
    calls = []

    def layer(embedded, features, attend):
        step = len(calls)
        calls.append(step)
        place = torch.arange(12) + 1 + step
        drafted = torch.where(right[place.clamp(max=11)], best[0, place.clamp(max=11)], (best[0, place.clamp(max=11)] + 1) % HIDDEN)
        return torch.nn.functional.one_hot(drafted, HIDDEN).float()[None] * 5

    drafter.layer = layer
    _, sums = UnrolledObjective(drafter, torch.zeros(VOCAB, HIDDEN), head, None, steps=3, decay=1.0, token_weight=1.0, feature_weight=0.0)(batch._replace(best=best))
    # Supervised are 5..9; a draft is fed with the tokens up to `place` and predicts what follows, so places 4..8 are taught. A chain starts after a token of the assistant: places 5..8 at level 0.
    assert sums.rows.tolist() == [5, 5, 5]
    assert sums.reached.tolist() == [4, 2, 1] and sums.accepted.tolist() == [3, 1, 0]


def test_weights_are_used_as_they_are_stored():
    """With a stored dtype, the forward uses rounded weights and the gradient passes to the exact ones."""
    config = make_config(version=3)
    exact, rounded = make_drafter(config), TrainableDrafter(config, torch.float8_e4m3fn)
    rounded.load_state_dict(exact.state_dict())
    x = torch.randn(3, 3 * HIDDEN)
    weight = exact.named_weights()["fc.weight"]
    rounded.prepare()
    assert torch.equal(rounded.fuse(x), x @ weight.detach().to(torch.float8_e4m3fn).float().T)
    rounded.fuse(x).sum().backward()
    torch.testing.assert_close(rounded.named_weights()["fc.weight"].grad, x.sum(0).expand(HIDDEN, -1))


@pytest.mark.parametrize("version", [1, 3])
def test_a_new_drafter_passes_the_feature_on(version):
    """But for the part of `fc` that is random, which the test takes away."""
    config = make_config(version)
    drafter, head, norm = TrainableDrafter(config), torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN) + 0.5
    initialise(drafter, 0, norm, head)
    weights = drafter.named_weights()
    assert weights["fc.weight"][:, :-HIDDEN].std() > 0
    with torch.no_grad():
        weights["fc.weight"][:, :-HIDDEN], weights["fc.weight"][:, -HIDDEN:] = 0, torch.eye(HIDDEN)
    plain = published(config, drafter, torch.randn(VOCAB, HIDDEN), head)
    states = torch.randn(6, config.fused_size)
    torch.testing.assert_close(plain.layer(list(range(6)), plain.first_features(states)), states[:, -HIDDEN:].double())
    if version == 3:
        assert torch.equal(weights["lm_head.weight"], head) and torch.equal(weights["norm.weight"], norm)
