"""The target model: a decoder of any supported family on the ops of eagle_kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_engine.checkpoint import Checkpoint
from eagle_engine.errors import EagleError
from eagle_engine.model_config import ModelConfig
from eagle_engine.prefill_attention import MAX_TREE_QUERIES, prefill_attention
from eagle_engine.rope import rope_table
from eagle_engine.target_weights import load_weights, packed_shapes
from eagle_kernels import (
    copy_rows,
    embedding,
    expert_linear,
    linear,
    rms_norm,
    rope_store_kv,
    route_experts,
    silu_mul,
    tree_attention,
)
from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.linear import PackedWeight


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer; norms and biases float32. With a router, gate_up and down hold all experts."""

    attention_norm: torch.Tensor
    qkv: PackedWeight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedWeight
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: PackedWeight
    gate_up_bias: torch.Tensor | None
    down: PackedWeight
    down_bias: torch.Tensor | None
    router: PackedWeight | None


class TargetModel:
    """Features and logits of tokens, given a paged cache of those before them.

    On the CPU, and on CUDA when deterministic, every row of every result depends on that row's inputs and its own prefix alone, bit for bit.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], max_positions: int, deterministic: bool = False) -> None:
        """weights: as `target_weights.load_weights` makes them, all on one device; positions 0..max_positions - 1 can be used; deterministic: see from_checkpoint."""
        self.config = config
        self.max_positions = max_positions
        self.num_bytes = sum(tensor.nbytes for tensor in weights.values())
        self.deterministic = deterministic
        shapes = packed_shapes(config)
        embedding_data = weights["embedding"]
        self.device, self.dtype = embedding_data.device, embedding_data.dtype
        layout = "rows" if embedding_data.dim() == 2 else "panels"
        # Between the ops: float32 on the CPU, the weights' dtype on CUDA.
        self.activation_dtype = self.dtype if layout == "rows" else torch.float32

        def take(name: str) -> torch.Tensor | PackedWeight | None:
            tensor = weights.get(name)
            kind = name.rsplit(".", 1)[-1]
            if tensor is not None and kind.endswith("_bias"):
                return tensor.to(self.activation_dtype)
            return PackedWeight(tensor, *shapes[kind], layout) if tensor is not None and kind in shapes else tensor

        self.embedding = take("embedding")
        self.head = self.embedding if config.tie_word_embeddings else take("head")
        self.final_norm = take("final_norm")
        self.layers = [
            Layer(**{field: take(f"layers.{i}.{field}") for field in Layer.__slots__}) for i in range(config.num_layers)
        ]
        self.rope_table = rope_table(config, max_positions).to(self.device)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
        progress: bool = True,
        cache_directory: Path | None = None,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
    ) -> TargetModel:
        """Read, convert and pack the weights (from the weight cache if the checkpoint is a GGUF file seen before).

        dtype          of the weights: float32 or bfloat16; on CUDA bfloat16 or float16
        max_positions  default: the model's max_position_embeddings
        deterministic  CUDA: row-invariant kernels in place of the fastest; the CPU has no others
        """
        device = torch.device(device)
        supported = (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16, torch.float16)
        if dtype not in supported:
            names = " or ".join(str(one).removeprefix("torch.") for one in supported)
            raise EagleError(f"weights can be held in {names} on {device.type}, not in {str(dtype).removeprefix('torch.')}")
        if max_positions is None:
            max_positions = checkpoint.config.max_position_embeddings
        weights = load_weights(checkpoint, dtype, progress, cache_directory, device)
        return cls(checkpoint.config, weights, max_positions, deterministic)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [...] int64 (below 0: as 0) -> [..., H] activations."""
        return embedding(token_ids, self.embedding)

    def logits(self, features: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """features [..., H] activations -> [..., V] float32, put into `out` where it is given."""
        if out is None:
            out = torch.empty(*features.shape[:-1], self.head.out_features, dtype=torch.float32, device=features.device)
        return linear(features, self.head, deterministic=self.deterministic, out=out)

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: torch.Tensor | Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        packed_ancestor_mask: torch.Tensor | None = None,
        captured_layers: Sequence[int] = (),
        captured: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run Q tentative rows of each sequence and store their keys and values behind the committed ones.

        token_ids, position_ids   [B, Q] int64, Q <= 256; more for a prompt on CUDA with flash-attn, B = 1 and no mask
        cache                     [layers, 2, pages, page_size, kv_heads, head_dim], or its layers as a list; modified:
                                  tentative row i of sequence b gets the keys and values of token_ids[b, i]
        seq_lens                  [B] int32, committed rows
        page_table                [B, max_pages] int32
        packed_ancestor_mask      [B, Q, W] int64; None: row i sees tentative rows 0..i
        captured_layers           layers whose inputs are kept, any of 0..num_layers; that of num_layers is the output of the last layer, before the final norm
        captured                  [B, Q, len(captured_layers) * H] activations, contiguous; modified: the residual stream, un-normed, at the input of each captured layer, side by side in
                                  the order of captured_layers

        Returns the features after the final norm, [B, Q, H] activations: float32 on the CPU, the weights' dtype on CUDA.
        """
        config = self.config
        batch, queries = token_ids.shape
        rows = batch * queries
        num_heads, head_dim, eps, window = config.num_heads, config.head_dim, config.rms_norm_eps, config.sliding_window
        num_qk_heads = num_heads + config.num_kv_heads
        num_qkv_heads = num_qk_heads + config.num_kv_heads
        rope, exact = self.rope_table, self.deterministic
        seq_len = int(seq_lens[0]) if queries > MAX_TREE_QUERIES else None  # the host may read it in a prefill, and must once

        # Buffers and their views serve all layers. Between attention and attention everything is a matrix of `rows` rows.
        hidden = embedding(token_ids.reshape(-1), self.embedding)
        x, update = torch.empty_like(hidden), torch.empty_like(hidden)
        qkv = hidden.new_empty(rows, num_qkv_heads * head_dim)
        heads = qkv.view(rows, num_qkv_heads, head_dim)
        q_rows, k_rows = heads[:, :num_heads], heads[:, num_heads:num_qk_heads]
        heads = heads.view(batch, queries, num_qkv_heads, head_dim)
        q, k, v = heads[:, :, :num_heads], heads[:, :, num_heads:num_qk_heads], heads[:, :, num_qk_heads:]
        attended = hidden.new_empty(batch, queries, num_heads, head_dim)
        attended_rows = attended.view(rows, num_heads * head_dim)
        gate_up = hidden.new_empty(rows, 2 * config.intermediate_size)
        inner = hidden.new_empty(rows, config.intermediate_size)

        kept = self._places(captured_layers, captured, hidden, batch)

        residual = (
            None  # The first norm takes the embeddings alone; each later one adds the last block's update to them.
        )
        for layer, layer_cache, places in zip(self.layers, cache, kept):
            rms_norm(hidden if residual is None else update, layer.attention_norm, eps, residual, out=x)
            residual = hidden  # now the input of this layer, until the norm before the MLP adds to it
            for place in places:
                copy_rows(residual, place)
            linear(x, layer.qkv, layer.qkv_bias, deterministic=exact, out=qkv)
            if layer.q_norm is not None:
                rms_norm(q_rows, layer.q_norm, eps, out=q_rows)
                rms_norm(k_rows, layer.k_norm, eps, out=k_rows)
            rope_store_kv(q, k, v, position_ids, rope, layer_cache, page_table, seq_lens)
            if queries > MAX_TREE_QUERIES:
                prefill_attention(q, layer_cache, page_table, seq_len, window=window, out=attended)
            else:
                tree_attention(q, layer_cache, page_table, seq_lens, packed_ancestor_mask, window=window, deterministic=exact, out=attended)
            linear(attended_rows, layer.o, layer.o_bias, deterministic=exact, out=update)
            rms_norm(update, layer.mlp_norm, eps, residual, out=x)
            if layer.router is None:
                linear(x, layer.gate_up, layer.gate_up_bias, deterministic=exact, out=gate_up)
                linear(silu_mul(gate_up, out=inner), layer.down, layer.down_bias, deterministic=exact, out=update)
            else:
                update = self._expert_mlp(x, layer)
        rms_norm(update, self.final_norm, eps, residual, out=x)
        for place in kept[config.num_layers]:
            copy_rows(residual, place)
        return x.view(batch, queries, config.hidden_size)

    def forward_with_states(
        self,
        captured_layers: Sequence[int],
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: torch.Tensor | Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        packed_ancestor_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`: the features, and the states that a drafter takes: those of captured_layers, or without any the features themselves (EAGLE-1/2)."""
        if not captured_layers:
            features = self.forward(token_ids, position_ids, cache, seq_lens, page_table, packed_ancestor_mask)
            return features, features
        width = len(captured_layers) * self.config.hidden_size
        captured = torch.empty(*token_ids.shape, width, dtype=self.activation_dtype, device=token_ids.device)
        return self.forward(token_ids, position_ids, cache, seq_lens, page_table, packed_ancestor_mask, captured_layers, captured), captured

    def _places(self, captured_layers: Sequence[int], captured: torch.Tensor | None, hidden: torch.Tensor, batch: int) -> list[list[torch.Tensor]]:
        """Of each layer, and of what would be the next: the parts of `captured` [B, Q, ...] as [B * Q, H] that its input goes to."""
        places: list[list[torch.Tensor]] = [[] for _ in range(self.config.num_layers + 1)]
        if captured_layers:
            rows, size = hidden.shape
            check_tensor("captured", captured, (batch, rows // batch, len(captured_layers) * size), hidden.dtype, hidden.device)
            bad = [i for i in captured_layers if not 0 <= i <= self.config.num_layers]
            refuse(bool(bad), "captured_layers", f"0 to {self.config.num_layers}", bad)
            for i, part in zip(captured_layers, captured.view(rows, -1).split(size, dim=1)):
                places[i].append(part)
        return places

    def _expert_mlp(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        top_k = self.config.num_experts_per_token
        router_logits = torch.empty(x.shape[0], layer.router.out_features, dtype=torch.float32, device=x.device)
        weights, expert_ids = route_experts(linear(x, layer.router, deterministic=self.deterministic, out=router_logits), top_k)
        expert_ids = expert_ids.view(-1)
        inner = silu_mul(expert_linear(x.repeat_interleave(top_k, dim=0), layer.gate_up, expert_ids))
        outputs = expert_linear(inner, layer.down, expert_ids).view(-1, top_k, x.shape[-1])
        # Added in the order of the experts' ranks, one product and one sum at a time: the same bits for any number of rows.
        total = outputs[:, 0] * weights[:, :1]
        for rank in range(1, top_k):
            total = total + outputs[:, rank] * weights[:, rank : rank + 1]
        return total.to(x.dtype)
