"""Faults that were reported about engines that run EAGLE, as catalogued in README.md: where is written and read. The number in a test's name is that of catalogue B."""

from dataclasses import fields

import pytest
import torch
from eagle_engine import EagleError, SamplingParams
from eagle_kernels import accept, compact, head_topk, linear, pack_weight, rope_store_kv, tree_attention, unpack_weight
from eagle_kernels.triton import tree_attention as triton_tree_attention
from gpu_mode import kernels_are_compiled
from helpers import PagedCache, assert_exact, packed_mask
from test_step_graphs import graphed
from tiny_engines import TREES, bigram_drafter, make_engine, oracle_drafter, plain_tokens, random_drafter, random_eagle3, tiny_target
from tiny_targets import VOCAB_SIZE, random_tokens

GREEDY = dict(temperature=0.0)
WIDE = dict(tree="dynamic", top_k=6, max_depth=4, num_nodes=50)


@pytest.mark.skipif(kernels_are_compiled(), reason="loads and stores are only checked under the interpreter")
def test_b04_a_wide_frontier_at_the_very_end_of_the_cache_reads_nothing_beyond_it(checked_launches):
    """Ten nodes whose last row is the last of the last page, and a page table without a spare entry: every load and store of the interpreted kernel lies within a tensor of its arguments."""
    page_size, length, nodes = 16, 22, 10
    kv = torch.randn(2, 2, page_size, 1, 64).bfloat16()
    cache = PagedCache(kv, torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))
    mask = packed_mask(torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 4, 5, 6]], dtype=torch.int32))
    q = torch.randn(1, nodes, 2, 64).bfloat16()
    for deterministic in (False, True):
        out = torch.full(q.shape, float("nan"), dtype=q.dtype)
        triton_tree_attention.tree_attention(q, *cache, mask, 0.125, 0, 0.0, deterministic, out, None)
        assert (out.float() - tree_attention(q.float(), kv, cache.page_table, cache.seq_lens, mask)).abs().max() < 0.02


def test_b05_accepted_paths_of_a_batch_whose_trees_are_wider_than_they_are_deep():
    """Three trees of seven nodes, paths of at most three: each row's path and next token are its own."""
    parent = torch.tensor([[-1, 0, 0, 0, 1, 2, 4]] * 3, dtype=torch.int32)
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6], [9, 11, 12, 13, 14, 15, 16], [9, 21, 22, 23, 24, 25, 26]])
    sampled = torch.tensor([[1, 4, 0, 0, 6, 0, 77], [12, 0, 15, 0, 0, 88, 0], [29, 0, 0, 0, 0, 0, 0]])
    accepted = accept(tokens, parent, sampled, torch.ones(3, dtype=torch.bool), 3)
    assert accepted.accepted_nodes.tolist() == [[0, 1, 4, 6], [0, 2, 5, -1], [0, -1, -1, -1]]
    assert accepted.num_accepted_drafts.tolist() == [3, 2, 0] and accepted.bonus_token.tolist() == [77, 88, 29]


VIEWS = ("output_ring", "gains")  # of the buffer `outputs`, one after the other


def with_canaries(state) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Every buffer of a state moved into the middle of a larger one; name, what stands before it, and what stands behind."""
    guards = []
    for field in fields(state):
        tensor = getattr(state, field.name)
        if not isinstance(tensor, torch.Tensor) or field.name in VIEWS:
            continue
        room = 64 * (1 + tensor.element_size())
        whole = torch.full((tensor.numel() + 2 * room,), 1 if tensor.dtype == torch.bool else 77, dtype=tensor.dtype)
        middle = whole[room : room + tensor.numel()].view(tensor.shape)
        middle.copy_(tensor)
        setattr(state, field.name, middle)
        guards.append((field.name, whole[:room], whole[room + tensor.numel() :]))
    start = 0
    for name in VIEWS:
        shape = getattr(state, name).shape
        setattr(state, name, state.outputs[start : start + shape.numel()].view(shape))
        start += shape.numel()
    assert start == state.outputs.numel()
    return guards


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_b06_no_buffer_of_a_step_is_written_past_its_ends(kind):
    """Several children per node, a batch of two in slots for three: all that lies around the buffers stays as it was, every draft is a token, and the answers are right."""
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = random_drafter(target) if kind == "eagle-1" else random_eagle3(target)
    engine = make_engine(target, drafter, max_batch_size=3, max_model_len=60, enforce_eager=True, **WIDE)
    guards = with_canaries(engine.state)
    prompts, params = [random_tokens(500, 9), random_tokens(501, 25)], SamplingParams(**GREEDY, max_tokens=30)
    assert [output.token_ids for output in engine.generate(prompts, params)] == [plain_tokens(target, prompt, params) for prompt in prompts]
    assert len(guards) > 15
    for name, *around in guards:
        for guard in around:
            assert (guard == (1 if guard.dtype == torch.bool else 77)).all(), name
    assert ((engine.state.pool_tokens[:2] >= 0) & (engine.state.pool_tokens[:2] < VOCAB_SIZE)).all()


def test_b07_rows_beyond_two_to_the_31_numbers():
    """A cache of 2.7e9 numbers in each plane, of which only the last pages are touched: storing, attending and compacting there gives what a small cache gives."""
    far_page, shape = 40_990, (64, 8, 128)
    far = torch.empty(2, 41_000, *shape, dtype=torch.bfloat16)
    assert far_page * far.stride(1) > 2**31
    small = torch.zeros(2, 2, *shape, dtype=torch.bfloat16)
    tables = [torch.tensor([[far_page, far_page + 7]], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)]
    seq_lens, positions = torch.tensor([60], dtype=torch.int32), torch.arange(60, 68)[None]
    q, k, v = torch.randn(1, 8, 16, 128), torch.randn(1, 8, 8, 128), torch.randn(1, 8, 8, 128)
    prefix = torch.randn(2, 64, 8, 128).bfloat16()
    mask, rope = packed_mask(torch.tensor([[-1, 0, 0, 1, 2, 3, 4, 4]], dtype=torch.int32)), torch.randn(80, 128)
    results = []
    for kv, table in zip((far, small), tables):
        first, second = table[0].tolist()
        kv[:, first], kv[:, second] = prefix, 0
        turned = q.clone()
        rope_store_kv(turned, k, v, positions, rope, kv, table, seq_lens)
        out = tree_attention(turned, kv, table, seq_lens, mask)
        compact(kv[None], table, seq_lens, torch.tensor([[0, 2, 4, 7]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
        results.append((turned, out, kv[:, first].clone(), kv[:, second].clone()))
    for ours, theirs in zip(*results):
        assert_exact(ours, theirs)
    assert not torch.equal(results[1][2][:, :64], prefix)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_b22_slots_that_fill_up_a_captured_batch_write_to_the_spare_page_alone(kind):
    """Three sequences in a bucket of four: pages that belong to nobody keep their poison, and the answers are right."""
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = random_drafter(target) if kind == "eagle-1" else random_eagle3(target)
    engine, _ = graphed(target, drafter, max_model_len=80, num_pages=80, **WIDE)
    prompts, params = [random_tokens(510 + i, 7 + 9 * i) for i in range(3)], SamplingParams(**GREEDY, max_tokens=20)
    caches, taken, take = [engine.state.target_cache, engine.state.draft_cache], set(), engine.pages.take
    for cache in caches:
        cache[:, :, :80] = float("nan")

    def noted(count: int) -> list[int]:
        pages = take(count)
        taken.update(pages)
        return pages

    engine.pages.take = noted
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [plain_tokens(target, prompt, params) for prompt in prompts]
    nobody = sorted(set(range(80)) - taken)
    assert len(nobody) > 10
    assert all(cache[:, :, nobody].isnan().all() for cache in caches)


def reduced(target, ids: torch.Tensor, text: list[int]):
    """A drafter over some of the tokens, that has seen the text."""
    return bigram_drafter(target, [text], random_drafter(target, draft_vocab=ids))


def test_b23_a_draft_vocabulary_smaller_than_the_targets_in_captured_steps():
    """Buffers are as wide as the drafts, ids are the target's: with vocabularies of 5, 40 and 83 tokens out of 83 the text is the same, and only their tokens are drafted."""
    target, prompt, params = tiny_target("llama"), random_tokens(520, 9), SamplingParams(**GREEDY, max_tokens=40)
    expected = plain_tokens(target, prompt, params)
    lengths = []
    for size in (5, 40, 83):
        common = [token for token, _ in sorted(((token, expected.count(token)) for token in range(VOCAB_SIZE)), key=lambda pair: (-pair[1], pair[0]))]
        ids = torch.tensor(common[:size])
        engine, _ = graphed(target, reduced(target, ids, prompt + expected), **TREES["dynamic"])
        output = engine.generate(prompt, params)[0]
        assert output.token_ids == expected
        assert set(engine.state.pool_tokens[0].tolist()) <= set(ids.tolist())
        lengths.append(output.stats.acceptance_length)
    assert lengths == sorted(lengths) and lengths[-1] > 1.5


def test_b28_the_padding_of_a_vocabulary_is_never_drawn_or_drafted():
    """83 rows stand in tiles of 16. Where every logit is far below zero a row of padding, whose logit is zero, would win each arg-max and each top_k."""
    weight, x = torch.randn(VOCAB_SIZE, 48).abs() * -1, torch.rand(9, 48) + 0.1
    logits = linear(x, pack_weight(weight))
    assert logits.shape == (9, VOCAB_SIZE) and logits.max() < -1
    head = head_topk(x, pack_weight(weight), 5)
    ids = 0xFFFFFFFF - (head.keys[:, 0] & 0xFFFFFFFF)
    assert torch.equal(ids, logits.topk(5).indices) and (head.max[:, 0] < -1).all()
    # A whole target like that: its first channel dominates every state, and the head counts it down.
    whole, prompt, params = tiny_target("llama"), random_tokens(530, 6), SamplingParams(temperature=0.05, seed=1, max_tokens=30)
    target = object.__new__(type(whole))
    target.__dict__.update(whole.__dict__)
    embedding, head = unpack_weight(whole.embedding), unpack_weight(whole.head)
    embedding[:, 0], head[:, 0] = 300.0, -50.0
    target.embedding, target.head = pack_weight(embedding), pack_weight(head)
    seen, original = [], target.logits
    target.logits = lambda features, out=None: seen.append(original(features, out)) or seen[-1]
    expected = plain_tokens(target, prompt, params, enforce_eager=True)
    drafter = oracle_drafter(target, prompt + expected, ranks=[0, 1, 0])
    assert make_engine(target, drafter, enforce_eager=True, **TREES["dynamic-wide"]).generate(prompt, params)[0].token_ids == expected
    assert max(expected) < VOCAB_SIZE and len(set(expected)) > 5 and max(float(logits.max()) for logits in seen) < -100
    with pytest.raises(EagleError, match="vocab_size of the drafter is 96, of the target 83"):
        random_drafter(whole, vocab_size=96)
