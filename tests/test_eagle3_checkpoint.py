"""EAGLE-3 drafter directories: every published layout, and everything that can be wrong with one, named."""

import re

import pytest
import torch
from drafter_files import LAYOUTS, speculators, write_drafter
from eagle_engine import EagleError
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_checkpoint import read_drafter
from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.drafter_format import parse_drafter_config
from helpers import assert_exact
from tiny_engines import drafter_config, eagle3_config, random_tensors, tiny_target

TARGET = tiny_target("llama", num_hidden_layers=7)
VOCAB_SIZE = TARGET.config.vocab_size
OPTIONS = {
    "plain": {},
    "fc-norm": dict(fc_norm=True, norm_output=True),
    "fc-norm-alone": dict(fc_norm=True, norm_output=False),
    "norm-before-fc": dict(norm_before_fc=True, norm_before_residual=True),
    "narrow": dict(hidden_size=32, target_hidden_size=48),
    "whole-vocabulary": dict(draft_vocab_size=VOCAB_SIZE),
    "head-dim": dict(head_dim=20),
}
FULL = eagle3_config(TARGET, **OPTIONS["fc-norm"])


def raw_and_tensors(**options):
    raw = eagle3_config(TARGET, **options)
    return raw, random_tensors(raw)


def refused(tmp_path, raw, tensors, message: str, **arguments) -> None:
    """The directory is refused, by its name and with the message."""
    directory = write_drafter(tmp_path / "d", raw, tensors)
    with pytest.raises(EagleError, match=message) as caught:
        read_drafter(directory, **arguments)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_reads_as_the_same_drafter(tmp_path, layout, options, binary):
    raw, tensors = raw_and_tensors(**OPTIONS[options])
    written, named = LAYOUTS[layout](raw, tensors)
    if layout == "published" and "head_dim" in raw:
        written["head_dim"] = raw["head_dim"]
    config, read = read_drafter(write_drafter(tmp_path / "d", written, named, binary))
    assert config == parse_drafter_config(raw)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_exact(read[name], tensor)


def test_what_config_json_says_is_what_the_config_holds():
    config = parse_drafter_config(eagle3_config(TARGET, head_dim=20, hidden_size=32, target_hidden_size=48, rope_theta=700.0, norm_before_fc=True))
    assert (config.version, config.layer.head_dim, config.layer.hidden_size, config.target_hidden_size, config.fused_size) == (3, 20, 32, 48, 144)
    assert (config.layer.rope_theta, config.draft_vocab_size, config.captured_layer_ids) == (700.0, 57, None)
    assert (config.fc_norm, config.norm_before_fc, config.norm_before_residual, config.norm_output) == (False, True, False, False)
    plain = parse_drafter_config(eagle3_config(TARGET))
    assert (plain.layer.head_dim, plain.layer.rope_theta, plain.target_hidden_size) == (12, 10000.0, 48)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    assert parse_drafter_config(eagle3_config(TARGET, rope_scaling=llama3)).layer.rope_scaling == llama3


def test_flags_may_stand_in_eagle_config():
    assert parse_drafter_config(eagle3_config(TARGET, eagle_config={"norm_before_fc": True})).norm_before_fc
    with pytest.raises(EagleError, match="norm_before_fc twice"):
        parse_drafter_config(eagle3_config(TARGET, norm_before_fc=False, eagle_config={"norm_before_fc": True}))
    with pytest.raises(EagleError, match="norm_output: expected true or false, got 'yes'"):
        parse_drafter_config(eagle3_config(TARGET, norm_output="yes"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_written_is_read_again(tmp_path, options):
    """DrafterConfig.to_dict with the canonical names."""
    raw, tensors = raw_and_tensors(**OPTIONS[options])
    config = parse_drafter_config(raw)
    for ids in (None, (1, 3, 6)):
        config = DrafterConfig(**(vars(config) | {"captured_layer_ids": ids}))
        again, _ = read_drafter(write_drafter(tmp_path / f"d{ids is None}", config.to_dict("float32"), tensors))
        assert again.captured_layer_ids == ids
        assert (again.expected_tensors(), again.prefix, again.fused_size, again.layer.head_dim, again.layer.rope_theta) == (
            config.expected_tensors(), config.prefix, config.fused_size, config.layer.head_dim, config.layer.rope_theta,
        )  # fmt: skip
        assert [getattr(again, flag) for flag in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")] == [
            getattr(config, flag) for flag in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
        ]


# Versions


def test_the_version_is_told_by_the_tensors(tmp_path):
    assert read_drafter(write_drafter(tmp_path / "three", *raw_and_tensors()))[0].version == 3
    one = drafter_config(TARGET)
    assert read_drafter(write_drafter(tmp_path / "one", one, random_tensors(one)))[0].version == 1


@pytest.mark.parametrize("layout", ["published", "speculators"])
def test_config_and_tensors_of_two_versions_contradict_each_other(tmp_path, layout):
    raw, tensors = LAYOUTS[layout](*raw_and_tensors())
    one = drafter_config(TARGET)
    refused(tmp_path, raw, random_tensors(one), "contradict each other: config.json is that of an EAGLE-3 drafter .*the tensors are those of an EAGLE-1/2")
    refused(tmp_path, one, tensors, "contradict each other: config.json is that of an EAGLE-1/2 drafter .*the tensors are those of an EAGLE-3")


def test_tensors_are_known_by_their_width_when_no_name_tells(tmp_path):
    raw, tensors = speculators(*raw_and_tensors(draft_vocab_size=VOCAB_SIZE))
    del tensors["layers.0.hidden_norm.weight"]
    refused(tmp_path, drafter_config(TARGET), tensors, "tensors are those of an EAGLE-3 drafter .*twice as wide")
    refused(tmp_path, raw, tensors, "missing tensor midlayer.hidden_norm.weight")


def test_a_config_that_contradicts_itself(tmp_path):
    refused(tmp_path, eagle3_config(TARGET, architectures=["LlamaForCausalLMEagle"]), raw_and_tensors()[1], "contradicts itself: LlamaForCausalLMEagle is an EAGLE-1/2 drafter, draft_vocab_size")


def test_sglang_files_of_eagle1_have_a_head(tmp_path):
    raw = drafter_config(TARGET, architectures=["LlamaForCausalLMEagle"])
    head = torch.randn(VOCAB_SIZE, 48)
    config, tensors = read_drafter(write_drafter(tmp_path / "d", raw, random_tensors(raw) | {"lm_head.weight": head}))
    assert config.version == 1
    assert_exact(tensors["lm_head.weight"], head)


# Tensors


@pytest.mark.parametrize("layout", ["published", "half-prefixed", "speculators"])
@pytest.mark.parametrize("name", [*parse_drafter_config(FULL).expected_tensors(), "input_norm.weight", "embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path, name, layout):
    special = {"input_norm.weight": dict(norm_before_fc=True), "embed_tokens.weight": OPTIONS["narrow"]}
    raw, tensors = raw_and_tensors(**special.get(name, OPTIONS["fc-norm"]))
    del tensors[name]
    refused(tmp_path, *LAYOUTS[layout](raw, tensors), f"missing tensor {name}|norm_before_fc, but there is no tensor {name}")


@pytest.mark.parametrize("name", [*parse_drafter_config(FULL).expected_tensors(), "input_norm.weight", "embed_tokens.weight"])
def test_a_misshaped_tensor_is_named(tmp_path, name):
    raw, tensors = raw_and_tensors(**(dict(norm_before_fc=True) if name == "input_norm.weight" else OPTIONS["fc-norm"]))
    tensor = tensors.get(name, torch.zeros(VOCAB_SIZE, 48))
    tensors[name] = torch.cat((tensor, tensor[:1]))
    refused(tmp_path, raw, tensors, f"{name}: expected shape")


@pytest.mark.parametrize("name", ["fc.bias", "midlayer.self_attn.q_proj.bias", "midlayer.self_attn.q_norm.weight", "layers.0.typo", "typo", "norm.bias", "input_norm.0.weight"])
def test_an_unused_tensor_is_named(tmp_path, name):
    raw, tensors = raw_and_tensors()
    message = "the layer is there twice, as midlayer.* and as layers.0.typo" if name.startswith("layers.0") else f"unused tensor {name}"
    refused(tmp_path, raw, tensors | {name: torch.zeros(48)}, re.escape(message))


def test_a_tensor_under_two_names_is_refused(tmp_path):
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, tensors | {"model.norm.weight": torch.zeros(48)}, "norm.weight is there twice")


def test_tables_of_rotary_embeddings_are_passed_over(tmp_path):
    raw, tensors = raw_and_tensors()
    read_drafter(write_drafter(tmp_path / "d", raw, tensors | {"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(6)}))


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.float64], ids=str)
def test_weights_of_another_dtype_are_refused(tmp_path, name, dtype):
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, tensors | {name: tensors[name].to(dtype)}, f"tensor {name} is {str(dtype)[6:]}; expected float32 or bfloat16 or float16")


@pytest.mark.parametrize("make", [drafter_config, eagle3_config], ids=["eagle-1", "eagle-3"])
def test_weights_in_8_bits_are_plain_numbers(tmp_path, make):
    """As the trainer can export them, norms and biases in 16 bits; a scale beside a weight would be an unused tensor."""
    raw = make(TARGET, torch_dtype="float8_e4m3fn")
    tensors = {name: tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor for name, tensor in random_tensors(raw).items()}
    directory = write_drafter(tmp_path / "d", raw, tensors)
    wide = {name: tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in tensors.items()}
    drafters = [Drafter.from_directory(directory, TARGET, max_positions=64), Drafter(parse_drafter_config(raw), wide, TARGET, max_positions=64)]
    features = torch.randn(4, 3 * 48 if raw.get("draft_vocab_size") else 48)
    assert_exact(*(drafter.logits(drafter.fuse(features)) for drafter in drafters))
    refused(tmp_path, raw, tensors | {"fc.weight_scale": torch.ones(())}, "unused tensor fc.weight_scale")
    norm = next(name for name in tensors if name.endswith("post_attention_layernorm.weight"))
    refused(tmp_path, raw, tensors | {norm: tensors[norm].to(torch.float8_e4m3fn)}, f"tensor {norm} is float8_e4m3fn; expected float32 or bfloat16 or float16")


@pytest.mark.parametrize("flag, names", [("fc_norm", ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]), ("norm_before_fc", ["input_norm.weight"])])
@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_flag_and_its_tensors_belong_together(tmp_path, flag, names, layout):
    plain, without = raw_and_tensors()
    raw, tensors = raw_and_tensors(**{flag: True, "norm_output": False})
    refused(tmp_path, *LAYOUTS[layout](raw, without), f"config.json sets {flag}, but there is no tensor {', '.join(names)}")
    refused(tmp_path, *LAYOUTS[layout](plain, tensors), f"there is a tensor {', '.join(names)}, but config.json does not set {flag}")


def test_flags_that_readers_take_differently_must_be_said(tmp_path):
    raw, tensors = speculators(*raw_and_tensors())
    del raw["norm_before_residual"]
    refused(tmp_path, raw, tensors, "does not say norm_before_residual.*vLLM takes true, the converter of speculators false")
    raw, tensors = raw_and_tensors(fc_norm=True, norm_output=False)
    del raw["norm_output"]
    refused(tmp_path, raw, tensors, "sets fc_norm and does not say norm_output.*SpecForge takes true, SGLang false")


def test_two_ways_to_normalise_the_same_states_are_refused():
    with pytest.raises(EagleError, match="fc_norm and norm_before_fc"):
        parse_drafter_config(eagle3_config(TARGET, fc_norm=True, norm_before_fc=True, norm_output=True))


UNSUPPORTED = {
    "layers": (dict(num_hidden_layers=2), "one layer, this one has 2"),
    "no-states": (dict(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
    "four-states": (dict(num_aux_hidden_states=4), "num_aux_hidden_states 4 is not supported"),
    "p-eagle": (dict(mask_token_id=5), "P-EAGLE drafter"),
    "p-eagle-pard": (dict(pard_token=5), "P-EAGLE drafter"),
    "bias": (dict(attention_bias=True), "attention_bias is not supported"),
    "window": (dict(layer_types=["sliding_attention"]), "sliding window"),
    "yarn": (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope type 'yarn'"),
    "draft-vocab": (dict(draft_vocab_size=VOCAB_SIZE + 1), "draft_vocab_size: expected a whole number from 1"),
    "draft-vocab-0": (dict(draft_vocab_size=0), "draft_vocab_size: expected a whole number of 1 or more"),
    "quantised": (dict(quantization_config={"quant_method": "fp8"}), "quantised"),
    "activation": (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
}


@pytest.mark.parametrize("options, message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_computed_is_refused_by_name(options, message):
    with pytest.raises(EagleError, match=message):
        parse_drafter_config(eagle3_config(TARGET, **options))


def test_other_drafters_are_refused_by_name(tmp_path):
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, tensors | {"mask_hidden": torch.zeros(48)}, "P-EAGLE drafter .tensor mask_hidden.")
    written, named = speculators(raw, tensors)
    refused(tmp_path, written, named | {"layers.1.mlp.up_proj.weight": torch.zeros(2)}, "several layers .tensor layers.1.mlp.up_proj.weight.")
    one = random_tensors(drafter_config(TARGET))
    for kind, found in (("peagle", named), ("eagle", one), ("dflash", named)):
        refused(tmp_path, written | {"speculators_model_type": kind}, found, f"speculators_model_type '{kind}' is not supported")
    del written["transformer_layer_config"]
    refused(tmp_path, written, named, "transformer_layer_config, which is missing")
