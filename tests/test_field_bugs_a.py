"""Faults that were reported about EAGLE itself, as catalogued in README.md: decoding. The number in a test's name is that of catalogue A."""

import time

import pytest
import torch
from eagle_engine import EagleConfig, SamplingParams
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_format import parse_drafter_config
from eagle_kernels import DraftPool, accept, accept_rejection, pack_weight, rerank, sample, unpack_weight
from helpers import depths
from plain_drafts import BUSHY, CONFIGS, FEW, PlainDrafts, TreeRecorder, check_shape, check_trees, drafted_plainly, few_tokens
from test_sample import LEVEL, chi_square_pvalue, neutral
from test_step_graphs import graphed
from tiny_engines import TREES, KnowingDrafter, bigram_drafter, drafter_config, made_up_profile, make_drafter, make_engine, oracle_drafter, plain_tokens, random_drafter, random_tensors, tiny_target
from tiny_targets import VOCAB_SIZE, hf_logits, random_tokens, tiny_model

GREEDY = dict(temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a01_greedy_text_is_that_of_plain_decoding_in_either_precision(dtype):
    """Four prompts at once, through a tree; and an end token in the middle stops both at the same place."""
    target = tiny_target("llama", dtype=dtype)
    prompts = [random_tokens(100 + i, 5 + 9 * i) for i in range(4)]
    params = SamplingParams(**GREEDY, max_tokens=30)
    expected = [plain_tokens(target, prompt, params) for prompt in prompts]
    drafter = bigram_drafter(target, [prompt + answer for prompt, answer in zip(prompts, expected)])
    outputs = make_engine(target, drafter, **TREES["dynamic-wide"]).generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert min(output.stats.acceptance_length for output in outputs) > 1.5
    ends = expected[0][9]
    stopped = make_engine(target, drafter, eos=(ends,), **TREES["dynamic-wide"]).generate(prompts[0], params)[0]
    assert stopped.token_ids == expected[0][: expected[0].index(ends) + 1] and stopped.finish_reason == "stop"


def test_a03_the_token_after_a_fully_accepted_path_is_drawn_from_the_target_alone():
    """Every draft is less likely under the drafter than under the target, so all are accepted; what follows has the target's distribution at the last node and nothing left over from an earlier one."""
    rows = 20000
    target_probs = torch.tensor([[0.1, 0.6, 0.1, 0.2], [0.1, 0.2, 0.5, 0.2], [0.4, 0.3, 0.2, 0.1]])
    draft_probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]])
    tokens, parent = torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    many = [x.expand(rows, *x.shape[-2:] if x.dim() > 1 else x.shape).contiguous() for x in (tokens[0], parent[0], target_probs[None], draft_probs[None])]
    accepted = accept_rejection(*many, torch.arange(rows), torch.full((rows,), 7), torch.ones(rows, dtype=torch.bool), 2)
    assert (accepted.num_accepted_drafts == 2).all()
    assert chi_square_pvalue(accepted.bonus_token, target_probs[2]) > LEVEL
    left_over = (target_probs[1] - draft_probs[1]).clamp(min=0)
    assert chi_square_pvalue(accepted.bonus_token, left_over / left_over.sum()) < LEVEL


def test_a04_siblings_that_were_not_sampled_change_no_probability():
    """Three of six tokens are children of the root, by rank: the emitted token has the target's distribution, and a draft is accepted with the sum of the children's probabilities."""
    rows, logits = 20000, torch.tensor([0.3, 1.1, -0.4, 0.9, 0.0, -1.0])
    sampled = sample(logits.expand(rows, -1).contiguous(), **neutral(rows))
    tokens, parent = torch.tensor([[5, 1, 3, 0]]).expand(rows, -1).contiguous(), torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32).expand(rows, -1).contiguous()
    accepted = accept(tokens, parent, sampled[:, None].expand(-1, 4).contiguous(), torch.ones(rows, dtype=torch.bool), 1)
    drafted = accepted.num_accepted_drafts == 1
    emitted = torch.where(drafted, tokens.gather(1, accepted.accepted_nodes[:, 1:].clamp(min=0).long())[:, 0], accepted.bonus_token)
    probs = logits.softmax(-1)
    assert chi_square_pvalue(emitted, probs) > LEVEL
    share = probs[[0, 1, 3]].sum()
    assert chi_square_pvalue(drafted.long(), torch.stack((1 - share, share))) > LEVEL


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_a05_no_token_outside_the_nucleus_is_ever_emitted(acceptance):
    """Accepted drafts and the tokens after them alike, held to the logits of transformers; drafts are accepted, so that the last nodes of the tree have their say."""
    target, prompt = tiny_target("llama", **FEW), few_tokens(110, 6)
    params = [SamplingParams(temperature=2.0, top_p=0.4, seed=seed, max_tokens=25) for seed in range(6)]
    outputs = make_engine(target, random_drafter(target), tree="static", choices=((0,), (1,), (2,), (3,)), acceptance=acceptance).generate([prompt] * 6, params)
    model, narrow = tiny_model("llama", **FEW), 0
    for output in outputs:
        text = prompt + output.token_ids
        probs = (hf_logits(model, text) / 2.0).softmax(-1)
        for position in range(len(prompt), len(text)):
            row = probs[position - 1]
            before = row[row > row[text[position]]].sum()
            assert before < 0.4 + 1e-5, f"token {text[position]} at {position}: {float(before):.3f} of the mass stands before it"
            narrow += int((row.sort(descending=True).values.cumsum(0) < 0.4).sum()) < 4
    assert narrow > 100  # the nucleus leaves most tokens out
    assert sum(sum(output.stats.acceptance_by_depth) for output in outputs) > 1


def test_a07_features_that_overflow_end_their_request_and_no_other():
    """The target's state becomes infinite behind one token: that answer ends with an error that says where, in plain and speculative decoding alike; a drafter that overflows changes nothing."""
    whole = tiny_target("llama", seed=7)
    prompt, other = random_tokens(120, 6), random_tokens(121, 9)
    params = SamplingParams(temperature=3.0, seed=2, max_tokens=20)
    answer, second = plain_tokens(whole, prompt, params), plain_tokens(whole, other, params)
    at = next(i for i in range(5, 20) if answer[i] not in prompt + other + answer[:i] + second)
    broken = object.__new__(type(whole))
    broken.__dict__.update(whole.__dict__)
    weight = unpack_weight(whole.embedding)
    weight[answer[at]] = float("inf")
    broken.embedding = pack_weight(weight)
    for drafter in (None, oracle_drafter(broken, prompt + answer), random_drafter(broken)):
        failed, fine = make_engine(broken, drafter).generate([prompt, other], params)
        assert (failed.token_ids, failed.finish_reason) == (answer[: at + 1], "error") and f"position {len(prompt) + at + 1} " in failed.error
        assert (fine.token_ids, fine.finish_reason) == (second, "length")
    overflowing = make_drafter(whole, drafter_config(whole), edit=lambda tensors: tensors["layers.0.mlp.down_proj.weight"].mul_(3e38))
    assert make_engine(whole, overflowing, **TREES["dynamic"]).generate(prompt, params)[0].token_ids == answer


@pytest.mark.parametrize("kind", CONFIGS)
def test_a11_a_batch_of_unequal_prompts_goes_as_each_prompt_alone(kind):
    """The same tokens in the same number of steps, accepted at the same depths, whoever leaves the batch first."""
    target = tiny_target("llama", **FEW)
    prompts = [few_tokens(130 + i, length) for i, length in enumerate((1, 33, 5, 64))]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=count) for i, count in enumerate((4, 40, 20, 30))]
    drafter = make_drafter(target, CONFIGS[kind](target))
    together = make_engine(target, drafter, **BUSHY).generate(prompts, params)
    for prompt, param, output in zip(prompts, params, together):
        alone = make_engine(target, drafter, max_batch_size=1, **BUSHY).generate(prompt, param)[0]
        assert output.token_ids == alone.token_ids == plain_tokens(target, prompt, param)
        assert (output.stats.steps, output.stats.acceptance_by_depth) == (alone.stats.steps, alone.stats.acceptance_by_depth)
    assert sum(output.stats.acceptance_length for output in together) > 4.5


def test_a12_a_tree_is_no_larger_than_pays_on_the_device():
    """Where rows of a step are free the tree grows to its largest, where each costs as much as a step of its own nothing is drafted but now and then a probe, and in between it stays small; the text is the
    same."""
    target, prompt = tiny_target("llama"), random_tokens(139, 9)
    params = SamplingParams(**GREEDY, max_tokens=170)
    text = prompt + plain_tokens(target, prompt, params)
    options = dict(tree="adaptive", top_k=3, max_depth=4, num_nodes=12)
    drafter = oracle_drafter(target, text)
    nodes = []
    for row_seconds in (0.0, 0.1, 1.0):
        engine = make_engine(target, drafter, profile=made_up_profile(EagleConfig(**options), node=row_seconds, level=0.0), **options)
        assert prompt + engine.generate(prompt, params)[0].token_ids == text
        steps = engine.sizes.num_steps
        nodes.append(sum(engine.shapes[i].num_nodes * count for i, count in steps.items()) / sum(steps.values()))
    assert nodes[0] > 10 and 3 < nodes[1] < 7 and nodes[2] < 2, nodes


@pytest.mark.parametrize("options", [TREES["chain"], dict(top_k=4, max_depth=6, num_nodes=60)], ids=["chain", "deep-tree"])
def test_a13_a_step_costs_one_launch_and_one_copy_whatever_the_tree(options):
    target, prompt = tiny_target("llama"), random_tokens(140, 9)
    engine, api = graphed(target, random_drafter(target), **options)
    api.events.clear()
    output = engine.generate(prompt, SamplingParams(**GREEDY, max_tokens=12))[0]
    steps = output.stats.steps + 1  # one was on its way when the host learnt that the answer had ended
    assert (api.events.count("replay"), api.events.count("copy"), api.events.count("wait"), len(api.events)) == (steps, steps, steps - 1, 3 * steps - 1)


def test_a15_acceptance_length_counts_the_bonus_token_and_steps_from_one():
    """A drafter that is always right emits max_depth + 1 tokens per step, one that is always wrong exactly one; the token of the prefill belongs to no step."""
    target, prompt = tiny_target("llama"), random_tokens(150, 6)
    params = SamplingParams(**GREEDY, max_tokens=1 + 4 * 6)
    text = prompt + plain_tokens(target, prompt, params)
    right = make_engine(target, oracle_drafter(target, text), **TREES["chain"]).generate(prompt, params)[0].stats
    assert (right.steps, right.acceptance_length, right.acceptance_by_depth) == (6, 4.0, [1.0, 1.0, 1.0])
    wrong = KnowingDrafter(target, lambda _token, position: torch.eye(VOCAB_SIZE)[(text[position + 1 if position + 1 < len(text) else 0] + 1) % VOCAB_SIZE])
    output = make_engine(target, wrong, **TREES["chain"]).generate(prompt, params)[0]
    assert (output.stats.steps, output.stats.acceptance_length, sum(output.stats.acceptance_by_depth)) == (24, 1.0, 0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a21_a_drafter_with_a_window_sees_what_is_near_and_nothing_else(kind):
    """A window of 6 over a context of 30: every draft is that of the plain forward with such a window, below the root too, and not that of the plain forward without."""
    target, prompt, params = tiny_target("llama", **FEW), few_tokens(159, 26), SamplingParams(temperature=1.0, seed=4, max_tokens=5)
    raw = CONFIGS[kind](target)
    tensors = random_tensors(raw)
    engine = make_engine(target, Drafter(parse_drafter_config(raw), tensors, target, max_positions=512, window=6), **BUSHY)
    (output,), _ = check_trees(engine, PlainDrafts(raw, tensors, "llama", window=6, **FEW), [prompt], params)
    assert output.token_ids == plain_tokens(target, prompt, params)
    with pytest.raises(AssertionError, match="position 26"):
        check_trees(engine, PlainDrafts(raw, tensors, "llama", **FEW), [prompt], params)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a22_every_draft_comes_from_true_features_of_what_was_accepted(kind):
    """Over steps that accept paths of several lengths: rows of rejected drafts and predicted features are gone from the drafter's cache."""
    trees = drafted_plainly(CONFIGS[kind], [few_tokens(160, 7)], SamplingParams(temperature=1.0, seed=4, max_tokens=20))
    assert len({len(tree.accepted_nodes) for tree in trees}) > 2


@pytest.mark.parametrize("kind", CONFIGS)
def test_a23_nodes_of_a_frontier_see_their_own_ancestors(kind):
    """Levels whose nodes all hang on one parent, and levels where they swap lanes: the first step's tree alone, wide and deep."""
    wide = dict(tree="dynamic", top_k=6, max_depth=4, num_nodes=40)
    tree = drafted_plainly(CONFIGS[kind], [few_tokens(161, 9)], SamplingParams(**GREEDY, max_tokens=2), tree=wide)[0]
    expanded = [[tree.parent[node] for node in range(1, 40) if tree.depth[node] == depth] for depth in (2, 3)]
    assert any(parents != sorted(set(parents)) for parents in expanded)


DRAFT_LOGITS = {
    "all-equal": lambda token, position: torch.zeros(VOCAB_SIZE),
    "nan": lambda token, position: torch.full((VOCAB_SIZE,), float("nan")),
    "one-sided": lambda token, position: 300.0 * torch.eye(VOCAB_SIZE)[(token + 1) % VOCAB_SIZE],  # log-probability 0: a child ties with its parent
    "half-nan": lambda token, position: torch.where(torch.arange(VOCAB_SIZE) % 2 == position % 2, float("nan"), torch.linspace(0.0, 1.0, VOCAB_SIZE)),
    "minus-infinity": lambda token, position: torch.full((VOCAB_SIZE,), -float("inf")),
}


@pytest.mark.parametrize("logits", DRAFT_LOGITS)
def test_a24_ties_and_nan_in_the_drafters_scores_leave_no_orphan(logits):
    target, prompt = tiny_target("llama"), random_tokens(170, 6)
    params, recorder = SamplingParams(**GREEDY, max_tokens=12), TreeRecorder()
    engine = make_engine(target, KnowingDrafter(target, DRAFT_LOGITS[logits]), tree="dynamic", top_k=4, max_depth=5, num_nodes=30)
    with engine.observing(recorder):
        output = engine.generate(prompt, params)[0]
    assert output.token_ids == plain_tokens(target, prompt, params)
    assert len(recorder.trees[output.request_id]) == output.stats.steps > 0
    for tree in recorder.trees[output.request_id]:
        check_shape(tree)


def test_a25_a_nodes_position_follows_its_own_depth():
    """The best of a pool whose levels are chosen unevenly: each node's position is the length plus its distance from the root."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        parents = [-1] * 4 + torch.cat([torch.randint(4 * level, 4 * level + 4, (4,), generator=generator).sort().values for level in range(4)]).tolist()
        scores = []
        for parent in parents:
            scores.append((scores[parent] if parent >= 0 else 0.0) - float(torch.rand((), generator=generator)))
        pool = DraftPool(torch.arange(20)[None], torch.tensor([scores]), torch.tensor([parents], dtype=torch.int32))
        tree = rerank(pool, torch.tensor([99]), torch.tensor([31], dtype=torch.int32), 9)
        paths = depths(tree.parent[0].tolist())
        assert tree.position_ids[0].tolist() == [31 + depth for depth in paths] and tree.depth[0].tolist() == paths
        for node in range(1, 9):
            parent = parents[int(tree.tokens[0, node])]
            assert int(tree.tokens[0, tree.parent[0, node]]) == (99 if parent < 0 else parent)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shared", [7, 8, 9, 15, 16, 17])
def test_a33_a_page_that_is_used_again_holds_no_pair_of_another_next_token(kind, shared):
    """Two prompts that part at, before or behind the edge of a page of 8: the second drafts as in an engine that has seen nothing, since the drafter's row i is made of token i + 1."""
    target = tiny_target("llama", **FEW)
    drafter, params = make_drafter(target, CONFIGS[kind](target)), SamplingParams(**GREEDY, max_tokens=5)
    first = few_tokens(175, 30)
    second = first[:shared] + [(first[shared] + 1) % FEW["vocab_size"]] + few_tokens(176, 4)
    warm, cold = (make_engine(target, drafter, page_size=8, **BUSHY) for _ in range(2))
    warm.generate(first, params)
    trees = []
    for engine in (warm, cold):
        recorder = TreeRecorder()
        with engine.observing(recorder):
            output = engine.generate(second, params)[0]
        assert output.token_ids == plain_tokens(target, second, params)
        trees.append(recorder.trees[output.request_id])
        found = output.stats.num_cached_tokens
        assert found == ((shared - 1) // 8 * 8 if engine is warm else 0)
    assert trees[0] == trees[1]


def test_a35_without_top_p_nothing_is_sorted():
    """A row of a real vocabulary costs many times less when top_p is off; measured 30 to 40 times."""
    logits, seconds = torch.randn(4, 64000), {}
    for top_p in (1.0, 0.999):
        parameters = neutral(4) | {"top_p": torch.full((4,), top_p)}
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            sample(logits, **parameters)
            best = min(best, time.perf_counter() - start)
        seconds[top_p] = best
    assert 4 * seconds[1.0] < seconds[0.999], seconds
