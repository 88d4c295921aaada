"""The house is as CONTRIBUTING's map draws it: no room imports one that its row does not name."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
PACKAGE = HOME / "src/fedld"
ABOVE = {"__init__", "__main__"}  # the lazy front door and the entry point see everything
ONLY = {
    "flwr": ("engine/backends/flower/", "deployment/", "flower.py"),
    "matplotlib": ("study/",),
    "mpl_toolkits": ("study/",),
}


def allowed() -> dict[str, set[str]]:
    """Rooms and what they may import, from the table; the first row is the ground floor."""
    rows = re.findall(r"^\| (`.+?) \|.*\| (.*?) ?\|$", (HOME / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    names = [(re.findall(r"`(\w+)`", room), set(re.findall(r"`(\w+)`", reach))) for room, reach in rows]
    ground = set(names[0][0])
    return {room: reach | ground | set(rooms) for rooms, reach in names for room in rooms}


def parts() -> dict[str, tuple[set[str], set[str]]]:
    """Parts of rooms, by name: their files or folders (none: the others) and what they may import."""
    rows = re.findall(
        r"^\| `(\w+: \w+)` \| (.*?) \| ?(.*?) ?\|$", (HOME / "CONTRIBUTING.md").read_text(), re.M
    )
    return {
        name: (set(re.findall(r"`([\w/]+)`", files)), set(re.findall(r"`(\w+: \w+)`", reach)))
        for name, files, reach in rows
    }


def part_of(file: str, known: dict[str, tuple[set[str], set[str]]]) -> str | None:
    """The part of a file of the package, by its longest match; None for a room without parts."""
    room, _, rest = file.removesuffix(".py").partition("/")
    own = {name: files for name, (files, _) in known.items() if name.startswith(f"{room}: ")}
    matches = [(file, name) for name, files in own.items() for file in files]
    fitting = [(m, name) for m, name in matches if rest == m or (m.endswith("/") and rest.startswith(m))]
    others = [name for name, files in own.items() if not files]
    return max(fitting, key=lambda one: len(one[0]))[1] if fitting else next(iter(others), None)


def imports(file: Path) -> list[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: imports are absolute"
            found += [(node.lineno, _module(str(node.module), alias.name)) for alias in node.names]
    return found


def _module(package: str, name: str) -> str:
    """What `from package import name` imports: a module of a room, or something of a module."""
    path = PACKAGE.joinpath(*package.split(".")[1:], name)
    is_module = path.is_dir() or path.with_suffix(".py").is_file() or package == "fedld"
    return f"{package}.{name}" if package.split(".")[0] == "fedld" and is_module else package


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def trespasses() -> list[str]:
    rooms, found = allowed(), []
    for file in sorted(PACKAGE.rglob("*.py")):
        here = file.relative_to(PACKAGE).as_posix()
        for line, name in imports(file):
            head, _, rest = name.partition(".")
            if head in ONLY and not here.startswith(ONLY[head]):
                found.append(f"{here}:{line} imports {head}")
            target = rest.split(".")[0]
            known = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").exists()
            if head != "fedld" or not known or room_of(file) in ABOVE:
                continue
            if target != room_of(file) and target not in rooms.get(room_of(file), set()):
                found.append(f"{here}:{line} imports {target}")
    return found


def test_no_room_imports_what_the_map_does_not_allow():
    assert trespasses() == []


def test_every_room_is_on_the_map():
    rooms = {room_of(file) for file in PACKAGE.rglob("*.py")} - ABOVE
    assert rooms == set(allowed())


def test_no_part_of_a_room_imports_what_its_row_does_not_allow():
    known, wrong = parts(), []
    for file in sorted(PACKAGE.rglob("*.py")):
        here = file.relative_to(PACKAGE).as_posix()
        for line, name in imports(file):
            path = name.removeprefix("fedld.").replace(".", "/")
            target = f"{path}/__init__.py" if (PACKAGE / path).is_dir() else f"{path}.py"
            own, other = part_of(here, known), part_of(target, known)
            if not name.startswith("fedld.") or room_of(file) != path.split("/")[0] or own == other:
                continue
            if own is not None and other not in known[own][1]:
                wrong.append(f"{here}:{line} imports {name}")
    assert wrong == []


def test_a_part_is_found_by_its_longest_match():
    known = parts()
    files = {
        "engine/backends/flower/wire.py": "engine: flower",
        "engine/backends/pool.py": "engine: backends",
    }
    files |= {"engine/loop.py": "engine: rounds", "engine/jobs.py": "engine: jobs", "data/table.py": None}
    assert {file: part_of(file, known) for file in files} == files


def test_parts_point_one_way_and_name_files_that_exist():
    known = parts()
    assert {name.split(":")[0] for name in known} >= {"engine", "study", "analysis", "config"}
    for number, (name, (files, reach)) in enumerate(known.items()):
        room = PACKAGE / name.split(":")[0]
        assert all((room / file).is_dir() or (room / f"{file}.py").is_file() for file in files), name
        assert reach <= set(list(known)[:number]), f"{name} imports a part that stands below it"


def test_the_map_points_one_way():
    rooms, order = allowed(), []
    while len(order) < len(rooms):
        ready = [r for r in rooms if r not in order and rooms[r] - {r} <= {*order, *_together(rooms, r)}]
        assert ready, f"a circle among {sorted(set(rooms) - set(order))}"
        order += ready


def _together(rooms: dict[str, set[str]], room: str) -> set[str]:
    """Rooms that share a row: they may import each other."""
    return {other for other in rooms if rooms[other] == rooms[room]}


@pytest.mark.parametrize("line", ["from fedld.engine import loop", "import flwr", "import matplotlib.pyplot"])
def test_a_trespass_is_seen(tmp_path, monkeypatch, line):
    folder = PACKAGE
    copy = tmp_path / "fedld"
    (copy / "data").mkdir(parents=True)
    (copy / "engine").mkdir()
    (copy / "data/bad.py").write_text(f"def late():\n    {line}\n")
    monkeypatch.setitem(globals(), "PACKAGE", copy)
    assert len(trespasses()) == 1
    assert folder != copy


def test_a_class_has_its_name_for_itself():
    """Neither another class nor an alias of a type is called the same."""
    found = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            for name in [node.name] if isinstance(node, ast.ClassDef) else map(ast.unparse, targets):
                found[name].append((isinstance(node, ast.ClassDef), str(file.relative_to(PACKAGE))))
    twice = {name: [file for _, file in places] for name, places in found.items() if len(places) > 1}
    assert {name: files for name, files in twice.items() if any(kind for kind, _ in found[name])} == {}
