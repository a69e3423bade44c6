"""What is trained is what decodes: the differentiable drafter against the one on the kernels, and trained drafters of every kind read and run by the engine."""

import pytest
import torch
from eagle_engine import Engine, SamplingParams
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_format import parse_drafter_config
from eagle_engine.training.model import TrainableDrafter, UnrolledAttention
from eagle_engine.training.run import train
from helpers import make_paged_cache
from tiny_engines import drafter_config, eagle3_config, random_tensors, tiny_target
from tiny_targets import random_tokens
from tiny_training import make_target, tiny_config, write_conversations

VARIANTS = {
    "eagle-1": (drafter_config, {}),
    "eagle-3": (eagle3_config, {}),
    "fc-norm": (eagle3_config, dict(fc_norm=True, norm_output=False)),
    "norm-before-fc": (eagle3_config, dict(norm_before_fc=True)),
    "norm-before-residual": (eagle3_config, dict(norm_before_residual=True)),
    "norm-output": (eagle3_config, dict(fc_norm=True, norm_output=True)),
    "narrow": (eagle3_config, dict(hidden_size=32, target_hidden_size=48, head_dim=20)),
}
LENGTH, STEPS = 9, 3


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.no_grad()
def test_unrolled_training_computes_what_decoding_does(variant):
    """Row t of step i in training is the draft i levels below the committed pair t, fed with the features predicted on the way."""
    target = tiny_target("llama", num_hidden_layers=7)
    make, options = VARIANTS[variant]
    raw = make(target, **options)
    config, tensors = parse_drafter_config(raw), random_tensors(raw)
    decoder = Drafter(config, tensors, target, max_positions=64)
    trained = TrainableDrafter(config)
    for name, weight in trained.named_weights().items():
        weight.copy_(tensors[name])
    trained.prepare()
    tokens, states = torch.tensor(random_tokens(1, LENGTH + STEPS)), torch.randn(1, LENGTH, config.fused_size)
    embedding = tensors.get("embed_tokens.weight", target.embed(torch.arange(83)))
    attention = UnrolledAttention(config, torch.ones(1, LENGTH, LENGTH).tril().bool(), torch.arange(LENGTH)[None], STEPS)
    features, unrolled = trained.fuse(states), []
    for step in range(STEPS):
        features = trained.layer(embedding[tokens[None, step : step + LENGTH]], features, attention)
        unrolled.append(features[0])
    head = torch.stack([target.logits(row[None])[0] for row in torch.eye(48)]).T  # [V, H]
    for t in range(LENGTH):
        cache = make_paged_cache([0], LENGTH + STEPS, 4, config.layer.num_kv_heads, config.layer.head_dim)
        ids, positions = tokens[None, : t + 1], torch.arange(t + 1)[None]
        feature = decoder.forward(ids, decoder.fuse(states[:, : t + 1]), positions, cache.kv, cache.seq_lens, cache.page_table)[:, -1:]
        for step in range(STEPS):
            expected = unrolled[step][t]
            torch.testing.assert_close(feature[0, 0], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(decoder.logits(feature)[0, 0], trained.logits(expected, head), rtol=1e-4, atol=1e-3)
            cache.seq_lens.fill_(t + 1 + step)
            if step + 1 < STEPS:
                token, position = tokens[None, t + step + 1 : t + step + 2], torch.tensor([[t + step + 1]])
                feature = decoder.forward(token, feature.clone(), position, cache.kv, cache.seq_lens, cache.page_table)


RUNS = {
    "eagle-1": dict(version=1),
    "eagle-3": dict(version=3, draft_vocab_size=30),
    "eagle-3-layers": dict(version=3, captured_layers=[0, 3, 6]),
    "eagle-3.1": dict(version=3, fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle-3.1-fc-norm-alone": dict(version=3, fc_norm=True, draft_vocab_size=40),
    "eagle-3-float8": dict(version=3, export_dtype="float8_e4m3fn"),
}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_trained_drafter_is_read_and_run(tmp_path, run):
    """The run itself measures with the engine; with the exported drafter the tokens are those of plain decoding."""
    target = make_target(tmp_path / "target")
    data = write_conversations(tmp_path / "conversations.jsonl")
    outcome = train(tiny_config(target, tmp_path / "run", data, epochs=6.0, measure_prompts=2, **RUNS[run]), progress=False, say=lambda line: None)
    assert outcome.finished and outcome.acceptance_length is not None
    engine = Engine.from_pretrained(target, outcome.drafter, dtype="float32", progress=False, tree="dynamic", top_k=4, max_depth=3, num_nodes=12)
    assert engine.models.drafter.config.version == RUNS[run]["version"]
    assert engine.models.captured_layers == {"eagle-1": (), "eagle-3-layers": (0, 3, 6)}.get(run, (2, 3, 4))
    prompts = [random_tokens(seed, 12) for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in engine.plain().generate(prompts, params)]
