"""Faults that were reported about engines that run EAGLE, as catalogued in README.md: pages of the cache that are shared, found again and taken away. The number in a test's name is that of catalogue B."""

import pytest
from eagle_engine import SamplingParams
from plain_drafts import BUSHY, CONFIGS, FEW, TreeRecorder, few_tokens
from tiny_engines import TREES, bigram_drafter, make_drafter, make_engine, plain_tokens, random_drafter, tiny_target
from tiny_targets import random_tokens

GREEDY = dict(temperature=0.0)


def drafts_of(engine, prompts: list[list[int]], params: SamplingParams) -> tuple[list, list[list]]:
    """Outputs, and the trees of each."""
    recorder = TreeRecorder()
    with engine.observing(recorder):
        outputs = engine.generate(prompts, params)
    return outputs, [recorder.trees[output.request_id] for output in outputs]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("length", [20, 21, 22, 23])
def test_b08_after_a_prefix_hit_the_drafts_are_those_of_a_cold_run(kind, length):
    """The next turn of a conversation finds the prompt, written by a prefill, and the answer, written by steps that accepted and rejected drafts and that ends anywhere in a page: the same trees, score for
    score, as without."""
    target = tiny_target("llama", **FEW)
    drafter, params = make_drafter(target, CONFIGS[kind](target)), SamplingParams(temperature=1.0, seed=4, max_tokens=length)
    warm, cold = (make_engine(target, drafter, page_size=4, **BUSHY) for _ in range(2))
    prompt = few_tokens(600, 11)
    (first,), (trees,) = drafts_of(warm, [prompt], params)
    assert sum(len(tree.accepted_nodes) > 1 for tree in trees) > 2
    turn = prompt + first.token_ids + few_tokens(601, 3)
    (hit,), (warm_trees,) = drafts_of(warm, [turn], params)
    (missed,), (cold_trees,) = drafts_of(cold, [turn], params)
    assert hit.stats.num_cached_tokens >= 24 and missed.stats.num_cached_tokens == 0
    assert hit.token_ids == missed.token_ids == plain_tokens(target, turn, params) and warm_trees == cold_trees


def test_b09_a_request_that_lost_its_pages_drafts_on_as_if_nothing_had_been():
    """Too few pages for two: one is computed anew in the middle of its answer, the drafter's rows with the target's. Its trees from there on are those of an undisturbed run."""
    target = tiny_target("llama", **FEW)
    drafter, params = make_drafter(target, CONFIGS["eagle-3"](target)), SamplingParams(temperature=1.0, seed=4, max_tokens=40)
    prompts = [few_tokens(602 + i, 9) for i in range(2)]
    tight = make_engine(target, drafter, page_size=4, num_pages=24, enable_prefix_caching=False, **BUSHY)
    outputs, trees = drafts_of(tight, prompts, params)
    assert tight.scheduler.num_preemptions > 0
    for prompt, output, seen in zip(prompts, outputs, trees):
        (alone,), (expected,) = drafts_of(make_engine(target, drafter, page_size=4, **BUSHY), [prompt], params)
        assert output.token_ids == alone.token_ids == plain_tokens(target, prompt, params)
        # What is redone after a preemption starts from the last token that was emitted: every tree hangs on the same root at the same place.
        by_position = {tree.position: tree for tree in seen}
        same = [tree for tree in expected if tree.position in by_position]
        assert len(same) > 10 and all(by_position[tree.position] == tree for tree in same)


def test_b11_room_for_drafts_does_not_drive_prefixes_out():
    """Requests that may write a hundred tokens and wide trees, but end early: a pool that holds all their sequences, and one tree besides, still has each of them afterwards."""
    target = tiny_target("llama")
    prompts = [random_tokens(610 + i, 41) for i in range(5)]
    answers = [plain_tokens(target, prompt, SamplingParams(**GREEDY, max_tokens=3)) for prompt in prompts]
    options = dict(tree="dynamic", top_k=6, max_depth=3, num_nodes=40)
    drafter = random_drafter(target)
    engine = make_engine(target, drafter, page_size=4, num_pages=5 * 11 + 12, max_batch_size=1, **options)
    ends = [SamplingParams(**GREEDY, max_tokens=100, stop_token_ids=[answer[2]]) for answer in answers]
    for again in (False, True):
        for prompt, answer, params in zip(prompts, answers, ends):
            output = engine.generate(prompt, params)[0]
            assert output.token_ids == answer[: answer.index(answer[2]) + 1]
            assert output.stats.num_cached_tokens == (40 if again else 0)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 40])
def test_b27_a_drafter_costs_no_page_of_a_prefix(length):
    """A prompt asked again finds every full page before its last token, with a drafter as without: the token after the last page is known."""
    target, prompt, params = tiny_target("llama"), random_tokens(620, length), SamplingParams(**GREEDY, max_tokens=2)
    for drafter in (None, random_drafter(target)):
        engine = make_engine(target, drafter, page_size=16)
        found = [engine.generate(prompt, params)[0].stats.num_cached_tokens for _ in range(2)]
        assert found == [0, (length - 1) // 16 * 16]


def test_b45_pages_are_found_whoever_wrote_them():
    """By a prefill, or by the steps of an answer: a sequence has one key, so the same prompt finds the same rows."""
    target, prompt = tiny_target("llama"), random_tokens(630, 10)
    params = SamplingParams(**GREEDY, max_tokens=20)
    text = prompt + plain_tokens(target, prompt, params)
    drafter, found = bigram_drafter(target, [text], random_drafter(target)), []
    for written in (text[:29], prompt):
        engine = make_engine(target, drafter, page_size=4, **TREES["dynamic"])
        engine.generate(written, SamplingParams(**GREEDY, max_tokens=len(text) - len(written)))
        found.append(engine.generate(text[:26], SamplingParams(**GREEDY, max_tokens=1))[0].stats.num_cached_tokens)
    assert found == [24, 24]
