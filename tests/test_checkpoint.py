"""Hugging Face directories: every tensor is found, and nothing is missing, unused or mis-shaped in silence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import CASES, save_directory

from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.errors import EagleError


@pytest.fixture
def directory(tmp_path):
    save_directory(tmp_path, "llama")
    return tmp_path


def edit_tensors(directory, edit) -> None:
    """Load model.safetensors, let `edit` change the dict of tensors, write it back."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_json(file, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("max_shard_size", ["1GB", "30KB"], ids=["single-file", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_read(tmp_path, case, max_shard_size):
    save_directory(tmp_path, case, max_shard_size)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size != "1GB")
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(stored)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), stored[name]), name


def test_generation_config_has_the_last_word_on_end_tokens(directory):
    assert open_checkpoint(directory).config.eos_token_ids == (2,)
    edit_json(directory / "generation_config.json", eos_token_id=[7, 2])
    assert open_checkpoint(directory).config.eos_token_ids == (7, 2)


def test_known_buffers_are_ignored(directory):
    edit_tensors(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    open_checkpoint(directory)


def test_tied_head_may_be_stored_twice_if_equal(tmp_path):
    save_directory(tmp_path, "qwen3-tied")
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in open_checkpoint(tmp_path).names()
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(
        EagleError, match=r"ties lm_head.weight to model.embed_tokens.weight, but the two tensors differ"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensor model\.norm\.weight"),
        (lambda t: t.pop("lm_head.weight"), r"missing tensor lm_head\.weight"),
        (lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), r"unused tensor model\.layers\.0\.extra"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}), r"unused tensor .*q_proj\.bias"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            r"tensor model\.norm\.weight: expected shape \[48\], got \[47\]",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if ".1." in name],
            r"missing tensors model\.layers\.1\..* and 4 more",
        ),
    ],
    ids=["missing", "missing-head", "unused", "unused-bias", "mis-shaped", "many-missing"],
)
def test_strict(directory, edit, message):
    edit_tensors(directory, edit)
    with pytest.raises(EagleError, match=message):
        open_checkpoint(directory)


def test_integer_tensor_is_refused(directory):
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    with pytest.raises(EagleError, match=r"model\.norm\.weight is torch\.int32"):
        open_checkpoint(directory).tensor("model.norm.weight")


@pytest.mark.parametrize("keep", [0.0, 0.00001, 0.01, 0.5, 0.999])
def test_truncated_file_is_named(directory, keep):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(EagleError, match=r"model\.safetensors: .*truncated"):
        open_checkpoint(directory)


def test_missing_shard_is_named(tmp_path):
    save_directory(tmp_path, "llama", "30KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(EagleError, match=f"{shard.name}: no such file"):
        open_checkpoint(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path):
    save_directory(tmp_path, "llama", "30KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    with pytest.raises(EagleError, match=f"{name} is in both"):
        open_checkpoint(tmp_path)


def test_damaged_json_is_named(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(EagleError, match=r"config\.json: not readable as JSON"):
        open_checkpoint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(EagleError, match=r"config\.json: no such file"):
        open_checkpoint(directory)


def test_config_error_names_the_directory_and_the_architecture(directory):
    edit_json(directory / "config.json", architectures=["BloomForCausalLM"])
    with pytest.raises(EagleError, match=f"{directory.name}: architecture 'BloomForCausalLM' is not supported"):
        open_checkpoint(directory)


def test_directory_without_safetensors_says_what_it_found(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(EagleError, match=r"neither model\.safetensors nor .*index\.json; found pytorch_model\.bin"):
        open_checkpoint(directory)


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", "nowhere", "~/nowhere-at-all"])
def test_path_that_does_not_exist(source):
    with pytest.raises(EagleError, match="no such file or directory"):
        open_checkpoint(source)


def test_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(EagleError, match=r"model\.bin: expected a \.gguf file, or a directory"):
        open_checkpoint(tmp_path / "model.bin")


def test_hub_id_is_fetched(directory, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, **_: str(directory))
    assert open_checkpoint("someone/tiny").config.architecture == "llama"


def test_hub_failure_is_a_user_error(monkeypatch):
    def offline(repository, **_):
        raise OSError("network is unreachable")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(EagleError, match=r"'someone/tiny'.*Hugging Face hub failed: network is unreachable"):
        open_checkpoint("someone/tiny")
