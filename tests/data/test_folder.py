import numpy as np
import pytest
from PIL import Image

from fedld.data import DataSpec, load
from fedld.errors import FedLDError


def paint(file, level, size=(30, 20)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, level, level)).save(file)


@pytest.fixture
def open_folder(tmp_path):
    def opener(**options):
        spec = DataSpec(dataset=f"folder:{tmp_path / 'own'}", **{"image_size": 8, "min_size": 1, **options})
        return load(spec, tmp_path / "cache")

    return opener


def test_class_folders(tmp_path, open_folder):
    for i in range(20):
        paint(tmp_path / "own" / ("cat" if i % 2 else "dog") / f"{i:02}.{'png' if i % 3 else 'JPG'}", 10 * i)
    (tmp_path / "own" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "own" / ".hidden").mkdir()
    federation = open_folder(clients=2, alpha=100.0)
    assert federation.classes == ("cat", "dog")
    assert federation.partition == "dirichlet"
    assert federation.images.shape == (20, 8, 8, 3)
    levels = federation.images[:, 4, 4, 0].astype(int)
    assert np.abs(levels - 10 * np.array([*range(1, 20, 2), *range(0, 20, 2)])).max() <= 2
    assert federation.labels[federation.test].tolist() == [0, 0, 1, 1]


def test_site_folders_are_clients(tmp_path, open_folder):
    for site in ("oslo", "rome"):
        for i in range(10):
            paint(tmp_path / "own" / site / f"class{i % 2}" / f"{i}.png", 7 * i)
    federation = open_folder()
    assert [client.name for client in federation.clients] == ["oslo", "rome"]
    assert sum(len(client.train) for client in federation.clients) == 16
    assert sum(len(client.test) for client in federation.clients) == 4
    assert open_folder(partition="iid", clients=4).partition == "iid"


def test_train_and_test_folders(tmp_path, open_folder):
    for split, count in (("train", 8), ("test", 4)):
        for i in range(count):
            paint(tmp_path / "own" / split / "rome" / f"class{i % 2}" / f"{i}.png", 7 * i)
    federation = open_folder()
    assert len(federation.test) == 4
    assert federation.partition == "dirichlet"  # one site is no federation
    assert [client.name for client in open_folder(partition="site").clients] == ["rome"]


def test_a_damaged_image_is_named_or_skipped(tmp_path, open_folder):
    for i in range(20):
        paint(tmp_path / "own" / f"class{i % 2}" / f"{i}.png", 100)
    bad = tmp_path / "own" / "class0" / "4.png"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(FedLDError, match=r"class0/4\.png is damaged"):
        open_folder(clients=2)
    federation = open_folder(clients=2, skip_bad=True)
    used = np.concatenate([*(client.train for client in federation.clients), federation.test])
    assert len(used) == 19
    assert (federation.images[used] == 100).all()
    assert federation.mean == pytest.approx([100 / 255] * 3)


def test_nothing_usable(tmp_path, open_folder):
    own = tmp_path / "own"
    with pytest.raises(FedLDError, match="no folder"):
        open_folder()
    own.mkdir()
    with pytest.raises(FedLDError, match="holds no images in class folders"):
        open_folder()
    paint(own / "cat" / "1.png", 1)
    with pytest.raises(FedLDError, match="only one class, 'cat'"):
        open_folder()
    paint(own / "rome" / "dog" / "1.png", 1)
    with pytest.raises(FedLDError, match="mixes class folders and site/class folders"):
        open_folder()
