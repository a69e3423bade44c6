"""One engine under requests that come, end, are aborted and refused at any moment, share beginnings and run out of pages: each answer is that of its solo plain run, and in the end nobody holds a page."""

import string
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from eagle_engine import EagleConfig, EagleError, Engine, RequestOutput, SamplingParams, StructuredOutputs
from eagle_engine.cost_profile import CostProfile
from eagle_engine.observation import ObservedTree
from eagle_engine.tokenizer import Tokenizer
from eagle_engine.tree_shape import tree_shapes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from plain_drafts import CONFIGS, FEW, TreeRecorder
from test_step_graphs import CountingGraphs
from tiny_engines import make_drafter, oracle_drafter, random_drafter, tiny_target
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

VOCAB = FEW["vocab_size"]
LONGEST = 56  # tokens of a sequence, prompt included
EOS = 11
TREES = {
    "dynamic": dict(tree="dynamic", top_k=3, max_depth=3, num_nodes=8),
    "bushy": dict(tree="dynamic", top_k=4, max_depth=4, num_nodes=14),
    "adaptive": dict(tree="adaptive", top_k=3, max_depth=3, num_nodes=8),
    "static": dict(tree="static"),
    "chain": dict(tree="chain", max_depth=3),
    "plain": {},
}
DRAFTERS = {
    "eagle-1": lambda target: make_drafter(target, CONFIGS["eagle-1"](target)),
    "eagle-3": lambda target: make_drafter(target, CONFIGS["eagle-3"](target)),
    "reduced-vocabulary": lambda target: random_drafter(target, draft_vocab=torch.arange(1, 12, 2)),
    "always-wrong": lambda target: oracle_drafter(target, []),
}


@cache
def letters() -> Tokenizer:
    """A letter for each token, the last of which ends answers."""
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate([*string.ascii_lowercase[: VOCAB - 1], "</s>"])}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, None, {"eos_token": "</s>"}, (EOS,))


@cache
def drafter_of(kind: str):
    return DRAFTERS[kind](tiny_target("llama", **FEW))


def make(tree: str, drafter: str, captured: bool, num_pages: int, max_batch: int) -> Engine:
    config = EagleConfig(max_model_len=LONGEST, page_size=4, num_pages=num_pages, max_batch_size=max_batch, prefill_chunk=3, **TREES[tree])
    profile = None
    if tree == "adaptive":
        shapes = tree_shapes(config)
        # Rows that cost a tenth of a step: all of plain decoding, small and large trees come up.
        profile = CostProfile([[shape.max_depth, shape.num_nodes] for shape in shapes], [1, 4], [[1.0 + 0.1 * shape.num_nodes] * 2 for shape in shapes], [0.0] * len(shapes), 64)
    drafts = None if tree == "plain" else drafter_of(drafter)
    return Engine(tiny_target("llama", **FEW), drafts, letters(), config, eos_token_ids=(EOS,), graph_api=CountingGraphs() if captured else None, profile=profile)


@cache
def solo_engine(tree: str, drafter: str | None) -> Engine:
    """Room for one, eager, nothing remembered."""
    config = EagleConfig(max_model_len=LONGEST, max_batch_size=1, enable_prefix_caching=False, **TREES[tree])
    return Engine(tiny_target("llama", **FEW), None if drafter is None else drafter_of(drafter), letters(), config, eos_token_ids=(EOS,))


_solo: dict[str, tuple[RequestOutput, list[ObservedTree]]] = {}


def solo(prompt: list[int], params: SamplingParams, tree: str = "plain", drafter: str | None = None) -> tuple[RequestOutput, list[ObservedTree]]:
    """What this request alone gives, plain decoding or with drafts, and its trees."""
    key = repr((prompt, params, tree, drafter))
    if key not in _solo:
        recorder = TreeRecorder()
        with solo_engine(tree, drafter).observing(recorder):
            output = solo_engine(tree, drafter).generate(prompt, params)[0]
        _solo[key] = output, recorder.trees.get(output.request_id, [])
    return _solo[key]


def check_balanced(engine: Engine) -> None:
    """Nobody holds a page, no slot decodes; pages that are kept for their contents can be taken like all others."""
    assert engine.pages.num_held == 0 and engine.pages.num_free == engine.pages.num_pages
    assert not engine.state.active.any() and engine.scheduler.is_empty


def check_finished(output: RequestOutput, prompt: list[int], params: SamplingParams) -> None:
    """Text and all that is told beside it."""
    expected, _ = solo(prompt, params)
    assert [vars(answer) | {"stats": None} for answer in output.outputs] == [vars(answer) | {"stats": None} for answer in expected.outputs]
    assert output.prompt_logprobs == expected.prompt_logprobs


def check_drafts(output: RequestOutput, trees: list[ObservedTree] | None, prompt: list[int], params: SamplingParams, tree: str, drafter: str) -> None:
    """Whatever has been shared, moved or computed anew, the same was drafted in each step as alone, score for score; trees None: captured steps show none, but what was accepted."""
    alone, expected = solo(prompt, params, tree, drafter)
    for answer, drafted in zip(output.outputs, alone.outputs, strict=True):
        assert (answer.stats.steps, answer.stats.acceptance_by_depth) == (drafted.stats.steps, drafted.stats.acceptance_by_depth)
    if trees is not None and len(output.outputs) == 1:
        assert trees == expected


def check_aborted(output: RequestOutput, prompt: list[int], params: SamplingParams) -> None:
    """Each answer ended by itself, or is the beginning of what it would have been."""
    for answer, expected in zip(output.outputs, solo(prompt, params)[0].outputs, strict=True):
        assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        assert answer.finish_reason == "abort" or answer.token_ids == expected.token_ids
        assert answer.error is None


tokens = st.integers(0, VOCAB - 1)
CHANGES = [
    {}, {}, {}, {}, {}, {}, {}, {}, dict(logprobs=2), dict(prompt_logprobs=1), dict(repetition_penalty=1.4), dict(presence_penalty=1.5, frequency_penalty=-0.4), dict(logit_bias={3: 2.0, 5: -100.0}), dict(allowed_token_ids=(1, 2, 4, 6, 8, 11)),
    dict(bad_words=("ab", "c")), dict(structured_outputs=StructuredOutputs(regex="[abc]{2,9}[de]f?")),
]  # fmt: skip


@st.composite
def parameters(draw) -> SamplingParams:
    change = draw(st.sampled_from(CHANGES))
    sampled = draw(st.booleans())
    options = dict(temperature=draw(st.sampled_from((0.7, 1.3))), top_p=draw(st.sampled_from((1.0, 0.9))), seed=draw(st.integers(0, 3)), n=draw(st.sampled_from((1, 1, 1, 2)))) if sampled else dict(temperature=0.0)
    return SamplingParams(
        max_tokens=draw(st.sampled_from((40, 30, 30, 12, 3, 1))), ignore_eos="structured_outputs" not in change and draw(st.integers(0, 5)) > 0, stop_token_ids=draw(st.sampled_from(((), (), (), (), (), (7,), (0, 9)))),
        stop=draw(st.sampled_from(((), (), (), (), (), ("ab", "k"), ("cde",)))), **options, **change,
    )  # fmt: skip


class Workload(RuleBasedStateMachine):
    """live: requests that were accepted and not yet delivered or aborted; ids: all that ever were."""

    tree = "dynamic"

    @initialize(drafter=st.sampled_from(sorted(DRAFTERS)), captured=st.booleans(), num_pages=st.sampled_from((18, 20, 24, 40)), max_batch=st.sampled_from((4, 3, 4, 1)))
    def start(self, drafter: str, **options) -> None:
        self.drafter, self.engine = drafter, make(self.tree, drafter, **options)
        self.recorder, self.observing = TreeRecorder(), ExitStack()
        if not self.engine.captures_steps:
            self.observing.enter_context(self.engine.observing(self.recorder))
        self.live: dict[int, tuple[list[int], SamplingParams]] = {}
        self.ids: list[int] = [10**6]  # one that never was
        self.known: list[list[int]] = [[1, 2, 3]]  # texts that prompts may begin with

    def take(self, outputs: list[RequestOutput]) -> None:
        ended = [(output, *self.live.pop(output.request_id)) for output in outputs]
        for output, prompt, params in ended:
            self.check(output, prompt, params)
            self.known.append(prompt + output.token_ids)

    def check(self, output: RequestOutput, prompt: list[int], params: SamplingParams) -> None:
        check_finished(output, prompt, params)
        if self.tree not in ("plain", "adaptive"):  # an adaptive tree is sized for all that run
            trees = None if self.engine.captures_steps else self.recorder.trees.get(output.request_id, [])
            check_drafts(output, trees, prompt, params, self.tree, self.drafter)

    def draw_prompt(self, data: st.DataObject) -> list[int]:
        """New, or the beginning of what was there before and a little more."""
        tail = data.draw(st.lists(tokens, min_size=1, max_size=9))
        if data.draw(st.booleans()):
            return tail
        before = data.draw(st.sampled_from(self.known[-6:]))
        return before[: data.draw(st.integers(0, min(len(before), LONGEST - 12)))] + tail

    @rule(data=st.data(), requests=st.lists(parameters(), min_size=1, max_size=5))
    def add(self, data: st.DataObject, requests: list[SamplingParams]) -> None:
        for params in requests:
            prompt = self.draw_prompt(data)
            rows = len(prompt) + min(params.max_tokens, LONGEST - len(prompt)) + self.engine.scheduler._step_rows
            if self.engine.pages.pages_for(rows) > self.engine.pages.num_pages:
                with pytest.raises(EagleError, match="pages of the KV cache"):
                    self.engine.add_request(prompt, params)
                continue
            request_id = self.engine.add_request(prompt, params)
            self.live[request_id] = (prompt, params)
            self.ids.append(request_id)
            self.known.append(prompt)

    @rule(prompt=st.sampled_from(([], [0] * LONGEST, [1] * 200, [3, VOCAB], [-1])))
    def add_what_is_refused(self, prompt: list[int]) -> None:
        with pytest.raises(EagleError, match="prompt"):
            self.engine.add_request(prompt, SamplingParams(max_tokens=5))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([*self.live, *self.ids[-3:]]))
        output = self.engine.abort(request_id)
        if output is not None:
            check_aborted(output, *self.live.pop(request_id))
        elif request_id in self.live:
            assert request_id in {output.request_id for output in self.engine._undelivered}  # it had ended before

    @rule(data=st.data(), params=parameters())
    def generate(self, data: st.DataObject, params: SamplingParams) -> None:
        """A call that comes back with the answer; the others go on meanwhile, and their outputs come with the next step."""
        prompt = self.draw_prompt(data)
        output = self.engine.generate(prompt, params)[0]
        if output.finish_reason == "error" and "pages of the KV cache" in (output.error or ""):
            return
        self.check(output, prompt, params)

    @rule(data=st.data(), pieces=st.integers(1, 4), seed=st.integers(0, 3))
    def stream_and_close(self, data: st.DataObject, pieces: int, seed: int) -> None:
        prompt, params = self.draw_prompt(data), SamplingParams(temperature=0.8, seed=seed, max_tokens=10)
        stream, seen = self.engine.stream(prompt, params), []
        for _, piece in zip(range(pieces), stream):
            seen += piece.token_ids
        stream.close()
        assert seen == solo(prompt, params)[0].token_ids[: len(seen)]

    @precondition(lambda self: self.live)
    @rule()
    def drain(self) -> None:
        for _ in range(3000):
            if not self.engine.has_unfinished():
                break
            self.take(self.engine.step())
        assert not self.live, "requests that never end"
        check_balanced(self.engine)

    @invariant()
    def pages_are_held_by_those_that_run(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler, pages = self.engine.scheduler, self.engine.pages
        at_work = scheduler.running + ([scheduler.prefilling] if scheduler.prefilling is not None else [])
        assert len(scheduler.running) <= self.engine.config.max_batch_size
        assert len({page for request in at_work for page in request.pages}) == pages.num_held == pages.num_pages - pages.num_free

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            with self.observing:
                self.drain()


@pytest.mark.parametrize("tree", TREES)
def test_any_workload_gives_solo_plain_answers(tree):
    run_workloads(tree, max_examples=8, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
def test_any_long_workload_gives_solo_plain_answers(tree):
    run_workloads(tree, max_examples=60, stateful_step_count=50)


def run_workloads(tree: str, **sizes: int) -> None:
    run_state_machine_as_test(type(f"Workload_{tree}", (Workload,), {"tree": tree}), settings=settings(**sizes))
