"""config.json of a drafter, in each of the published formats, as a DrafterConfig.

EAGLE-1/2          the published files, and SGLang's (architecture LlamaForCausalLMEagle)
EAGLE-3 and 3.1    the published files and SpecForge's (LlamaForCausalLM or LlamaForCausalLMEagle3 with draft_vocab_size), options at the top level or in eagle_config;
                   speculators' (speculators_model_type), sizes of the layer in transformer_layer_config

What two readers of a format take differently must be said, never guessed: ids of captured layers, norm_before_residual of a speculators file, norm_output beside fc_norm.
"""

from __future__ import annotations

from typing import Any

from eagle_engine.drafter_config import FLAGS, LAYER_ID_CONVENTIONS, NUM_CAPTURED, DrafterConfig
from eagle_engine.errors import EagleError
from eagle_engine.model_config import ModelConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_ID_CONVENTION = "eagle_aux_hidden_state_layer_id_convention"
_EAGLE3_KEYS = ("draft_vocab_size", "target_hidden_size", "speculators_model_type", "eagle_config", LAYER_IDS, *FLAGS)


def stated_version(config: dict[str, Any]) -> tuple[int, str]:
    """The version that config.json is about, and what in it says so."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise EagleError(f"speculators_model_type {kind!r} is not supported, only 'eagle3' is")
    names = [str(name) for name in config.get("architectures") or ()]
    signs = [name for name in names if "eagle3" in name.lower()] + [key for key in _EAGLE3_KEYS if config.get(key) is not None]
    if signs and "LlamaForCausalLMEagle" in names:
        raise EagleError(f"config.json contradicts itself: LlamaForCausalLMEagle is an EAGLE-1/2 drafter, {', '.join(signs)} an EAGLE-3 drafter")
    return (3, ", ".join(signs)) if signs else (1, "no draft_vocab_size, no name of EAGLE-3")


def parse_drafter_config(config: dict[str, Any], layer_ids: str | None = None) -> DrafterConfig:
    """config     the dictionary of config.json
    layer_ids  "input" or "output": what ids of captured layers count where the file does not say; None: it must say
    """
    if layer_ids not in (None, *LAYER_ID_CONVENTIONS):
        raise EagleError(f"draft_layer_ids: expected {' or '.join(LAYER_ID_CONVENTIONS)}, got {layer_ids!r}")
    return _eagle1(config) if stated_version(config)[0] == 1 else _eagle3(config, layer_ids)


def _eagle1(config: dict[str, Any]) -> DrafterConfig:
    # The published code ignores head_dim.
    layer = _layer({key: value for key, value in config.items() if key != "head_dim"} | {"attention_bias": False}, "EAGLE-1/2")
    return DrafterConfig(1, layer, layer.hidden_size, bias=bool(config.get("bias", True)), qkv_bias=bool(config.get("qkv_bias", False)))


def _eagle3(config: dict[str, Any], layer_ids: str | None) -> DrafterConfig:
    is_speculators = config.get("speculators_model_type") is not None
    for key in ("mask_token_id", "pard_token"):
        if config.get(key) is not None:
            raise EagleError(f"this is a P-EAGLE drafter ({key}), which drafts several tokens in one forward; it is not supported")
    if _option(config, "use_aux_hidden_state") is False:
        raise EagleError("use_aux_hidden_state is false: EAGLE-3 drafters that take no captured states are not supported")
    count = _option(config, "num_aux_hidden_states")
    if count not in (None, NUM_CAPTURED):
        raise EagleError(f"num_aux_hidden_states {count!r} is not supported, only {NUM_CAPTURED} is")
    sizes = config
    if is_speculators:
        sizes = config.get("transformer_layer_config")
        if not isinstance(sizes, dict):
            raise EagleError("a speculators config.json holds the sizes of the layer in transformer_layer_config, which is missing")
    for key in ("attention_bias", "mlp_bias"):
        if sizes.get(key):
            raise EagleError(f"{key} is not supported in an EAGLE-3 drafter")
    if "sliding_attention" in (sizes.get("layer_types") or ()):
        raise EagleError("layer_types: a drafter with a sliding window is not supported")
    layer = _layer(sizes, "EAGLE-3")
    return DrafterConfig(
        3,
        layer,
        _size(config, "target_hidden_size", layer.hidden_size),
        draft_vocab_size=_size(config, "draft_vocab_size", layer.vocab_size),
        captured_layer_ids=_captured_layer_ids(config, layer_ids, is_speculators),
        **_flags(config, is_speculators),
    )


def _layer(sizes: dict[str, Any], name: str) -> ModelConfig:
    """Sizes of the decoder layer; RoPE base 10000 when absent, whatever the target's is."""
    layers = sizes.get("num_hidden_layers", 1)
    if layers != 1:
        raise EagleError(f"an {name} drafter has one layer, this one has {layers} (num_hidden_layers); drafters of several layers are not supported")
    # The dtype is read from the tensors.
    plain = {key: value for key, value in sizes.items() if key not in ("sliding_window", "dtype", "torch_dtype")}
    return ModelConfig.from_hf_dict(plain | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})


def _flags(config: dict[str, Any], is_speculators: bool) -> dict[str, bool]:
    """The flags of EAGLE-3.1; absent means off where all readers agree on that."""
    flags = {name: _option(config, name) for name in FLAGS}
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise EagleError(f"{name}: expected true or false, got {value!r}")
    if is_speculators and flags["norm_before_residual"] is None:
        raise EagleError("config.json does not say norm_before_residual, and readers of speculators files disagree: vLLM takes true, the converter of speculators false; add what the drafter was trained with")
    if flags["fc_norm"] and flags["norm_output"] is None:
        raise EagleError("config.json sets fc_norm and does not say norm_output, and readers disagree: SpecForge takes true, SGLang false; add what the drafter was trained with")
    return {name: bool(value) for name, value in flags.items()}


def _captured_layer_ids(config: dict[str, Any], layer_ids: str | None, is_speculators: bool) -> tuple[int, ...] | None:
    """The layers whose inputs are captured; None: the default ones, on which readers agree."""
    ids = _option(config, LAYER_IDS)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise EagleError(f"{LAYER_IDS}: expected a list of {NUM_CAPTURED} layers, got {ids!r}")
    stated = _option(config, LAYER_ID_CONVENTION) or ("input" if is_speculators else None)
    if stated is not None and stated not in LAYER_ID_CONVENTIONS:
        raise EagleError(f"{LAYER_ID_CONVENTION}: expected {' or '.join(LAYER_ID_CONVENTIONS)}, got {stated!r}")
    if stated is not None and layer_ids is not None and stated != layer_ids:
        raise EagleError(f"draft_layer_ids is {layer_ids!r}, but this drafter's config.json says that {LAYER_IDS} counts {stated}s")
    convention = stated or layer_ids
    after = [i + 1 for i in ids]
    if convention is None:
        raise EagleError(
            f"{LAYER_IDS} {ids}: readers disagree on what these ids count. vLLM takes the input of the layer with the id (captured: the inputs of layers {ids}), SGLang its output "
            f"(the inputs of layers {after}). Say which with draft_layer_ids='input' or 'output' (--draft-layer-ids), or with {LAYER_ID_CONVENTION} beside the ids in config.json"
        )
    return tuple(ids if convention == "input" else after)


def _option(config: dict[str, Any], name: str) -> Any:
    """A key of the top level or of eagle_config; None: in neither."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise EagleError(f"eagle_config: expected an object, got {nested!r}")
    values = [place[name] for place in (config, nested) if place.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise EagleError(f"config.json says {name} twice, {values[0]!r} and in eagle_config {values[1]!r}")
    return values[0] if values else None


def _size(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EagleError(f"{key}: expected a whole number of 1 or more, got {value!r}")
    return value
