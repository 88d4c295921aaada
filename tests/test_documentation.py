"""Every command, option and setting that a page names exists."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

import fedld
from fedld.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:^|[`$ ])(fedld [a-z][^`\n]*)", re.MULTILINE)


def commands(text):
    """Commands as a reader would type them: lines joined where a backslash continues them, comments cut."""
    for found in COMMAND.findall(text.replace("\\\n", " ")):
        words = re.split(r"\s#|[;&|]|\s-> ", found)[0]
        try:
            yield shlex.split(words)
        except ValueError:  # an apostrophe of the sentence around it
            yield words.split()


def resolve(words):
    """The command that the words name, and the words that follow; None where it is only a sentence."""
    group, rest = typer.main.get_command(app), words[1:]
    while isinstance(group, click.Group) and rest and rest[0] in group.commands:
        group, rest = group.commands[rest[0]], rest[1:]
    return (None, rest) if isinstance(group, click.Group) else (group, rest)


def unknown_options(text):
    for words in commands(text):
        command, rest = resolve(words)
        named = [word.split("=")[0].rstrip(".,:)") for word in rest if re.match(r"--[a-z]", word)]
        if command is None:
            yield from [" ".join(words)] if named else []
            continue
        known = {"--help"}.union(*(option.opts + option.secondary_opts for option in command.params))
        yield from (f"fedld {command.name} {name}" for name in named if name not in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_a_page_names_exists(page):
    assert list(unknown_options(page.read_text(encoding="utf-8"))) == []


def test_an_option_that_does_not_exist_is_found():
    text = "Try `fedld run --roundz 3`, or\n\n    fedld compare --seeds 0 \\\n      --no-such-thing\n"
    assert list(unknown_options(text)) == ["fedld run --roundz", "fedld compare --no-such-thing"]


def guide():
    """Pages of the guide, in the order of the navigation."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    section = text.split("  - Guide:\n")[1].split("\n  - ")[0]
    return re.findall(r": (\S+\.md)$", section, re.MULTILINE)


def test_the_guide_has_eight_pages_that_take_five_minutes():
    assert len(guide()) == 8
    words = {
        name: len(re.findall(r"\S*\w\S*", (ROOT / "docs" / name).read_text(encoding="utf-8")))
        for name in guide()
    }
    assert max(words.values()) <= 1000, words


def test_snippets_on_transforms_callbacks_and_engines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "own-transforms.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = {"fedld": fedld, "sites": fedld.data("digits", clients=3, alpha=100.0)}
    assert len(snippets) == 3
    for snippet in snippets:
        exec(snippet, names)


def without_generated_and_code(text):
    """A page without its generated blocks and without fenced and indented code."""
    text = re.sub(r"<!-- generated.*?<!-- /generated -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<=\n\n)(?: {4}[^\n]*\n+)+", "\n", text)


def long_lines(text):
    """Lines above 120 characters, but for tables and addresses that cannot be broken."""
    for line in without_generated_and_code(text).splitlines():
        if len(re.sub(r"https?://\S+", "", line)) > 120 and not line.startswith("|"):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_long(page):
    assert list(long_lines(page.read_text(encoding="utf-8"))) == []


def sentences(text):
    """Sentences of paragraphs and lists; code counts as a word, a link as its text."""
    prose = re.sub(r"^(\||#|---).*$", "\n", without_generated_and_code(text), flags=re.MULTILINE)
    prose = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", prose))
    for paragraph in re.split(r"\n\s*\n| · |\n *(?:[-*]|\d\.) ", prose):
        yield from re.split(r"(?<=[.!?:])\s+|(?<=[.!?:][)*])\s+", " ".join(paragraph.split()))


def long_sentences(text, most=25):
    return [sentence for sentence in sentences(text) if len(sentence.split()) > most]


@pytest.mark.parametrize("name", ["../README.md", "index.md", "privacy.md", "privacy-protocols.md", *guide()])
def test_sentences_for_users_have_at_most_25_words(name):
    assert long_sentences((ROOT / "docs" / name).read_text(encoding="utf-8")) == []


def test_long_lines_and_sentences_are_found():
    words = "word " * 26
    text = f"# Title\n\n{words}end.\n\n| {words} |\n\n    {words}\n\nShort. [{words}](a.md)\n"
    assert [sentence.split()[-1] for sentence in long_sentences(text)] == ["end.", "word"]
    assert [line[:5] for line in long_lines(text)] == ["word ", "Short"]


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_links_outside_of_the_built_pages_lead_somewhere(page):
    """Those of docs/ are checked by `mkdocs build --strict`."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
