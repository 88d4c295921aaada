"""Public names say in their docstrings what they take and return, in sections that tools read."""

import inspect

import pytest

import fedld
from fedld.tasks import Task
from fedld.transforms import UpdateTransform
from reproduction.hooks import SECTIONS


def members():
    """Every public function, class and method of the package, by its name; overridden methods excepted."""
    found = {"Task": Task, "UpdateTransform": UpdateTransform}
    found |= {name: getattr(fedld, name) for name in fedld.__all__ if name not in ("__version__", "data")}
    found["data"] = fedld.data.make
    for name, value in list(found.items()):
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(member, "__func__", member)
            inherited = any(key in vars(base) for base in value.__mro__[1:])
            if inspect.isfunction(function) and not key.startswith("_") and not inherited:
                found[f"{name}.{key}"] = function
    return found


MEMBERS = members()


@pytest.mark.parametrize("name", [name for name, value in MEMBERS.items() if inspect.isfunction(value)])
def test_a_public_function_describes_arguments_and_result(name):
    function = MEMBERS[name]
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    for parameter in set(signature.parameters) - {"self", "cls"}:
        assert "Args:" in text
        assert f"{parameter}:" in text
    if signature.return_annotation not in (None, "None"):
        assert "Returns:" in text


@pytest.mark.parametrize(
    "name",
    [
        "auto",
        "compare",
        "data",
        "diagnose",
        "load",
        "predict",
        "report",
        "run",
        "tune",
        "aggregate",
        "decompose",
    ],
)
def test_a_verb_has_an_example_that_runs_and_its_errors(name):
    text = inspect.getdoc(MEMBERS[name])
    assert ">>>" in text
    assert "Raises:" in text


def test_the_page_of_public_names_has_all_of_them():
    names = " ".join(SECTIONS.values()).split()
    assert sorted(names) == sorted(set(fedld.__all__) - {"__version__"})
