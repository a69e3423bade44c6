"""Text to token ids and back, chat templates, end tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer as Backend

from eagle_engine.checkpoint import Checkpoint
from eagle_engine.errors import EagleError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """backend: the `tokenizers.Tokenizer` underneath, for incremental decoding and anything else this class does not wrap.

    chat_template   Jinja source or None
    special_tokens  "bos_token", "eos_token", ... -> text; visible to the chat template
    eos_token_ids   every id that ends a text
    """

    def __init__(
        self, backend: Backend, chat_template: str | None, special_tokens: dict[str, str], eos_token_ids: Sequence[int]
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = special_tokens
        eos = backend.token_to_id(special_tokens.get("eos_token") or "")
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self._template = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer in the checkpoint's directory or GGUF metadata."""
        if checkpoint.gguf_metadata is None:
            return _from_directory(checkpoint.path, checkpoint.config.eos_token_ids)
        from eagle_engine.gguf_tokenizer import build_backend, special_token_texts

        metadata = checkpoint.gguf_metadata
        try:
            backend = build_backend(metadata)
        except EagleError as error:
            raise EagleError(f"{checkpoint.path}: {error}") from error
        template = metadata.get("tokenizer.chat_template")
        return cls(backend, template, special_token_texts(metadata), checkpoint.config.eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model may have a few more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; add_special_tokens adds what the model wants around a text, such as a leading bos."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise EagleError(f"the text holds half of a surrogate pair at character {error.start}: it is no valid Unicode") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """messages [{"role": ..., "content": ...}, ...] as the text the model was trained on."""
        if self.chat_template is None:
            raise EagleError("this model has no chat template; give a plain prompt instead of a chat")
        from jinja2 import TemplateError

        try:
            if self._template is None:
                self._template = _compile_template(self.chat_template)
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise EagleError(f"the chat template does not accept these messages: {error}") from error

    def encode_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """apply_chat_template, then encode; the template writes the special tokens itself."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)


def _from_directory(path: Path, eos_token_ids: Sequence[int]) -> Tokenizer:
    """`transformers` knows how each published directory wants its tokenizer put together."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make up an empty tokenizer for some families.
        raise EagleError(f"{path}: no usable tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # any of OSError, ValueError, ImportError, KeyError: all mean that the files do not fit
        raise EagleError(f"{path}: no usable tokenizer: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise EagleError(f"{path}: {type(tokenizer).__name__} has no fast tokenizer (tokenizer.json)")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special_tokens = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return Tokenizer(backend, template, special_tokens, eos_token_ids)


def _compile_template(source: str):
    """Chat templates expect trimmed blocks, loop controls, raise_exception, strftime_now and an unescaped tojson."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """{% generation %}...{% endgeneration %} marks the answer for training; here it is its content."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
