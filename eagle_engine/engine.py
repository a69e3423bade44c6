"""The engine as its users see it: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from eagle_engine.config import EagleConfig
from eagle_engine.cost_profile import CostProfile
from eagle_engine.drafter import Drafter
from eagle_engine.engine_core import EngineCore
from eagle_engine.errors import EagleError
from eagle_engine.graphs import GraphApi
from eagle_engine.intake import Prompt, check_params, make_answers, read_prompt
from eagle_engine.loading import DEMO, config_of, load_models
from eagle_engine.outputs import CompletionOutput, RequestOutput, TextDelta
from eagle_engine.request import Request
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.structured_outputs import Grammars
from eagle_engine.target import TargetModel
from eagle_engine.tokenizer import Tokenizer


class Engine(EngineCore):
    """EAGLE speculative decoding whose output is that of plain decoding, token for token.

    target, drafter  the models; drafter None: plain decoding
    tokenizer        None: prompts are token ids, and answers have no text
    graph_api        how steps are captured and replayed; None: torch.cuda's graphs on CUDA, none on the CPU
    profile          of an adaptive tree: what steps cost, taken at its word; None: as it was measured before for these models on this machine, or else is measured now, and corrected by what steps take
    progress         show a bar on stderr while it is measured
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        tokenizer: Tokenizer | None,
        config: EagleConfig | None = None,
        *,
        eos_token_ids: tuple[int, ...] | None = None,
        graph_api: GraphApi | None = None,
        profile: CostProfile | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__(target, drafter, config or EagleConfig(), graph_api=graph_api, profile=profile, progress=progress)
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids if eos_token_ids is not None else tokenizer.eos_token_ids if tokenizer else target.config.eos_token_ids)
        self._grammars = Grammars(tokenizer, target.config.vocab_size, self.eos_token_ids)
        self._next_id = 0

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path = DEMO,
        draft: str | Path | None = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
        draft_vocab: int | str | Path | None = "auto",
        draft_layer_ids: str | None = None,
        draft_window: int = 0,
        threads: int | None = None,
        progress: bool = True,
        config: EagleConfig | None = None,
        profile: CostProfile | None = None,
        **options,
    ) -> Engine:
        """Load a target and its drafter.

        target       "demo", a Hugging Face directory or hub id, or a .gguf file
        draft        a drafter directory in a published format of EAGLE-1/2 or EAGLE-3 (speculators' and SGLang's among them), or a hub id; "auto": the demo's drafter with the demo target, else an error that asks for one; "eagle1", "eagle3": those of the demo target;
                     None or "none": plain decoding
        device       "cpu", "cuda", or "auto": CUDA where there is a GPU
        dtype        of the weights: "float32" (CPU), "bfloat16", "float16" (CUDA), or "auto": on the CPU float32 for float32 checkpoints and bfloat16 for all others, GGUF files among them;
                     on CUDA float16 for float16 checkpoints and bfloat16 for all others
        draft_vocab  None: the whole vocabulary, or the drafter's own; a number: so many of the drafter's most frequent tokens; a file of token ids; "auto": 4096 for the demo pair, else None
        draft_layer_ids  "input" or "output": what eagle_aux_hidden_state_layer_ids of an EAGLE-3 drafter count where its config.json does not say: inputs of those layers (vLLM) or outputs (SGLang)
        draft_window  tokens that the drafter's attention reaches back, for texts longer than those it was trained on; 0: all. The text does not depend on it
        threads      of torch and the kernels; None leaves them as they are
        profile      as for the constructor
        options      fields of EagleConfig, instead of `config`

        EagleError says what is wrong with a file or an option.
        """
        config = config_of(config, options)
        if threads is not None:
            torch.set_num_threads(threads)
        return cls(*load_models(target, draft, config, device, dtype, draft_vocab, draft_layer_ids, draft_window, progress), config, profile=profile, progress=progress)

    def plain(self) -> Engine:
        """An engine of plain decoding on the same target, weights shared."""
        return Engine(self.models.target, None, self.tokenizer, self.config, eos_token_ids=tuple(self.eos_token_ids), graph_api=self._graphs.api if self._graphs else None)

    def generate(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Answers to prompts, in their order.

        prompts          texts, or lists of token ids; one or several
        sampling_params  one for all, or one for each

        A prompt that cannot be served gives an output with finish_reason "error" and its `error`; the others go on.
        """
        if not isinstance(prompts, (str, list, tuple)):
            raise EagleError(f"prompts: expected texts or lists of token ids, one or several, got {type(prompts).__name__}")
        prompts = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        params = sampling_params if isinstance(sampling_params, list) else [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise EagleError(f"sampling_params: expected one, or {len(prompts)} for as many prompts, got {len(params)}")
        for param in params:
            check_params(param)
        requests: list[Request | RequestOutput] = []
        mine: list[Request] = []
        with tqdm(total=sum(param.n for param in params), desc="generating", unit="answer", disable=not progress, leave=False) as bar:
            try:
                for prompt, param in zip(prompts, params):
                    try:
                        requests.append(self._enqueue(prompt, param, held=True))
                        mine += requests[-1].answers
                    except EagleError as error:
                        ids = list(prompt) if isinstance(prompt, (list, tuple)) else []
                        requests.append(RequestOutput(self._next_request_id(), prompt if isinstance(prompt, str) else None, ids, [CompletionOutput(0, "", [], "error", error=str(error))]))
                        bar.total -= param.n
                while not all(request.finished for request in mine):
                    self._advance()
                    bar.update(sum(request.finished for request in mine) - bar.n)
            finally:
                for request in mine:
                    if not request.all_finished:
                        self.abort(request.request_id)
        return [request.output() if isinstance(request, Request) else request for request in requests]

    def chat(self, messages: list[dict[str, str]], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The answer to a conversation [{"role": ..., "content": ...}, ...], through the model's chat template."""
        return self.generate([self.encode_chat(messages)], sampling_params)[0]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for an answer."""
        return self._need_tokenizer().encode_chat(messages)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """The answer in pieces, as each step emits them; joined, their texts are the text of `generate`. Closing the iterator ends the request. EagleError, after the last piece, when
        something went wrong."""
        sampling_params = SamplingParams() if sampling_params is None else sampling_params
        check_params(sampling_params)
        if sampling_params.n > 1:
            raise EagleError(f"n: a stream has one answer, got n {sampling_params.n}; use generate")
        request = self._enqueue(prompt, sampling_params, held=True)
        try:
            while True:
                if not request.finished:  # other calls may have carried it on, to its end even
                    self._advance()
                delta = request.delta()
                if delta.finish_reason == "error":
                    if delta.text or delta.token_ids:
                        yield delta._replace(finish_reason=None, stats=None)
                    raise EagleError(request.error)
                if delta.text or delta.token_ids or delta.finish_reason is not None:
                    yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queue a prompt; its request id. EagleError when it cannot be served."""
        return self._enqueue(prompt, sampling_params, held=False).request_id

    def has_unfinished(self) -> bool:
        return bool(self._undelivered) or not self.scheduler.is_empty

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now, all its answers, and free its pages; its output so far, or None when it is not in the engine."""
        mine = self.scheduler.find(request_id)
        for request in mine:
            request.finish("abort")
            self.scheduler.retire(request)
        return mine[0].output() if mine else None

    def step(self) -> list[RequestOutput]:
        """Admit waiting requests, prefill a piece of those that are new, advance every one that decodes by one draft-and-verify cycle; the outputs of the caller's requests that have ended since the last call."""
        self._advance()
        ended, self._undelivered = self._undelivered, []
        return ended

    def _enqueue(self, prompt: Prompt, sampling_params: SamplingParams, held: bool) -> Request:
        """The first of its answers. held: whoever queued the request keeps it and reads its output there, instead of from `step`."""
        check_params(sampling_params)
        text, ids = read_prompt(prompt, self.tokenizer, self.models.target.config.vocab_size)
        limit = min(sampling_params.max_tokens, self._room_for(ids))
        needed = self.pages.pages_for(len(ids) + limit + self._step_rows)
        if needed > self.pages.num_pages:
            raise EagleError(f"the request needs {needed} pages of the KV cache, which has {self.pages.num_pages}; ask for fewer tokens or raise num_pages")
        self._check_steps_can(sampling_params)
        if sampling_params.stop_strings and self.tokenizer is None:
            raise EagleError("stop strings need a tokenizer, and this engine has none")
        answers = make_answers(self._next_request_id(), text, ids, sampling_params, limit, self.tokenizer, self.eos_token_ids, self._grammars, self.models.target, held)
        for answer in answers:
            self.scheduler.add(answer)
        return answers[0]

    def _room_for(self, prompt_ids: list[int]) -> int:
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise EagleError(f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer in max_model_len {self.max_model_len}")
        return room

    def _check_steps_can(self, params: SamplingParams) -> None:
        asked = ", ".join((*params.changes_logits, *params.tells_logprobs))
        if asked and self.models.rejection and self.models.shape.levels:
            raise EagleError(f'{asked}: not with acceptance "rejection"; use "exact"')

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise EagleError("this engine has no tokenizer: give prompts as lists of token ids")
        return self.tokenizer

    def _next_request_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
