"""The catalogue of reported faults in README.md and the tests named after it agree."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| ([AB])(\d+) \| (.+) \| (.+) \| (.+) \|$")
NAME = re.compile(r"test_([ab])(\d+)_\w+")


def read_rows(text: str) -> list[tuple[str, int, str, str, str]]:
    """Catalogue, number, reports, kind of fault and tests of every row."""
    rows = [ROW.match(line) for line in text.splitlines() if re.match(r"^\| [AB]\d", line)]
    assert all(rows), "a row is not four columns"
    return [(row[1], int(row[2]), *row.groups()[2:]) for row in rows]


def named_tests() -> dict[str, str]:
    """Every test named after a row, and the file it stands in; none stands anywhere else than where the tables say."""
    found = {}
    for file in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and NAME.fullmatch(node.name):
                assert node.name not in found, f"{node.name} stands in {found[node.name]} and {file.name}"
                found[node.name] = file.name
    return found


def problems(rows: list[tuple[str, int, str, str, str]], tests: dict[str, str]) -> list[str]:
    """What does not agree, in words."""
    wrong, listed = [], set()
    keys = [(catalogue, number) for catalogue, number, *_ in rows]
    if keys != sorted(set(keys)):
        wrong.append("rows are not in order, each once")
    for catalogue, number, reports, kind, cell in rows:
        where = f"{catalogue}{number}"
        if not re.match(r"(?:[\w.-]+/)?[\w.-]*#\d+", reports) or len(kind) < 10:
            wrong.append(f"{where} names no report or no kind of fault")
        names = re.findall(r"`(test_\w+)`", cell)
        if not names and not re.fullmatch(r"none(?: yet)?: .{10,}", cell):
            wrong.append(f"{where} has neither a test nor a reason for having none")
        for name in names:
            listed.add(name)
            match = NAME.fullmatch(name)
            if match is None or (match[1].upper(), int(match[2])) != (catalogue, number):
                wrong.append(f"{where} lists {name}, which has another number")
            if name not in tests:
                wrong.append(f"{where} lists {name}, which does not exist")
            elif not tests[name].startswith(f"test_field_bugs_{catalogue.lower()}"):
                wrong.append(f"{name} stands in {tests[name]}")
    return wrong + [f"{name} is in no row" for name in tests if name not in listed]


def test_the_tables_and_the_tests_agree():
    rows = read_rows((TESTS / "README.md").read_text())
    assert not problems(rows, named_tests())
    assert len(rows) > 60 and sum("`" in row[-1] for row in rows) > 50


def test_disagreement_is_noticed():
    rows, tests = read_rows((TESTS / "README.md").read_text()), named_tests()
    first = next(iter(tests))
    for broken in (rows[:1] + rows, rows[1:], [(*rows[0][:4], "`test_a01_nothing`")] + rows[1:], [("A", 6, *rows[0][2:])] + rows, [(*rows[0][:4], "later")] + rows[1:], [(*rows[0][:2], "somewhere", *rows[0][3:])] + rows[1:]):  # fmt: skip
        assert problems(broken, tests)
    assert problems(rows, tests | {"test_a99_new": "test_field_bugs_a.py"})
    assert problems(rows, tests | {first: "test_engine.py"})
    assert problems(rows, {name: file for name, file in tests.items() if name != first})
