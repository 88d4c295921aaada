from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedld.data import DataSpec, load
from fedld.errors import FedLDError

FIXTURE = Path("/work/shared/data/sslfl_layout_fixture")
SITES = ["bimcv", "cohen", "gz", "rsna-0"]


def lines(file, rows, end="\n"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("".join(row + end for row in rows).encode())


@pytest.fixture
def retina(tmp_path):
    """Twelve training and three test arrays of every kind of pixel, in the published layout."""
    home = tmp_path / "Retina"
    train = [f"{i}_right.npy" for i in range(12)]
    test = [f"{i}_right_test.npy" for i in range(3)]
    for folder, names in (("train", train), ("test", test)):
        (home / folder).mkdir(parents=True)
        for i, name in enumerate(names):
            pixels = np.full((20, 20, 3), 10 * i + 5, np.uint8)
            kinds = [pixels, pixels.astype(np.float32), pixels / 255, pixels[..., 0]]
            np.save(home / folder / name, kinds[i % 4])
    listed = [*reversed(train), "nowhere.npy", *test]  # labels.csv has its own order and files on no list
    lines(home / "labels.csv", [f"{name},{i % 2}.0" for i, name in enumerate(listed)])
    lines(home / "train.csv", train)
    lines(home / "test.csv", test)
    for split in (1, 2, 3):
        for client in range(1, 6):
            rows = train[client - 1 : 10 + split - 1 : 5]
            lines(home / f"5_clients/split_{split}/client_{client}.csv", rows)
    return home


@pytest.fixture
def covid(tmp_path):
    """Mixed file types and endings, CRLF labels, one csv a site."""
    home = tmp_path / "COVID-FL"
    names = ["a.png", "b.jpeg", "c.jpg", "d.JPG", "e.PNG", "f.png", "g-1.2.png", "h.png"]
    for i, name in enumerate(names):
        folder = home / ("train" if i < 6 else "test")
        folder.mkdir(parents=True, exist_ok=True)
        mode = ["L", "RGB", "RGBA", "I;16"][i % 4] if name.lower().endswith("png") else "L"
        size = (30 + i, 24)
        picture = (
            Image.fromarray(np.full(size, 40 * 257, np.uint16))
            if mode == "I;16"
            else Image.new("L", size, 40)
        )
        (picture if mode == "I;16" else picture.convert(mode)).save(folder / name)
    lines(home / "labels.csv", [f"{name},{i % 3}.0" for i, name in enumerate(names)], end="\r\n")
    lines(home / "train.csv", names[:6])
    lines(home / "test.csv", names[6:])
    for i, site in enumerate(SITES):
        lines(home / f"12_clients/split_real/{site}.csv", names[i:6:4])
    return home


def spec(home, **options):
    dataset = {"Retina": "retina", "COVID-FL": "covid-fl"}[home.name]
    return DataSpec(**{"dataset": dataset, "data_root": home.parent, "image_size": 16, **options})


def test_retina(retina, tmp_path):
    seen = []
    federation = load(
        spec(retina), tmp_path / "cache", progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(i, 15) for i in range(1, 16)]
    assert federation.classes == ("normal", "diseased")
    assert federation.partition == "column:sslfl_split1"
    assert federation.mean == (0.5007, 0.5010, 0.5019)
    assert [client.name for client in federation.clients] == [f"client_{i}" for i in range(1, 6)]
    assert [len(client.train) for client in federation.clients] == [2] * 5
    assert len(federation.test) == 3
    # Rows follow labels.csv (reversed here); every kind of pixel comes out as the same grey level.
    assert federation.images.shape == (15, 16, 16, 3)
    wanted = [10 * i + 5 for i in range(11, -1, -1)] + [5, 15, 25]
    assert (federation.images == np.array(wanted).reshape(15, 1, 1, 1)).all()
    assert federation.labels.tolist() == [i % 2 for i in range(12)] + [1, 0, 1]


def test_retina_splits_and_other_partitions(retina, tmp_path):
    sizes = [
        [len(client.train) for client in load(spec(retina, split=split), tmp_path / "cache").clients]
        for split in (1, 2, 3)
    ]
    assert sizes == [[2, 2, 2, 2, 2], [3, 2, 2, 2, 2], [3, 3, 2, 2, 2]]
    drawn = load(spec(retina, partition="iid", clients=3, min_size=1), tmp_path / "cache")
    assert [len(client.train) for client in drawn.clients] == [4, 4, 4]
    assert len(list((tmp_path / "cache").iterdir())) == 1  # decoded once for all of them
    with pytest.raises(FedLDError, match="sslfl_split4"):
        load(spec(retina, split=4), tmp_path / "cache")


def test_data_root_may_be_the_folder_itself(retina, tmp_path):
    one = load(spec(retina), tmp_path / "cache")
    assert load(spec(retina, data_root=retina), tmp_path / "cache").folder == one.folder


def test_covid(covid, tmp_path):
    federation = load(spec(covid), tmp_path / "cache")
    assert [client.name for client in federation.clients] == SITES
    assert [len(client.train) for client in federation.clients] == [2, 2, 1, 1]
    assert federation.classes == ("normal", "pneumonia", "COVID-19")
    assert federation.mean == (0.485, 0.456, 0.406)
    assert np.abs(federation.images.astype(int) - 40).max() <= 2  # JPEG rounds
    assert load(spec(covid, image_size=None), tmp_path / "cache").images.shape[1:] == (384, 384, 3)


@pytest.mark.parametrize("damage", ["missing", "truncated", "pickled", "non-finite"])
def test_a_bad_file_is_named_with_its_csv_and_line(retina, tmp_path, damage):
    file = retina / "train" / "4_right.npy"
    match damage:
        case "missing":
            file.unlink()
        case "truncated":
            file.write_bytes(file.read_bytes()[:200])
        case "pickled":
            np.save(file, np.array([{}], dtype=object), allow_pickle=True)
        case "non-finite":
            np.save(file, np.full((20, 20, 3), np.nan))
    with pytest.raises(FedLDError) as caught:
        load(spec(retina), tmp_path / "cache")
    assert f"{file} ({retina / 'train.csv'} line 5) is " in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []
    federation = load(spec(retina, skip_bad=True), tmp_path / "cache")
    assert [len(client.train) for client in federation.clients] == [2, 2, 2, 2, 1]
    assert len(federation.skipped) == 1
    assert "line 5" in federation.skipped[0]


def test_a_damaged_picture(covid, tmp_path):
    file = covid / "train" / "b.jpeg"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(FedLDError, match=r"b\.jpeg \(.*train\.csv line 2\) is damaged"):
        load(spec(covid), tmp_path / "cache")
    assert len(load(spec(covid, skip_bad=True), tmp_path / "cache").skipped) == 1


def test_a_site_without_one_good_file_is_no_client(covid, tmp_path):
    (covid / "train" / "d.JPG").unlink()
    names = [client.name for client in load(spec(covid, skip_bad=True), tmp_path / "cache").clients]
    assert names == ["bimcv", "cohen", "gz"]


def test_the_cache_notices_a_changed_source(retina, tmp_path):
    one = load(spec(retina), tmp_path / "cache")
    np.save(retina / "train" / "0_right.npy", np.full((20, 20, 3), 99, np.uint8))
    two = load(spec(retina), tmp_path / "cache")
    assert one.folder != two.folder
    assert two.images[11].max() == 99


def extra_line(file, line):
    def change(home):
        with (home / file).open("a") as stream:
            stream.write(line + "\n")

    return change


def rewrite(file, content):
    return lambda home: (home / file).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            extra_line("train.csv", "unknown.npy"),
            r"train\.csv line 13 names unknown\.npy, which has no label",
        ),
        (extra_line("train.csv", "0_right_test.npy"), r"test\.csv line 1 names .* already names"),
        (extra_line("train.csv", "../../secret.npy"), "not a plain file name"),
        (
            extra_line("5_clients/split_2/client_3.csv", "x.npy"),
            r"client_3\.csv line 3 names x.npy, which is not",
        ),
        (extra_line("5_clients/split_1/client_2.csv", "0_right.npy"), "another client already has"),
        (rewrite("5_clients/split_1/client_2.csv", b"\n"), "client 'client_2' would be empty"),
        (
            rewrite("labels.csv", b"0_right.npy,7.0\n"),
            r"labels\.csv line 1 has label 7\.0, which is not one of 0 to 1",
        ),
        (rewrite("labels.csv", b"0_right.npy,nan\n"), "label nan"),
        (rewrite("labels.csv", b"0_right.npy\n"), r"labels\.csv line 1 has no label"),
        (rewrite("train.csv", b"\xff\xfe"), "not a readable csv"),
        (lambda home: (home / "test.csv").unlink(), r"no file .*test\.csv"),
        (lambda home: (home / "labels.csv").unlink(), r"does not hold Retina/labels\.csv"),
    ],
)
def test_bad_lists_are_named(retina, tmp_path, change, message):
    change(retina)
    with pytest.raises(FedLDError, match=message):
        load(spec(retina), tmp_path / "cache")


def test_the_root_is_needed(retina, tmp_path):
    with pytest.raises(FedLDError, match="needs data_root"):
        load(replace(spec(retina), data_root=None), tmp_path / "cache")


@pytest.mark.skipif(not FIXTURE.exists(), reason="needs the small real example")
def test_the_real_example(tmp_path):
    retina = load(DataSpec(dataset="retina", data_root=FIXTURE, image_size=32, split=3), tmp_path)
    assert sum(len(client.train) for client in retina.clients) == 11
    assert len(retina.test) == 2
    bright = retina.images.mean(axis=(1, 2, 3))
    assert bright.min() > 20  # float 0..255 and uint8 files alike
    covid = load(DataSpec(dataset="covid-fl", data_root=FIXTURE, image_size=32), tmp_path)
    assert len(covid.clients) == 12
    assert (sum(len(client.train) for client in covid.clients), len(covid.test)) == (25, 6)
