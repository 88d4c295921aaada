"""`images.csv` beside a folder of images."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fedld.data import DataSpec, load
from fedld.errors import FedLDError

HEAD = "path,label,site,patient,split\n"


@pytest.fixture
def own(tmp_path):
    """Forty images in one folder without any order: 4 per patient, two sites."""
    folder = tmp_path / "own"
    (folder / "scans" / "deep").mkdir(parents=True)
    for i in range(40):
        Image.new("L", (20, 16), 5 * i).save(folder / "scans" / "deep" / f"{i:02}.png")
    return folder


def rows(**changes):
    """Rows of a good list, some of them changed by their number."""
    made = [
        f"scans/deep/{i:02}.png,{(i // 4) % 2 + 9},{'oslo' if i < 20 else 'rome'},p{i // 4},"
        f"{'test' if i // 4 in (3, 8) else 'train'}"
        for i in range(40)
    ]
    for place, text in changes.items():
        made[int(place[1:])] = text
    return HEAD + "\n".join(made) + "\n"


def open_list(folder, text=None, **options):
    if text is not None:
        (folder / "images.csv").write_text(text)
    spec = DataSpec(dataset=f"folder:{folder}", **{"image_size": 8, "min_size": 1, **options})
    return load(spec, folder.parent / "cache")


def test_a_list_names_classes_sites_patients_and_the_split(own):
    federation = open_list(own, rows())
    assert federation.classes == ("9", "10")  # numbers by size
    assert {client.name: client.size for client in federation.clients} == {"oslo": 16, "rome": 16}
    assert federation.test.tolist() == [*range(12, 16), *range(32, 36)]
    assert federation.client("oslo").test.tolist() == [12, 13, 14, 15]
    assert federation.labels.tolist() == [(i // 4) % 2 for i in range(40)]
    assert federation.patients.tolist() == [f"p{i // 4}" for i in range(40)]
    assert (federation.images[:, 4, 4, 0] == 5 * np.arange(40)).all()


def test_another_list_of_the_same_images_is_another_dataset(own):
    assert open_list(own, rows()).classes == ("9", "10")
    assert open_list(own, rows().replace(",9,", ",ill,").replace(",10,", ",well,")).classes == ("ill", "well")


def test_path_and_label_are_enough_and_other_columns_name_clients(own):
    text = "path,label,camera\n" + "".join(
        f"scans/deep/{i:02}.png,{'ab'[i % 2]},cam{i % 4 // 2}\n" for i in range(38)
    )
    federation = open_list(own, text, clients=3, alpha=100.0)
    assert federation.partition == "dirichlet"
    assert len(federation.test) == 8
    assert "2 images are not in images.csv" in " ".join(federation.notes)
    named = open_list(own, partition="column:camera")
    assert [client.name for client in named.clients] == ["cam0", "cam1"]


def test_a_drawn_test_set_keeps_patients_together(own):
    text = "\n".join(line.rpartition(",")[0] for line in rows().splitlines())
    federation = open_list(own, text)
    patients = federation.patients
    trained = {patients[row] for client in federation.clients for row in client.train}
    assert len(federation.test) == 8
    assert not trained & set(patients[federation.test])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (rows(r3="../secret.png,9,oslo,p0,train"), r"images\.csv, line 5: '\.\./secret\.png' is not below"),
        (rows(r3="/etc/passwd,9,oslo,p0,train"), r"line 5: '/etc/passwd' is not below the folder"),
        (
            rows(r3="scans/deep/00.png,9,oslo,p0,train"),
            r"line 5: 'scans/deep/00\.png' is listed before, in line 2",
        ),
        (rows(r3="scans/deep/03.png,,oslo,p0,train"), r"line 5: the label of 'scans/deep/03\.png' is empty"),
        (rows(r3=",9,oslo,p0,train"), r"line 5: the path is empty"),
        (rows(r3="scans/deep/03.png,9,,p0,train"), r"line 5: the site of 'scans/deep/03\.png' is empty"),
        (
            rows(r3="scans/deep/03.png,9,oslo,p0,valid"),
            r"line 5: the split is 'train', 'test' or empty.*'valid'",
        ),
        (rows(r3="scans/deep/03.png,9,oslo"), r"line 5: 3 cells under 5 columns"),
        (rows(r3="scans/deep/99.png,9,oslo,p0,train"), r"99\.png \(images\.csv line 5\) is missing"),
        ("file,label\na.png,1\n", r"images\.csv has no column 'path'"),
        (HEAD, "has no rows"),
    ],
)
def test_a_bad_row_is_named(own, text, sentence):
    with pytest.raises(FedLDError, match=sentence):
        open_list(own, text)


def test_a_missing_image_is_skipped_on_request(own):
    federation = open_list(own, rows(r3="scans/deep/99.png,9,oslo,p0,train"), skip_bad=True)
    assert federation.client("oslo").train.tolist() == [0, 1, 2, *range(4, 12), *range(16, 20)]
    assert "images.csv line 5" in federation.skipped[0]


def test_patients_come_from_the_column_or_from_names(own):
    with pytest.raises(FedLDError, match="has a column 'patient'"):
        open_list(own, rows(), patient=r"^(\d)")
    text = "\n".join(",".join(line.split(",")[:3]) for line in rows().splitlines())
    assert set(open_list(own, text, patient=r"^(\d)", test_fraction=0.5).patients) == {"0", "1", "2", "3"}


def test_the_command_reads_it(own, tmp_path):
    (own / "images.csv").write_text(rows())
    command = [
        sys.executable,
        "-m",
        "fedld",
        "data",
        "--dataset",
        f"folder:{own}",
        "--image-size",
        "8",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [client["name"] for client in json.loads(done.stdout)["clients"]] == ["oslo", "rome"]
    (own / "images.csv").write_text(rows(r3="scans/deep/03.png,,oslo,p0,train"))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "line 5: the label" in done.stderr
