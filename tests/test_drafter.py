"""The EAGLE-1/2 drafter: the published architecture, and strict loading of the published format."""

import json

import numpy as np
import pytest
import torch
from drafter_files import write_drafter
from eagle_engine import EagleError
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_checkpoint import read_drafter, read_token_ids
from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.drafter_format import parse_drafter_config
from eagle_engine.rope import rope_table
from helpers import assert_exact, make_paged_cache
from tiny_engines import DRAFTERS, drafter_config, random_drafter, random_eagle3, random_tensors, tiny_target

OPTIONS = {
    "bias": {},
    "no-bias": dict(bias=False),
    "qkv-bias": dict(bias=False, qkv_bias=True),
    "own-rope-base": dict(rope_theta=700.0),
    "own-kv-heads": dict(num_key_value_heads=1),
    "mha": dict(num_attention_heads=3, num_key_value_heads=3),
    "head-dim-ignored": dict(head_dim=64),
}


def published_forward(config: DrafterConfig, tensors, embedding, token_ids, features) -> torch.Tensor:
    """Features [Q, H] of pairs 0 .. Q - 1 in float64, stated plainly: fc(cat(embedding, feature)) is the residual stream and, without a norm, the attention's input."""
    layer = config.layer
    w = {name: tensor.double() for name, tensor in tensors.items()}
    heads, kv_heads, dim, length = layer.num_heads, layer.num_kv_heads, layer.head_dim, len(token_ids)

    def project(name, x):
        y = x @ w[f"layers.0.self_attn.{name}_proj.weight"].T
        return y + w[f"layers.0.self_attn.{name}_proj.bias"] if config.qkv_bias and name != "o" else y

    hidden = torch.cat((embedding[token_ids].double(), features.double()), dim=1) @ w["fc.weight"].T
    if config.bias:
        hidden = hidden + w["fc.bias"]
    q, k, v = (project(name, hidden).view(length, -1, dim).transpose(0, 1) for name in "qkv")
    angles = torch.arange(length)[:, None] * layer.rope_theta ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = (torch.cat((x, x), dim=1) for x in (angles.cos(), angles.sin()))
    turn = lambda x: torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)  # noqa: E731
    q, k = (x * cos + turn(x) * sin for x in (q, k))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    hidden = hidden + project("o", (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1))
    normed = hidden * (hidden.pow(2).mean(-1, keepdim=True) + layer.rms_norm_eps).rsqrt() * w["layers.0.post_attention_layernorm.weight"]
    gate, up = (normed @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return hidden + (torch.nn.functional.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T


def run(drafter: Drafter, token_ids, features) -> torch.Tensor:
    cache = make_paged_cache([0], 64, 4, drafter.config.layer.num_kv_heads, drafter.config.layer.head_dim)
    cache.kv.fill_(float("nan"))
    positions = torch.arange(len(token_ids))[None]
    return drafter.forward(token_ids[None], features[None], positions, cache.kv, cache.seq_lens, cache.page_table)[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_is_that_of_the_published_architecture(options):
    target = tiny_target("llama-tied-biases-linear")
    raw = drafter_config(target, **OPTIONS[options])
    config, tensors = parse_drafter_config(raw), random_tensors(raw)
    token_ids, features = torch.randint(target.config.vocab_size, (33,)), torch.randn(33, target.config.hidden_size)
    drafter = Drafter(config, tensors, target, max_positions=64)
    embedding = target.embed(torch.arange(target.config.vocab_size))
    expected = published_forward(config, tensors, embedding, token_ids, features)
    actual = run(drafter, token_ids, features)
    assert (actual - expected).abs().max() < 1e-4
    # No final norm: the target's head reads the raw output.
    head = torch.stack([target.logits(row[None])[0] for row in torch.eye(target.config.hidden_size)]).double()
    assert (drafter.logits(actual) - expected @ head).abs().max() < 1e-3


def test_rope_base_is_the_drafters_own():
    target = tiny_target("llama-llama3-rope-head-dim")
    drafter = random_drafter(target)
    assert drafter.config.layer.rope_theta == 10000.0 and drafter.config.layer.rope_scaling is None
    assert_exact(drafter.rope_table, rope_table(drafter.config.layer, target.max_positions))


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("embeddings", [False, True], ids=["no-embeddings", "embeddings"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_published_files_load(tmp_path, options, embeddings, binary):
    target = tiny_target("llama")
    raw = drafter_config(target, **OPTIONS[options])
    tensors = random_tensors(raw, embeddings=embeddings)
    drafter = Drafter.from_directory(write_drafter(tmp_path / "drafter", raw, tensors, binary), target, max_positions=64)
    token_ids, features = torch.randint(target.config.vocab_size, (9,)), torch.randn(9, target.config.hidden_size)
    embedding = tensors.get("embed_tokens.weight", target.embed(torch.arange(target.config.vocab_size)))
    expected = published_forward(parse_drafter_config(raw), tensors, embedding, token_ids, features)
    assert (run(drafter, token_ids, features) - expected).abs().max() < 1e-4


def test_a_copy_of_the_targets_embedding_is_held_once():
    target = tiny_target("llama")
    raw = drafter_config(target)
    tensors = random_tensors(raw) | {"embed_tokens.weight": target.embed(torch.arange(target.config.vocab_size))}
    assert Drafter(parse_drafter_config(raw), tensors, target, max_positions=64).embedding is target.embedding


def test_own_head_is_used():
    target = tiny_target("llama")
    raw = drafter_config(target)
    head = torch.randn(target.config.vocab_size, target.config.hidden_size)
    drafter = Drafter(parse_drafter_config(raw), random_tensors(raw) | {"lm_head.weight": head}, target, max_positions=64)
    x = torch.randn(3, target.config.hidden_size)
    assert torch.allclose(drafter.logits(x), x @ head.T, atol=1e-4)


ALL_TENSORS = sorted(parse_drafter_config(drafter_config(tiny_target("llama"), qkv_bias=True)).expected_tensors())


@pytest.mark.parametrize("name", ALL_TENSORS)
def test_missing_tensor_is_named(tmp_path, name):
    raw = drafter_config(tiny_target("llama"), qkv_bias=True)
    tensors = random_tensors(raw)
    del tensors[name]
    with pytest.raises(EagleError, match=f"missing tensor.*{name}"):
        read_drafter(write_drafter(tmp_path / "d", raw, tensors))


@pytest.mark.parametrize("name", ALL_TENSORS)
def test_misshaped_tensor_is_named(tmp_path, name):
    raw = drafter_config(tiny_target("llama"), qkv_bias=True)
    tensors = random_tensors(raw)
    tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
    with pytest.raises(EagleError, match=f"{name}: expected shape"):
        read_drafter(write_drafter(tmp_path / "d", raw, tensors))


@pytest.mark.parametrize(
    "name, options",
    [("fc.bias", dict(bias=False)), ("layers.0.self_attn.q_proj.bias", {}), ("layers.0.input_layernorm.weight", {}), ("layers.1.mlp.up_proj.weight", {}), ("norm.weight", {}), ("typo", {})],
)
def test_unused_tensor_is_named(tmp_path, name, options):
    raw = drafter_config(tiny_target("llama"), **options)
    with pytest.raises(EagleError, match=f"unused tensor.*{name}"):
        read_drafter(write_drafter(tmp_path / "d", raw, random_tensors(raw) | {name: torch.zeros(48)}))


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
def test_truncated_file_is_named(tmp_path, binary):
    raw = drafter_config(tiny_target("llama"))
    directory = write_drafter(tmp_path / "d", raw, random_tensors(raw), binary)
    file = directory / ("pytorch_model.bin" if binary else "model.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(EagleError, match=file.name):
        read_drafter(directory)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(EagleError, match="no such drafter directory"):
        read_drafter(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EagleError, match="config.json"):
        read_drafter(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(drafter_config(tiny_target("llama"))))
    with pytest.raises(EagleError, match="neither model.safetensors nor pytorch_model.bin"):
        read_drafter(tmp_path / "empty")


@pytest.mark.parametrize("field, value", [("hidden_size", 64), ("vocab_size", 99)])
def test_drafter_of_another_target_is_refused(field, value):
    target = tiny_target("llama")
    raw = drafter_config(target, **{field: value})
    with pytest.raises(EagleError, match=f"another target.*{field}"):
        Drafter(parse_drafter_config(raw), random_tensors(raw), target, max_positions=64)


def test_more_than_one_layer_is_refused():
    with pytest.raises(EagleError, match="num_hidden_layers"):
        parse_drafter_config(drafter_config(tiny_target("llama"), num_hidden_layers=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reduced_vocabulary_gives_the_same_logits_for_its_tokens(dtype):
    target = tiny_target("llama", dtype=dtype)
    ids = torch.randperm(target.config.vocab_size)[:29]
    features = torch.randn(5, target.config.hidden_size)
    full, reduced = random_drafter(target), random_drafter(target, draft_vocab=ids)
    assert_exact(reduced.logits(features), full.logits(features)[:, ids].contiguous())
    assert torch.equal(reduced.draft_to_target, ids)


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_token_list_files(tmp_path, suffix):
    file = tmp_path / f"tokens{suffix}"

    def write(values):
        np.save(file, np.asarray(values)) if suffix == ".npy" else file.write_text(json.dumps(values))
        return file

    assert read_token_ids(write([5, 1, 3]), 10).tolist() == [5, 1, 3]
    assert read_token_ids(write([5, 1, 3]), 10, 2).tolist() == [5, 1]
    for values, message in ([[5, 10]], "0..9"), ([[-1, 2]], "0..9"), ([[2, 2]], "twice"), ([[]], "list of token ids"), ([[0.5]], "list of token ids"):
        with pytest.raises(EagleError, match=message):
            read_token_ids(write(*values), 10)
    with pytest.raises(EagleError, match="holds 2 tokens"):
        read_token_ids(write([5, 1]), 10, 3)
    file.write_text("no list")
    with pytest.raises(EagleError, match=file.name):
        read_token_ids(file, 10)


STORING = DRAFTERS | {name: lambda target, options=options: random_drafter(target, **options) for name, options in OPTIONS.items()} | {
    "queries-that-fill-no-panel": lambda target: random_eagle3(target, hidden_size=40, target_hidden_size=target.config.hidden_size),
}


@pytest.mark.parametrize("kind", STORING)
def test_store_leaves_what_forward_leaves(kind: str) -> None:
    """Keys and values alone, which are projected from a part of the weights that forward uses; the part is not counted twice."""
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = STORING[kind](target)
    layer = drafter.config.layer
    caches = [make_paged_cache([3, 0], 9, 4, layer.num_kv_heads, layer.head_dim) for _ in range(2)]
    caches[1].page_table.copy_(caches[0].page_table)
    for cache in caches:
        cache.kv.fill_(float("nan"))
    tokens, states = torch.randint(0, target.config.vocab_size, (2, 9)), torch.randn(2, 9, drafter.config.fused_size)
    positions = caches[0].seq_lens[:, None] + torch.arange(9)
    for method, cache in zip((drafter.forward, drafter.store), caches):
        method(tokens, drafter.fuse(states), positions, cache.kv, cache.seq_lens, cache.page_table)
    assert_exact(caches[1].kv, caches[0].kv)
    assert (~caches[0].kv.isnan()).sum() == 2 * 2 * 9 * layer.num_kv_heads * layer.head_dim
    shares = kind != "queries-that-fill-no-panel"
    pointers = {weight.data.untyped_storage().data_ptr(): weight.data.untyped_storage().nbytes() for weight, _ in drafter._weights.values()}
    assert len(pointers) == len(drafter._weights) - shares
    others = [weight.data.nbytes for weight in (drafter.embedding, drafter.head) if weight is not target.embedding and weight is not target.head]
    assert drafter.num_bytes == sum(pointers.values()) + sum(others)
