"""A draft tree as a picture (SVG) and as text."""

from __future__ import annotations

import math
import unicodedata
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

from eagle_engine.observation import ObservedTree

LABEL_WIDTH = 22  # columns of a token's text; a longer one is cut and stands whole in the node's tooltip
CHARACTER = 7.9  # width of a column at the size of a label
ROW, GAP, BOX = 27, 46, 20  # px: between rows, between columns, height of a node
MARGIN, HEADING = 18, 92

STYLE = """
text { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 13px; fill: #1f2328; white-space: pre; }
.heading { font-family: system-ui, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 12px; fill: #57606a; }
.heading.first { font-size: 15px; font-weight: 600; fill: #1f2328; }
.confidence { font-size: 10.5px; fill: #57606a; }
rect { stroke-width: 1.2; }
.root rect, .accepted rect { fill: #dafbe1; stroke: #2da44e; }
.root rect { stroke-width: 2.4; }
.bonus rect { fill: #fff8c5; stroke: #bf8700; stroke-dasharray: 4 2; }
.rejected rect { fill: #f6f8fa; stroke: #d0d7de; }
.rejected text { fill: #848d97; }
path { fill: none; stroke: #d0d7de; stroke-width: 1.2; }
path.accepted { stroke: #2da44e; stroke-width: 2.6; }
path.bonus { stroke: #bf8700; stroke-width: 1.8; stroke-dasharray: 4 3; }
"""


@dataclass
class DrawnNode:
    """A node as it is drawn. The bonus token is one too, though the drafter did not guess it.

    kind      "root", "accepted", "rejected" or "bonus"
    token     token id
    text      the token's text
    children  in the order of drawing
    """

    kind: str
    token: int
    text: str
    depth: int
    parent: DrawnNode | None = None
    confidence: float | None = None
    path_confidence: float | None = None
    score: float | None = None
    target_text: str | None = None  # of the token that the target draws after this node
    children: list[DrawnNode] = field(default_factory=list)


def drawn_tree(tree: ObservedTree, texts: list[str], bonus_text: str, target_texts: list[str] | None) -> list[DrawnNode]:
    """The nodes of a tree, the root first, the bonus token last.

    texts         of each node's token
    target_texts  of the token that the target draws after each node, or None
    """
    accepted = set(tree.accepted_nodes)
    nodes: list[DrawnNode] = []
    for i, (token, text, depth, confidence, path, score) in enumerate(zip(tree.tokens, texts, tree.depth, tree.confidences, tree.path_confidences, tree.scores)):
        kind = "root" if i == 0 else "accepted" if i in accepted else "rejected"
        node = DrawnNode(kind, token, text, depth, target_text=target_texts[i] if target_texts else None)
        if i > 0:
            node.parent, node.confidence, node.path_confidence, node.score = nodes[tree.parent[i]], confidence, path, score
            node.parent.children.append(node)
        nodes.append(node)
    last = nodes[tree.accepted_nodes[-1]]
    bonus = DrawnNode("bonus", tree.bonus_token, bonus_text, last.depth + 1, parent=last)
    last.children.append(bonus)
    return [*nodes, bonus]


def visible(text: str) -> str:
    """The text with every character to be seen: a space as ␣, line ends and tabs as \\n, \\r, \\t, other characters without a shape (controls, joiners, what is unassigned) as \\x or \\u; nothing at all as ∅.

    A backslash is doubled, so that the two are told apart. What comes back holds no character that XML forbids.
    """
    named = {" ": "␣", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
    return "".join(named.get(c) or (_escaped(c) if unicodedata.category(c)[0] in "CZ" else c) for c in text) or "∅"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _number(value: float, digits: int) -> str:
    return "n/a" if math.isnan(value) else f"{value:.{digits}f}"


def columns(text: str) -> int:
    """Columns of a text in a fixed-width font."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def label(text: str) -> str:
    """The visible text, cut to LABEL_WIDTH columns."""
    shown = visible(text)
    if columns(shown) <= LABEL_WIDTH:
        return shown
    while columns(shown) > LABEL_WIDTH - 1:
        shown = shown[:-1]
    return shown + "…"


def tree_text(nodes: list[DrawnNode], heading: list[str]) -> str:
    """The tree as indented lines: * before an accepted draft, + before the bonus token."""
    marks = {"root": "", "accepted": "* ", "rejected": "  ", "bonus": "+ "}
    lines: list[tuple[str, DrawnNode]] = []

    def walk(node: DrawnNode, branch: str, indent: str) -> None:
        lines.append((branch + marks[node.kind] + label(node.text), node))
        for child in node.children:
            end = child is node.children[-1]
            walk(child, indent + ("└─" if end else "├─"), indent + ("  " if end else "│ "))

    walk(nodes[0], "", "")
    width = max(columns(text) for text, _ in lines) + 2
    out = [*heading, "", f"{'':<{width}}confidence    path"]
    for text, node in lines:
        pad = text + " " * (width - columns(text))
        if node.confidence is None:
            out.append(pad + ("root" if node.kind == "root" else "bonus token"))
        else:
            out.append(f"{pad}{_number(node.confidence, 3):>10}{_number(node.path_confidence, 3):>8}")
    return "\n".join([*out, "", "*: accepted; +: the target's own token; confidence: the drafter's probability of the token given its path; path: of all of its path"])


def tree_svg(nodes: list[DrawnNode], heading: list[str]) -> bytes:
    """The tree as a picture, the root at the left, a column per depth, a row per leaf. Text is text, with a tooltip for each node."""
    rows = _rows(nodes)
    widths = [0.0] * (1 + max(node.depth for node in nodes))
    for node in nodes:
        widths[node.depth] = max(widths[node.depth], _box_width(node))
    left = [MARGIN + sum(widths[:depth]) + GAP * depth for depth in range(len(widths))]
    width = max(left[-1] + widths[-1] + MARGIN, MARGIN * 2 + max(7.0 * columns(line) for line in heading))
    height = HEADING + ROW * (1 + max(rows.values())) + MARGIN
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "width": f"{width:.0f}", "height": f"{height:.0f}", "viewBox": f"0 0 {width:.0f} {height:.0f}"})
    ElementTree.SubElement(svg, "title").text = heading[0]
    ElementTree.SubElement(svg, "style").text = STYLE
    ElementTree.SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
    for i, line in enumerate(heading):
        ElementTree.SubElement(svg, "text", {"class": "heading first" if i == 0 else "heading", "x": str(MARGIN), "y": str(MARGIN + 10 + 18 * i)}).text = line
    _draw_legend(svg, MARGIN, MARGIN + 10 + 18 * len(heading))

    def middle(node: DrawnNode) -> float:
        return HEADING + ROW * (rows[id(node)] + 0.5)

    # Edges first, those of the accepted path above the others.
    for node in sorted(nodes[1:], key=lambda node: ("rejected", "bonus", "accepted").index(node.kind)):
        x0, x1, y0, y1 = left[node.parent.depth] + _box_width(node.parent), left[node.depth], middle(node.parent), middle(node)
        bend = left[node.parent.depth] + widths[node.parent.depth]
        curve = f"M{x0:.1f},{y0:.1f} H{bend:.1f} C{bend + GAP / 2:.1f},{y0:.1f} {x1 - GAP / 2:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
        ElementTree.SubElement(svg, "path", {"class": node.kind, "d": curve})
    for i, node in enumerate(nodes):
        _draw_node(svg, node, i, left[node.depth], middle(node))
    return ElementTree.tostring(svg, encoding="utf-8", xml_declaration=True)


def _rows(nodes: list[DrawnNode]) -> dict[int, float]:
    """Row of each node, by identity: leaves one after the other, a parent midway between its first and its last child."""
    rows: dict[int, float] = {}
    next_row = 0

    def place(node: DrawnNode) -> float:
        nonlocal next_row
        if not node.children:
            rows[id(node)] = next_row
            next_row += 1
        else:
            places = [place(child) for child in node.children]
            rows[id(node)] = (places[0] + places[-1]) / 2
        return rows[id(node)]

    place(nodes[0])
    return rows


def _box_width(node: DrawnNode) -> float:
    return 16 + CHARACTER * columns(label(node.text)) + (0 if node.confidence is None else 38)


def _draw_node(svg: ElementTree.Element, node: DrawnNode, index: int, x: float, y: float) -> None:
    attributes = {"class": f"node {node.kind}"} | ({} if node.kind == "bonus" else {"data-node": str(index)})
    group = ElementTree.SubElement(svg, "g", attributes)
    ElementTree.SubElement(group, "title").text = _tooltip(node)
    width = _box_width(node)
    ElementTree.SubElement(group, "rect", {"x": f"{x:.1f}", "y": f"{y - BOX / 2:.1f}", "width": f"{width:.1f}", "height": str(BOX), "rx": "5"})
    ElementTree.SubElement(group, "text", {"class": "token", "x": f"{x + 8:.1f}", "y": f"{y + 4.5:.1f}"}).text = label(node.text)
    if node.confidence is not None:
        ElementTree.SubElement(group, "text", {"class": "confidence", "x": f"{x + width - 7:.1f}", "y": f"{y + 4:.1f}", "text-anchor": "end"}).text = _number(node.confidence, 2)


def _tooltip(node: DrawnNode) -> str:
    lines = [f"{visible(node.text)} (token {node.token}), {node.kind}, depth {node.depth}"]
    if node.confidence is not None:
        lines.append(f"confidence {_number(node.confidence, 4)}, path {_number(node.path_confidence, 4)}, score {_number(node.score, 4)}")
    if node.target_text is not None:
        lines.append(f"then the target draws {visible(node.target_text)}")
    return "\n".join(lines)


def _draw_legend(svg: ElementTree.Element, x: float, y: float) -> None:
    for kind, text in (("accepted", "accepted"), ("rejected", "rejected"), ("bonus", "bonus token: the target's own")):
        group = ElementTree.SubElement(svg, "g", {"class": kind})
        ElementTree.SubElement(group, "rect", {"x": f"{x:.1f}", "y": f"{y - 10:.1f}", "width": "16", "height": "11", "rx": "3"})
        ElementTree.SubElement(svg, "text", {"class": "heading", "x": f"{x + 22:.1f}", "y": f"{y:.1f}"}).text = text
        x += 40 + 7.0 * len(text)
    ElementTree.SubElement(svg, "text", {"class": "heading", "x": f"{x:.1f}", "y": f"{y:.1f}"}).text = "numbers: the drafter's confidence in the token given its path"
