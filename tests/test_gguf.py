"""GGUF files: metadata, names, layouts and every supported quantisation; damage is named."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tiny_targets import CASES, tiny_model, write_gguf

from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.errors import EagleError
from eagle_engine.gguf_file import GgufFile
from eagle_engine.model_config import ModelConfig

# hidden and intermediate sizes of whole 256-value blocks
WIDE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
# Families whose Hugging Face configuration a GGUF file can carry in full.
GGUF_CASES = [
    case for case in CASES if case not in ("llama-tied-biases-linear", "qwen2-window", "llama-llama3-rope-head-dim")
]


def random_blocks(array: np.ndarray, kind: Kind) -> np.ndarray:
    """Blocks of a format that `gguf` can read but not write: random bits, and scales that are small half-precision numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.randint(0, 256, (array.size // block, size), dtype=np.uint8)
    scales = np.random.uniform(0.001, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q4_K:
        blocks[:, :4] = scales
    else:
        blocks[:, -2:] = scales[:, :2]
    return blocks.reshape(*array.shape[:-1], -1)


def stored_as(kind: Kind):
    def quantise(name, array):
        if kind in (Kind.Q4_K, Kind.Q6_K):
            return random_blocks(array, kind), kind
        return quantize(array, kind), kind

    return quantise


def undo_llama_cpp_permutation(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Row by row: half h of pair j stands at 2 j + h in the file, at h * head_dim / 2 + j in Hugging Face's order."""
    head_dim = len(array) // num_heads
    out = np.empty_like(array)
    for head in range(num_heads):
        for j in range(head_dim // 2):
            for h in range(2):
                out[head * head_dim + h * head_dim // 2 + j] = array[head * head_dim + 2 * j + h]
    return out


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_quantisations_equal_those_of_gguf(tmp_path, case, kind):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(case, **WIDE), stored_as(Kind[kind]))
    checkpoint = open_checkpoint(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(stored) == len(checkpoint.names())
    for name in checkpoint.names():
        tensor = stored[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        expected = dequantize(tensor.data, tensor.tensor_type)
        if case == "llama" and (".q_proj" in name or ".k_proj" in name):
            expected = undo_llama_cpp_permutation(expected, 4 if ".q_proj" in name else 2)
        actual = checkpoint.tensor(name)
        assert torch.equal(actual.float(), torch.from_numpy(expected.copy()).reshape(actual.shape)), name
    assert checkpoint.config.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")


@pytest.mark.parametrize("case", GGUF_CASES)
def test_float32_file_equals_the_model(tmp_path, case):
    model = tiny_model(case)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    expected = vars(ModelConfig.from_hf_dict(model.config.to_dict()))
    differences = {key for key, value in vars(checkpoint.config).items() if value != expected[key]}
    # llama.cpp stores Mistral as llama, and its files do not carry the window; the norm's epsilon is a float32.
    assert differences <= {"rms_norm_eps", "dtype"} | (
        {"architecture", "sliding_window"} if "mistral" in case else set()
    )
    state = model.state_dict()
    for name in checkpoint.names():
        if ".experts." in name:
            layer, expert, matrix = name.split(".")[2], int(name.split(".")[5]), name.split(".")[6]
            block = f"model.layers.{layer}.mlp.experts."
            gate_up, down = state[block + "gate_up_proj"][expert], state[block + "down_proj"][expert]
            wanted = {"w1": gate_up[:72], "w3": gate_up[72:], "w2": down}[matrix]
        else:
            wanted = state[name.replace("block_sparse_moe", "mlp")]
        assert torch.equal(checkpoint.tensor(name), wanted), name


def test_old_mixtral_files_have_one_tensor_per_expert(tmp_path):
    def split(tensors):
        for name in [name for name in tensors if name.endswith("_exps.weight")]:
            for e, array in enumerate(tensors.pop(name)):
                tensors[name.replace("_exps.weight", f".{e}.weight")] = array

    model = tiny_model("mixtral")
    stacked = open_checkpoint(write_gguf(tmp_path / "stacked.gguf", model))
    single = open_checkpoint(write_gguf(tmp_path / "single.gguf", model, edit=split))
    assert single.names() == stacked.names()
    for name in single.names():
        assert torch.equal(single.tensor(name), stacked.tensor(name)), name


def test_rope_factors_and_linear_scaling(tmp_path):
    model = tiny_model("llama")
    factors = np.array([1, 1, 2, 4, 8, 8], dtype=np.float32)
    path = write_gguf(tmp_path / "factors.gguf", model, extra_tensors={"rope_freqs.weight": factors})
    assert open_checkpoint(path).config.rope_scaling == {"rope_type": "freq_factors", "factors": [1, 1, 2, 4, 8, 8]}
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "linear.gguf", model, metadata=scaling)
    assert open_checkpoint(path).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_end_tokens(tmp_path):
    model = tiny_model("llama")
    tokens = [f"t{i}" for i in range(82)] + ["<|eot_id|>"]
    metadata = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.tokens": tokens}
    assert open_checkpoint(write_gguf(tmp_path / "a.gguf", model, metadata=metadata)).config.eos_token_ids == (2, 5)
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<|eot_id|>"
    assert open_checkpoint(write_gguf(tmp_path / "b.gguf", model, metadata=metadata)).config.eos_token_ids == (2, 5, 82)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(edit=lambda t: t.pop("output_norm.weight")), r"missing tensor output_norm\.weight"),
        (dict(edit=lambda t: t.pop("token_embd.weight")), r"missing tensor token_embd\.weight"),
        (dict(extra_tensors={"blk.0.odd": np.ones(3, np.float32)}), r"unused tensor blk\.0\.odd"),
        (
            dict(edit=lambda t: t.update({"blk.1.ffn_up.weight": np.ones((71, 48), np.float32)})),
            r"blk\.1\.ffn_up\.weight: expected shape \[72, 48\], got \[71, 48\]",
        ),
        (dict(metadata={"general.architecture": "gemma"}), "GGUF architecture 'gemma' is not supported; supported are"),
        (dict(metadata={"llama.rope.scaling.type": "yarn"}), "rope scaling 'yarn' is not supported"),
        (dict(metadata={"llama.rope.dimension_count": 6}), r"rope\.dimension_count = 6 differs from head_dim 12"),
        (dict(metadata={"llama.attention.head_count_kv": [1, 2]}), r"head_count_kv must be one int for all layers"),
        (dict(metadata={"llama.logit_scale": 0.5}), r"llama\.logit_scale = 0\.5 is not supported"),
        (dict(metadata={"split.count": 3}), "split GGUF files are not supported"),
    ],
    ids=[
        "missing",
        "no-embedding",
        "unused",
        "mis-shaped",
        "architecture",
        "yarn",
        "partial-rope",
        "per-layer",
        "scale",
        "split",
    ],
)
def test_strict(tmp_path, options, message):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), **options)
    with pytest.raises(EagleError, match=message) as caught:
        open_checkpoint(path)
    assert "tiny.gguf" in str(caught.value)


def test_other_quantisations_are_refused_by_name(tmp_path):
    path = write_gguf(
        tmp_path / "tiny.gguf", tiny_model("llama", **WIDE), lambda name, a: (quantize(a, Kind.Q5_0), Kind.Q5_0)
    )
    with pytest.raises(
        EagleError, match=r"quantisation Q5_0, which is not supported; supported are F32, F16, BF16, Q8_0"
    ):
        open_checkpoint(path)


def test_metadata_values_equal_those_of_gguf_reader(tmp_path):
    metadata = {
        "a.text": "héllo",
        "a.flag": True,
        "a.number": 7,
        "a.real": 0.5,
        "a.list": [3, 1, 2],
        "a.words": ["x", "", "ÿ"],
    }
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), metadata=metadata)
    expected = {
        key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if not key.startswith("GGUF.")
    }
    file = GgufFile(path)
    assert file.metadata == expected
    assert metadata.items() <= file.metadata.items()


def test_truncated_file_is_named_wherever_it_ends(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), metadata={"tokenizer.ggml.tokens": ["a", "b"]})
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 2200, 7), len(data) // 2, len(data) - 64]:
        cut.write_bytes(data[:size])
        with pytest.raises(EagleError, match=r"cut\.gguf: "):
            open_checkpoint(cut)


@pytest.mark.parametrize("position", [4, 8, 16, 24, 60])
def test_flipped_header_bytes_are_an_error_that_names_the_file(tmp_path, position):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    data = bytearray(path.read_bytes())
    data[position : position + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(EagleError, match=r"tiny\.gguf: "):
        open_checkpoint(path)


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(EagleError, match=r"tiny\.gguf: not a GGUF file"):
        open_checkpoint(path)
