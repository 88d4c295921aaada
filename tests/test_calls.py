"""Dataclasses with five or more fields are `kw_only`, and a call names its arguments from the fifth on."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src/fedld"
FIELDS, POSITIONAL = 5, 4
ANY_NUMBER = {
    "Progress",
    "_new",
    "derive",
    "fingerprint",
    "max",
    "min",
    "numpy_generator",
    "part",
    "partial",
    "print",
    "torch_generator",
    "with_settings",
    "zip",
}
"""Functions of any number of alike arguments."""
OTHERS = {"adam", "conv2d", "unfold", "usual"}
"""Functions of other packages that take their arguments by position."""
OPEN = {
    "flower engine": 19,
    "methods": 3,
    "privacy": 9,
}
"""Findings that a room may still have: lower a number whenever it falls, and drop a room that has none."""


def findings(room_file: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file with a wide dataclass that is not kw_only, or a call with too many bare arguments."""
    for node in ast.walk(ast.parse(room_file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and _is_wide(node):
            yield node.lineno, f"{node.name} has {FIELDS} or more fields and is not kw_only"
        if isinstance(node, ast.Call) and _bare(node) > POSITIONAL:
            yield node.lineno, f"{ast.unparse(node.func)} is called with {_bare(node)} positional arguments"


def _bare(call: ast.Call) -> int:
    """Positional arguments of a call that could name them."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in ANY_NUMBER | OTHERS:
        return 0
    return sum(not isinstance(argument, ast.Starred) for argument in call.args)


def _is_wide(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass with many fields that may be given by position."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not any(text.startswith("dataclass") for text in decorators) or "kw_only=True" in "".join(decorators):
        return False
    count = 0
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.annotation).endswith("KW_ONLY"):
            break  # what follows is keyword-only
        count += isinstance(part, ast.AnnAssign) and _is_field(part)
    return count >= FIELDS


def _is_field(part: ast.AnnAssign) -> bool:
    """Whether an annotation is a field of __init__ that is not keyword-only by itself."""
    value = "" if part.value is None else ast.unparse(part.value)
    return not ast.unparse(part.annotation).startswith("ClassVar") and "kw_only=True" not in value


def by_room() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        room = "flower engine" if "backends/flower" in name else name.split("/")[0].removesuffix(".py")
        found.setdefault(room, []).extend(f"{name}:{line} {what}" for line, what in findings(file))
    return {room: lines for room, lines in found.items() if lines}


def test_wide_dataclasses_and_calls_name_their_arguments():
    found = by_room()
    assert {room: lines for room, lines in found.items() if len(lines) > OPEN.get(room, 0)} == {}


def test_a_wide_dataclass_and_a_bare_call_are_found(tmp_path):
    file = tmp_path / "wide.py"
    file.write_text(
        "@dataclass(frozen=True)\nclass Wide:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n"
        "    f: ClassVar[int] = 1\nWide(1, 2, 3, 4, 5)\nWide(1, 2, 3, 4, e=5)\n"
        "@dataclass(kw_only=True)\nclass Named:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n"
    )
    assert [line for line, _ in findings(file)] == [2, 9]
