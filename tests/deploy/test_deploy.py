"""What deploy/ ships, checked as far as it can be without a container runtime."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer
import yaml

from fedld import __version__
from fedld.cli import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = {name: yaml.safe_load((DEPLOY / f"{name}.yml").read_text()) for name in ("server", "site")}
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ENVIRONMENT = {"FEDLD_SITE": "site_1", "FEDLD_SERVER": "server.example.org:8000", "FEDLD_DATA": "/data/xrays"}
KEYS = {
    *("image", "build", "command", "ports", "volumes", "healthcheck", "user", "read_only", "tmpfs"),
    *("cap_drop", "security_opt", "init", "restart", "stop_grace_period"),
}


def parsed(words):
    """The values that fedld itself reads from a command line; unknown options and bad values raise."""
    command, rest = typer.main.get_command(app), list(words)
    while isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    return command.make_context(str(command.name), rest).params


def instructions(file):
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def filled(value):
    """Compose's variables: ${NAME}, ${NAME:-default}, ${NAME:?message}."""
    text = json.dumps(value)
    return json.loads(
        re.sub(
            r"\$\{(\w+)(?::([-?])([^}]*))?\}",
            lambda m: ENVIRONMENT.get(m[1]) or {"-": m[3], "?": None, None: None}[m[2]],
            text,
        )
    )


def test_the_image_copies_what_exists_and_runs_as_nobody():
    lines = instructions(DEPLOY / "Dockerfile")
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in lines} <= known
    for _, rest in (line for line in lines if line[0] == "COPY" and "--from" not in line[1]):
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    last = lines[max(k for k, (name, _) in enumerate(lines) if name == "FROM") :]
    [user] = [rest for name, rest in last if name == "USER"]
    assert user.split(":")[0] not in ("0", "root")
    assert json.loads(dict(last)["ENTRYPOINT"]) == ["fedld"]


def test_bases_and_images_have_versions():
    base = dict(instructions(DEPLOY / "Dockerfile"))["ARG"]
    assert re.fullmatch(r"PYTHON=\d+\.\d+\.\d+-slim-\w+", base)
    minor = tuple(map(int, re.findall(r"\d+", base)[:2]))
    assert minor >= (3, 11)
    for file in [DEPLOY / "Dockerfile", *DEPLOY.glob("*.yml")]:
        assert ":latest" not in file.read_text()
    assert {s["image"] for c in COMPOSE.values() for s in c["services"].values()} == {f"fedld:{__version__}"}
    assert f"fedld:{__version__}" in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_is_closed_and_its_command_is_fedlds(name):
    assert set(COMPOSE[name]) == {"services"}
    [service] = filled(COMPOSE[name]["services"]).values()
    assert set(service) <= KEYS
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    [user] = [rest for name, rest in instructions(DEPLOY / "Dockerfile") if name == "USER"]
    assert service["user"] == user
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    values = parsed(service["command"])
    test = service["healthcheck"]["test"]
    assert test[:2] == ["CMD", "fedld"]
    parsed(test[2:])
    mounted = [volume.split(":") for volume in service["volumes"]]
    inside = [Path(one[1]) for one in mounted]
    for option in ("ca", "certificate", "key", "data"):
        if option in values:
            file = Path(values[option])
            assert any(file == one or one in file.parents for one in inside), option
    writable = [one[1] for one in mounted if one[2:] != ["ro"]]
    assert writable == ["/var/lib/fedld"]  # which is where the relative folders of the command are
    assert not any("ca.key" in volume for volume in service["volumes"])
    assert ("ports" in service) == (name == "server")


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_a_site_that_is_not_told_its_name_does_not_start(variable):
    assert f"${{{variable}:?" in (DEPLOY / "site.yml").read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_fedld_and_are_closed(unit):
    text = unit.read_text().replace("\\\n", " ")
    [start] = re.findall(r"^ExecStart=/opt/fedld/bin/fedld (.*)$", text, re.MULTILINE)
    for name, value in ENVIRONMENT.items():
        start = start.replace(f"${{{name}}}", value)
    parsed(shlex.split(start.replace("%i", "site_1")))
    for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=", "User=fedld"):
        assert f"\n{line}\n" in text


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_units(unit, tmp_path):
    """With a program and an account that exist here."""
    program = str(Path(sys.executable).with_name("fedld"))
    text = unit.read_text().replace("/opt/fedld/bin/fedld ", f"{program} ")
    text = re.sub(r"^(User|Group)=fedld$", r"\1=root", text, flags=re.MULTILINE)
    (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit.name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr  # what it says of other units is not ours


def test_a_misspelt_option_is_seen():
    with pytest.raises(click.exceptions.NoSuchOption):
        parsed(["server", "start", "--hots=0.0.0.0"])


def test_the_script_refuses_what_it_would_overwrite(tmp_path):
    script = DEPLOY / "install.sh"
    for words, sentence in (([], "usage"), ([str(tmp_path)], "exists")):
        done = subprocess.run([script, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert sentence in done.stderr


def test_the_lock_has_the_pinned_versions_with_hashes():
    """Hashes in constraints would make pip ask for hashes of the folder that is installed, too."""

    def plain(name):
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = [line for line in (DEPLOY / "requirements.lock").read_text().splitlines() if line[0] != "#"]
    locked = {}
    for line in lines:
        name, version = re.fullmatch(r"([\w.-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}", line).groups()
        locked[plain(name)] = version
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pins = {plain(name): version for name, version in pins.items()}
    del locked["setuptools"]  # a tool, which the constraints leave alone
    assert {name: pins.get(name) for name in locked} == locked
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["flower"], *extras["secure"], *extras["dicom"]]
    names = {plain(re.match(r"[\w.-]+", one)[0]) for one in wanted}
    assert names - locked.keys() == {"torch", "fedld"} & names


def test_lower_bounds_are_free_of_known_faults():
    """Mended: Pillow 11.3 (CVE-2025-48379), Jinja2 3.1.6 (CVE-2025-27516), Starlette 0.49.1 (-62727)."""
    text = (ROOT / "pyproject.toml").read_text()
    for bound in ("pillow>=12.2", "jinja2>=3.1.6", "starlette>=1.3"):
        assert f'"{bound}"' in text
