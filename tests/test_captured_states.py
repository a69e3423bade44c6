"""States that the target hands over from inside its forward: which ones they are, and that taking them changes nothing."""

import pytest
import torch
from drafter_files import write_drafter
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.drafter import Drafter
from eagle_engine.target import TargetModel
from helpers import assert_exact, packed_mask, path_to_root
from tiny_engines import eagle3_config, random_eagle3, random_tensors, tiny_target
from tiny_targets import CASES, empty_cache, prefill, random_tokens, tiny_model

TOKENS = random_tokens(seed=3, count=21)


def capture(target, layers, tokens, *, chunk=None, poison=float("nan")) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [n, H] and states [n, len(layers) * H] of one sequence."""
    cache, pieces = empty_cache(target.config), []
    size = chunk or len(tokens)
    for start in range(0, len(tokens), size):
        ids = torch.tensor([tokens[start : start + size]])
        positions = torch.arange(start, start + ids.shape[1])[None]
        states = torch.full((1, ids.shape[1], len(layers) * target.config.hidden_size), poison)
        features = target.forward(ids, positions, cache.kv, cache.seq_lens, cache.page_table, captured_layers=layers, captured=states)
        pieces.append((features[0], states[0]))
        cache.seq_lens.add_(ids.shape[1])
    return torch.cat([features for features, _ in pieces]), torch.cat([states for _, states in pieces])


@pytest.mark.parametrize("num_layers", [7, 8, 9])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_default_states_are_the_inputs_of_layers_2_half_and_3_before_the_end_in_transformers(case, num_layers):
    model, target = tiny_model(case, num_hidden_layers=num_layers), tiny_target(case, num_hidden_layers=num_layers)
    layers = random_eagle3(target).captured_layers
    assert layers == (2, num_layers // 2, num_layers - 3)
    with torch.no_grad():
        hidden = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states  # hidden[i]: the input of layer i
    _, states = capture(target, layers, TOKENS)
    for place, i in enumerate(layers):
        expected = hidden[i][0]
        error = (states[:, place * 48 : (place + 1) * 48] - expected).abs().max().item()
        assert error < 1e-4 * max(1.0, expected.abs().max().item()), f"input of layer {i}: largest difference {error:.2e}"
        # Neighbouring layers are far away: an off-by-one cannot pass.
        assert min((hidden[i] - hidden[j]).abs().max() for j in (i - 1, i + 1)) > 1e-2


def constant_target(directory, num_layers: int = 7) -> TargetModel:
    """Layer i adds 2^i to every channel, and nothing else."""
    model = tiny_model("llama-tied-biases-linear", num_hidden_layers=num_layers)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.randint(-9, 9, (83, 48)))
        for i, layer in enumerate(model.model.layers):
            for parameter in (layer.self_attn.o_proj.weight, layer.self_attn.o_proj.bias, layer.mlp.down_proj.weight):
                parameter.zero_()
            layer.mlp.down_proj.bias.fill_(2.0**i)
    model.save_pretrained(directory)
    return TargetModel.from_checkpoint(open_checkpoint(directory), max_positions=200, progress=False)


def test_states_of_a_target_whose_layers_add_known_constants(tmp_path):
    """Every layer's input, as integers without rounding: the embedding and the constants of the layers before it; behind the last, the output of the last."""
    target = constant_target(tmp_path)
    _, states = capture(target, tuple(range(8)), TOKENS)
    for i in range(8):
        assert_exact(states[:, i * 48 : (i + 1) * 48].contiguous(), target.embed(torch.tensor(TOKENS)) + float(2**i - 1))


@pytest.mark.parametrize("convention, constants", [("input", (1, 7, 31)), ("output", (3, 15, 63))])
def test_listed_layers_are_the_ones_of_their_convention(tmp_path, convention, constants):
    """Ids 1, 3, 5 of a file: their inputs hold the constants of the layers before them, their outputs that of the layer itself too."""
    target = constant_target(tmp_path)
    raw = eagle3_config(target, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    directory = write_drafter(tmp_path / "d", raw, random_tensors(raw | {"eagle_aux_hidden_state_layer_ids": None}))
    drafter = Drafter.from_directory(directory, target, max_positions=200, layer_ids=convention)
    _, states = capture(target, drafter.captured_layers, TOKENS)
    for place, constant in enumerate(constants):
        assert_exact(states[:, place * 48 : (place + 1) * 48].contiguous(), target.embed(torch.tensor(TOKENS)) + float(constant))


@pytest.mark.parametrize("case", ["llama", "mistral-window", "mixtral", "qwen3-biases"])
def test_capturing_changes_no_bit_and_chunks_leave_no_trace(case):
    target = tiny_target(case, num_hidden_layers=7)
    plain = prefill(target, empty_cache(target.config), TOKENS)
    features, states = capture(target, (0, 3, 7), TOKENS)
    assert_exact(features, plain)
    for chunk in (1, 5):
        again, parts = capture(target, (0, 3, 7), TOKENS, chunk=chunk, poison=7.5)
        assert_exact(again, plain)
        assert_exact(parts, states)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_states_of_tree_nodes_are_those_of_plain_decoding_bit_for_bit(case):
    target = tiny_target(case, num_hidden_layers=7)
    parent, layers = [-1, 0, 0, 1, 2, 2, 5], (2, 3, 4)
    tokens = random_tokens(seed=6, count=len(parent))
    paths = [path_to_root(parent, node) for node in range(len(parent))]
    cache = empty_cache(target.config, batch=2)
    whole = torch.tensor([TOKENS, TOKENS])
    target.forward(whole, torch.arange(len(TOKENS)).repeat(2, 1), cache.kv, cache.seq_lens, cache.page_table)
    cache.seq_lens.add_(len(TOKENS))
    positions = torch.tensor([[len(TOKENS) + len(path) - 1 for path in paths]]).repeat(2, 1)
    mask = packed_mask(torch.tensor([parent, parent]))
    features, states = target.forward_with_states(layers, torch.tensor([tokens, tokens]), positions, cache.kv, cache.seq_lens, cache.page_table, mask)
    for node, path in enumerate(paths):
        expected, expected_states = capture(target, layers, TOKENS + [tokens[i] for i in path], chunk=1)
        for b in range(2):
            assert_exact(features[b, node], expected[-1])
            assert_exact(states[b, node], expected_states[-1])


def test_without_captured_layers_the_states_are_the_features():
    target, cache = tiny_target("llama"), empty_cache(tiny_target("llama").config)
    features, states = target.forward_with_states((), torch.tensor([TOKENS]), torch.arange(len(TOKENS))[None], cache.kv, cache.seq_lens, cache.page_table)
    assert states is features


def test_wrong_buffers_and_layers_are_refused():
    target = tiny_target("llama")
    cache = empty_cache(target.config)

    def forward(layers, captured):
        ids = torch.tensor([TOKENS])
        target.forward(ids, torch.arange(len(TOKENS))[None], cache.kv, cache.seq_lens, cache.page_table, captured_layers=layers, captured=captured)

    good = torch.empty(1, len(TOKENS), 96)
    forward((0, 2), good)
    for bad in (good[..., :95].contiguous(), good.bfloat16(), good[:, 1:], torch.empty(1, len(TOKENS), 192)[..., ::2]):
        with pytest.raises(ValueError, match=r"captured: expected \[1, 21, 96\] float32, contiguous"):
            forward((0, 2), bad)
    for layers in ((0, 3), (-1, 2)):
        with pytest.raises(ValueError, match="captured_layers: expected 0 to 2"):
            forward(layers, good)
