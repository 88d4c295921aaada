"""Commands in this process: what starting one takes would be most of the time of a refusal."""

import sys

import pytest

from fedld.cli import start


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder; give its sentence."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDLD_CACHE", str(tmp_path / "cache"))

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fedld", *words])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as left:
            start()
        text = capsys.readouterr().err.strip()
        assert left.value.code == 2, text
        assert text.startswith("fedld: ") or "Usage" in text, text
        assert len(text.splitlines()) == 1 or "Usage" in text, text
        after = sorted(tmp_path.rglob("*"))
        assert [p for p in after if p not in before and "cache" not in p.parts] == []
        return text

    return run
