import json

import pytest

from fedld.records.reader import read_run


@pytest.fixture
def write_run(tmp_path):
    """A finished run with the given last round, in the engine's format."""

    def write(method, seed, confusion=((5, 1, 0), (1, 5, 0)), private=1, **line):
        path = tmp_path / f"{method}-{seed}"
        path.mkdir()
        (path / "config.toml").write_text(
            f'dataset = "digits"\nseed = {seed}\nmethod = {{name = "{method}"}}\n'
        )
        record = {"round": 1, "bytes_up": 1_000_000, "bytes_down": 2_000_000, "seconds": 4.0, **line}
        (path / "rounds.jsonl").write_text(json.dumps(record) + "\n")
        (path / "clients.jsonl").write_text("")
        (path / "predictions.json").write_text(
            json.dumps({"classes": ["healthy", "ill"], "confusion": confusion})
        )
        (path / "summary.json").write_text(json.dumps({"seed": seed, "private_parameters": private}))
        return read_run(path)

    return write
