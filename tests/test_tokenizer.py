"""Tokenizers from GGUF metadata and from directories, chat templates, end tokens."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from eagle_engine.checkpoint import Checkpoint
from eagle_engine.errors import EagleError
from eagle_engine.gguf_tokenizer import PRE_TOKENIZERS, build_backend
from eagle_engine.model_config import ModelConfig
from eagle_engine.tokenizer import Tokenizer

CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=300,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    eos_token_ids=(7,),
)
TEXTS = [
    "",
    " ",
    "Hello world",
    "It's 3.14159,   42 isn't it?\n\n\tdef f(x):\n    return x**2  # fin",
    "été 你好 🙂 \u200b\u2028 end",
    "\r\n\r\n  tabs\t\tand trailing   ",
    "<|im_start|>user\nhi<|im_end|>",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_metadata(pre: str, merges: tuple[str, ...] = ()) -> dict:
    """A vocabulary of two control tokens, one user-defined, all 256 bytes, and what the merges make."""
    tokens = ["<|im_start|>", "<|im_end|>", "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    types = [3, 3, 4] + [1] * 256
    tokens += [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [1] * len(merges),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHATML,
    }


def from_metadata(metadata: dict) -> Tokenizer:
    return Tokenizer.from_checkpoint(Checkpoint(Path("tiny.gguf"), CONFIG, {}, None, metadata))


def words(pre: str, text: str) -> list[str]:
    """How the pre-tokenizer cuts a text, spaces as they are."""
    pieces = build_backend(byte_level_metadata(pre)).pre_tokenizer.pre_tokenize_str(text)
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["I", "'ve", "  ", "1", "2", "3", "4", " x", "\n", "\n", "y", "!", "\n "]),
        ("gpt-2", ["I", "'ve", " ", " 1234", " x", "\n", "\n", "y", "!", "\n "]),
        ("default", ["I", "'ve", " ", " 1234", " x", "\n", "\n", "y", "!", "\n "]),
        ("qwen2", ["I", "'ve", " ", " ", "1", "2", "3", "4", " x", "\n\n", "y", "!\n", " "]),
        ("llama-bpe", ["I", "'ve", " ", " ", "123", "4", " x", "\n\n", "y", "!\n", " "]),
    ],
)
def test_pre_tokenizers_cut_where_the_models_were_trained_to(pre, expected):
    assert words(pre, "I've  1234 x\n\ny!\n ") == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_byte_level_round_trip(pre, text):
    tokenizer = from_metadata(byte_level_metadata(pre, ("h i", "Ġ w", "o r", "Ġw or")))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_merges_apply_in_order_and_not_across_words():
    tokenizer = from_metadata(byte_level_metadata("smollm", ("a b", "b c", "ab c", "1 2")))
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abcbc12")]
    assert pieces == ["abc", "bc", "1", "2"]


def test_llama_bpe_takes_known_words_whole():
    merges = ("a b", "c d", "b c")
    metadata = byte_level_metadata("llama-bpe", merges)
    metadata["tokenizer.ggml.tokens"].append("abcd")  # no merge leads here
    tokenizer = from_metadata(metadata)
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abcd", add_special_tokens=False)] == ["abcd"]


def test_special_tokens_are_single_ids():
    tokenizer = from_metadata(byte_level_metadata("smollm"))
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|>")
    assert ids[:1] + ids[2:] == [0, 2, 1]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<tool><|im_end|>"
    assert tokenizer.eos_token_ids == (7, 1)
    assert tokenizer.vocab_size == 259


@pytest.mark.parametrize(
    ("pre", "options", "start", "end"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True}, [0], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ],
    ids=str,
)
def test_bos_and_eos_as_the_file_asks(pre, options, start, end):
    metadata = byte_level_metadata(pre) | {f"tokenizer.ggml.{key}": value for key, value in options.items()}
    tokenizer = from_metadata(metadata)
    inner = tokenizer.encode("abc", add_special_tokens=False)
    assert tokenizer.encode("abc") == start + inner + end


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer.ggml.pre": "deepseek-llm"},
            "tiny.gguf: pre-tokenizer 'deepseek-llm' is not supported; supported are llama-bpe",
        ),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported; supported are gpt2 and llama"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "the tokenizer metadata is damaged"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the tokenizer metadata is damaged"),
        (
            {"tokenizer.ggml.bos_token_id": 5000, "tokenizer.ggml.add_bos_token": True},
            "the tokenizer metadata is damaged",
        ),
        ({"tokenizer.ggml.model": "llama"}, "no score for each token"),
    ],
    ids=["pre", "model", "empty", "unknown-merge", "half-merge", "bos-out-of-range", "no-scores"],
)
def test_refused_by_name(changes, message):
    with pytest.raises(EagleError, match=message):
        from_metadata(byte_level_metadata("smollm") | changes)


def sentencepiece_metadata(pieces: dict[str, float]) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece_by_definition(pieces: dict[str, float], text: str) -> list[str]:
    """Join the neighbours whose union is a piece of the best score, leftmost first, until none is left."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(-pieces[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not unions:
            return parts
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_sentencepiece_equals_its_definition():
    generator = random.Random(3)
    pieces = {letter: -1000.0 - i for i, letter in enumerate("▁abc")}
    while len(pieces) < 60:
        known = list(pieces)
        union = generator.choice(known) + generator.choice(known)
        if "▁" not in union[1:]:
            pieces.setdefault(union, -float(len(pieces)))
    tokenizer = from_metadata(sentencepiece_metadata(pieces))
    for _ in range(200):
        text = "".join(generator.choice("aabbcc ") for _ in range(generator.randrange(1, 30)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.backend.id_to_token(i) for i in ids] == sentencepiece_by_definition(pieces, text), text
        assert tokenizer.decode(ids) == text


def test_sentencepiece_bytes_bos_and_specials():
    tokenizer = from_metadata(sentencepiece_metadata({"▁": -1.0, "a": -2.0, "▁a": -0.5}))
    assert tokenizer.encode("a é</s>") == [1, 261, 259, 3 + 0xC3, 3 + 0xA9, 2]
    assert tokenizer.decode(tokenizer.encode("a é 🙂")) == "a é 🙂"


def test_chat_template():
    tokenizer = from_metadata(byte_level_metadata("smollm"))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    ids = tokenizer.encode_chat(messages)
    assert (ids[0], ids.count(0), ids.count(1)) == (0, 2, 1)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.apply_chat_template(messages)


TEMPLATES = {
    "chatml": CHATML,
    "trimmed-blocks": "  {% for m in messages %}\n  {{ m.role }}\n  {% endfor %}\n{{ bos_token }}{{ eos_token }}",
    "loop-controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{% if tools is not none and tools is defined %}no{% endif %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(template):
    from transformers import PreTrainedTokenizerFast

    metadata = byte_level_metadata("smollm") | {"tokenizer.chat_template": TEMPLATES[template]}
    messages = [{"role": "user", "content": "<é> & 'x'"}, {"role": "assistant", "content": "ok"}]
    tokenizer = from_metadata(metadata)
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **tokenizer.special_tokens)
    other.chat_template = TEMPLATES[template]
    expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages) == expected


def test_chat_template_errors():
    metadata = byte_level_metadata("smollm") | {
        "tokenizer.chat_template": "{{ raise_exception('roles must alternate') }}"
    }
    with pytest.raises(EagleError, match="roles must alternate"):
        from_metadata(metadata).encode_chat([{"role": "user", "content": "hi"}])
    metadata["tokenizer.chat_template"] = "{% if %}"
    with pytest.raises(EagleError, match="chat template"):
        from_metadata(metadata).encode_chat([{"role": "user", "content": "hi"}])
    del metadata["tokenizer.chat_template"]
    with pytest.raises(EagleError, match="no chat template"):
        from_metadata(metadata).encode_chat([{"role": "user", "content": "hi"}])


def test_directory(tmp_path):
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    saved.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_checkpoint(Checkpoint(tmp_path, CONFIG, {}, None))
    assert tokenizer.encode("hello world") == [3, 4]
    assert tokenizer.encode_chat([{"role": "user", "content": "world"}]) == [1, 4, 2]
    assert tokenizer.eos_token_ids == (7, 2)


def test_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(EagleError, match=f"{tmp_path.name}: no usable tokenizer"):
        Tokenizer.from_checkpoint(Checkpoint(tmp_path, CONFIG, {}, None))
