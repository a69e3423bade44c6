"""Parameters that change the logits: each against an independent implementation, and each on trees the same as in plain decoding."""

from functools import cache

import pytest
import torch
from eagle_engine import EagleError, SamplingParams, StructuredOutputs
from eagle_engine.logits_processing import LogitsProcessor, bad_words
from eagle_engine.structured_outputs import Grammars
from eagle_engine.tokenizer import Tokenizer
from eagle_kernels import reference
from helpers import assert_exact, parents_strategy
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import TREES, bigram_drafter, make_engine, random_drafter, tiny_target
from tiny_targets import VOCAB_SIZE, empty_cache, prefill, random_tokens
from tiny_tokenizers import EOS, character_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

PROMPT = random_tokens(40, 8)
SAMPLING = {"greedy": dict(temperature=0.0), "sampled": dict(temperature=1.2, top_k=40, top_p=0.95, seed=7)}
LENGTH = 30
CHANGES = {
    "repetition_penalty": dict(repetition_penalty=1.4),
    "presence_penalty": dict(presence_penalty=1.8),
    "presence_reward": dict(presence_penalty=-1.5),
    "frequency_penalty": dict(frequency_penalty=0.9),
    "frequency_reward": dict(frequency_penalty=-0.6),
    "logit_bias": dict(logit_bias={8: -100.0, 55: 2.5, 30: 1.5}),
    "min_tokens": dict(min_tokens=22, stop_token_ids=list(range(3, 60)), ignore_eos=False),
    "bad_words": dict(bad_words=["I", "UUU", "S(S(", "EuU", "A", "1k", "M7"]),
    "allowed_token_ids": dict(allowed_token_ids=list(range(5, 60, 3))),
    "everything": dict(
        repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={55: 2.0, 9: -3.0}, min_tokens=9, stop_token_ids=[30, 31, 32, 33], bad_words=["I", "UU", "Ay"],
        allowed_token_ids=list(range(2, 70)), ignore_eos=False,
    ),
}  # fmt: skip
# What a draft changes for the drafts below it; the others are the same at every place.
DEPEND_ON_THE_PATH = [name for name in CHANGES if name not in ("logit_bias", "allowed_token_ids")]


def params_of(change: str, sampling: str) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=LENGTH, ignore_eos=True) | SAMPLING[sampling] | CHANGES.get(change, {})))


def tokens_of(drafter, params: SamplingParams, **options) -> list[int]:
    engine = make_engine(tiny_target("llama"), drafter, character_tokenizer(), eos=(EOS,), **options)
    output = engine.generate([PROMPT], params)[0]
    assert output.error is None and engine.pages.num_free == engine.pages.num_pages
    return output.token_ids


@cache
def plain_answer(change: str, sampling: str) -> list[int]:
    return tokens_of(None, params_of(change, sampling))


def simple_answer(params: SamplingParams) -> list[int]:
    """Plain decoding in a few lines: the whole sequence again for each token, logits changed by transformers' processors where there are any."""
    target, tokenizer = tiny_target("llama"), character_tokenizer()
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    banned = [tokenizer.encode(word) for word in params.bad_words]
    text = list(PROMPT)
    while len(text) - len(PROMPT) < params.max_tokens:
        answer = text[len(PROMPT) :]
        logits = target.logits(prefill(target, empty_cache(target.config), text)[-1:]).clone()
        every, own = torch.tensor([text]), torch.tensor([[0] + answer])  # <unk> is in no bad word
        if params.allowed_token_ids is not None:
            logits[0, [token for token in range(VOCAB_SIZE) if token not in params.allowed_token_ids]] = -torch.inf
        if banned:
            logits = NoBadWordsLogitsProcessor(banned, eos_token_id=None)(own, logits)
        changes = LogitsProcessorList()
        if params.min_tokens:
            changes.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, sorted(ends), device="cpu"))
        if params.logit_bias:
            changes.append(SequenceBiasLogitsProcessor({(token,): value for token, value in params.logit_bias.items()}))
        if params.repetition_penalty != 1.0:
            changes.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        logits = changes(every, logits)
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=VOCAB_SIZE)
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        row = [torch.tensor([value], dtype=dtype) for value, dtype in ((params.temperature, torch.float32), (max(params.top_k, 0), torch.int32), (params.top_p, torch.float32), (0.0, torch.float32))]
        text.append(int(reference.sample(logits, *row, torch.tensor([params.seed or 0]), torch.tensor([len(text)]))[0]))
        if text[-1] in ends:
            break
    return text[len(PROMPT) :]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("change", CHANGES)
def test_plain_decoding_is_that_of_an_independent_implementation(change, sampling):
    plain = plain_answer(change, sampling)
    assert plain == simple_answer(params_of(change, sampling))
    without = SamplingParams(**(dict(max_tokens=LENGTH, ignore_eos=True) | SAMPLING[sampling] | {name: CHANGES[change][name] for name in ("stop_token_ids", "ignore_eos") if name in CHANGES[change]}))
    assert plain != simple_answer(without), "the parameter changes nothing here, so nothing is tested"


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("change", CHANGES)
def test_speculative_equals_plain(change, tree, sampling):
    target, params, expected = tiny_target("llama"), params_of(change, sampling), plain_answer(change, sampling)
    assert tokens_of(random_drafter(target), params, **TREES[tree]) == expected
    engine = make_engine(target, bigram_drafter(target, [PROMPT + expected]), character_tokenizer(), eos=(EOS,), **TREES[tree])
    output = engine.generate([PROMPT], params)[0]
    assert output.token_ids == expected
    assert output.stats.acceptance_length > 1.3, "hardly a draft was accepted, so the rows below the root were not tested"


@pytest.mark.parametrize("change", DEPEND_ON_THE_PATH)
def test_changes_that_are_frozen_over_the_tree_are_noticed(change, monkeypatch):
    """A planted fault: every node gets what the root gets."""
    right = LogitsProcessor.sample_arguments
    monkeypatch.setattr(
        LogitsProcessor, "sample_arguments", lambda self, tokens, parent: {name: value.expand(len(tokens), *value.shape[1:]).contiguous() for name, value in right(self, [-1], [-1]).items()}
    )
    target = tiny_target("llama")
    different = 0
    for sampling in SAMPLING:
        expected = plain_answer(change, sampling)
        for tree in TREES.values():
            different += tokens_of(bigram_drafter(target, [PROMPT + expected]), params_of(change, sampling), **tree) != expected
    assert different > 0


WORDS = ["a", "bc", "cab", "bb", "abca"]
EVERYTHING = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 2.0, 11: -100.0}, min_tokens=7, bad_words=WORDS, allowed_token_ids=list(range(2, 40))
)


def processor_of(params: SamplingParams) -> LogitsProcessor:
    grammar = None
    if params.structured_outputs is not None:
        grammar = Grammars(character_tokenizer(), VOCAB_SIZE, (EOS,)).compile(params.structured_outputs)
    return LogitsProcessor(PROMPT, params, VOCAB_SIZE, [EOS, 30], grammar, character_tokenizer(), torch.device("cpu"))


@given(data=st.data(), parents=parents_strategy(16))
def test_rows_of_a_tree_are_those_of_its_paths(data, parents):
    """Every node of any tree, after any answer: what the processor says is what a fresh one says that was brought to the node's path token by token, or at once."""
    letters = st.sampled_from(character_tokenizer().encode("abc"))
    emitted = data.draw(st.lists(letters, max_size=8))
    tokens = [-1] + [data.draw(letters | st.just(-1)) for _ in parents[1:]]
    tree = processor_of(EVERYTHING)
    tree.update(emitted)
    arguments = tree.sample_arguments(tokens, parents)
    assert {name: tuple(value.shape) for name, value in arguments.items()} == {name: (len(parents), VOCAB_SIZE) for name in ("logit_bias", "output_counts", "prompt_mask")} | {
        name: (len(parents),) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    }
    for node in range(len(parents)):
        path, at = [], node
        while at > 0:
            path.append(tokens[at])
            at = parents[at]
        if -1 in path:
            continue
        fresh = processor_of(EVERYTHING)
        for end in range(len(emitted) + len(path) + 1) if data.draw(st.booleans()) else [len(emitted) + len(path)]:
            fresh.update((emitted + path[::-1])[:end])
        for name, value in fresh.sample_arguments([-1], [-1]).items():
            assert_exact(arguments[name][node : node + 1], value)


def test_what_is_off_costs_nothing():
    assert processor_of(SamplingParams(logprobs=3)).sample_arguments([-1, 5], [-1, 0]) == {}
    assert set(processor_of(SamplingParams(presence_penalty=1.0)).sample_arguments([-1, 5], [-1, 0])) == {"presence_penalty", "output_counts"}
    assert set(processor_of(SamplingParams(logit_bias={3: 1.0})).sample_arguments([-1, 5], [-1, 0])) == {"logit_bias"}
    early = processor_of(SamplingParams(min_tokens=2))
    assert set(early.sample_arguments([-1, 5], [-1, 0])) == {"logit_bias"}
    early.update([5, 6])
    assert early.sample_arguments([-1, 5], [-1, 0]) == {}


@pytest.mark.parametrize("tree", TREES)
def test_requests_with_and_without_changes_side_by_side(tree):
    """More requests than slots, so that they move and leave; each gets its solo answer."""
    names = [None, "bad_words", "everything", None, "repetition_penalty", None, None, "min_tokens", "frequency_reward"]
    target, tokenizer = tiny_target("llama"), character_tokenizer()
    params = [
        SamplingParams(**(dict(max_tokens=6 + 5 * (i % 4), ignore_eos=True) | SAMPLING["sampled" if i % 2 else "greedy"] | ({} if name is None else CHANGES[name] | dict(min_tokens=0)) | dict(seed=i)))
        for i, name in enumerate(names)
    ]
    prompts = [random_tokens(60 + i, 3 + i) for i in range(len(names))]
    plain = make_engine(target, None, tokenizer, eos=(EOS,), max_batch_size=1)
    expected = [plain.generate([prompt], param)[0].token_ids for prompt, param in zip(prompts, params)]
    for drafter in (random_drafter(target), bigram_drafter(target, [prompt + answer for prompt, answer in zip(prompts, expected)])):
        engine = make_engine(target, drafter, tokenizer, eos=(EOS,), max_batch_size=4, **TREES[tree])
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected


def test_stop_strings_are_looked_for_after_min_tokens():
    target, tokenizer = tiny_target("llama"), character_tokenizer()
    base = dict(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    whole = make_engine(target, None, tokenizer).generate([PROMPT], SamplingParams(**base))[0].text
    stop = whole[2]
    late = whole.index(stop, 3)
    for drafter in (None, bigram_drafter(target, [PROMPT + plain_answer("none", "greedy")])):
        engine = make_engine(target, drafter, tokenizer)
        assert engine.generate([PROMPT], SamplingParams(**base, stop=stop, min_tokens=2))[0].text == whole[:2]
        assert engine.generate([PROMPT], SamplingParams(**base, stop=stop, min_tokens=3))[0].text == whole[:late]


def test_bad_words_after_a_space_are_other_tokens():
    vocab = {piece: i for i, piece in enumerate(["a", "b", "Ġ", "Ġa", "ba"])}
    backend = Backend(models.BPE(vocab, [("Ġ", "a"), ("b", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(backend, None, {}, ())
    assert bad_words(SamplingParams(bad_words=["ab", "  b", "aba"]), tokenizer, 5) == [[0, 1], [3, 1], [1], [0, 4], [3, 4]]
    with pytest.raises(EagleError, match="bad_words: 'ab' has no tokens in the model's vocabulary"):
        bad_words(SamplingParams(bad_words=["ab"]), tokenizer, 1)


def test_parameters_that_ban_everything_end_their_own_request_only():
    target, tokenizer = tiny_target("llama"), character_tokenizer()
    token = tokenizer.encode("a")[0]
    params = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), SamplingParams(max_tokens=5, allowed_token_ids=[token], bad_words=["aa"])]
    for drafter in (None, random_drafter(target)):
        fine, banned = make_engine(target, drafter, tokenizer, eos=(EOS,)).generate([PROMPT, PROMPT], params)
        assert fine.finish_reason == "length" and len(fine.token_ids) == 5
        assert (banned.finish_reason, banned.token_ids) == ("error", [token])
        assert banned.error == f"the sampling parameters ban every token at position {len(PROMPT) + 1} (allowed_token_ids, bad_words)"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(repetition_penalty=0), "repetition_penalty"), (dict(repetition_penalty=-1.0), "repetition_penalty"), (dict(repetition_penalty=True), "repetition_penalty"),
        (dict(presence_penalty=2.5), "presence_penalty: expected a number from -2 to 2"), (dict(frequency_penalty=-3), "frequency_penalty"), (dict(frequency_penalty="x"), "frequency_penalty"),
        (dict(logit_bias=[1]), "logit_bias: expected a dict"), (dict(logit_bias={-1: 0.0}), "logit_bias"), (dict(logit_bias={"5": 0.0}), "logit_bias"), (dict(logit_bias={5: 101}), "-100 to 100"),
        (dict(logit_bias={5: float("-inf")}), "logit_bias"), (dict(min_tokens=-1), "min_tokens"), (dict(min_tokens=6, max_tokens=5), "min_tokens: expected at most max_tokens 5"),
        (dict(bad_words="ab"), "bad_words"), (dict(bad_words=["a", " "]), "bad_words"), (dict(bad_words=[5]), "bad_words"), (dict(allowed_token_ids=[]), "allowed_token_ids"),
        (dict(allowed_token_ids=7), "allowed_token_ids"), (dict(allowed_token_ids=[1.5]), "allowed_token_ids"), (dict(logprobs=21), "logprobs"), (dict(logprobs=True), "logprobs"), (dict(logprobs=-1), "logprobs"),
        (dict(prompt_logprobs=21), "prompt_logprobs"), (dict(n=0), "n: expected"), (dict(n=2, temperature=0.0), "n: expected 1 with temperature 0"), (dict(structured_outputs="a+"), "structured_outputs"),
        (dict(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True), "leave out ignore_eos"), (dict(structured_outputs=StructuredOutputs(regex="a"), min_tokens=3), "leave out min_tokens"),
        (dict(structured_outputs=StructuredOutputs(regex="a"), allowed_token_ids=[3]), "leave out allowed_token_ids"),
    ],
)  # fmt: skip
def test_bad_values_are_named(options, message):
    with pytest.raises(EagleError, match=message):
        SamplingParams(**options)


def test_what_an_engine_cannot_serve_ends_alone():
    target = tiny_target("llama")
    fine = SamplingParams(temperature=0.0, max_tokens=4)
    asked = [
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), f"logit_bias: expected token ids from 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
        (SamplingParams(allowed_token_ids=[3, 900]), "allowed_token_ids: expected token ids from 0 to"),
        (SamplingParams(bad_words=["a"]), "bad_words need a tokenizer"),
        (SamplingParams(structured_outputs=StructuredOutputs(regex="a")), "structured_outputs need a tokenizer"),
    ]
    outputs = make_engine(target, random_drafter(target)).generate([PROMPT] * 5, [*(params for params, _ in asked), fine])
    for output, (_, message) in zip(outputs, asked):
        assert output.finish_reason == "error" and message in output.error
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("options", [*({name: value} for change in list(CHANGES.values())[:-1] for name, value in change.items() if name not in ("stop_token_ids", "ignore_eos")), dict(structured_outputs=StructuredOutputs(regex="a")), dict(logprobs=0), dict(prompt_logprobs=1)], ids=lambda options: next(iter(options)))  # fmt: skip
def test_rejection_sampling_refuses_by_name(options):
    target = tiny_target("llama")
    params = SamplingParams(max_tokens=LENGTH, **options)
    engine = make_engine(target, random_drafter(target), character_tokenizer(), tree="chain", acceptance="rejection")
    with pytest.raises(EagleError, match=f'{next(iter(options))}: not with acceptance "rejection"'):
        engine.add_request(PROMPT, params)
    assert not engine.has_unfinished()
    assert engine.plain().generate([PROMPT], params)[0].finish_reason in ("length", "stop")
