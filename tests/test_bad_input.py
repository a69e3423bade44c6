"""What a caller can get wrong: it is named before anything starts, and ends alone."""

import pytest
import torch
from eagle_engine import EagleConfig, EagleError, Engine, SamplingParams
from eagle_engine.tokenizer import Tokenizer
from test_engine import GREEDY, PROMPT, engines, tiny_tokenizer
from tiny_engines import make_engine, plain_tokens, random_drafter, tiny_target
from tiny_targets import VOCAB_SIZE


def test_bad_prompts_end_alone():
    engine = engines()["speculative"]
    params = SamplingParams(**GREEDY, max_tokens=5)
    outputs = engine.generate([PROMPT, [], [VOCAB_SIZE], [-1], list(range(60)) * 4, "ab", PROMPT], params)
    messages = [output.error or "" for output in outputs]
    assert "empty" in messages[1]
    assert f"0 to {VOCAB_SIZE - 1}" in messages[2] and str(VOCAB_SIZE) in messages[2]
    assert "-1" in messages[3]
    assert "240 tokens" in messages[4] and "max_model_len 200" in messages[4]
    assert [output.finish_reason for output in outputs][1:5] == ["error"] * 4
    assert outputs[0].token_ids == outputs[6].token_ids and len(outputs[0].token_ids) == 5
    assert engine.generate([""], params)[0].error is not None
    assert "surrogate" in engine.generate(["ab\ud800"], params)[0].error


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(temperature=-1), "temperature"), (dict(temperature=float("nan")), "temperature"), (dict(temperature=1e-9), "temperature"), (dict(temperature="hot"), "temperature"),
        (dict(top_p=0.0), "top_p"), (dict(top_p=1.5), "top_p"), (dict(min_p=-0.1), "min_p"), (dict(min_p=2), "min_p"), (dict(top_k=-2), "top_k"), (dict(top_k=1.5), "top_k"),
        (dict(max_tokens=0), "max_tokens"), (dict(max_tokens=True), "max_tokens"), (dict(stop=""), "stop"), (dict(stop=["a", ""]), "stop"), (dict(stop_token_ids=[-1]), "stop_token_ids"),
        (dict(seed=2**63), "seed"), (dict(seed="x"), "seed"), (dict(stop=5), "stop: expected a list"), (dict(stop_token_ids=5), "stop_token_ids: expected a list"), (dict(bad_words=5), "bad_words: expected a list"),
    ],
)  # fmt: skip
def test_bad_sampling_values_are_named(options, message):
    with pytest.raises(EagleError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tree="bush"), "tree"), (dict(acceptance="maybe"), "acceptance"), (dict(top_k=0), "top_k"), (dict(max_depth=0), "max_depth"), (dict(num_nodes=300), "num_nodes"),
        (dict(top_k=2, max_depth=2, num_nodes=8), "num_nodes 8 is more"), (dict(acceptance="rejection"), "chain"), (dict(tree="static", choices=((0, 0),)), "parent"),
        (dict(tree="static", choices=((0,), (0,))), "different"), (dict(tree="static", choices=((-1,),)), "ranks"), (dict(tree="static", choices=()), "choices"),
        (dict(tree="static", choices=5), "choices: expected a list of paths"), (dict(tree="static", choices=[0, 1]), "choices: expected a list of paths"), (dict(tree="static", choices=[["0"]]), "ranks"),
        (dict(prefill_chunk=257), "prefill_chunk"), (dict(max_model_len=0), "max_model_len"), (dict(top_k=64, max_depth=10, num_nodes=8), "at most 256"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(options, message):
    with pytest.raises(EagleError, match=message):
        EagleConfig(**options)


def test_choices_may_be_lists():
    """As in a JSON file, and in the README."""
    assert EagleConfig(tree="static", choices=[[0], [1], [0, 0]]) == EagleConfig(tree="static", choices=((0,), (1,), (0, 0)))


def test_unknown_options_are_named():
    with pytest.raises(EagleError, match="num_speculative_tokens"):
        Engine.from_pretrained("nowhere", num_speculative_tokens=5)
    with pytest.raises(EagleError, match="drafter"):
        Engine.from_pretrained("nowhere")
    with pytest.raises(EagleError, match="dtype"):
        Engine.from_pretrained("nowhere", "none", dtype="int3")
    with pytest.raises(EagleError, match="not both"):
        Engine.from_pretrained("nowhere", "none", config=EagleConfig(), top_k=3)


def test_published_settings_are_converted_once():
    config = EagleConfig.from_published(total_token=60, depth=5, top_k=10)
    assert (config.num_nodes, config.max_depth, config.top_k) == (60, 6, 10)


def test_no_list_is_an_empty_list():
    """As it is for vLLM."""
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()


BAD_PROMPTS = {
    "none": (None, "expected a text or a list of token ids, got NoneType"), "number": (5, "got int"), "tensor": (torch.tensor([1, 2]), "got Tensor"), "bytes": (b"ab", "got bytes"), "empty": ([], "is empty"),
    "none-in-a-list": ([3, None], "holds None"), "false-in-a-list": ([3, False], "holds False"), "float-in-a-list": ([3, 1.0], "holds 1.0"), "beyond": ([3, VOCAB_SIZE], f"holds {VOCAB_SIZE}"),
}  # fmt: skip


@pytest.mark.parametrize("prompt, message", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_it_starts_and_alone(prompt, message):
    engine = make_engine(tiny_target("llama"), random_drafter(tiny_target("llama")))
    params = SamplingParams(**GREEDY, max_tokens=5)
    other = engine.add_request(PROMPT, params)
    with pytest.raises(EagleError, match=message):
        engine.add_request(prompt, params)
    with pytest.raises(EagleError, match=message):
        next(engine.stream(prompt, params))
    outputs = engine.generate([PROMPT, prompt, PROMPT], params)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"] and message in outputs[1].error
    assert outputs[0].token_ids == outputs[2].token_ids == plain_tokens(tiny_target("llama"), PROMPT, params)
    assert [output.request_id for output in engine.step()] == [other]
    assert not engine.has_unfinished() and engine.pages.num_held == 0


@pytest.mark.parametrize("params", [dict(max_tokens=3), 5, [SamplingParams(max_tokens=3), None]], ids=["dict", "number", "none-in-a-list"])
def test_what_are_no_sampling_parameters_is_said_before_anything_starts(params):
    engine = make_engine(tiny_target("llama"), None)
    for call in (lambda: engine.generate([PROMPT] * 2, params), lambda: engine.add_request(PROMPT, params), lambda: next(engine.stream(PROMPT, params))):
        with pytest.raises(EagleError, match="sampling_params: expected SamplingParams, got"):
            call()
        assert not engine.has_unfinished()


@pytest.mark.parametrize("prompts", [None, 5, torch.tensor([1, 2]), dict(prompt="a")], ids=lambda prompts: type(prompts).__name__)
def test_what_are_no_prompts_is_said(prompts):
    with pytest.raises(EagleError, match="prompts: expected texts or lists of token ids"):
        make_engine(tiny_target("llama"), None).generate(prompts)


def test_nothing_stays_behind_when_a_request_cannot_be_queued(monkeypatch):
    """Whatever goes wrong with one prompt, the others of the call do not go on without their caller."""
    engine = make_engine(tiny_target("llama"), None, tiny_tokenizer())
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: 1 // 0 if text == "." else encode(self, text, **options))
    with pytest.raises(ZeroDivisionError):
        engine.generate([PROMPT, "."], SamplingParams(max_tokens=3))
    assert not engine.has_unfinished()
