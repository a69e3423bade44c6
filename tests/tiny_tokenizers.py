"""Tokenizers for tiny targets: one token per character, and one whose tokens are pieces of JSON and halves of characters."""

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


def _with_special(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, None, {"eos_token": "</s>"}, (EOS,))
