"""The drafter: one decoder layer that predicts the target's next feature, EAGLE-1/2 (Li et al., 2024a, 2024b) or EAGLE-3 (Li et al., 2025), on the ops of eagle_kernels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eagle_engine import drafter_layer
from eagle_engine.drafter_checkpoint import RANKING_FILE, read_drafter, read_token_ids, target_ids
from eagle_engine.drafter_config import DrafterConfig, misfits
from eagle_engine.errors import EagleError
from eagle_engine.rope import rope_table
from eagle_engine.target import TargetModel
from eagle_kernels import HeadTopK, PackedWeight, embedding, head_topk, linear, pack_weight, rms_norm, rope_store_kv, silu_mul, slice_outputs, tree_attention, unpack_weight


class Drafter:
    """Features and draft logits; pair i is (feature of token i, embedding of token i + 1) and sits at RoPE position i. Its methods are also the DrafterOps of drafter_layer.

    captured_layers  layers of the target whose inputs it takes, EAGLE-3; (): the target's feature, EAGLE-1/2
    draft_to_target  [draft vocabulary] int64, target id of each draft id; None: the whole vocabulary
    window           tokens that its attention reaches back; 0: all of them
    """

    def __init__(self, config: DrafterConfig, tensors: dict[str, Tensor], target: TargetModel, *, max_positions: int, draft_vocab: Tensor | None = None, window: int = 0) -> None:
        """tensors: as read_drafter returns them; draft_vocab [n] int64: target ids, for a head over a part of the vocabulary where the drafter has none of its own."""
        reasons = misfits(config, target.config)
        if reasons:
            raise EagleError(f"drafter of another target: {'; '.join(reasons)}")
        if draft_vocab is not None:
            _check_has_no_vocab(config)
        self.config, self.window = config, window
        self.captured_layers = config.captured_layers(target.config.num_layers)
        dtype, device, layout = target.dtype, target.device, target.embedding.layout
        # Weights that are multiplied with the same rows are packed as one.
        attention, mlp = config.prefix + "self_attn.", config.prefix + "mlp."
        groups = [("fc",), tuple(f"{attention}{name}_proj" for name in "qkv"), (attention + "o_proj",), (mlp + "gate_proj", mlp + "up_proj"), (mlp + "down_proj",)]
        self._weights: dict[tuple[str, ...], tuple[PackedWeight, Tensor | None]] = {}
        expected = config.expected_tensors()
        for names in groups:
            weight = torch.cat([tensors[f"{name}.weight"].to(device, dtype) for name in names])
            biases = [tensors[f"{name}.bias"].to(device, target.activation_dtype) for name in names if f"{name}.bias" in expected]
            self._weights[names] = pack_weight(weight, layout), torch.cat(biases) if biases else None
        # Keys and values alone, for pairs after which nothing is drafted.
        queries_keys_values, num_queries = groups[1], config.layer.num_heads * config.layer.head_dim
        weight, bias = self._weights[queries_keys_values]
        self._weights[queries_keys_values[1:]] = slice_outputs(weight, num_queries), None if bias is None else bias[num_queries:]
        self._norms = {name.removesuffix(".weight"): tensor.to(device, torch.float32) for name, tensor in tensors.items() if tensor.dim() == 1 and "norm" in name}
        # Sized by what is served, not by max_position_embeddings of the drafter, which the published ones have far below their target's.
        self.rope_table = rope_table(config.layer, max_positions).to(device)
        self.embedding = self._own_embedding(tensors.get("embed_tokens.weight"), target)
        own_head = tensors.get("lm_head.weight")
        if config.has_own_vocab:
            self.draft_to_target = target_ids(tensors["d2t"]).to(device)
        else:
            self.draft_to_target = None if draft_vocab is None else draft_vocab.to(device)
        if draft_vocab is not None:
            rows = unpack_weight(target.head) if own_head is None else own_head.to(device, dtype)
            self.head = pack_weight(rows[self.draft_to_target], layout)
        else:
            self.head = target.head if own_head is None else pack_weight(own_head.to(device, dtype), layout)
        own = [weight.data for weight, _ in self._weights.values()] + [weight.data for weight in (self.embedding, self.head) if weight is not target.embedding and weight is not target.head]
        storages = {data.untyped_storage().data_ptr(): data.untyped_storage() for data in own}  # a slice shares that of the whole
        self.num_bytes = sum(storage.nbytes() for storage in storages.values())  # of the weights that are not the target's

    @classmethod
    def from_directory(
        cls, path: Path, target: TargetModel, *, max_positions: int, draft_vocab: int | str | Path | None = None, layer_ids: str | None = None, window: int = 0
    ) -> Drafter:
        """Load a drafter in a published format, strictly.

        draft_vocab  None: the whole vocabulary, or the drafter's own; a number: so many of the most frequent tokens, as ranked in the drafter's token_ranking.npy; a path: a file of ids
        window       tokens that its attention reaches back; 0: all of them
        layer_ids    "input" or "output": what ids of captured layers count, for an EAGLE-3 drafter that lists some and does not say
        """
        config, tensors = read_drafter(path, layer_ids)
        try:
            ids = None
            if draft_vocab is not None:
                _check_has_no_vocab(config)
                count = draft_vocab if isinstance(draft_vocab, int) else None
                ranking = path / RANKING_FILE if count is not None else Path(draft_vocab).expanduser()
                if not ranking.is_file():
                    raise EagleError(f"draft vocabulary: {ranking} does not exist; give a file of token ids, most frequent first, or no draft vocabulary")
                ids = read_token_ids(ranking, config.layer.vocab_size, count)
            return cls(config, tensors, target, max_positions=max_positions, draft_vocab=ids, window=window)
        except EagleError as error:
            raise EagleError(str(error) if str(path) in str(error) else f"{path}: {error}") from error

    @staticmethod
    def _own_embedding(own: Tensor | None, target: TargetModel) -> PackedWeight:
        """Published checkpoints carry a copy of the target's embedding; one that is equal is held once."""
        if own is None:
            return target.embedding
        own = own.to(target.device, target.dtype)
        is_copy = own.shape[1] == target.embedding.in_features and torch.equal(own, unpack_weight(target.embedding))
        return target.embedding if is_copy else pack_weight(own, target.embedding.layout)

    @property
    def vocab_size(self) -> int:
        return self.head.out_features

    def fuse(self, states: Tensor) -> Tensor:
        """What the target hands over, [..., fused_size] activations -> features for `forward`, [..., H]."""
        return drafter_layer.fuse(self, self.config, states)

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
        features              [B, Q, H] activations (fp32 on the CPU, the weights' dtype on CUDA): fused states of the target, or features predicted earlier. EAGLE-3: contiguous; modified, as the
                              residual is added up in place
        position_ids          [B, Q] int64, of the features
        cache                 [2, pages, page_size, kv_heads, head_dim]; modified
        seq_lens              [B] int32, committed rows of the drafter
        packed_ancestor_mask  [B, Q, W] int64 over the tentative rows; None: a causal chunk
        returns               [B, Q, H] activations, the predicted features
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rope_store_kv(q, k, v, position_ids, self.rope_table, cache, page_table, seq_lens, row_offset)
            return tree_attention(q, cache, page_table, seq_lens, packed_ancestor_mask, window=self.window, out=torch.empty_like(q, memory_format=torch.contiguous_format)).flatten(-2)

        return drafter_layer.draft_layer(self, self.config, embedding(token_ids, self.embedding), features, attend)

    def store(self, token_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Tensor, seq_lens: Tensor, page_table: Tensor) -> None:
        """What `forward` leaves in the cache, without the features that it predicts: for pairs after which nothing is drafted. Arguments as there; any number of pairs."""
        x, _ = drafter_layer.layer_input(self, self.config, embedding(token_ids, self.embedding), features)
        k, v = drafter_layer.keys_values(self, self.config, x)
        rope_store_kv(k.new_empty(*k.shape[:-2], 0, k.shape[-1]), k, v, position_ids, self.rope_table, cache, page_table, seq_lens)

    def logits(self, features: Tensor) -> Tensor:
        """features [..., H] activations -> [..., draft vocabulary] fp32."""
        x = drafter_layer.head_input(self, self.config, features)
        return linear(x, self.head, out=torch.empty(*x.shape[:-1], self.vocab_size, dtype=torch.float32, device=x.device))

    def head_topk(self, features: Tensor, top_k: int) -> HeadTopK:
        """The best top_k draft tokens after each of the features [..., H], without writing the logits on CUDA."""
        return head_topk(drafter_layer.head_input(self, self.config, features), self.head, top_k)

    # DrafterOps

    def linear(self, x: Tensor, *names: str) -> Tensor:
        weight, bias = self._weights[names]
        return linear(x, weight, bias)

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._norms[name], self.config.layer.rms_norm_eps)

    def add_rms_norm(self, x: Tensor, name: str, residual: Tensor) -> tuple[Tensor, Tensor]:
        return residual, rms_norm(x, self._norms[name], self.config.layer.rms_norm_eps, residual)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)


def _check_has_no_vocab(config: DrafterConfig) -> None:
    if config.has_own_vocab:
        raise EagleError(f"draft_vocab: this drafter has a vocabulary of its own, of {config.draft_vocab_size} tokens; leave draft_vocab out (--draft-vocab auto or all)")
