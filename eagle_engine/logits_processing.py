"""What a request does to the target's logits beyond temperature and filters, and what it wants to know of them: for each node of its draft tree, from the tokens on the node's own path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eagle_engine.errors import EagleError
from eagle_engine.outputs import TokenLogprobs
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.structured_outputs import Grammars, GrammarState
from eagle_engine.token_logprobs import prompt_logprobs, token_logprobs
from eagle_engine.tokenizer import Tokenizer
from eagle_kernels import Accepted, Tree, sample

DEAD_END = "structured_outputs: the grammar has come to a dead end at position {position}: no token of the vocabulary continues it"
ALL_BANNED = "the sampling parameters ban every token at position {position} ({names})"


class LogitsProcessor:
    """One request's, from its arrival to its end. What it says is a function of the prompt, the tokens of the answer so far and the parameters.

    An exception out of its grammar or tokenizer ends its request alone: from then on it allows no token, and `failure` tells what happened.

    prompt_ids     tokens of the prompt
    end_token_ids  what ends the answer: those that min_tokens bans
    grammar        at its beginning, or None
    tokenizer      for the texts in log-probabilities; may be None
    device         of the logits
    """

    def __init__(
        self, prompt_ids: list[int], params: SamplingParams, vocab_size: int, end_token_ids: Sequence[int], grammar: GrammarState | None, tokenizer: Tokenizer | None, device: torch.device
    ) -> None:
        self.params, self.changes_logits = params, bool(params.changes_logits)
        self.failure: str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_ids, self._vocab_size, self._tokenizer, self._device = prompt_ids, vocab_size, tokenizer, device
        self._grammar = grammar
        self._emitted: list[int] = []
        self._bad_words = bad_words(params, tokenizer, vocab_size)
        self._end_token_ids = sorted(token for token in end_token_ids if token < vocab_size)
        self.release()

    def update(self, token_ids: list[int]) -> None:
        """Go on to the tokens of the answer so far, of which those that were seen before have not changed."""
        new = token_ids[len(self._emitted) :]
        if not new:
            return
        self._emitted.extend(new)
        if self._counts is not None:
            self._count(new)
        if self._grammar is not None:
            with self._alone("structured_outputs"):
                self._grammar.take(new)

    def sample_arguments(self, tokens: list[int], parent: list[int]) -> dict[str, Tensor]:
        """Further arguments of `sample` for the N rows of a tree: row i draws the token after node i.

        tokens, parent  N entries, parent[i] < i; node 0, the root, is the last token of `update` (or of the prompt); its own token is not looked at
        returns         logit_bias [N, V] fp32, prompt_mask [N, V] bool, output_counts [N, V] int32, *_penalty [N] fp32, as far as there is need of them

        A node of token -1, and those below it, may get anything: they are never accepted.
        """
        arguments = {}
        if self.failure is None:
            with self._alone("structured_outputs"):
                arguments = self._arguments(tokens, parent)
        if self.failure is not None:
            return {"logit_bias": torch.full((len(tokens), self._vocab_size), -math.inf, device=self._device)}
        return arguments

    def release(self) -> None:
        """Hold nothing on the device, as while the request waits; what a step needs is made when it needs it."""
        self._held = False
        self._ends = self._bias = self._counts = self._prompt_mask = None

    def _hold(self) -> None:
        if self._held:
            return
        p, self._held = self.params, True
        self._ends = torch.tensor(self._end_token_ids, dtype=torch.int64, device=self._device)
        self._bias = self._constant_bias()
        if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
            self._counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
            self._count(self._emitted)
        if p.repetition_penalty != 1.0:
            self._prompt_mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            self._prompt_mask[torch.tensor(self._prompt_ids, device=self._device)] = True

    def _count(self, token_ids: list[int]) -> None:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        self._counts.index_put_((ids,), torch.ones_like(ids, dtype=torch.int32), accumulate=True)

    def _arguments(self, tokens: list[int], parent: list[int]) -> dict[str, Tensor]:
        self._hold()
        paths: list[list[int]] = [[]]
        for node in range(1, len(tokens)):
            paths.append(paths[parent[node]] + [tokens[node]])
        arguments = {}
        bias = self._bias_of(tokens, parent, paths)
        if bias is not None:
            arguments["logit_bias"] = bias
        if self._counts is None:
            return arguments
        counts = self._counts[None].repeat(len(tokens), 1)
        drafted = [(node, token) for node, path in enumerate(paths) for token in path if token >= 0]
        if drafted:
            nodes, ids = torch.tensor(drafted, device=self._device).T
            counts.index_put_((nodes, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
        arguments["output_counts"] = counts
        for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
            if getattr(self.params, name) != off:
                arguments[name] = torch.full((len(tokens),), getattr(self.params, name), dtype=torch.float32, device=self._device)
        if self._prompt_mask is not None:
            arguments["prompt_mask"] = self._prompt_mask[None].repeat(len(tokens), 1)
        return arguments

    def record(self, logits: Tensor, emitted: list[int]) -> None:
        """Keep the log-probabilities of tokens that follow those of `update`.

        logits   [R, V] fp32, of the rows that they were drawn from
        emitted  R tokens; from a -1 on nothing is kept
        """
        if self.params.logprobs is not None:
            usable = emitted[: emitted.index(-1)] if -1 in emitted else emitted
            del self.logprobs[len(self._emitted) :]
            with self._alone("logprobs"):
                self.logprobs += token_logprobs(logits[: len(usable)], usable, self.params.logprobs, self._tokenizer)

    def record_prompt(self, head, features: Tensor, start: int) -> None:
        """Keep the log-probabilities of the prompt's tokens from start + 1 on, unless they are there already.

        head      features [r, H] -> logits [r, V]
        features  [R, H] of the tokens at start, start + 1, ...
        """
        if self.params.prompt_logprobs is None:
            return
        known = len(self.prompt_logprobs) - start
        following = self._prompt_ids[start + 1 : start + 1 + features.shape[0]]
        if 0 <= known < len(following):
            with self._alone("prompt_logprobs"):
                self.prompt_logprobs += prompt_logprobs(head, features[known:], following[known:], self.params.prompt_logprobs, self._tokenizer)

    def is_complete(self, token_ids: list[int]) -> bool:
        """Whether the answer is over without an end token: its grammar is, and the model has none."""
        if self._grammar is None:
            return False
        self.update(token_ids)
        with self._alone("structured_outputs"):
            return self.failure is None and self._grammar.is_complete()
        return False

    def why_nothing_is_allowed(self, token_ids: list[int]) -> str | None:
        """What bans every token after these; None when something is allowed."""
        self.update(token_ids)
        bias = self.sample_arguments([-1], [-1]).get("logit_bias")
        if bias is None or bool((bias > -math.inf).any()):
            return None
        position = len(self._prompt_ids) + len(token_ids)
        if self._grammar is not None and not self._grammar.allowed([-1], [-1]).any():
            return DEAD_END.format(position=position) + (f" ({self._grammar.failure})" if self._grammar.failure else "")
        return ALL_BANNED.format(position=position, names=", ".join(self.params.changes_logits))

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """What the block raises is this request's failure, and nobody else's."""
        try:
            yield
        except Exception as error:  # of libraries: anything
            self.failure, self.changes_logits = self.failure or f"{what}: {type(error).__name__}: {error}", True

    def _constant_bias(self) -> Tensor | None:
        """[V] fp32: what is added at every place."""
        p = self.params
        single = [word[0] for word in self._bad_words if len(word) == 1]
        if not p.logit_bias and p.allowed_token_ids is None and not single:
            return None
        bias = torch.zeros(self._vocab_size)
        for token, value in (p.logit_bias or {}).items():
            bias[token] = value
        if p.allowed_token_ids is not None:
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[list(p.allowed_token_ids)] = True
            bias[~allowed] = -math.inf
        bias[single] = -math.inf
        return bias.to(self._device)

    def _bias_of(self, tokens: list[int], parent: list[int], paths: list[list[int]]) -> Tensor | None:
        early = [node for node, path in enumerate(paths) if len(self._emitted) + len(path) < self.params.min_tokens]
        banned = self._banned_by_words(paths)
        if self._bias is None and self._grammar is None and not banned and not (early and len(self._ends) > 0):
            return None
        if self._bias is None:
            bias = torch.zeros(len(tokens), self._vocab_size, device=self._device)
        else:
            bias = self._bias[None].repeat(len(tokens), 1)
        if self._grammar is not None:
            bias.masked_fill_(~self._grammar.allowed(tokens, parent).to(self._device), -math.inf)
        if early and len(self._ends) > 0:
            bias[torch.tensor(early, device=self._device)[:, None], self._ends] = -math.inf
        if banned:
            nodes, ids = torch.tensor(banned, device=self._device).T
            bias[nodes, ids] = -math.inf
        return bias

    def _banned_by_words(self, paths: list[list[int]]) -> list[tuple[int, int]]:
        """(node, token) where a bad word of several tokens would end."""
        several = [word for word in self._bad_words if len(word) > 1]
        if not several:
            return []
        before = self._emitted[-max(len(word) for word in several) :]
        banned = []
        for node, path in enumerate(paths):
            text = before + path
            banned += [(node, word[-1]) for word in several if text[1 - len(word) :] == word[:-1]]
        return banned


def make_processor(
    prompt_ids: list[int], params: SamplingParams, vocab_size: int, end_token_ids: Sequence[int], grammars: Grammars, tokenizer: Tokenizer | None, device: torch.device
) -> LogitsProcessor | None:
    """None for a request that neither changes logits nor wants to know of them. EagleError names what this vocabulary and tokenizer cannot serve."""
    if not params.changes_logits and not params.tells_logprobs:
        return None
    for name in ("logit_bias", "allowed_token_ids"):
        beyond = next((token for token in getattr(params, name) or () if token >= vocab_size), None)
        if beyond is not None:
            raise EagleError(f"{name}: expected token ids from 0 to {vocab_size - 1}, got {beyond}")
    if params.bad_words and tokenizer is None:
        raise EagleError("bad_words need a tokenizer, and this engine has none")
    grammar = None if params.structured_outputs is None else grammars.compile(params.structured_outputs)
    return LogitsProcessor(prompt_ids, params, vocab_size, end_token_ids, grammar, tokenizer, device)


def bad_words(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """The tokens of each bad word, and those of it after a space where these are as many and begin with another token."""
    found = []
    for word in params.bad_words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        for ids in [plain] + ([spaced] if len(spaced) == len(plain) and spaced[:1] != plain[:1] else []):
            if not ids or max(ids) >= vocab_size:
                raise EagleError(f"bad_words: {word!r} has no tokens in the model's vocabulary")
            found.append(ids)
    return found


def sample_tree(logits: Tensor, tree: Tree, params: dict[str, Tensor], order: str, processors: Sequence[LogitsProcessor | None]) -> Tensor:
    """The target's token after each node, [B, N] int64.

    logits      [B * N, V] fp32
    params      arguments of `sample` for B * N rows
    processors  one for each sequence, or none at all
    """
    batch, nodes = tree.tokens.shape
    params = params | {"positions": (tree.position_ids + 1).view(-1)}
    changing = [slot for slot, processor in enumerate(processors) if processor is not None and processor.changes_logits]
    if not changing:
        return sample(logits, **params, order=order).view(batch, nodes)
    sampled = torch.empty(batch, nodes, dtype=torch.int64, device=logits.device)
    # Rows do not depend on each other: runs of slots without further arguments between single slots with.
    first = 0
    for slot in [*changing, batch]:
        for start, end in ((first, slot), (slot, slot + 1)):
            if start == end or start == batch:
                continue
            rows = slice(start * nodes, end * nodes)
            arguments = processors[start].sample_arguments(tree.tokens[start].tolist(), tree.parent[start].tolist()) if start == slot else {}
            sample(logits[rows], **{name: value[rows].clone() for name, value in params.items()}, order=order, **arguments, out=sampled[start:end].view(-1))
        first = slot + 1
    return sampled


def record_logprobs(logits: Tensor, tree: Tree, accepted: Accepted, processors: Sequence[LogitsProcessor | None]) -> None:
    """Hand each processor that asked for log-probabilities the rows that its accepted path was drawn from.

    logits  [B * N, V] fp32
    """
    for slot, processor in enumerate(processors):
        if processor is None or processor.params.logprobs is None:
            continue
        path = [node for node in accepted.accepted_nodes[slot].tolist() if node >= 0]
        rows = torch.tensor(path, device=logits.device) + slot * tree.tokens.shape[1]
        tokens = tree.tokens[slot].tolist()
        processor.record(logits[rows], [tokens[node] for node in path[1:]] + [int(accepted.bonus_token[slot])])
