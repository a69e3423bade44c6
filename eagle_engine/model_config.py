"""What a target model is: sizes, options and special tokens, checked on creation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_engine.errors import EagleError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "freq_factors")
DTYPES = ("float32", "bfloat16", "float16")

# What `transformers` assumes when the key is absent from config.json.
_DEFAULT_ROPE_THETA = {"mixtral": 1_000_000.0}
_DEFAULT_SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_DEFAULT_RMS_NORM_EPS = {"mixtral": 1e-5}
_DEFAULT_HEAD_DIM = {"qwen3": 128}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the supported families.

    rope_scaling is None or one of
        {"rope_type": "linear", "factor": f}
        {"rope_type": "llama3", "factor": f, "low_freq_factor": a, "high_freq_factor": b, "original_max_position_embeddings": n}
        {"rope_type": "freq_factors", "factors": [head_dim / 2 numbers]}   each frequency is divided by its number (GGUF)
    sliding_window is 0 when attention sees the whole prefix; w > 0 means that a key is visible iff query - key < w.
    dtype is the dtype of the stored weights ("float32" for quantised files).
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 0
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES.values():
            raise EagleError(_unsupported_architecture(self.architecture))
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ):
            _check(
                _is_int(getattr(self, name)) and getattr(self, name) > 0,
                f"{name} must be a positive integer, got {getattr(self, name)!r}",
            )
        for name in ("rms_norm_eps", "rope_theta"):
            _check(
                _is_number(getattr(self, name)) and getattr(self, name) > 0,
                f"{name} must be a positive number, got {getattr(self, name)!r}",
            )
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        _check(self.head_dim % 2 == 0, f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        _check(
            _is_int(self.sliding_window) and self.sliding_window >= 0,
            f"sliding_window must be 0 (off) or a positive integer, got {self.sliding_window!r}",
        )
        _check(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.num_experts:
            _check(
                self.architecture == "mixtral", f"experts are supported for mixtral only, not for {self.architecture}"
            )
            _check(
                0 < self.num_experts_per_token <= self.num_experts,
                f"num_experts_per_token must be in 1..{self.num_experts}, got {self.num_experts_per_token}",
            )
        else:
            _check(self.architecture != "mixtral", "a mixtral model needs num_experts > 0")
        _check_rope_scaling(self.rope_scaling, self.head_dim)

    @classmethod
    def from_hf_dict(cls, config: dict[str, Any]) -> ModelConfig:
        """Read the dictionary of a Hugging Face config.json, as written by `transformers` 4 and 5."""
        architecture = _hf_architecture(config)
        if config.get("quantization_config"):
            method = _dict(config, "quantization_config").get("quant_method", "unknown method")
            raise EagleError(
                f"quantised Hugging Face weights ({method}) are not supported; use the unquantised model or a GGUF file"
            )
        hidden_act = config.get("hidden_act", "silu")
        if hidden_act not in ("silu", "swish"):
            raise EagleError(f"hidden_act {hidden_act!r} is not supported, only 'silu' is")
        hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
        _check(hidden_size > 0 and num_heads > 0, "hidden_size and num_attention_heads must be positive")
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = _DEFAULT_HEAD_DIM.get(architecture, hidden_size // num_heads)
            _check(
                architecture in _DEFAULT_HEAD_DIM or hidden_size % num_heads == 0,
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and there is no head_dim",
            )
        num_kv_heads = config.get("num_key_value_heads")
        _check(num_kv_heads is not None or architecture == "llama", "config.json has no num_key_value_heads")
        rope_theta, rope_scaling = _hf_rope(config, architecture)
        attention_bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            num_layers=_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            vocab_size=_int(config, "vocab_size"),
            rms_norm_eps=config.get("rms_norm_eps", _DEFAULT_RMS_NORM_EPS.get(architecture, 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_int(config, "max_position_embeddings"),
            sliding_window=_hf_sliding_window(config, architecture),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            num_experts=_int(config, "num_local_experts", 8) if architecture == "mixtral" else 0,
            num_experts_per_token=_int(config, "num_experts_per_tok", 2) if architecture == "mixtral" else 0,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=token_id_tuple(config.get("eos_token_id")),
            dtype=dtype,
        )


def token_id_tuple(value: Any) -> tuple[int, ...]:
    """None, one id or a list of ids, as config.json and generation_config.json write them, as a tuple."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    _check(all(_is_int(i) for i in ids), f"token ids must be integers, got {value!r}")
    return ids


def _unsupported_architecture(name: Any) -> str:
    return f"architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"


def _hf_architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        if names[0] not in ARCHITECTURES:
            raise EagleError(_unsupported_architecture(names[0]))
        return ARCHITECTURES[names[0]]
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES.values():
        raise EagleError(_unsupported_architecture(model_type))
    return model_type


def _hf_rope(config: dict[str, Any], architecture: str) -> tuple[float, dict[str, Any] | None]:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` at the top level before that."""
    parameters = dict(_dict(config, "rope_parameters") or _dict(config, "rope_scaling"))
    _check(
        not any(isinstance(v, dict) for v in parameters.values()), "rope parameters per layer type are not supported"
    )
    theta = parameters.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta")
    if theta is None:
        theta = _DEFAULT_ROPE_THETA.get(architecture, 10_000.0)
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    _check(partial == 1.0, f"partial_rotary_factor {partial} is not supported")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, {"rope_type": "linear", "factor": _number(parameters, "factor", rope_type)}
    if rope_type == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return theta, {"rope_type": "llama3"} | {key: _number(parameters, key, rope_type) for key in keys}
    raise EagleError(f"rope type {rope_type!r} is not supported; supported are default, linear, llama3")


def _hf_sliding_window(config: dict[str, Any], architecture: str) -> int:
    if architecture == "llama":
        return 0
    window = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW.get(architecture))
    if architecture in ("mistral", "mixtral"):
        return window or 0
    if not config.get("use_sliding_window", False) or window is None:
        return 0
    num_layers = _int(config, "num_hidden_layers")
    first_windowed = _int(config, "max_window_layers", 28)
    layer_types = config.get("layer_types") or [
        "full_attention" if i < first_windowed else "sliding_attention" for i in range(num_layers)
    ]
    if set(layer_types) == {"full_attention"}:
        return 0
    if set(layer_types) == {"sliding_attention"}:
        return window
    raise EagleError(
        f"use_sliding_window with a window on only some layers (max_window_layers {first_windowed} of {num_layers}) is not supported"
    )


def _check_rope_scaling(scaling: dict[str, Any] | None, head_dim: int) -> None:
    if scaling is None:
        return
    rope_type = scaling.get("rope_type")
    _check(rope_type in ROPE_TYPES, f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if rope_type == "freq_factors":
        factors = scaling.get("factors", ())
        _check(len(factors) == head_dim // 2, f"rope frequency factors: expected {head_dim // 2}, got {len(factors)}")
        _check(all(f > 0 for f in factors), "rope frequency factors must be positive")
    elif rope_type != "default":
        _check(scaling["factor"] > 0, f"rope scaling factor must be positive, got {scaling['factor']}")
    if rope_type == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        _check(0 < low < high, f"rope scaling needs 0 < low_freq_factor < high_freq_factor, got {low} and {high}")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise EagleError(f"model config: {message}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    _check(value is not None, f"config.json has no {key}")
    _check(_is_int(value), f"{key} must be an integer, got {value!r}")
    return value


def _number(parameters: dict[str, Any], key: str, rope_type: str) -> float:
    value = parameters.get(key)
    _check(_is_number(value), f"rope type {rope_type} needs a number {key}, got {value!r}")
    return value


def _dict(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    _check(isinstance(value, dict), f"{key} must be an object, got {value!r}")
    return value
