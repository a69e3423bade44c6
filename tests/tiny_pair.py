"""A tiny target with a tokenizer and a chat template, and a random drafter for it in the published EAGLE-1 format."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file
from tiny_engines import random_tensors
from tiny_targets import VOCAB_SIZE, save_directory
from tokenizers import Tokenizer, decoders, models

CHARACTERS = (string.ascii_letters + string.digits + "\n .,?!:;'()-+*/=<>")[: VOCAB_SIZE - 3]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
DRAFTER_CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=48,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=1,
    hidden_act="silu",
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    vocab_size=VOCAB_SIZE,
    bias=True,
)


class TinyPair(NamedTuple):
    target: Path
    draft: Path


def make_pair(directory: Path, case: str = "llama") -> TinyPair:
    save_directory(directory / "target", case)
    save_tokenizer(directory / "target")
    return TinyPair(directory / "target", save_drafter(directory / "draft"))


def save_tokenizer(directory: Path, template: str | None = TEMPLATE) -> None:
    """One token per character; ids 0 to 2 are <unk>, <s> and </s>."""
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *CHARACTERS])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def save_drafter(directory: Path, *, seed: int = 5, edit=None, **options) -> Path:
    """options replace keys of config.json; edit is called with the tensors before they are written."""
    directory.mkdir()
    config = DRAFTER_CONFIG | options
    (directory / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, seed=seed)
    if edit is not None:
        edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory
