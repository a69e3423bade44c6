"""The EAGLE-1/2 drafter: one decoder layer that predicts the target's next feature (Li et al., 2024a, 2024b)."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle_engine.checkpoint import check_tensors
from eagle_engine.errors import EagleError
from eagle_engine.huggingface_checkpoint import open_safetensors, read_json
from eagle_engine.model_config import ModelConfig
from eagle_engine.prefill_attention import MAX_TREE_QUERIES, prefill_attention
from eagle_engine.rope import rope_table
from eagle_engine.target import TargetModel
from eagle_kernels import HeadTopK, PackedWeight, embedding, head_topk, linear, pack_weight, rms_norm, rope_store_kv, silu_mul, tree_attention, unpack_weight

RANKING_FILE = "token_ranking.npy"
_LAYER = "layers.0."


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and options of an EAGLE-1/2 drafter, from its own config.json.

    bias      of `fc`; the published code takes True when the key is absent
    qkv_bias  of q, k and v; False when absent
    layer     sizes of the decoder layer; head_dim is hidden_size / num_heads whatever config.json says, RoPE base 10000 when absent
    """

    layer: ModelConfig
    bias: bool
    qkv_bias: bool

    @classmethod
    def from_dict(cls, config: dict) -> DrafterConfig:
        if "draft_vocab_size" in config or any("Eagle3" in str(name) for name in config.get("architectures") or ()):
            raise EagleError("this is an EAGLE-3 drafter; this version runs EAGLE-1 and EAGLE-2 drafters")
        layers = config.get("num_hidden_layers", 1)
        if layers != 1:
            raise EagleError(f"an EAGLE-1/2 drafter has one layer, this one has {layers} (num_hidden_layers)")
        plain = {key: value for key, value in config.items() if key not in ("head_dim", "architectures", "sliding_window")}
        layer = ModelConfig.from_hf_dict(plain | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "num_hidden_layers": 1})
        return cls(layer, bool(config.get("bias", True)), bool(config.get("qkv_bias", False)))

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Published name -> shape of every tensor that must be there."""
        c = self.layer
        hidden, q_size, kv_size, inner = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
        if self.bias:
            shapes["fc.bias"] = (hidden,)
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            shapes[f"{_LAYER}self_attn.{name}.weight"] = (size, hidden)
            if self.qkv_bias:
                shapes[f"{_LAYER}self_attn.{name}.bias"] = (size,)
        shapes[_LAYER + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[_LAYER + "mlp.gate_proj.weight"] = shapes[_LAYER + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[_LAYER + "mlp.down_proj.weight"] = (hidden, inner)
        shapes[_LAYER + "post_attention_layernorm.weight"] = (hidden,)
        return shapes

    def optional_tensors(self) -> dict[str, tuple[int, ...]]:
        """Tensors that a checkpoint may carry; without them the target's are used."""
        shape = (self.layer.vocab_size, self.layer.hidden_size)
        return {"embed_tokens.weight": shape, "lm_head.weight": shape}


def read_drafter(path: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration and tensors of a drafter directory: config.json with model.safetensors or pytorch_model.bin. Any missing, unused or mis-shaped tensor is an error."""
    if not path.is_dir():
        raise EagleError(f"{path}: no such drafter directory")
    try:
        config = DrafterConfig.from_dict(read_json(path / "config.json"))
    except EagleError as error:
        raise EagleError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    tensors = _read_tensors(path)
    if any(name.startswith("midlayer.") for name in tensors) or "d2t" in tensors:
        raise EagleError(f"{path}: this is an EAGLE-3 drafter (tensors midlayer.* or d2t); this version runs EAGLE-1 and EAGLE-2 drafters")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = config.expected_tensors()
    expected |= {name: shape for name, shape in config.optional_tensors().items() if name in tensors}
    check_tensors(path, expected, shapes)
    return config, tensors


def _read_tensors(path: Path) -> dict[str, Tensor]:
    safetensors, pickled = path / "model.safetensors", path / "pytorch_model.bin"
    if safetensors.is_file():
        handle = open_safetensors(safetensors)
        return {name: handle.get_tensor(name) for name in handle.keys()}
    if not pickled.is_file():
        raise EagleError(f"{path}: neither model.safetensors nor pytorch_model.bin")
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise EagleError(f"{pickled}: cannot be read; it is truncated or no checkpoint of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise EagleError(f"{pickled}: expected a dictionary of tensors")
    return tensors


def read_token_ids(path: Path, vocab_size: int, count: int | None = None) -> Tensor:
    """A draft vocabulary: token ids, most frequent first, from a .npy or .json file; the first `count` of them, as int64."""
    try:
        ids = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.asarray(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise EagleError(f"{path}: expected a list of token ids as .npy or .json: {error}") from error
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise EagleError(f"{path}: expected a list of token ids, got an array of shape {list(ids.shape)} and type {ids.dtype}")
    ids = torch.from_numpy(ids.astype(np.int64))
    if count is not None:
        if count > len(ids):
            raise EagleError(f"{path}: a draft vocabulary of {count} was asked for, the list holds {len(ids)} tokens")
        ids = ids[:count]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise EagleError(f"{path}: token ids must lie in 0..{vocab_size - 1}, found {int(ids.min())}..{int(ids.max())}")
    if len(ids.unique()) != len(ids):
        raise EagleError(f"{path}: a token id stands twice in the draft vocabulary")
    return ids


class Drafter:
    """Features and draft logits; pair i is (feature of token i, embedding of token i + 1) and sits at RoPE position i.

    draft_to_target  [draft vocabulary] int64, target id of each draft id; None: the whole vocabulary
    """

    def __init__(self, config: DrafterConfig, tensors: dict[str, Tensor], target: TargetModel, *, max_positions: int, draft_vocab: Tensor | None = None) -> None:
        layer = config.layer
        if layer.hidden_size != target.config.hidden_size:
            raise EagleError(f"drafter of another target: its hidden_size is {layer.hidden_size}, the target's is {target.config.hidden_size}")
        if layer.vocab_size != target.config.vocab_size:
            raise EagleError(f"drafter of another target: its vocab_size is {layer.vocab_size}, the target's is {target.config.vocab_size}")
        dtype, device, activation_dtype = target.dtype, target.device, target.activation_dtype

        def pack(*names: str) -> PackedWeight:
            return pack_weight(torch.cat([tensors[name].to(device, dtype) for name in names]), target.embedding.layout)

        def bias(*names: str) -> Tensor:
            return torch.cat([tensors[name] for name in names]).to(device, activation_dtype)

        attention = _LAYER + "self_attn."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        self.config = layer
        self.fc = pack("fc.weight")
        self.fc_bias = bias("fc.bias") if config.bias else None
        self.qkv = pack(*(f"{name}.weight" for name in qkv))
        self.qkv_bias = bias(*(f"{name}.bias" for name in qkv)) if config.qkv_bias else None
        self.o = pack(attention + "o_proj.weight")
        self.mlp_norm = tensors[_LAYER + "post_attention_layernorm.weight"].to(device, torch.float32)
        self.gate_up = pack(_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight")
        self.down = pack(_LAYER + "mlp.down_proj.weight")
        self.rope_table = rope_table(layer, max_positions).to(device)
        own_embedding = tensors.get("embed_tokens.weight")
        # Published checkpoints carry a copy of the target's embedding; one that is equal is held once.
        self.embedding = target.embedding if own_embedding is None or torch.equal(own_embedding.to(device, dtype), unpack_weight(target.embedding)) else pack("embed_tokens.weight")
        self.head, self.draft_to_target = self._draft_head(tensors.get("lm_head.weight"), target, draft_vocab)

    @classmethod
    def from_directory(cls, path: Path, target: TargetModel, *, max_positions: int, draft_vocab: int | str | Path | None = None) -> Drafter:
        """Load a drafter in the published format, strictly.

        draft_vocab  None: the target's whole vocabulary; a number: so many of the most frequent tokens, as ranked in the drafter's token_ranking.npy; a path: a file of ids
        """
        config, tensors = read_drafter(path)
        ids = None
        if draft_vocab is not None:
            count = draft_vocab if isinstance(draft_vocab, int) else None
            ranking = path / RANKING_FILE if count is not None else Path(draft_vocab).expanduser()
            if not ranking.is_file():
                raise EagleError(f"draft vocabulary: {ranking} does not exist; give a file of token ids, most frequent first, or no draft vocabulary")
            ids = read_token_ids(ranking, config.layer.vocab_size, count)
        try:
            return cls(config, tensors, target, max_positions=max_positions, draft_vocab=ids)
        except EagleError as error:
            raise EagleError(f"{path}: {error}") from error

    @staticmethod
    def _draft_head(own_head: Tensor | None, target: TargetModel, draft_vocab: Tensor | None) -> tuple[PackedWeight, Tensor | None]:
        if draft_vocab is None:
            return (target.head if own_head is None else pack_weight(own_head.to(target.device, target.dtype), target.head.layout)), None
        draft_vocab = draft_vocab.to(target.device)
        rows = (unpack_weight(target.head) if own_head is None else own_head.to(target.device, target.dtype))[draft_vocab]
        return pack_weight(rows, target.head.layout), draft_vocab

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that are not the target's."""
        own = [self.fc.data, self.qkv.data, self.o.data, self.gate_up.data, self.down.data]
        own += [self.head.data] if self.draft_to_target is not None else []
        return sum(tensor.nbytes for tensor in own)

    @property
    def vocab_size(self) -> int:
        return self.head.out_features

    def forward(
        self,
        token_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        packed_ancestor_mask: Tensor | None = None,
        row_offset: int = 0,
    ) -> Tensor:
        """Run Q pairs of each sequence as the tentative rows row_offset, row_offset + 1, ... of the drafter's cache.

        token_ids             [B, Q] int64, the token after each feature; below 0: as 0
        features              [B, Q, H] activations (fp32 on the CPU, the weights' dtype on CUDA)
        position_ids          [B, Q] int64, of the features
        cache                 [2, pages, page_size, kv_heads, head_dim]; modified
        seq_lens              [B] int32, committed rows of the drafter
        packed_ancestor_mask  [B, Q, W] int64 over the tentative rows; None: a causal chunk
        returns               [B, Q, H] activations, the predicted features
        """
        c = self.config
        batch, queries = token_ids.shape
        x = torch.cat((embedding(token_ids.reshape(-1), self.embedding), features.reshape(-1, c.hidden_size)), dim=1)
        hidden = linear(x, self.fc, self.fc_bias)
        qkv = linear(hidden, self.qkv, self.qkv_bias).view(batch, queries, -1, c.head_dim)
        q, k, v = qkv[:, :, : c.num_heads], qkv[:, :, c.num_heads : c.num_heads + c.num_kv_heads], qkv[:, :, c.num_heads + c.num_kv_heads :]
        rope_store_kv(q, k, v, position_ids, self.rope_table, cache, page_table, seq_lens, row_offset)
        if queries > MAX_TREE_QUERIES:
            attended = prefill_attention(q, cache, page_table, int(seq_lens[0]), out=torch.empty_like(q, memory_format=torch.contiguous_format))
        else:
            attended = tree_attention(q, cache, page_table, seq_lens, packed_ancestor_mask)
        x = rms_norm(linear(attended.view(batch * queries, -1), self.o), self.mlp_norm, c.rms_norm_eps, hidden)
        hidden += linear(silu_mul(linear(x, self.gate_up)), self.down)
        return hidden.view(batch, queries, c.hidden_size)

    def logits(self, features: Tensor) -> Tensor:
        """features [..., H] activations -> [..., draft vocabulary] fp32."""
        return linear(features, self.head, out=torch.empty(*features.shape[:-1], self.vocab_size, dtype=torch.float32, device=features.device))

    def head_topk(self, features: Tensor, top_k: int) -> HeadTopK:
        """The best top_k draft tokens after each of the features [..., H], without writing the logits on CUDA."""
        return head_topk(features, self.head, top_k)
