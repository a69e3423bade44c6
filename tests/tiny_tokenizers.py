"""Tokenizers for tiny targets: one token per character, one whose tokens are pieces of JSON and halves of characters, and one that falls back to bytes."""

from __future__ import annotations

import string
from functools import cache

from eagle_engine.tokenizer import Tokenizer
from tiny_pair import CHARACTERS
from tiny_targets import VOCAB_SIZE
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

EOS = 2
SPECIAL = ["<unk>", "<s>", "</s>"]
JSON_PIECES = [*'{}":,[]-.\\', *string.digits, *string.ascii_lowercase, "Ġ", '{"', '":', '",', 'e"', "true", "false", "null", "Ã", "©", "¤", "ab", "abc", "12", "Ġ}"]


@cache
def character_tokenizer() -> Tokenizer:
    """One token per character of tiny_pair.CHARACTERS; ids 0 to 2 are <unk>, <s> and </s>."""
    backend = Backend(models.BPE({token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return _with_special(backend)


@cache
def json_tokenizer() -> Tokenizer:
    """Byte-level, for decoding alone: a text is one token or unknown."""
    pieces = [*SPECIAL, *JSON_PIECES, *string.ascii_uppercase][:VOCAB_SIZE]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel()
    return _with_special(backend)


@cache
def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Mistral have it, for decoding alone: words with their space, and bytes, of which those of no character stand between those of some."""
    odd_bytes = [0x0A, 0x22, 0x80, 0x9F, 0x98, 0xC3, 0xA9, 0xE2, 0xF0, 0xFF]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in odd_bytes), "▁", "▁the", "▁a", "é", *string.ascii_letters][:VOCAB_SIZE]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _with_special(backend)


def _with_special(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, None, {"eos_token": "</s>"}, (EOS,))
