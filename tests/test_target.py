"""The target model against `transformers`, and against itself: chunks, batches, trees, threads."""

import pytest
import torch
from helpers import assert_exact, packed_mask, path_to_root
from tiny_targets import CASES, empty_cache, hf_logits, prefill, random_tokens, save_directory, tiny_model, write_gguf

from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.errors import EagleError
from eagle_engine.target import TargetModel

TOKENS = random_tokens(seed=1, count=21)


def load(path, dtype=torch.float32, **options) -> TargetModel:
    return TargetModel.from_checkpoint(open_checkpoint(path), dtype, progress=False, **options)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(transformers model, TargetModel) of each family."""
    path = tmp_path_factory.mktemp("target")
    model = save_directory(path, request.param)
    return model, load(path)


def test_logits_equal_transformers(pair):
    model, target = pair
    logits = target.logits(prefill(target, empty_cache(target.config), TOKENS))
    error = (logits - hf_logits(model, TOKENS)).abs().max().item()
    assert error < 1e-4, f"largest difference {error:.2e}"


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunked_prefill_is_whole_prefill_bit_for_bit(pair, chunk):
    _, target = pair
    whole = empty_cache(target.config)
    chunked = whole.copy()
    assert_exact(prefill(target, chunked, TOKENS, chunk), prefill(target, whole, TOKENS))
    assert_exact(chunked.kv, whole.kv)


def test_batch_rows_are_single_rows_bit_for_bit(pair):
    _, target = pair
    prompts = [random_tokens(seed, 9) for seed in (3, 4, 5)]
    cache = empty_cache(target.config, batch=3)
    positions = torch.arange(9).repeat(3, 1)
    features = target.forward(torch.tensor(prompts), positions, cache.kv, cache.seq_lens, cache.page_table)
    for row, prompt in zip(features, prompts):
        assert_exact(row, prefill(target, empty_cache(target.config), prompt))


def test_tree_rows_are_plain_decoding_bit_for_bit(pair):
    _, target = pair
    parent = [-1, 0, 0, 1, 2, 2, 5]
    tokens = random_tokens(seed=6, count=len(parent))
    paths = [path_to_root(parent, node) for node in range(len(parent))]
    mask = packed_mask(torch.tensor([parent]))
    cache = empty_cache(target.config)
    prefill(target, cache, TOKENS)
    positions = torch.tensor([[len(TOKENS) + len(path) - 1 for path in paths]])
    features = target.forward(torch.tensor([tokens]), positions, cache.kv, cache.seq_lens, cache.page_table, mask)[0]
    for path, feature in zip(paths, features):
        plain = prefill(target, empty_cache(target.config), TOKENS + [tokens[node] for node in path], chunk=1)
        assert_exact(target.logits(feature), target.logits(plain[-1]))


def test_layers_of_the_cache_as_a_list(pair):
    _, target = pair
    whole = empty_cache(target.config)
    split = whole.copy()
    expected = prefill(target, whole, TOKENS)
    layers = list(split.kv)
    positions = torch.arange(len(TOKENS))[None]
    assert_exact(
        target.forward(torch.tensor([TOKENS]), positions, layers, split.seq_lens, split.page_table)[0], expected
    )


def test_thread_count_does_not_change_bits(tmp_path, restore_num_threads):
    save_directory(tmp_path, "llama", hidden_size=192, intermediate_size=512)
    target = load(tmp_path)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(target.logits(prefill(target, empty_cache(target.config), TOKENS)))
    assert_exact(results[1], results[0])
    assert_exact(results[2], results[0])


def test_bfloat16_weights_stay_close_to_transformers_with_rounded_weights(tmp_path):
    model = save_directory(tmp_path, "qwen3-tied")
    target = load(tmp_path, torch.bfloat16)
    assert target.embedding.data.dtype == torch.bfloat16
    assert target.head is target.embedding
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.bfloat16().float())
    logits = target.logits(prefill(target, empty_cache(target.config), TOKENS))
    assert (logits - hf_logits(model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "case", ["llama", "mistral-no-window", "mixtral", "qwen2", "qwen3-tied", "llama-llama3-rope-head-dim"]
)
def test_gguf_logits_equal_transformers(tmp_path, case):
    model = tiny_model(case)
    extra = {}
    if "llama3-rope" in case:
        inverse, plain = model.model.rotary_emb.inv_freq.double(), 500.0 ** (-torch.arange(0, 16, 2).double() / 16)
        extra["rope_freqs.weight"] = (plain / inverse).float().numpy()
    path = write_gguf(tmp_path / "tiny.gguf", model, extra_tensors=extra)
    target = load(path, cache_directory=tmp_path / "cache")
    assert target.config.architecture == {"mistral-no-window": "llama"}.get(case, case.split("-")[0])
    logits = target.logits(prefill(target, empty_cache(target.config), TOKENS))
    assert (logits - hf_logits(model, TOKENS)).abs().max() < 1e-4


def test_embed_reads_row_zero_for_no_token(tmp_path):
    model = save_directory(tmp_path, "llama")
    target = load(tmp_path)
    table = model.get_input_embeddings().weight.detach()
    assert torch.equal(target.embed(torch.tensor([[5, -1, 82]])), table[[5, 0, 82]][None])


def test_max_positions_does_not_change_the_rope_table(tmp_path):
    save_directory(tmp_path, "llama-llama3-rope-head-dim")
    short, long = load(tmp_path, max_positions=70), load(tmp_path, max_positions=1000)
    assert short.rope_table.shape == (70, 16)
    assert torch.equal(short.rope_table, long.rope_table[:70])


def test_weight_dtype_is_checked(tmp_path):
    save_directory(tmp_path, "llama")
    with pytest.raises(EagleError, match="float32 or bfloat16"):
        load(tmp_path, torch.float16)
