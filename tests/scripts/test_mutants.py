import ast

import mutants


def test_each_kind_of_fault_is_put_in_its_place(tmp_path):
    text = (
        'def f(a: int = 1) -> str:\n    if not a < 2 and a:\n        raise ValueError("é", 3)\n    return a\n'
    )
    found = [
        mutants.with_change(text, node, new).splitlines() for node, new, _ in mutants.changes(ast.parse(text))
    ]
    changed = {next(line.strip() for line in lines if line not in text.splitlines()) for lines in found}
    assert changed == {
        "def f(a: int = (2)) -> str:",
        "if (not a < 2 or a):",
        "if (a < 2) and a:",
        "if not (a <= 2) and a:",
        "if not a < (3) and a:",
        "return (None)",
    }
    (tmp_path / "app").mkdir()
    assert all(isinstance(fault, str) for fault in mutants.by_hand(tmp_path))  # no place is found
