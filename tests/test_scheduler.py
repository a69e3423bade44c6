"""Requests that share steps, pages and beginnings: whatever happens to the others, each gets the tokens of its solo plain run."""

import gc

import pytest
import torch
from eagle_engine import SamplingParams
from eagle_engine.kv_cache import PagePool
from helpers import assert_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from test_step_graphs import graphed
from tiny_engines import DRAFTERS, TREES, bigram_drafter, first_draft, make_engine, plain_tokens, random_drafter, tiny_target
from tiny_targets import random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def run(engine, requests: dict) -> dict[int, list[int]]:
    """Drive the engine until everything has ended: tokens by request id."""
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
    assert engine.pages.num_held == 0
    return {name: outputs[request_id] for name, request_id in requests.items()}


# Prompts in pieces


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_long_prompt_comes_in_while_others_decode(captured):
    """A piece per step: the others emit in every one of these steps, and nobody's tokens change."""
    target = tiny_target("llama")
    drafter = random_drafter(target)
    engine = graphed(target, drafter, prefill_chunk=8)[0] if captured else make_engine(target, drafter, prefill_chunk=8)
    short, long = random_tokens(1, 5), random_tokens(2, 61)
    ids = {"short": engine.add_request(short, SamplingParams(temperature=0.0, max_tokens=60))}
    engine.step()
    request = engine.scheduler.running[0]
    ids["long"] = engine.add_request(long, GREEDY)
    pieces = 0
    while not any(one.request_id == ids["long"] for one in engine.scheduler.running):
        before = len(request.token_ids)
        engine.step()
        pieces += 1
        assert len(request.token_ids) > before
    assert pieces == 8
    outputs = run(engine, ids)
    assert outputs["short"] == plain_tokens(target, short, SamplingParams(temperature=0.0, max_tokens=60))
    assert outputs["long"] == plain_tokens(target, long, GREEDY)


def test_abort_in_the_middle_of_a_prompt_frees_its_pages():
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), prefill_chunk=4)
    first = engine.add_request(random_tokens(3, 5), GREEDY)
    engine.step()
    second = engine.add_request(random_tokens(4, 90), GREEDY)
    engine.step()
    assert engine.scheduler.prefilling.request_id == second
    assert engine.abort(second).finish_reason == "abort"
    assert run(engine, {"first": first})["first"] == plain_tokens(target, random_tokens(3, 5), GREEDY)


# Preemption


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("tree", ["plain", *TREES])
def test_preempted_requests_go_on_with_the_same_text(tree, captured):
    target = tiny_target("qwen3-tied")
    prompts = [random_tokens(10 + i, 9 + i) for i in range(6)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30) for i in range(6)]
    expected = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, params)]
    drafter = None if tree == "plain" else bigram_drafter(target, [prompt + text for prompt, text in zip(prompts, expected)], random_drafter(target))
    options = {} if tree == "plain" else TREES[tree]
    longest = 14 + 30 + 40  # rows of the longest request with its tree
    options = options | dict(page_size=4, num_pages=max(28, -(-longest // 4)), max_batch_size=4)
    engine = graphed(target, drafter, **options)[0] if captured else make_engine(target, drafter, **options)
    outputs = run(engine, {i: engine.add_request(prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params))})
    assert [outputs[i] for i in range(6)] == expected
    assert engine.scheduler.num_preemptions > 0


def test_the_latest_request_is_preempted_and_goes_on_first():
    target = tiny_target("llama")
    engine = make_engine(target, None, page_size=4, num_pages=14, max_batch_size=3, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ids = {i: engine.add_request(random_tokens(20 + i, 8), params) for i in range(4)}
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step()]
    assert engine.scheduler.num_preemptions > 0
    assert order == sorted(ids.values())


def test_a_preempted_request_knows_all_that_was_emitted(monkeypatch):
    """What a captured step on its way has emitted is delivered first: nothing is computed twice."""
    target = tiny_target("llama")
    prompts, params = [random_tokens(20 + i, 8) for i in range(4)], SamplingParams(temperature=0.0, max_tokens=24)
    engine = graphed(target, random_drafter(target), tree="chain", max_depth=3, page_size=4, num_pages=24, max_batch_size=3)[0]
    preempt, known = engine.scheduler.preempt, []

    def check(request) -> None:
        if request in engine.scheduler.running:
            slot = engine.scheduler.running.index(request)
            known.append((request.num_rows, int(engine.state.seq_lens[slot])))
        preempt(request)

    monkeypatch.setattr(engine.scheduler, "preempt", check)
    assert [output.token_ids for output in engine.generate(prompts, params)] == [plain_tokens(target, prompt, params) for prompt in prompts]
    assert known and all(host == device for host, device in known)


def test_preemption_keeps_what_was_recorded_of_the_logits():
    """Log-probabilities, counts of penalties and the place in a grammar are functions of the tokens: they survive."""
    target = tiny_target("llama")
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=30, logprobs=2, repetition_penalty=1.3, presence_penalty=0.5)
    prompts = [random_tokens(30 + i, 9) for i in range(4)]
    alone = [make_engine(target, None).generate([prompt], params)[0].outputs[0] for prompt in prompts]
    engine = make_engine(target, random_drafter(target), num_pages=24)
    shared = [output.outputs[0] for output in engine.generate(prompts, params)]
    assert engine.scheduler.num_preemptions > 0
    assert [one.token_ids for one in shared] == [one.token_ids for one in alone]
    assert [one.logprobs for one in shared] == [one.logprobs for one in alone]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("ending", ["length", "abort", "error"])
def test_a_request_that_has_ended_leaves_nothing_on_the_device(ending, captured):
    """However it ended, at once and not when Python next looks for circles: numbers per token of the vocabulary, and those of the prompt, would add up."""
    target = tiny_target("llama")
    change = dict(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=5) if ending == "error" else dict(logit_bias={3: 1.0})
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, repetition_penalty=1.2, presence_penalty=0.3, logprobs=1, **change)
    engine = graphed(target, random_drafter(target))[0] if captured else make_engine(target, random_drafter(target), enforce_eager=True)
    gc.collect()
    gc.disable()
    try:
        before = {id(one) for one in gc.get_objects() if type(one) is torch.Tensor}
        for seed in range(3):
            request_id = engine.add_request(random_tokens(60 + seed, 9), params)
            if ending == "abort":
                engine.step()
                assert engine.abort(request_id).outputs[0].logprobs
            reasons = []
            while engine.has_unfinished():
                reasons += [output.finish_reason for output in engine.step()]
            assert reasons == ([] if ending == "abort" else [ending])
        left = [tuple(one.shape) for one in gc.get_objects() if type(one) is torch.Tensor and id(one) not in before]
    finally:
        gc.enable()
    assert left == []


def test_requests_that_wait_hold_nothing_on_the_device():
    """New ones, however many, and those that were preempted: the room is that of those that run."""
    target = tiny_target("llama")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, repetition_penalty=1.2, presence_penalty=0.3, logit_bias={3: 1.0}, n=10)
    engine = make_engine(target, random_drafter(target), enforce_eager=True, num_pages=24, max_batch_size=3)
    expected = make_engine(target, None).generate([random_tokens(60, 9)], params)[0]
    gc.collect()
    before = {id(one) for one in gc.get_objects() if type(one) is torch.Tensor}

    def held() -> int:
        return sum(type(one) is torch.Tensor and id(one) not in before for one in gc.get_objects())

    engine.add_request(random_tokens(60, 9), params)
    assert held() == 0
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        at_work = len(engine.scheduler.running) + (engine.scheduler.prefilling is not None)
        assert held() <= 6 * at_work
    assert engine.scheduler.num_preemptions > 0
    assert [answer.token_ids for answer in outputs[0].outputs] == [answer.token_ids for answer in expected.outputs]


# Prefix reuse


@pytest.mark.parametrize("kind", DRAFTERS, ids=str)
@pytest.mark.parametrize("length", [31, 32, 33, 34])
def test_a_prefix_hit_gives_the_same_drafts_as_a_cold_run(kind, length):
    """Pages of 16, prompts around the edge: after a hit both caches and the whole draft pool are those of a cold run, as bytes."""
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = DRAFTERS[kind](target)
    prompt = random_tokens(40, length)
    warm, cold = (make_engine(target, drafter, page_size=16, **TREES["dynamic"]) for _ in range(2))
    warm.generate([prompt[:33] + random_tokens(41, 20)], GREEDY)
    pools = [first_draft(engine, prompt, GREEDY) for engine in (warm, cold)]
    found = warm.scheduler.running[0]._num_cached
    assert found == (16 if length < 33 else 32)  # the pair of row 31 is made of token 32
    assert cold.scheduler.running[0]._num_cached == 0
    for a, b in zip(*pools):
        assert_exact(a, b)
    for name in ("target_cache", "draft_cache"):
        rows = [getattr(engine.state, name)[:, :, engine.state.page_table[0].long()].flatten(2, 3)[:, :, : length - 1] for engine in (warm, cold)]
        assert_exact(rows[0].contiguous(), rows[1].contiguous())


def test_the_token_after_a_page_decides_whether_its_pairs_are_found():
    """The drafter's last pair of a page is made of the token after it: a prompt that differs there only must not get that page."""
    target = tiny_target("llama")
    drafter = random_drafter(target)
    first = random_tokens(42, 40)
    other = first[:16] + [(first[16] + 1) % 80] + first[17:]
    for candidate, found in ((drafter, 0), (None, 16)):
        engine = make_engine(target, candidate, page_size=16)
        engine.generate([first], GREEDY)
        output = engine.generate([other], GREEDY)[0]
        assert output.stats.num_cached_tokens == found
        assert output.token_ids == plain_tokens(target, other, GREEDY)


def test_answers_are_found_too():
    """The next turn of a conversation finds the rows of the answer before it, drafted ones among them."""
    target = tiny_target("llama")
    prompt = random_tokens(43, 20)
    answer = plain_tokens(target, prompt, GREEDY)
    drafter = bigram_drafter(target, [prompt + answer], random_drafter(target))
    engine = make_engine(target, drafter, page_size=4, **TREES["dynamic"])
    assert engine.generate([prompt], GREEDY)[0].token_ids == answer
    turn = prompt + answer + random_tokens(44, 5)
    output = engine.generate([turn], GREEDY)[0]
    assert output.stats.num_cached_tokens >= len(prompt) + len(answer) - 8
    assert output.token_ids == plain_tokens(target, turn, GREEDY)


def test_requests_that_run_together_share_the_pages_of_their_beginning():
    target = tiny_target("llama")
    shared = random_tokens(45, 33)
    prompts = [shared + random_tokens(46 + i, 3) for i in range(4)]
    engine = make_engine(target, random_drafter(target), page_size=4)
    outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [plain_tokens(target, prompt, GREEDY) for prompt in prompts]
    assert [output.stats.num_cached_tokens for output in outputs] == [0, 32, 32, 32]


def test_without_prefix_caching_nothing_is_found():
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), enable_prefix_caching=False)
    prompt = random_tokens(47, 40)
    outputs = [engine.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [output.stats.num_cached_tokens for output in outputs] == [0, 0]
    assert engine.pages.num_cached == 0


def test_a_hit_is_given_up_when_there_is_no_room_for_the_rest():
    """Pages that were held while the request was looked at are given back: the count of holders stays right."""
    target = tiny_target("llama")
    engine = make_engine(target, None, page_size=4, num_pages=20, max_batch_size=4)
    shared = random_tokens(48, 16)
    engine.generate([shared + [1]], SamplingParams(temperature=0.0, max_tokens=1))
    prompts = [shared + random_tokens(49 + i, 20) for i in range(4)]
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    assert [output.token_ids for output in outputs] == [plain_tokens(target, prompt, SamplingParams(temperature=0.0, max_tokens=20)) for prompt in prompts]
    assert engine.pages.num_held == 0 and engine.pages.num_free == 20


# The pool


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_the_pool_keeps_count_and_finds_only_what_was_registered(data):
    """Sequences over an alphabet of two begin, grow and end at random; contents are modelled as the tokens that a page's rows depend on."""
    size, lookahead = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1))
    pool = PagePool(data.draw(st.integers(3, 9)), size, lookahead)
    contents: dict[int, tuple] = {}  # page -> the whole text that its rows were made of
    running: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if running and data.draw(st.booleans()):
            text, pages = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if data.draw(st.booleans()):
                pool.register(text, pages, data.draw(st.integers(0, len(text) - lookahead)))
            pool.give_back(pages)
        else:
            text = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            found = pool.find(text)
            assert len(found) * size < len(text)
            for i, page in enumerate(found):
                assert contents[page] == tuple(text[: (i + 1) * size + lookahead])
            missing = pool.pages_for(len(text)) - len(found)
            if missing > pool.num_free:
                pool.give_back(found)
                continue
            pages = found + pool.take(missing)
            assert len(set(pages)) == len(pages)
            for other in running:
                assert not set(pages[len(found) :]) & set(other[1])
            for i in range(len(found), len(pages)):
                contents[pages[i]] = tuple(text[: (i + 1) * size + lookahead])
            running.append((text, pages))
        held = {page for _, pages in running for page in pages}
        assert pool.num_held == len(held) and pool.num_free == pool.num_pages - len(held)
    for _, pages in running:
        pool.give_back(pages)
    assert pool.num_held == 0 and sorted(pool.take(pool.num_pages)) == list(range(pool.num_pages))


def test_the_longest_unused_page_goes_first_and_of_a_sequence_its_last():
    pool = PagePool(6, 2)
    first, second = pool.take(3), pool.take(3)
    pool.register([1, 2, 3, 4, 5, 6], first, 6)
    pool.register([7, 8, 9, 10, 11, 12], second, 6)
    pool.give_back(first)
    pool.give_back(second)
    assert pool.num_cached == 6
    taken = pool.take(2)
    assert taken == [first[2], first[1]]
    pool.give_back(taken)
    assert pool.find([1, 2, 3, 4, 5, 6, 0]) == first[:1]
    assert pool.find([7, 8, 9, 10, 11, 12, 0]) == second


def test_a_page_that_is_given_back_too_often_is_noticed():
    pool = PagePool(2, 4)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.give_back(pages)
