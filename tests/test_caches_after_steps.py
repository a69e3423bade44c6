"""What steps leave in the caches of target and drafter, and what drafts are made of it: as bytes, those of a fresh start."""

import pytest
import torch
from eagle_engine import SamplingParams
from eagle_engine.step import PhaseTimer, draft, rerank, run_step, verify
from helpers import assert_exact
from tiny_engines import DRAFTERS, TREES, begin_requests, make_engine, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import random_tokens


@pytest.mark.parametrize("kind", DRAFTERS, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_draft_logits_of_a_node_are_those_of_its_root_path(tree, kind):
    """Right ancestry: a frontier node sees the drafter's rows of its own ancestors, not of the lane it took over."""
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = DRAFTERS[kind](target)
    engine = make_engine(target, drafter, **TREES[tree])
    prompt = random_tokens(27, 19)
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=8))
    begin_requests(engine)
    seen = []
    original = drafter.forward

    def forward(token_ids, features, *args, **kwargs):
        result = original(token_ids, features, *args, **kwargs)
        seen.append((token_ids.clone(), result.clone(), args[4] if len(args) > 4 else kwargs.get("packed_ancestor_mask")))
        return result

    drafter.forward = forward
    state = engine.state
    with torch.inference_mode():
        draft(engine.models, state, 1)
    del drafter.forward
    (_, root_features, _), *levels = seen
    rows: list[tuple[int, torch.Tensor]] = []  # of each draft row: token, mask words
    checked = 0
    for tokens, features, mask in levels:
        for j in range(tokens.shape[1]):
            rows.append((int(tokens[0, j]), mask[0, j]))
        for j in range(tokens.shape[1]):
            ancestors = [r for r in range(len(rows)) if int(mask[0, j, r // 64]) >> (r % 64) & 1]
            expected = path_feature(engine, drafter, [rows[r][0] for r in ancestors])
            assert_exact(features[0, j], expected)
            assert_exact(drafter.logits(features[:, j]), drafter.logits(expected[None]))
            checked += 1
    assert checked == engine.models.shape.draft_rows > 0


def path_feature(engine, drafter, path: list[int]) -> torch.Tensor:
    """The feature after a path of draft tokens, run one by one behind the committed pairs."""
    state = engine.state
    cache, seq_len, page_table = state.draft_cache[0].clone(), int(state.seq_lens[0]), state.page_table[:1]
    draft_len = seq_len - 1
    position = torch.tensor([[draft_len]])
    lens = torch.tensor([draft_len], dtype=torch.int32)
    feature = drafter.forward(state.root_tokens[:1, None], drafter.fuse(state.pending_features[:1, :1]).clone(), position, cache, lens, page_table)
    for token in path:
        lens, position = lens + 1, position + 1
        feature = drafter.forward(torch.tensor([[token]]), feature, position, cache, lens, page_table)
    return feature[0, 0]


@pytest.mark.parametrize("kind", DRAFTERS, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_drafter_cache_after_any_step_is_that_of_a_fresh_prefill(tree, kind):
    target = tiny_target("llama", num_hidden_layers=7)
    prompt, params = random_tokens(28, 13), SamplingParams(temperature=0.0, max_tokens=40)
    text = prompt + plain_tokens(target, prompt, params)
    # The real drafter writes the cache, the knowing one decides what is drafted, so that paths of all lengths are accepted.
    drafter = oracle_drafter(target, text, ranks=[0, 1, 0, 0, 2, 0, 5], drafter=DRAFTERS[kind](target))
    engine = make_engine(target, drafter, **TREES[tree])
    engine.add_request(prompt, params)
    begin_requests(engine)
    lengths = set()
    for _ in range(8):
        with torch.inference_mode():
            lengths.add(int(run_step(engine.models, engine.state, 1, PhaseTimer()).num_accepted_drafts[0]))
        seq_len = int(engine.state.seq_lens[0])
        # The pending pairs belong to the committed rows too; the next draft feeds them first.
        with torch.inference_mode():
            draft(engine.models, engine.state, 1)
        fresh = make_engine(target, drafter, **TREES[tree])
        fresh.add_request(text[:seq_len], params)
        begin_requests(fresh)
        with torch.inference_mode():
            draft(fresh.models, fresh.state, 1)
        assert_exact(committed_rows(engine, seq_len), committed_rows(fresh, seq_len))
    assert len(lengths) > 1


def committed_rows(engine, count: int) -> torch.Tensor:
    size = engine.pages.page_size
    pages = engine.state.page_table[0, : -(-count // size)].long()
    return engine.state.draft_cache[0][:, pages].flatten(1, 2)[:, :count].clone()


def test_target_cache_after_any_step_is_that_of_a_fresh_prefill():
    target = tiny_target("llama")
    prompt, params = random_tokens(29, 13), SamplingParams(temperature=0.0, max_tokens=40)
    text = prompt + plain_tokens(target, prompt, params)
    engine = make_engine(target, oracle_drafter(target, text, ranks=[1, 0, 2]), top_k=3, max_depth=4, num_nodes=20)
    engine.add_request(prompt, params)
    begin_requests(engine)
    for _ in range(6):
        with torch.inference_mode():
            run_step(engine.models, engine.state, 1, PhaseTimer())
        seq_len = int(engine.state.seq_lens[0])
        fresh = make_engine(target, None)
        fresh.add_request(text[:seq_len], params)
        begin_requests(fresh)
        rows = [e.state.target_cache[:, :, e.state.page_table[0].long()].flatten(2, 3)[:, :, :seq_len] for e in (engine, fresh)]
        assert_exact(rows[0].contiguous(), rows[1].contiguous())


def test_a_broken_mask_is_noticed():
    """The comparison of logits can fail: a node that sees its sibling gets other bits."""
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), enforce_eager=True, **TREES["dynamic"])
    engine.add_request(random_tokens(30, 9), SamplingParams(temperature=0.0, max_tokens=8))
    begin_requests(engine)
    state, models = engine.state, engine.models
    with torch.inference_mode():
        pool, _ = draft(models, state, 1)
        tree = rerank(pool, state.root_tokens[:1], state.seq_lens[:1], models.shape.num_nodes)
        _, right = verify(models, state, 1, tree)
        broken = tree._replace(packed_ancestor_mask=tree.packed_ancestor_mask.clone())
        broken.packed_ancestor_mask[0, -1, 0] |= (1 << models.shape.num_nodes) - 1
        _, wrong = verify(models, state, 1, broken)
    assert torch.equal(right[:-1], wrong[:-1])
    assert not torch.equal(right[-1], wrong[-1])
