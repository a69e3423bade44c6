"""Faults that were reported about engines that run EAGLE, as catalogued in README.md: what is drafted, and what is kept of it. The number in a test's name is that of catalogue B."""

import pytest
import torch
from eagle_engine import EagleConfig, SamplingParams
from eagle_engine.loading import slack_rows
from helpers import make_paged_cache
from plain_drafts import BUSHY, CONFIGS, FEW, PlainDrafts, TreeRecorder, drafted_plainly, few_tokens, path_tokens, plain_tree
from published_drafter import PublishedDrafter
from test_step_graphs import graphed
from tiny_engines import DRAFTERS, drafter_config, eagle3_config, make_drafter, make_engine, oracle_drafter, plain_tokens, random_drafter, random_tensors, tiny_target
from tiny_targets import random_tokens

GREEDY = dict(temperature=0.0)


def observe(engine, prompt: list[int], params: SamplingParams) -> tuple:
    """The output of one prompt, and its trees."""
    recorder = TreeRecorder()
    with engine.observing(recorder):
        output = engine.generate(prompt, params)[0]
    return output, recorder.trees[output.request_id]


@pytest.mark.parametrize("kind", CONFIGS)
def test_b01_lanes_of_several_children_keep_their_own_pasts(kind):
    """Two sequences at once, past their first steps: the probability of every drafted token is the one it has when its path is run alone."""
    prompts = [few_tokens(300, 6), few_tokens(301, 11)]
    trees = drafted_plainly(CONFIGS[kind], prompts, SamplingParams(temperature=1.0, seed=4, max_tokens=8), tree=dict(tree="dynamic", top_k=5, max_depth=3, num_nodes=20))
    assert sum(len(tree.accepted_nodes) > 1 for tree in trees) > 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_b13_a_prompt_longer_than_the_drafter_was_made_for(kind):
    """32 positions, a prompt of 40 tokens: the drafts are those of the plain forward, which knows no end."""
    trees = drafted_plainly(CONFIGS[kind], [few_tokens(302, 40)], SamplingParams(**GREEDY, max_tokens=4), max_position_embeddings=32)
    assert trees[-1].position > 40


@pytest.mark.parametrize("options", [dict(tree="chain", max_depth=6), dict(top_k=4, max_depth=6, num_nodes=40)], ids=["chain", "tree"])
def test_b14_drafts_beyond_the_longest_sequence_disturb_nothing(options):
    """A target and a drafter with exactly the positions that the engine asks for: the last steps draft past the end of the sequence, and the answer fills it to the last token."""
    whole, prompt = tiny_target("llama"), random_tokens(303, 10)
    for length in (30, 31, 32, 33):
        target = tiny_target("llama", max_positions=length + slack_rows(EagleConfig(**options), True, False))
        answer = plain_tokens(whole, prompt, SamplingParams(**GREEDY, max_tokens=length - 10))
        for drafter in (oracle_drafter(target, prompt + answer, drafter=random_drafter(target)), random_drafter(target)):
            output = make_engine(target, drafter, max_model_len=length, max_batch_size=1, **options).generate(prompt, SamplingParams(**GREEDY, max_tokens=500))[0]
            assert (output.token_ids, output.finish_reason) == (answer, "length")


@pytest.mark.parametrize("kind", CONFIGS)
def test_b24_as_many_drafts_are_accepted_as_by_the_published_method(kind):
    """The whole method stated apart, from states of transformers to the tree: it has the same nodes at every step, so nothing of the acceptance is lost on the way."""
    target, prompt = tiny_target("llama", **FEW), few_tokens(304, 5)
    raw = CONFIGS[kind](target)
    sizes = dict(top_k=4, max_depth=3, num_nodes=12)
    output, trees = observe(make_engine(target, make_drafter(target, raw), tree="dynamic", **sizes), prompt, SamplingParams(temperature=1.0, seed=4, max_tokens=10))
    plain, text = PlainDrafts(raw, random_tensors(raw), "llama", **FEW), prompt + output.token_ids
    accepted = 0
    for tree in trees:
        before, after = text[: tree.position + 1], text[tree.position + 1 :]
        expected = plain_tree(plain, before, **sizes)
        assert {path_tokens(tree, node) for node in range(1, len(tree.tokens))} == expected
        longest = max(n for n in range(len(after) + 1) if n == 0 or tuple(after[:n]) in expected)
        assert min(len(tree.accepted_nodes) - 1, len(after)) == longest
        accepted += longest
    assert accepted > 1


@pytest.mark.parametrize("make_config", [drafter_config, eagle3_config], ids=["eagle-1", "eagle-3"])
def test_b25_the_drafters_forward_is_the_published_one_with_every_residual(make_config):
    """Features so large that a missing residual, or a norm too many, is most of the result."""
    target, count = tiny_target("llama", num_hidden_layers=7), 9
    raw = make_config(target)
    drafter, tensors = make_drafter(target, raw), random_tensors(raw)
    head = torch.stack([target.logits(row[None])[0] for row in torch.eye(48)]).T
    published = PublishedDrafter(raw, tensors, target.embed(torch.arange(83)), head)
    tokens, states = random_tokens(305, count), 5.0 * torch.randn(count, drafter.config.fused_size)
    layer = drafter.config.layer
    cache = make_paged_cache([0], 16, 4, layer.num_kv_heads, layer.head_dim)
    features = drafter.forward(torch.tensor([tokens]), drafter.fuse(states[None].clone()), torch.arange(count)[None], cache.kv, cache.seq_lens, cache.page_table)
    expected = published.run(tokens, states)
    torch.testing.assert_close(features[0].double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafter.logits(features)[0].double(), published.logits(expected), rtol=1e-3, atol=1e-3)


def test_b35_more_siblings_never_lower_the_accepted_length():
    """The same tree with one node more, and one more: the first step of each accepts at least as many; scattered accepted paths leave the text as it is."""
    target, prompt = tiny_target("llama"), random_tokens(306, 6)
    params = SamplingParams(**GREEDY, max_tokens=14)
    answer, longer = plain_tokens(target, prompt, params), 0
    drafter = oracle_drafter(target, prompt + answer, ranks=[1, 0, 2, 0, 1])
    for length in (0, 1, 2, 3, 4):
        accepted = []
        for num_nodes in (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 28):
            engine = make_engine(target, drafter, tree="dynamic", top_k=3, max_depth=4, num_nodes=num_nodes)
            output, trees = observe(engine, prompt + answer[:length], SamplingParams(**GREEDY, max_tokens=8))
            assert output.token_ids == answer[length : length + 8]
            accepted.append(len(trees[0].accepted_nodes))
            scattered = trees[0].accepted_nodes != list(range(len(trees[0].accepted_nodes)))
        assert accepted == sorted(accepted)
        longer += accepted[-1] > accepted[1] and scattered
    assert longer > 2


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "eagle-3-narrow"])
@pytest.mark.parametrize("options", [dict(max_depth=1, top_k=4, num_nodes=3), dict(max_depth=1, top_k=1, num_nodes=2), dict(max_depth=3, top_k=1, num_nodes=2), dict(num_nodes=1), dict(tree="chain", max_depth=1), dict(tree="static", choices=((2,),))], ids=str)  # fmt: skip
def test_b36_trees_of_one_level_one_child_one_node(options, kind):
    target, prompt = tiny_target("llama", num_hidden_layers=7), random_tokens(307, 5)
    params = SamplingParams(**GREEDY, max_tokens=9)
    text = prompt + plain_tokens(target, prompt, params)
    real = DRAFTERS[kind](target)
    for drafter in (real, oracle_drafter(target, text, ranks=[2] if "choices" in options else None, drafter=None if kind != "eagle-1" else real)):
        output, trees = observe(make_engine(target, drafter, **options), prompt, params)
        assert prompt + output.token_ids == text
        assert {len(tree.tokens) for tree in trees} == {options.get("num_nodes", 2)}
    # The knowing drafter's only draft is right in every step.
    assert output.stats.steps == (8 if options.get("num_nodes") == 1 else 4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_b38_a_tree_of_one_child_is_a_chain(kind):
    """Node for node and score for score, at every step."""
    target, prompt, params = tiny_target("llama", **FEW), few_tokens(308, 7), SamplingParams(temperature=0.9, seed=2, max_tokens=50)
    drafter = make_drafter(target, CONFIGS[kind](target))
    (first, chain), (second, tree) = (
        observe(make_engine(target, drafter, **options), prompt, params) for options in (dict(tree="chain", max_depth=4), dict(tree="dynamic", top_k=1, max_depth=4, num_nodes=5))
    )
    assert first.token_ids == second.token_ids == plain_tokens(target, prompt, params)
    assert chain == tree and sum(len(one.accepted_nodes) > 1 for one in chain) > 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_b44_accepted_nodes_that_are_no_dense_beginning_of_the_tree(kind):
    """Steps sent off before the last one has been read, whose accepted nodes lie anywhere in the tree: the next step drafts from them as an eager one does, and the text is right."""
    target, prompt, params = tiny_target("llama", **FEW), few_tokens(309, 7), SamplingParams(temperature=1.0, seed=4, max_tokens=40)
    drafter = make_drafter(target, CONFIGS[kind](target))
    eager, trees = observe(make_engine(target, drafter, max_model_len=160, page_size=8, **BUSHY), prompt, params)
    engine, _ = graphed(target, drafter, **BUSHY)
    late = engine.generate(prompt, params)[0]
    assert late.token_ids == eager.token_ids == plain_tokens(target, prompt, params)
    assert (late.stats.steps, late.stats.acceptance_by_depth) == (eager.stats.steps, eager.stats.acceptance_by_depth)
    assert sum(tree.accepted_nodes != list(range(len(tree.accepted_nodes))) for tree in trees) > 2
