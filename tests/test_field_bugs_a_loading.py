"""Faults that were reported about EAGLE itself, as catalogued in README.md: files, models and training. The number in a test's name is that of catalogue A."""

import ast
import json
import shutil
from pathlib import Path

import eagle_engine
import pytest
import torch
from drafter_files import write_drafter
from eagle_engine import EagleError, Engine, SamplingParams
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.cli.baseline import answer
from eagle_engine.drafter import Drafter
from eagle_engine.loading import weights_dtype
from eagle_engine.model_config import ModelConfig
from eagle_engine.target import TargetModel
from eagle_engine.training.objective import UnrolledObjective
from eagle_engine.transformers_model import load_model
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from plain_drafts import CONFIGS, TreeRecorder, drafted_plainly, few_tokens
from safetensors.torch import load_file, save_file
from test_training_objective import make_batch, make_config
from test_training_objective import make_drafter as make_trainable
from tiny_engines import DRAFTERS, TREES, drafter_config, eagle3_config, make_engine, plain_tokens, random_drafter, random_tensors, tiny_target
from tiny_pair import make_pair
from tiny_targets import empty_cache, hf_logits, prefill, random_tokens, save_directory, tiny_model, write_gguf

GREEDY = dict(temperature=0.0)


def greedy_of_transformers(model, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(hf_logits(model, text)[-1].argmax()))
    return text[len(prompt) :]


def test_a02_a_models_own_generation_settings_do_not_slip_into_the_comparison(tmp_path):
    """generation_config.json asks for a penalty, as Qwen2's does: transformers applies it by itself, and neither this engine nor its baseline does."""
    import transformers

    pair, prompt = make_pair(tmp_path, "qwen2"), random_tokens(200, 9)
    (pair.target / "generation_config.json").write_text(json.dumps(dict(repetition_penalty=1.6, do_sample=False, eos_token_id=None, pad_token_id=0)))
    engine = Engine.from_pretrained(pair.target, pair.draft, dtype="float32", progress=False, tree="dynamic")
    output = engine.generate(prompt, SamplingParams(**GREEDY, max_tokens=20, ignore_eos=True))[0]
    expected = greedy_of_transformers(tiny_model("qwen2"), prompt, 20)
    assert output.token_ids == answer(load_model(open_checkpoint(pair.target), torch.float32), prompt, 20) == expected
    assert answer(transformers.AutoModelForCausalLM.from_pretrained(pair.target), prompt, 20) != expected


def test_a08_a_half_precision_checkpoint_is_never_computed_in_half_precision_here(tmp_path):
    """States grow past 65504, the greatest float16, where the published code gave NaN; on the CPU such files run in bfloat16, on CUDA bfloat16 can be asked for."""
    pair = make_pair(tmp_path, "qwen2")
    file = pair.target / "model.safetensors"
    tensors = {name: tensor.half() * (3e4 if name.endswith("layers.0.mlp.down_proj.weight") else 1) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((pair.target / "config.json").read_text())
    (pair.target / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    engine = Engine.from_pretrained(pair.target, pair.draft, progress=False, tree="dynamic")
    target, prompt = engine.models.target, random_tokens(201, 12)
    assert (open_checkpoint(pair.target).config.dtype, target.dtype) == ("float16", torch.bfloat16)
    with torch.inference_mode():
        ids, pages = torch.tensor([prompt]), torch.arange(4, dtype=torch.int32)[None]
        _, states = target.forward_with_states((1,), ids, torch.arange(12)[None], engine.state.target_cache, torch.zeros(1, dtype=torch.int32), pages)
    assert states.abs().max() > torch.finfo(torch.float16).max and states.isfinite().all()
    output = engine.generate(prompt, SamplingParams(**GREEDY, max_tokens=20, ignore_eos=True))[0]
    assert output.finish_reason == "length" and output.token_ids == engine.plain().generate(prompt, SamplingParams(**GREEDY, max_tokens=20, ignore_eos=True))[0].token_ids
    assert weights_dtype("bfloat16", "float16", False, torch.device("cuda")) == torch.bfloat16


def test_a09_biases_of_qwen2_are_neither_dropped_nor_missed(tmp_path):
    """The weights of a Qwen2 behind the configuration of a Llama, and a Qwen2 without its biases: both are refused by the tensors' names, and with them the answer is that of transformers."""
    model = save_directory(tmp_path / "qwen2", "qwen2")
    config, tensors = json.loads((tmp_path / "qwen2" / "config.json").read_text()), load_file(tmp_path / "qwen2" / "model.safetensors")
    target = TargetModel.from_checkpoint(open_checkpoint(tmp_path / "qwen2"), torch.float32, 512, progress=False)
    prompt = random_tokens(202, 8)
    assert plain_tokens(target, prompt, SamplingParams(**GREEDY, max_tokens=12)) == greedy_of_transformers(model, prompt, 12)
    shutil.copytree(tmp_path / "qwen2", tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    with pytest.raises(EagleError, match="unused tensors .*self_attn.k_proj.bias"):
        open_checkpoint(tmp_path / "llama")
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}, tmp_path / "qwen2" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EagleError, match="missing tensors .*self_attn.k_proj.bias"):
        open_checkpoint(tmp_path / "qwen2")


def test_a17_a_bias_of_fc_is_there_when_it_is_said_or_not_said_and_never_otherwise(tmp_path):
    """Absent key: there is one. It takes part in the draft; a file that has one too many or one too few is refused by its name."""
    target, features = tiny_target("llama"), torch.randn(1, 3, 48)
    outs = []
    for options in ({}, dict(bias=True), dict(bias=False)):
        raw = drafter_config(target, **options)
        tensors = random_tensors(drafter_config(target, bias=True))
        bias = tensors.pop("fc.bias")
        for name, more, message in (("without", {}, "missing tensor fc.bias"), ("with", {"fc.bias": bias}, "unused tensor fc.bias")):
            directory = write_drafter(tmp_path / f"{name}-{len(outs)}", raw, tensors | more)
            if (name == "with") == raw.get("bias", True):
                drafter = Drafter.from_directory(directory, target, max_positions=64)
                cache = empty_cache(drafter.config.layer)
                outs.append(drafter.forward(torch.tensor([[1, 2, 3]]), features, torch.arange(3)[None], cache.kv[0], cache.seq_lens, cache.page_table))
            else:
                with pytest.raises(EagleError, match=message):
                    Drafter.from_directory(directory, target, max_positions=64)
    assert len(outs) == 3 and torch.equal(outs[0], outs[1]) and (outs[0] - outs[2]).abs().max() > 0.1


def test_a18_the_states_of_eagle3_are_the_inputs_of_layers_2_half_and_3_before_the_end():
    """Against transformers, for a depth at which no two of the rules in use agree; a layer more or less is far off."""
    options, tokens = dict(num_hidden_layers=10), random_tokens(203, 7)
    target, model = tiny_target("llama", **options), tiny_model("llama", **options)
    layers = DRAFTERS["eagle-3"](target).captured_layers
    assert layers == (2, 5, 7)
    with torch.inference_mode():
        cache = empty_cache(target.config)
        _, states = target.forward_with_states(layers, torch.tensor([tokens]), torch.arange(7)[None], cache.kv, cache.seq_lens, cache.page_table)
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for place, layer in enumerate(layers):
        mine = states[0, :, 48 * place : 48 * (place + 1)]
        errors = [float((mine - hidden[i][0]).abs().max()) for i in (layer - 1, layer, layer + 1)]
        assert errors[1] < 1e-3 < 1e-1 < min(errors[0], errors[2])


@pytest.mark.parametrize("rope_theta", [None, 300.0])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a19_the_drafter_turns_by_its_own_rope_base(kind, rope_theta):
    """A target of base 500 with scaled frequencies; the drafter says nothing, which means 10000, or names another base. Drafts are those of the plain forward with that base."""
    options = {} if rope_theta is None else dict(rope_theta=rope_theta)
    drafted_plainly(CONFIGS[kind], [few_tokens(204, 24)], SamplingParams(**GREEDY, max_tokens=5), "llama-llama3-rope-head-dim", **options)


def test_a20_a_drafter_made_for_2048_positions_goes_on_past_them():
    """The answer crosses position 2048: the same text as plain decoding, and the drafts of a drafter that was made for more."""
    target, prompt = tiny_target("llama", max_positions=2120), random_tokens(205, 2040)
    params, options = SamplingParams(**GREEDY, max_tokens=16), dict(max_model_len=2100, max_batch_size=1, page_size=64)
    seen = []
    for longest in (2048, 4096):
        recorder = TreeRecorder()
        engine = make_engine(target, random_drafter(target, max_position_embeddings=longest), **options, **TREES["dynamic"])
        with engine.observing(recorder):
            output = engine.generate(prompt, params)[0]
        seen.append([(tree.position, tree.tokens, tree.scores) for tree in recorder.trees[output.request_id]])
        assert output.token_ids == plain_tokens(target, prompt, params, **options)
    assert seen[0] == seen[1] and seen[0][-1][0] > 2048
    assert all(abs(score) < 100 for _, _, scores in seen[0] for score in scores)


PUBLIC = {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "GenerationConfig"}


def test_a26_transformers_is_used_by_its_public_names_and_only_where_it_is_needed():
    """Its inner modules move between versions: nothing is imported from them, and nothing of it when this package is imported."""
    used = set()
    for file in sorted(Path(eagle_engine.__file__).parent.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.split(".")[0] == "transformers":
                    assert name == "transformers" and node not in tree.body, f"{file.name}:{node.lineno}"
                    used |= {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
    assert used <= PUBLIC and "AutoTokenizer" in used


def test_a27_the_version_is_told_by_the_files_and_never_asked_for(tmp_path):
    """The same call loads an EAGLE-1 drafter, whose configuration has no draft vocabulary, and an EAGLE-3 drafter."""
    target, prompt = tiny_target("llama", num_hidden_layers=7), random_tokens(206, 5)
    params = SamplingParams(**GREEDY, max_tokens=8)
    for version, raw in ((1, drafter_config(target)), (3, eagle3_config(target))):
        drafter = Drafter.from_directory(write_drafter(tmp_path / str(version), raw, random_tensors(raw)), target, max_positions=512)
        assert drafter.config.version == version
        assert make_engine(target, drafter).generate(prompt, params)[0].token_ids == plain_tokens(target, prompt, params)


@pytest.mark.parametrize("version", [1, 3])
def test_a29_what_is_learned_is_the_marked_token_from_what_stands_before_it(version):
    """One conversation with one supervised token, at place 8: the loss is that of the pair two places before it, which has seen states up to there and tokens up to the one between, and of nothing else."""
    config, at, length = make_config(version), 8, 12
    batch, drafter = make_batch(config, [[length]]), make_trainable(config)
    batch = batch._replace(supervised=torch.arange(batch.tokens.shape[1])[None] == at)
    head, embedding = torch.randn(2, 37, 24, generator=torch.Generator().manual_seed(1))
    objective = UnrolledObjective(drafter, embedding, head, None, steps=1, decay=0.8, token_weight=1.0, feature_weight=float(version == 1))

    def loss(**fields) -> float:
        with torch.no_grad():
            return float(objective(batch._replace(**fields), 0)[0])

    before = loss()
    assert before > 0 and objective(batch, 0)[1].rows.tolist() == [1]
    for place in range(length):
        states, features, tokens = batch.states.clone(), batch.features.clone(), batch.tokens.clone()
        states[0, place] += 1.0
        features[0, place] += torch.randn(24, generator=torch.Generator().manual_seed(place))
        tokens[0, place] = (tokens[0, place] + 1) % 37
        assert (loss(states=states) != before) == (place <= at - 2), f"state {place}"
        assert (loss(tokens=tokens) != before) == (1 <= place <= at - 1), f"token {place}"
        assert (loss(features=features) != before) == (place == at - 1), f"the target's feature {place}"


def test_a31_an_unknown_architecture_is_refused_and_mistral_is_mistral():
    for config in (dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3"), dict(model_type="phi3")):
        with pytest.raises(EagleError, match="architecture '(Gemma3ForCausalLM|phi3)' is not supported; supported are .*MistralForCausalLM"):
            ModelConfig.from_hf_dict(config)
    prompt, params = random_tokens(207, 20), SamplingParams(**GREEDY, max_tokens=24)  # longer than the window of 7
    target = tiny_target("mistral-window")
    output = make_engine(target, random_drafter(target), **TREES["dynamic"]).generate(prompt, params)[0]
    assert output.token_ids == greedy_of_transformers(tiny_model("mistral-window"), prompt, 24)


def test_a32_a_quantised_target_hands_over_features_of_the_same_space(tmp_path):
    """Feature for feature and state for state near those of the target in full precision, so that its drafters serve; formats that turn the space or are not computed are refused by name."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=7)
    whole, tokens = tiny_target("llama", **sizes), random_tokens(208, 30)
    file = write_gguf(tmp_path / "q8.gguf", tiny_model("llama", **sizes), lambda _name, array: (quantize(array, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0))
    quantised = TargetModel.from_checkpoint(open_checkpoint(file), torch.float32, 200, progress=False, cache_directory=tmp_path)
    handed = []
    for target in (whole, quantised):
        cache = empty_cache(target.config)
        with torch.inference_mode():
            features = prefill(target, cache.copy(), tokens)
            _, states = target.forward_with_states((2, 3, 4), torch.tensor([tokens]), torch.arange(30)[None], cache.kv, cache.seq_lens, cache.page_table)
        handed.append([features, *states[0].split(64, dim=-1)])
    for ours, theirs in zip(*handed):
        assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99
        turned = ours @ torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1))).Q
        assert torch.nn.functional.cosine_similarity(ours, turned).max() < 0.9  # the comparison can tell
    with pytest.raises(EagleError, match="quantised .*quarot.* not supported"):
        ModelConfig.from_hf_dict(tiny_model("llama").config.to_dict() | dict(architectures=["LlamaForCausalLM"], quantization_config=dict(quant_method="quarot")))
