"""ModelConfig: what config.json files of transformers 4 and 5 say, and what is refused by name."""

import math

import pytest
import torch
from tiny_targets import CASES, tiny_model

from eagle_engine.errors import EagleError
from eagle_engine.model_config import ModelConfig
from eagle_engine.rope import rope_inverse_frequencies, rope_table

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# As published files of that age write it.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "rope_scaling": None}


def without(config: dict, key: str) -> dict:
    return {k: v for k, v in config.items() if k != key}


def test_llama_of_transformers_4():
    config = ModelConfig.from_hf_dict(LLAMA)
    assert config == ModelConfig(
        architecture="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=LLAMA3_SCALING,
        max_position_embeddings=131072,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    )


def test_rope_parameters_of_transformers_5_mean_the_same():
    new = without(without(LLAMA, "rope_scaling"), "rope_theta") | {"dtype": "bfloat16"}
    new["rope_parameters"] = LLAMA3_SCALING | {"rope_theta": 500000.0}
    assert ModelConfig.from_hf_dict(without(new, "torch_dtype")) == ModelConfig.from_hf_dict(LLAMA)


@pytest.mark.parametrize("case", CASES)
def test_config_written_by_the_installed_transformers(case):
    model = tiny_model(case)
    config = ModelConfig.from_hf_dict(model.config.to_dict())
    attention = model.model.layers[0].self_attn
    assert config.head_dim == attention.head_dim
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.o_bias == (attention.o_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.sliding_window == (7 if case == "mistral-window" else 5 if case == "qwen2-window" else 0)
    expected = model.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(rope_inverse_frequencies(config), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MISTRAL | {"sliding_window": 4096}, 4096),
        (MISTRAL | {"sliding_window": None}, 0),
        (MISTRAL, 4096),
        (QWEN2, 0),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 4}, 0),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 4}, 0),
        (LLAMA | {"sliding_window": 4096}, 0),
    ],
    ids=[
        "mistral",
        "mistral-null",
        "mistral-absent",
        "qwen2-off",
        "qwen2-beyond-last-layer",
        "qwen2-all-layers",
        "qwen2-layer-types",
        "llama-ignores",
    ],
)
def test_sliding_window(config, window):
    assert ModelConfig.from_hf_dict(config).sliding_window == window


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"architectures": ["GemmaForCausalLM"]}, r"'GemmaForCausalLM'.*LlamaForCausalLM, MistralForCausalLM"),
        (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, "'LlamaForCausalLMEagle3' is not supported"),
        (without(LLAMA, "architectures") | {"model_type": "gpt2"}, "architecture 'gpt2' is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "needs a number factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs a number low_freq_factor"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        (QWEN2 | {"use_sliding_window": True}, r"only some layers \(max_window_layers 2 of 4\)"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, r"quantised Hugging Face weights \(awq\)"),
        (without(LLAMA, "hidden_size"), "no hidden_size"),
        (without(MISTRAL, "num_key_value_heads"), "no num_key_value_heads"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size must be an integer, got '4096'"),
        (LLAMA | {"hidden_size": 4100}, "4100 is not a multiple of num_attention_heads 32"),
        (LLAMA | {"num_key_value_heads": 5}, "num_heads 32 is not a multiple of num_kv_heads 5"),
        (LLAMA | {"num_hidden_layers": 0}, "num_layers must be a positive integer, got 0"),
        (LLAMA | {"head_dim": 127}, "head_dim must be even"),
        (LLAMA | {"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        (LLAMA | {"eos_token_id": "</s>"}, "token ids must be integers"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "dtype must be one of float32, bfloat16, float16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(config, message):
    with pytest.raises(EagleError, match=message):
        ModelConfig.from_hf_dict(config)


def test_rope_table_is_the_rounded_float64_angle():
    config = ModelConfig.from_hf_dict(LLAMA | {"rope_scaling": None})
    table = rope_table(config, 200)
    assert table.shape == (200, 128)
    assert table.dtype == torch.float32
    for position, pair in ((0, 0), (1, 0), (199, 0), (77, 13), (199, 63)):
        angle = position * 500000.0 ** (-2 * pair / 128)
        for column, value in ((pair, math.cos(angle)), (64 + pair, math.sin(angle))):
            assert table[position, column].item() == pytest.approx(value, abs=2**-24)


def test_frequency_factors_divide_each_frequency():
    plain = ModelConfig.from_hf_dict(LLAMA | {"rope_scaling": None, "head_dim": 4})
    factors = {"rope_type": "freq_factors", "factors": [1.0, 8.0]}
    scaled = ModelConfig(**(vars(plain) | {"rope_scaling": factors}))
    expected = rope_inverse_frequencies(plain) / torch.tensor([1.0, 8.0])
    assert torch.equal(rope_inverse_frequencies(scaled), expected)
    with pytest.raises(EagleError, match="expected 2, got 1"):
        ModelConfig(**(vars(plain) | {"rope_scaling": {"rope_type": "freq_factors", "factors": [1.0]}}))
