"""eagle tree: the picture and the text show what the step did."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from cli_runner import one_error, pair, run  # noqa: F401  (fixtures)
from eagle_engine.cli.tree import choose_step, token_text
from eagle_engine.cli.tree_picture import LABEL_WIDTH, columns, drawn_tree, label, tree_svg, tree_text, visible
from eagle_engine.engine import Engine
from eagle_engine.observation import ObservedTree
from tiny_pair import save_drafter, save_tokenizer
from tiny_targets import VOCAB_SIZE, save_directory
from tokenizers import Tokenizer, decoders, models

SVG = "{http://www.w3.org/2000/svg}"
OPTIONS = ("--prompt", "Say one.", "--max-new-tokens", 30, "--ignore-eos", "--temperature", 1)
TREES = {
    "default": (),
    "dynamic": ("--tree-top-k", 5, "--max-depth", 4, "--num-nodes", 33),
    "largest": ("--tree-top-k", 8, "--max-depth", 4, "--num-nodes", 64),
    "static": ("--tree", "static"),
    "chain": ("--tree", "chain", "--max-depth", 4),
    "rejection": ("--tree", "chain", "--max-depth", 4, "--acceptance", "rejection"),
}


def groups(svg: bytes) -> list[ElementTree.Element]:
    """The drawn nodes in their order; the bonus token is the last."""
    root = ElementTree.fromstring(svg)
    assert root.tag == SVG + "svg"
    return [group for group in root.iter(SVG + "g") if "node" in group.get("class").split()]


def kind(group: ElementTree.Element) -> str:
    return group.get("class").split()[1]


def labels(svg: bytes) -> list[str]:
    return [next(text.text for text in group.iter(SVG + "text") if text.get("class") == "token") for group in groups(svg)]


@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
def test_the_picture_is_that_of_the_step(run, tmp_path, options):
    file = tmp_path / "tree.svg"
    status, out, err = run("tree", *OPTIONS, *options, "--out", file)
    assert (status, out) == (0, "") and err.endswith(f"; {file}\n")
    result = json.loads(run("tree", *OPTIONS, *options, "--json")[1])
    nodes, svg = groups(file.read_bytes()), file.read_bytes()
    assert len(nodes) == len(result["tokens"]) + 1
    assert labels(svg) == [label(text) for text in [*result["texts"], result["bonus_text"]]]
    assert [int(group.get("data-node")) for group in nodes if kind(group) in ("root", "accepted")] == result["accepted_nodes"]
    assert [kind(group) for group in nodes].count("bonus") == 1 and kind(nodes[-1]) == "bonus"
    assert f"token {result['bonus_token']}" in nodes[-1].find(SVG + "title").text
    shown = [next(text.text for text in group.iter(SVG + "text") if text.get("class") == "confidence") for group in nodes[1:-1]]
    assert shown == [f"{confidence:.2f}" for confidence in result["confidences"][1:]]
    curves = [path.get("class") for path in ElementTree.fromstring(svg).iter(SVG + "path")]
    assert len(curves) == len(result["tokens"]) and curves.count("accepted") == len(result["accepted_nodes"]) - 1
    # No two boxes touch, and all are inside.
    root = ElementTree.fromstring(svg)
    boxes = [tuple(float(box.get(name)) for name in ("x", "y", "width", "height")) for box in (group.find(SVG + "rect") for group in nodes)]
    assert all(x >= 0 and y > 0 and x + w <= float(root.get("width")) and y + h <= float(root.get("height")) for x, y, w, h in boxes)
    for i, (x, y, w, h) in enumerate(boxes):
        assert all(x + w < x2 or x2 + w2 < x or y + h < y2 or y2 + h2 < y for x2, y2, w2, h2 in boxes[:i])


def test_text_marks_the_accepted_path(run):
    status, out, err = run("tree", *OPTIONS, *TREES["dynamic"])
    result = json.loads(run("tree", *OPTIONS, *TREES["dynamic"], "--json")[1])
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"step {result['step']} of {result['steps']}: {len(result['accepted_nodes']) - 1} of 32 drafts accepted, ")
    body = lines[lines.index("") + 2 : -2]
    assert len(body) == len(result["tokens"]) + 1
    starred = [line.split("* ")[1].split()[0] for line in body if "─* " in line]
    assert starred == [label(result["texts"][node]) for node in result["accepted_nodes"][1:]] != []
    assert [label(result["bonus_text"])] == [line.split("+ ")[1].split()[0] for line in body if line.endswith("bonus token")]
    assert all(f"{result['confidences'][i]:.3f}" in out for i in range(1, 33))


def test_which_step_is_shown(run, tmp_path):
    results = []
    count = json.loads(run("tree", *OPTIONS, "--json")[1])["steps"]
    for number in range(1, count + 1):
        results.append(json.loads(run("tree", *OPTIONS, "--json", "--step", number)[1]))
    assert [result["step"] for result in results] == list(range(1, count + 1))
    answer = json.loads(run("generate", *OPTIONS[1:], "--seed", 0, "--json")[1])["outputs"][0]["token_ids"]
    emitted = answer[:1]
    for result in results:
        assert result["tokens"][0] == emitted[-1]
        emitted += [result["tokens"][node] for node in result["accepted_nodes"][1:]] + [result["bonus_token"]]
    assert emitted[: len(answer)] == answer
    accepted = [len(result["accepted_nodes"]) for result in results]
    assert json.loads(run("tree", *OPTIONS, "--json")[1]) == results[accepted.index(max(accepted))]
    assert max(accepted) > 1
    message = one_error(run("tree", *OPTIONS, "--step", count + 1))
    assert message == f"--step {count + 1}: the answer has {count} steps"


def test_text_and_picture_and_json_together(run, tmp_path):
    file = tmp_path / "tree.SVG"
    _, text, _ = run("tree", *OPTIONS)
    assert run("tree", *OPTIONS, "--text")[1] == text
    assert run("tree", *OPTIONS, "--text", "--out", file)[1] == text and file.exists()
    file.unlink()
    assert run("tree", *OPTIONS, "--out", file, "--json")[1] == run("tree", *OPTIONS, "--json")[1] and file.exists()


def test_chat_template_and_raw(run):
    through_template, raw = (json.loads(run("tree", *OPTIONS, "--step", 1, "--json", *options)[1]) for options in ((), ("--raw",)))
    assert through_template["position"] - raw["position"] == len("u:\na:")


def test_mistakes_are_told_in_one_line(run, tmp_path, monkeypatch):
    assert "--draft none leaves nothing to show" in one_error(run("tree", "--draft", "none"))
    assert one_error(run("tree", "--out", tmp_path / "tree.pdf")).endswith("tree.pdf: expected a file that ends in .svg")
    assert "expected a file that ends in .svg" in one_error(run("tree", "--out", tmp_path / "tree"))
    assert "there is no directory" in one_error(run("tree", "--out", tmp_path / "none" / "tree.svg"))
    (tmp_path / "folder.svg").mkdir()
    assert "is a directory" in one_error(run("tree", "--out", tmp_path / "folder.svg"))
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        assert "cannot be written" in one_error(run("tree", "--out", tmp_path / "tree.svg"))
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "No space left on device" in one_error(run("tree", *OPTIONS, "--out", tmp_path / "tree.svg"))
    assert one_error(run("tree", "--step", 0)) == "--step: steps are counted from 1, got 0"
    assert "invalid int value" in one_error(run("tree", "--step", "last"))
    assert "has no step" in one_error(run("tree", "--prompt", "Hi", "--max-new-tokens", 1))
    assert "prompt is empty" in one_error(run("tree", "--prompt", " "))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "captures_steps", True)
        assert "--enforce-eager" in one_error(run("tree", *OPTIONS))


# hostile tokens, through the drawing itself

HOSTILE = ["<b>&amp;</b>", "]]>", "a\nb\r\n\t", "\0\x1b[31m", "👩\u200d🚀", "", " ", "\u202e\ufffe\ue000", "x" * 300, "漢字" * 20, '"\'', "\\n", "Ångström e\u0301"]


def hostile_tree() -> ObservedTree:
    """A chain of the first half, the others below the root; the first two are accepted."""
    count = len(HOSTILE)
    parent = [-1, *range(6), *[0] * (count - 7)]
    depth = [0, *range(1, 7), *[1] * (count - 7)]
    return ObservedTree(list(range(count)), parent, depth, [-0.25 * d for d in depth], [0] * count, [0, 1, 2], 99, 5)


def test_hostile_tokens_survive():
    nodes = drawn_tree(hostile_tree(), HOSTILE, "\0<&>\n", HOSTILE)
    heading = [f"step 1 of 1 {visible('<&>')}", visible("after\0\n<")]
    svg = tree_svg(nodes, heading)
    assert labels(svg) == [label(text) for text in HOSTILE] + ["\\x00<&>\\n"]
    assert [kind(group) for group in groups(svg)] == ["root", "accepted", "accepted"] + ["rejected"] * (len(HOSTILE) - 3) + ["bonus"]
    titles = [group.find(SVG + "title").text for group in groups(svg)]
    # A label may be cut; the tooltip has it all.
    assert all(title.startswith(f"{visible(text)} (token {i})") for i, (text, title) in enumerate(zip(HOSTILE, titles)))
    assert {text.text for text in ElementTree.fromstring(svg).iter(SVG + "text")} >= set(heading)
    text = tree_text(nodes, heading)
    assert len(text.splitlines()) == len(heading) + 2 + len(HOSTILE) + 1 + 2 and "\0" not in text and "\x1b" not in text


@pytest.mark.parametrize(
    "text, shown",
    [(" a b", "␣a␣b"), ("a\nb\r\n\t", "a\\nb\\r\\n\\t"), ("\0\x1b", "\\x00\\x1b"), ("👩\u200d🚀", "👩\\u200d🚀"), ("", "∅"), ("\u202e\ufffe\ue000", "\\u202e\\ufffe\\ue000"), ("\\n", "\\\\n"), ("\U000e0041", "\\U000e0041")],
    ids=ascii,
)  # fmt: skip
def test_every_character_is_to_be_seen(text, shown):
    assert visible(text) == shown


def test_long_labels_are_cut_by_their_width():
    assert label("x" * LABEL_WIDTH) == "x" * LABEL_WIDTH
    assert label("x" * 300) == "x" * (LABEL_WIDTH - 1) + "…"
    assert label("漢" * 300) == "漢" * 10 + "…" and columns("漢字e\u0301") == 5


def test_the_first_step_that_accepted_most_is_chosen():
    def step(accepted: int) -> ObservedTree:
        return ObservedTree([0] * 4, [-1, 0, 1, 2], [0, 1, 2, 3], [0.0] * 4, [0] * 4, list(range(accepted + 1)), 1, 0)

    assert choose_step([step(n) for n in (0, 2, 1, 2)], None) == 2
    assert choose_step([step(0)], None) == choose_step([step(0)], 1) == 1


class Words:
    """A tokenizer that drops the space of a first word, as those of the Llama 2 kind do."""

    def __init__(self) -> None:
        self.backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<0xF0>": 2, "<0x9F>": 3}, "▁a"))
        self.backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])

    def decode(self, token_ids, skip_special_tokens):
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_the_space_of_a_token_is_shown():
    words = Words()
    assert words.decode([1], False) == "b"
    assert token_text(words, 1, [0]) == " b" and token_text(words, 1, []) == "b" and token_text(words, 1, [-1]) == "b"
    assert token_text(words, -1, [0]) == "" and "\ufffd" in token_text(words, 2, [0])


def test_a_model_without_a_template_and_a_drafter_that_knows_nothing(run, tmp_path):
    save_directory(tmp_path / "target", "llama")
    save_tokenizer(tmp_path / "target", template=None)
    draft = save_drafter(tmp_path / "draft", edit=lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    result = json.loads(run("tree", *OPTIONS, "--target", tmp_path / "target", "--draft", draft, "--json")[1])
    assert result["confidences"][1:] == pytest.approx([1 / VOCAB_SIZE] * 4, rel=1e-5)
