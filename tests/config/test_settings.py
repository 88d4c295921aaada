"""What a setting says of itself reaches the command line, the sites, the comparison and the documentation."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedld.config.experiment import RENAMED, SETTINGS, make_experiment
from fedld.config.page import settings_page
from fedld.errors import FedLDError

PAGE = Path(__file__).parents[2] / "docs/settings.md"


def test_the_page_is_current():
    assert PAGE.read_text() == settings_page(), "run: python -m fedld.config.page > docs/settings.md"


def test_every_setting_has_an_option():
    from fedld.cli import app

    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "250", "TERM": "dumb"}).output
    for setting in SETTINGS.values():
        assert setting.option in shown
        assert setting.help


def test_no_setting_that_names_a_file_or_a_device_travels():
    travelling = {name for name, setting in SETTINGS.items() if setting.sent_to_sites}
    assert not travelling & {"dataset", "data_root", "weights", "device", "workers", "compile", "data"}


@pytest.mark.parametrize("module", ["fedld", "fedld.config.experiment", "fedld.cli"])
def test_the_public_face_and_the_command_line_start_without_torch(module):
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'numpy', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_worker_starts_without_the_slow_parts_of_scipy():
    slow = "{'scipy.special', 'scipy.ndimage', 'scipy.optimize', 'matplotlib'}"
    code = f"import sys, fedld.engine.worker, fedld.engine.loop; sys.exit(bool({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_methods_are_listed_without_torch_the_second_time(tmp_path):
    code = "import sys; from fedld.cli.methods import known_methods; print(len(known_methods()), end=' ');"
    code += "print('torch' in sys.modules)"
    answers = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert answers[0].split()[0] == answers[1].split()[0]
    assert answers[1].split()[1] == "False"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": "resnet9"}, "unknown model 'resnet9': did you mean 'resnet8'"),
        ({"mu": 1.0, "method": "fedprox"}, "write 'method.mu'"),
        ({"hold_out": 1.5}, "hold_out: input should be less than 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings, problem):
    with pytest.raises(FedLDError, match=problem):
        make_experiment(settings)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_setting_keeps_its_old_name_with_a_warning(old, new):
    assert old not in SETTINGS
    with pytest.warns(FutureWarning, match=f"'{old}' is now called '{new}'"):
        experiment = make_experiment({old: not SETTINGS[new].default})
    assert getattr(experiment, new) is not SETTINGS[new].default
