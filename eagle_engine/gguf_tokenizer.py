"""Tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

`transformers` also reads these, but gives every byte-level vocabulary the pre-tokenizer of GPT-2, which is wrong for most.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from eagle_engine.errors import EagleError

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_PATTERNS = {
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
}
_GPT2_PATTERN = ("gpt-2", "default")
_DIGITS_THEN_GPT2 = ("smollm",)
PRE_TOKENIZERS = (*_SPLIT_PATTERNS, *_DIGITS_THEN_GPT2, *_GPT2_PATTERN)


def build_backend(metadata: dict[str, Any]) -> Backend:
    """The `tokenizers.Tokenizer` that the `tokenizer.ggml.*` metadata describes."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise EagleError("the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    if kind not in ("gpt2", "llama"):
        raise EagleError(f"tokenizer model {kind!r} is not supported; supported are gpt2 and llama")
    try:
        return _build(metadata, kind, tokens)
    except EagleError:
        raise
    except Exception as error:  # `tokenizers` raises plain Exception
        raise EagleError(f"the tokenizer metadata is damaged: {error}") from error


def _build(metadata: dict[str, Any], kind: str, tokens: list[str]) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _byte_level(metadata, vocab) if kind == "gpt2" else _sentencepiece(metadata, tokens, vocab)
    types = metadata.get("tokenizer.ggml.token_type", [])
    control = [token for token, t in zip(tokens, types) if t == _CONTROL]
    user_defined = [token for token, t in zip(tokens, types) if t == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])
    _add_bos_and_eos(backend, metadata, tokens, kind)
    return backend


def special_token_texts(metadata: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... -> text, as chat templates name them."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int]) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise EagleError(f"pre-tokenizer {pre!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    # Llama 3 takes a word that is in the vocabulary whole, before any merge.
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre in _SPLIT_PATTERNS:
        split = pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS_THEN_GPT2 else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], vocab: dict[str, int]) -> Backend:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise EagleError("the tokenizer metadata has no score for each token (tokenizer.ggml.scores)")
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_from_scores(vocab, scores)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the best score; the same as merges listed by that score."""
    ranked = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_bos_and_eos(backend: Backend, metadata: dict[str, Any], tokens: list[str], kind: str) -> None:
    default_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    parts, used = ["$A"], []
    for name, default, place in (("bos", default_bos, 0), ("eos", False, 2)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) and token_id is not None:
            parts.insert(place, tokens[token_id])
            used.append((tokens[token_id], token_id))
    if used:
        backend.post_processor = processors.TemplateProcessing(single=parts, pair=[*parts, "$B"], special_tokens=used)
