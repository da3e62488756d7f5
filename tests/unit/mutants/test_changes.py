"""The changes that mutants are made of: each is valid source, differs, and is found by its name."""

import ast

import pytest
from tests.mutants.__main__ import CRITICAL, ROOT
from tests.mutants.changes import changes

SOURCE = '''
LIMIT = 3

class Queue:
    """Not a docstring of a function."""

    def push(self, item, now_s):
        """Take an item."""
        if len(self.items) >= LIMIT and not self.open:
            return False
        self.items[item] = now_s + 1
        self.count += 1
        _log.info("pushed")
        self.told(item)
        return True
'''


def test_each_kind_of_change_is_made_once_where_it_can_be() -> None:
    found = changes("m.py", SOURCE)
    made = sorted((each.kind, each.before, each.after) for each in found)
    assert made == [
        ("add", "self.count += 1", "self.count -= 1"),
        ("always", "len(self.items) >= LIMIT and not self.open", "True"),
        ("and", "len(self.items) >= LIMIT and not self.open",
         "(len(self.items) >= LIMIT or not self.open)"),
        ("assign", "self.items[item] = now_s + 1", "pass"),
        ("call", "self.told(item)", "pass"),
        ("compare", "len(self.items) >= LIMIT", "(len(self.items) > LIMIT)"),
        ("flip", "False", "True"),
        ("flip", "True", "False"),
        ("never", "len(self.items) >= LIMIT and not self.open", "False"),
        ("not", "not self.open", "self.open"),
        ("number", "1", "2"),
        ("number", "1", "2"),
        ("reckon", "now_s + 1", "(now_s - 1)"),
        ("return", "return True", "return None"),
    ]  # fmt: skip
    assert {each.function for each in found} == {"Queue.push"}


def test_every_change_of_a_source_parses_and_differs() -> None:
    for change in changes("m.py", SOURCE):
        changed = change.applied(SOURCE)
        assert changed != SOURCE
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))


def test_letters_of_several_bytes_move_nothing() -> None:
    source = 'def f(a):\n    x("\N{BEER MUG}"); y(a)\n    return a < 3  # \N{BEER MUG}\n'
    (change,) = [each for each in changes("m.py", source) if each.kind == "compare"]
    assert "return (a <= 3)  # \N{BEER MUG}" in change.applied(source)


@pytest.mark.parametrize("module", [module for modules in CRITICAL for module in modules])
def test_critical_modules_are_there_and_can_be_changed(module: str) -> None:
    source = (ROOT / module).read_text()
    found = changes(module, source)
    assert len(found) > 5
    for change in found[:: max(1, len(found) // 20)]:
        ast.parse(change.applied(source))


def test_tests_of_critical_modules_are_there() -> None:
    for tests in CRITICAL.values():
        assert all((ROOT / each).exists() for each in tests)
