"""What a drafter is: its version, sizes and options, and the names and shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_engine.errors import EagleError
from eagle_engine.model_config import ModelConfig

LAYER = {1: "layers.0.", 3: "midlayer."}
NUM_CAPTURED = 3

# EAGLE-3.1 flags: options of the EAGLE-3 layer that a published config.json may set. Absent means off, except where readers disagree: drafter_format.py.
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")

# What the ids of captured states count: "input" of the layer with that id, or its "output". The first is what vLLM and the published defaults mean, the second what SGLang takes explicit ids for.
LAYER_ID_CONVENTIONS = ("input", "output")


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and options of a drafter.

    version             1: EAGLE-1 and EAGLE-2, whose weights are the same; 3: EAGLE-3 and 3.1
    layer               sizes of the decoder layer; vocab_size is the target's
    target_hidden_size  width of the target's states; that of the layer, unless an EAGLE-3 drafter is narrower
    bias                version 1: of `fc`; the published code takes True when the key is absent
    qkv_bias            version 1: of q, k and v; False when absent
    draft_vocab_size    version 3: rows of its own head; equal to the target's vocabulary: no d2t and t2d
    captured_layer_ids  version 3: the target's layers whose inputs are fused, low to high; None: 2, N // 2 and N - 3 of N layers
    fc_norm             version 3: each captured state is normalised before `fc`
    norm_before_fc      version 3: the captured states are normalised together before `fc`
    norm_before_residual  version 3: the residual is the normalised feature
    norm_output         version 3: the feature that is fed back is the normalised output
    """

    version: int
    layer: ModelConfig
    target_hidden_size: int
    bias: bool = False
    qkv_bias: bool = False
    draft_vocab_size: int = 0
    captured_layer_ids: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.version not in LAYER:
            raise EagleError(f"drafter version: expected 1 or 3, got {self.version!r}")
        if self.version == 1 and self.target_hidden_size != self.layer.hidden_size:
            raise EagleError(f"an EAGLE-1/2 drafter is as wide as its target: hidden_size {self.layer.hidden_size}, target_hidden_size {self.target_hidden_size}")
        if self.version == 3:
            if not 0 < self.draft_vocab_size <= self.layer.vocab_size:
                raise EagleError(f"draft_vocab_size: expected a whole number from 1 to the vocabulary's {self.layer.vocab_size}, got {self.draft_vocab_size}")
            if self.fc_norm and self.norm_before_fc:
                raise EagleError("fc_norm and norm_before_fc are two ways to normalise the same states: at most one may be set")
            ids = self.captured_layer_ids
            if ids is not None and (len(ids) != NUM_CAPTURED or sorted(set(ids)) != list(ids)):
                raise EagleError(f"captured layers: expected {NUM_CAPTURED} different ones in ascending order, as a target runs through them, got {list(ids)}")

    @property
    def prefix(self) -> str:
        """Of the decoder layer's tensors."""
        return LAYER[self.version]

    @property
    def fused_size(self) -> int:
        """Width of what the target hands over for each token: its feature, or the captured states side by side."""
        return NUM_CAPTURED * self.target_hidden_size if self.version == 3 else self.target_hidden_size

    @property
    def has_own_vocab(self) -> bool:
        """The head covers a part of the target's vocabulary, chosen by d2t and t2d."""
        return self.version == 3 and self.draft_vocab_size != self.layer.vocab_size

    def captured_layers(self, num_layers: int) -> tuple[int, ...]:
        """The target's layers, of num_layers, whose inputs are handed over; () for version 1, which takes the target's feature."""
        if self.version == 1:
            return ()
        ids = self.captured_layer_ids
        if ids is None:
            if num_layers < 7:
                raise EagleError(f"the default captured states, the inputs of layers 2, N // 2 and N - 3, need a target of 7 layers or more, this one has {num_layers}: name captured layers")
            ids = (2, num_layers // 2, num_layers - 3)
        if any(not 0 <= i <= num_layers for i in ids):
            raise EagleError(f"captured layers {list(ids)}: a target of {num_layers} layers has inputs 0 to {num_layers - 1}, and {num_layers} for the output of the last")
        return ids

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Published name -> shape of every tensor that must be there."""
        c = self.layer
        hidden, q_size, kv_size, inner = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden if self.version == 1 else self.fused_size)}
        if self.bias:
            shapes["fc.bias"] = (hidden,)
        width = hidden if self.version == 1 else 2 * hidden
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            shapes[f"{self.prefix}self_attn.{name}.weight"] = (size, width)
            if self.qkv_bias:
                shapes[f"{self.prefix}self_attn.{name}.bias"] = (size,)
        shapes[self.prefix + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[self.prefix + "mlp.gate_proj.weight"] = shapes[self.prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[self.prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes[self.prefix + "post_attention_layernorm.weight"] = (hidden,)
        if self.version == 3:
            shapes |= {self.prefix + "hidden_norm.weight": (hidden,), self.prefix + "input_layernorm.weight": (hidden,), "norm.weight": (hidden,)}
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
            if self.fc_norm:
                shapes |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in range(NUM_CAPTURED)}
            if self.norm_before_fc:
                shapes["input_norm.weight"] = (self.fused_size,)
            if self.has_own_vocab:
                shapes |= {"d2t": (self.draft_vocab_size,), "t2d": (c.vocab_size,)}
            if self.target_hidden_size != hidden:
                shapes["embed_tokens.weight"] = (c.vocab_size, hidden)
        return shapes

    def optional_tensors(self) -> dict[str, tuple[int, ...]]:
        """Tensors that a checkpoint may carry; without them the target's are used."""
        shape = (self.layer.vocab_size, self.layer.hidden_size)
        if self.version == 1:
            return {"embed_tokens.weight": shape, "lm_head.weight": shape}
        # Over the whole vocabulary d2t and t2d may be there and say nothing.
        return {"embed_tokens.weight": shape} | ({} if self.has_own_vocab else {"d2t": shape[:1], "t2d": shape[:1]})

    def to_dict(self, dtype: str) -> dict[str, Any]:
        """config.json of the published format."""
        c = self.layer
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM" if self.version == 1 else "LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "max_position_embeddings": c.max_position_embeddings,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope_theta,
            "vocab_size": c.vocab_size,
            "bos_token_id": c.bos_token_id,
            "eos_token_id": c.eos_token_ids[0] if len(c.eos_token_ids) == 1 else list(c.eos_token_ids),
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }
        if c.rope_scaling is not None:
            config["rope_scaling"] = c.rope_scaling
        if self.version == 1:
            return config | {"bias": self.bias, "qkv_bias": self.qkv_bias}
        config["draft_vocab_size"] = self.draft_vocab_size
        if self.target_hidden_size != c.hidden_size:
            config["target_hidden_size"] = self.target_hidden_size
        if self.captured_layer_ids is not None:
            config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(self.captured_layer_ids), "eagle_aux_hidden_state_layer_id_convention": "input"}
        # Beside fc_norm readers take a missing norm_output differently.
        return config | {name: getattr(self, name) for name in FLAGS if getattr(self, name) or (name == "norm_output" and self.fc_norm)}


def misfits(config: DrafterConfig, target: ModelConfig) -> list[str]:
    """Why a drafter cannot serve a target; empty when it can."""
    width = "hidden_size" if config.target_hidden_size == config.layer.hidden_size else "target_hidden_size"
    sizes = ((width, config.target_hidden_size, target.hidden_size), ("vocab_size", config.layer.vocab_size, target.vocab_size))
    reasons = [f"{name} of the drafter is {ours}, of the target {theirs}: it was made for another target" for name, ours, theirs in sizes if ours != theirs]
    try:
        config.captured_layers(target.num_layers)
    except EagleError as error:
        reasons.append(str(error))
    return reasons
