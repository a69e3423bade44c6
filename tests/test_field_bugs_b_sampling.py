"""Faults that were reported about engines that run EAGLE, as catalogued in README.md: which token is drawn, and where an answer ends. The number in a test's name is that of catalogue B."""

import itertools

import pytest
import torch
from eagle_engine import SamplingParams
from eagle_engine.tokenizer import Tokenizer
from eagle_kernels import accept_rejection, draw_children, linear, pack_weight, unpack_weight
from helpers import assert_exact
from plain_drafts import BUSHY, CONFIGS, FEW, TreeRecorder, few_tokens, path_tokens
from test_sample import LEVEL, chi_square_pvalue, neutral
from tiny_engines import TREES, bigram_drafter, make_drafter, make_engine, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import VOCAB_SIZE, empty_cache, random_tokens
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers import models

GREEDY = dict(temperature=0.0)


@pytest.mark.parametrize("options", [TREES["dynamic"], TREES["static"], TREES["chain"], TREES["static"] | dict(acceptance="rejection")], ids=["dynamic", "static", "chain", "rejection"])
def test_b02_min_p_of_one_is_greedy(options):
    """At a high temperature too: the filter is applied to every row that a step verifies."""
    target, prompt = tiny_target("llama"), random_tokens(400, 6)
    greedy = plain_tokens(target, prompt, SamplingParams(**GREEDY, max_tokens=24))
    for drafter in (random_drafter(target), oracle_drafter(target, prompt + greedy)):
        outputs = make_engine(target, drafter, **options).generate([prompt] * 3, [SamplingParams(temperature=3.0, min_p=1.0, seed=seed, max_tokens=24) for seed in range(3)])
        assert [output.token_ids for output in outputs] == [greedy] * 3


@pytest.mark.parametrize("kind", CONFIGS)
def test_b03_sampling_is_not_arg_max(kind):
    """The third token of 600 answers, drawn at the root or at a node below it, has the target's distribution over all beginnings; the likeliest one is drawn far from always."""
    target, prompt, count = tiny_target("llama", **FEW), few_tokens(401, 5), 600
    engine = make_engine(target, make_drafter(target, CONFIGS[kind](target)), max_batch_size=200, max_model_len=24, **BUSHY)
    outputs = engine.generate([prompt] * count, [SamplingParams(temperature=1.5, seed=seed, max_tokens=3) for seed in range(count)])
    drawn = torch.tensor([output.token_ids for output in outputs])
    assert sum(output.stats.steps == 1 for output in outputs) > 60  # there the third token was drawn below the root
    tokens = range(FEW["vocab_size"])
    (first,), second = following(target, [prompt], 1.5), following(target, [[*prompt, a] for a in tokens], 1.5)
    third = following(target, [[*prompt, a, b] for a in tokens for b in tokens], 1.5)
    assert chi_square_pvalue(drawn[:, 0], first) > LEVEL and 0.2 < first.max() < 0.9
    assert chi_square_pvalue(drawn[:, 2], (first[:, None] * second).flatten() @ third) > LEVEL


def following(target, texts: list[list[int]], temperature: float) -> torch.Tensor:
    """The target's distributions [texts, V] after texts of one length, in float64 of its own logits."""
    cache = empty_cache(target.config, batch=len(texts))
    positions = torch.arange(len(texts[0])).expand(len(texts), -1).contiguous()
    features = target.forward(torch.tensor(texts), positions, cache.kv, cache.seq_lens, cache.page_table)
    return (target.logits(features[:, -1]).double() / temperature).softmax(-1)


# The text of this answer is known, so where it has to be cut is known without asking an engine.
PROMPT = random_tokens(402, 8)
PARAMS = dict(temperature=3.0, seed=8, ignore_eos=True, max_tokens=24)


def known_answer() -> tuple[object, list[int]]:
    target = tiny_target("llama")
    return target, plain_tokens(target, PROMPT, SamplingParams(**PARAMS))


def pieces_tokenizer() -> Tokenizer:
    """A piece of one to three letters for each token."""
    pieces = [a + b + c for a, b, c in itertools.product("abcd", ["", "a", "b", "e"], ["", "a", "c", "b", "f", "g"])]
    return Tokenizer(worded(list(dict.fromkeys(pieces))[:VOCAB_SIZE]), None, {}, ())


def worded(pieces: list[str]) -> Backend:
    """A tokenizer of given pieces, whose texts are written one after the other."""
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    backend.decoder = decoders.Fuse()
    return backend


def test_b15_a_stop_string_early_in_an_accepted_run_is_found():
    """Runs of up to seven tokens: every string of one to four characters of the text, wherever it ends in its run, cuts where the text first has it."""
    (target, answer), tokenizer = known_answer(), pieces_tokenizer()
    engine = make_engine(target, oracle_drafter(target, PROMPT + answer), tokenizer, tree="chain", max_depth=6)
    whole = tokenizer.decode(answer)
    assert len(whole) > 24
    for start, length in itertools.product(range(20), (1, 2, 4)):
        stop = whole[start : start + length]
        output = engine.generate(PROMPT, SamplingParams(**PARAMS, stop=stop))[0]
        assert (output.text, output.finish_reason, output.stop_reason) == (whole[: whole.find(stop)], "stop", stop)
        # As many tokens as it takes to write the string, and no more.
        texts = [tokenizer.decode(answer[:n]) for n in range(len(answer) + 1)]
        assert output.token_ids == answer[: next(n for n, text in enumerate(texts) if stop in text)]


@pytest.mark.parametrize("others", [0, 8])
def test_b17_nothing_behind_an_end_token_is_emitted_or_counted(others):
    """An end token at every depth of an accepted run: tokens, steps, acceptance length and the stream all end with it; alone, and as one of more end tokens than a step looks for."""
    target, answer = known_answer()
    params = SamplingParams(**(PARAMS | dict(ignore_eos=False)))
    unused = [token for token in range(VOCAB_SIZE) if token not in answer][:others]
    ends = [i for i, token in enumerate(answer) if token not in answer[:i] and token > max(unused, default=-1)]
    assert {(i - 1) % 5 for i in ends if i} == set(range(5))
    for end in ends:
        engine = make_engine(target, oracle_drafter(target, PROMPT + answer), eos=(answer[end], *unused), tree="chain", max_depth=4)
        output = engine.generate(PROMPT, params)[0]
        assert (output.token_ids, output.finish_reason) == (answer[: end + 1], "stop")
        assert output.stats.steps == -(-end // 5)
        assert output.stats.acceptance_length * output.stats.steps == pytest.approx(end)
        assert [token for piece in engine.stream(PROMPT, params) for token in piece.token_ids] == answer[: end + 1]


def test_b33_a_seed_fixes_the_text_and_no_seed_shares_its_draws():
    """Alone, in a batch, in another order, beside requests without a seed: the same text; two requests without one differ, from each other and from the next run."""
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), **TREES["dynamic"])
    prompts = [random_tokens(403 + i, 4 + i) for i in range(3)]
    seeded = [SamplingParams(temperature=2.0, seed=5 + i, max_tokens=20) for i in range(3)]
    alone = [engine.generate(prompt, params)[0].token_ids for prompt, params in zip(prompts, seeded)]
    free = SamplingParams(temperature=2.0, max_tokens=20)
    forward, backward = engine.generate([*prompts, prompts[0]], [*seeded, free]), engine.generate([prompts[0], *prompts[::-1]], [free, *seeded[::-1]])
    assert [output.token_ids for output in forward[:3]] == [output.token_ids for output in backward[:0:-1]] == alone
    unseeded = [tuple(output.token_ids) for _ in range(2) for output in engine.generate([prompts[0]] * 3, free)] + [tuple(forward[3].token_ids), tuple(backward[0].token_ids)]
    assert len(set(unseeded)) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b34_near_ties_fall_the_same_way_one_row_at_a_time_and_many(dtype):
    """A head whose rows come in pairs that differ by a rounding error: arg-max is decided by the last bit, for one row as for all rows of a tree."""
    whole = tiny_target("llama", dtype=dtype)
    target = object.__new__(type(whole))
    target.__dict__.update(whole.__dict__)
    weight = unpack_weight(whole.head).float()
    weight[1:82:2] = weight[0:81:2] * (1 + 1e-7)  # equal, or one unit away
    noisy = weight + torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 1e-7
    target.head = pack_weight(noisy.to(dtype))
    prompt, params = random_tokens(404, 9), SamplingParams(**GREEDY, max_tokens=40)
    answer = plain_tokens(target, prompt, params)
    for drafter in (bigram_drafter(target, [prompt + answer]), random_drafter(target)):
        assert make_engine(target, drafter, **TREES["dynamic-wide"]).generate(prompt, params)[0].token_ids == answer
    rows = torch.randn(17, 48)
    assert_exact(linear(rows, target.head), torch.cat([linear(rows[m : m + 1], target.head) for m in range(17)]))


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_b37_every_node_is_judged_by_its_own_logits(temperature):
    """The token that a step draws at a node, accepted or not, is the one that plain decoding draws after that node's path with the same seed."""
    target, prompt = tiny_target("llama", **FEW), few_tokens(405, 6)
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=9, max_tokens=5)
    engine, recorder = make_engine(target, random_drafter(target), **BUSHY), TreeRecorder()
    with engine.observing(recorder):
        output = engine.generate(prompt, params)[0]
    text, one = prompt + output.token_ids, SamplingParams(temperature=temperature, top_p=0.95, seed=9, max_tokens=1)
    plain, checked = make_engine(target, None), set()
    for tree in recorder.trees[output.request_id]:
        paths = [[*text[: tree.position + 1], *path_tokens(tree, node)] for node in range(len(tree.tokens))]
        assert [answer.token_ids for answer in plain.generate(paths, one)] == [[token] for token in tree.sampled]
        checked |= set(tree.sampled)
    assert len(checked) > 3


def test_b40_rejection_of_several_siblings_gives_the_targets_distribution():
    """Two and three children drawn without replacement from a drafter that is far off: the emitted token follows the target, and where a token cannot be, it never is."""
    rows, seeds = 20000, torch.arange(20000)
    p, q = torch.tensor([0.05, 0.5, 0.0, 0.3, 0.15]), torch.tensor([0.5, 0.1, 0.25, 0.1, 0.05])
    for count in (2, 3):
        parameters = neutral(rows) | dict(positions=torch.full((rows,), 11))
        children = draw_children(q.log().expand(rows, -1).contiguous(), **parameters, count=count)
        tokens = torch.cat((torch.zeros(rows, 1, dtype=torch.int64), children), 1)
        parent = torch.tensor([[-1] + [0] * count], dtype=torch.int32).expand(rows, -1).contiguous()
        probs = [x.expand(rows, count + 1, -1).contiguous() for x in (p, q)]
        accepted = accept_rejection(tokens, parent, *probs, seeds, parameters["positions"], torch.ones(rows, dtype=torch.bool), 1)
        drafted = accepted.num_accepted_drafts == 1
        emitted = torch.where(drafted, tokens.gather(1, accepted.accepted_nodes[:, 1:].clamp(min=0).long())[:, 0], accepted.bonus_token)
        assert chi_square_pvalue(emitted, p) > LEVEL
        assert drafted.float().mean() > 0.6 + 0.1 * (count == 3)


def added_tokens_tokenizer() -> Tokenizer:
    """Pieces up to id 69, two added tokens behind them, one of them special, and no piece for the ids that the target's vocabulary has beyond: 71 of 75."""
    backend = worded(["<unk>", "</s>"] + [chr(0x4E00 + i) for i in range(67)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.add_special_tokens(["<end>", "<unk>", "</s>"])
    return Tokenizer(backend, None, {"eos_token": "</s>"}, (1,))


def test_b41_odd_vocabularies_and_added_tokens():
    """A target of 75 tokens, a tokenizer of 71: text comes as the tokenizer writes it, streamed or whole, and ids without a piece do no harm."""
    target, tokenizer, prompt = tiny_target("llama", vocab_size=75), added_tokens_tokenizer(), [3, 4, 69]
    params = SamplingParams(temperature=5.0, seed=3, max_tokens=60, ignore_eos=True)
    expected = plain_tokens(target, prompt, params)
    assert {69, 70} <= set(expected) and max(expected) > 70
    engine = make_engine(target, bigram_drafter(target, [prompt + expected]), tokenizer, **TREES["dynamic-wide"])
    output = engine.generate(prompt, params)[0]
    pieces = {2 + i: chr(0x4E00 + i) for i in range(67)} | {69: "<tool>"}
    assert output.token_ids == expected and output.stats.acceptance_length > 1.5
    assert output.text == "".join(pieces.get(token, "") for token in expected)
    assert "".join(piece.text for piece in engine.stream(prompt, params)) == output.text


@pytest.mark.parametrize("tree", TREES)
def test_b42_temperature_zero_is_greedy_whatever_else_is_set(tree):
    target, prompt = tiny_target("llama"), random_tokens(406, 7)
    greedy = plain_tokens(target, prompt, SamplingParams(**GREEDY, max_tokens=30))
    drafter = bigram_drafter(target, [prompt + greedy])
    params = [SamplingParams(**GREEDY, max_tokens=30, **options) for options in ({}, dict(top_p=0.3, seed=1), dict(top_k=2, min_p=0.9), dict(top_k=50, top_p=0.99, seed=-7))]
    outputs = make_engine(target, drafter, **TREES[tree]).generate([prompt] * 4, params)
    assert [output.token_ids for output in outputs] == [greedy] * 4 and outputs[0].stats.acceptance_length > 1.5
