"""Files that are not what they seem: good ones with bytes changed, cut, repeated, or replaced."""

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars
import torch
from PIL import Image
from safetensors.torch import save

from fedld.aggregation.sources import file_source
from fedld.config.experiment import make_experiment, read_toml
from fedld.data import DataSpec, load
from fedld.models import build, load_weights
from fedld.models.files import model_bytes, read_model
from fedld.privacy.context import read_peers
from fedld.privacy.policy import read_policy
from fedld.records.chain import sealed
from fedld.records.reader import Run, read


def _npz(**arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _images(count: int = 30) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), np.uint8)


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _archive(rng: random.Random) -> bytes:
    """An npz file, sometimes with a member that nobody expects or that unfolds to gigabytes."""
    sites = np.array(["a", "b"])[np.arange(30) % 2]
    arrays = {"images": _images(), "labels": np.arange(30) % 3, "site": sites}
    odd = rng.randrange(8)
    if odd == 0:
        arrays["labels"] = np.array([None] * 30)
    elif odd == 1:
        arrays["classes"] = np.arange(100_000).astype(str)
    elif odd == 2:
        arrays["other"] = np.zeros(200_000_000, np.uint8)
    elif odd == 3:
        arrays["images"] = np.zeros((100_000, 40, 40), np.uint8)
    content = _npz(**arrays)
    if odd == 4:
        buffer = io.BytesIO(content)
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr("readme.txt", "not an array")
            archive.writestr("folder/", "")
            archive.writestr("x.npy", rng.randbytes(40))
        content = buffer.getvalue()
    if odd == 5:
        buffer = io.BytesIO()
        huge = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 99999, 99999, 3), }"
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(huge)) + huge)
            archive.writestr("labels.npy", _npy(np.arange(3)))
        content = buffer.getvalue()
    return content


def _pth(rng: random.Random) -> bytes:
    model = build("cnn", classes=3, channels=1, image_size=8, seed=0)
    state = dict(model.state_dict())
    name = rng.choice(list(state))
    odd = rng.randrange(6)
    if odd == 0:
        state[name] = state[name].to_sparse()
    elif odd == 1:
        state[name] = state[name].to("meta")
    elif odd == 2:
        state[name] = torch.zeros(1).expand(10**9)
    elif odd == 3:
        state[name] = state[name].to(torch.complex64)
    elif odd == 4:
        state = {3: state[name], "x": "text", "deep": {"a": state[name]}}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _mutate(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, repeated, zeroed or swapped; a tenth of the files stay as they are."""
    data = bytearray(content)
    match rng.randrange(10):
        case 0:
            pass
        case 1 | 2 | 3:
            for _ in range(rng.choice([1, 1, 4, 40])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 4:
            del data[rng.randrange(len(data)) :]
        case 5:
            at = rng.randrange(len(data))
            data[at : at + rng.choice([1, 8, 64])] = b"\x00" * 8
        case 6:
            at = rng.randrange(len(data))
            data[at:at] = rng.randbytes(rng.choice([1, 8, 200]))
        case 7:
            at = rng.randrange(min(120, len(data)))  # headers
            data[at] = rng.choice(b"0123456789()[]{}<>|\\'\",\xff\x00")
        case 8:
            data = data + data[: rng.randrange(len(data))]
        case 9:
            data = bytearray(
                rng.choice([b"", b"\x00" * 100, b"PK\x03\x04", b"\x93NUMPY", rng.randbytes(300)])
            )
    return bytes(data)


def _place(path: Path, content: bytes, rng: random.Random) -> None:
    """Write the file, or something that only has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match rng.randrange(40):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            path.mkdir()
        case 3:
            path.symlink_to(path)
        case 4:
            path.symlink_to("nowhere")
        case _:
            path.write_bytes(_mutate(content, rng))


def _png(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    mode, kind = rng.choice(
        [("L", "png"), ("RGB", "jpeg"), ("I;16", "png"), ("L", "tiff"), ("RGB", "bmp"), ("P", "gif")]
    )
    Image.new(mode, (12, 10)).save(buffer, kind)
    return buffer.getvalue()


POLICY = """methods = ["fedavg", "ridge"]
min_sites = 3
updates = "summed"
models_to_sites = false
smallest_count = 50
epsilon = 4.0
"""
PEERS = "[peers]\n" + "".join(f'site_{k} = "{k:064x}"\n' for k in range(4))
ROWS = "age,kind,when,event,hospital,use\n" + "".join(
    f"{40 + k},{'abc'[k % 3]},{1 + k % 7},{k % 2},{'xy'[k % 2]},{'test' if k % 5 == 0 else 'train'}\n"
    for k in range(40)
)
IMAGE_LIST = "path,label,site,patient,split\n" + "".join(
    f"{k}.png,{'ab'[k % 2]},{'xy'[k // 2 % 2]},p{k // 2},{'test' if k > 5 else 'train'}\n" for k in range(8)
)


def _respelt(text: str, rng: random.Random) -> bytes:
    """Cells of a table replaced, rows repeated or left out, or bytes changed later by `_place`."""
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(rng.choice([0, 1, 1, 3])):
        row = rng.choice(rows)
        row[rng.randrange(len(row))] = rng.choice(
            ["", "nan", "inf", "-1", "1e400", "9" * 400, "\0", "../x", '"', "é"]
        )
    if rng.random() < 0.3:
        rows.append(rng.choice(rows))
    if rng.random() < 0.2:
        del rows[rng.randrange(1, len(rows)) :]
    return "\n".join(",".join(row) for row in rows).encode()


def _parquet(rng: random.Random) -> bytes:
    frame = polars.read_csv(ROWS.encode())
    match rng.randrange(5):
        case 0:
            frame = frame.with_columns(polars.lit([1, 2]).alias("kind"))
        case 1:
            frame = frame.with_columns(polars.lit(None).alias("when"))
        case 2:
            frame = frame.with_columns(polars.lit(b"\x00").alias("age"))
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def _table_case(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A table of rows as CSV or parquet, for one of three tasks."""
    suffix = rng.choice(["csv", "csv", "parquet"])
    file = folder / f"rows.{suffix}"
    _place(file, _respelt(ROWS, rng) if suffix == "csv" else _parquet(rng), rng)
    task, target = rng.choice([("classification", "kind"), ("regression", "age"), ("survival", "when,event")])
    spec = DataSpec(
        dataset=f"csv:{file}",
        task=task,
        target_column=target,
        site_column="hospital",
        split_column="use",
        min_size=1,
    )
    return lambda: load(spec)


def _list_case(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A folder of images with a list beside them."""
    for k in range(8):
        Image.new("L", (9, 9), 30 * k).save(folder / f"{k}.png")
    _place(folder / "images.csv", _respelt(IMAGE_LIST, rng), rng)
    return lambda: load(DataSpec(dataset=f"folder:{folder}", clients=2, min_size=1, image_size=8))


def make_case(rng: random.Random, folder: Path) -> Callable[[], object]:
    """One bad file of one of thirteen kinds, and whoever reads it."""
    kinds = ["npz", "npz", "folder", "lists", "pth", "safetensors", "model", "npy", "toml", "run"]
    match rng.choice([*kinds, "policy", "peers", "table", "table", "list"]):
        case "policy":
            _place(folder / "policy.toml", POLICY.encode(), rng)
            return lambda: read_policy(folder / "policy.toml")
        case "peers":
            _place(folder / "peers.toml", PEERS.encode(), rng)
            return lambda: read_peers(folder / "peers.toml")
        case "table":
            return _table_case(rng, folder)
        case "list":
            return _list_case(rng, folder)
        case "npz":
            _place(folder / "own.npz", _archive(rng), rng)
            return lambda: load(DataSpec(dataset=f"npz:{folder}/own.npz", clients=2, min_size=1))
        case "folder":
            for k in range(6):
                good = folder / "images" / "ab"[k % 2] / f"{k}.png"
                good.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (9, 9), 40 * k).save(good)
            suffix = rng.choice([".png", ".jpg", ".tif", ".bmp", ".gif", ".dcm", ".nii"])
            _place(folder / "images" / "a" / f"bad{suffix}", _png(rng), rng)
            skip = rng.random() < 0.5
            return lambda: load(
                DataSpec(
                    dataset=f"folder:{folder}/images", clients=2, min_size=1, image_size=8, skip_bad=skip
                )
            )
        case "lists":
            home = folder / "Retina"
            names = [f"{k}.npy" for k in range(8)]
            texts = {
                "labels.csv": "".join(f"{name},{k % 2}\n" for k, name in enumerate(names)),
                "train.csv": "".join(f"{name}\n" for name in names[:6]),
                "test.csv": "".join(f"{name}\n" for name in names[6:]),
            }
            for k, name in enumerate(names):
                place = home / ("train" if k < 6 else "test")
                place.mkdir(parents=True, exist_ok=True)
                np.save(place / name, np.full((9, 9, 3), k, np.uint8))
            bad = rng.choice([*texts, "train/0.npy"])
            for name, text in texts.items():
                if name != bad:
                    (home / name).write_text(text)
            if bad in texts:
                lines = texts[bad].splitlines(keepends=True)
                _place(home / bad, "".join(rng.choices(lines, k=len(lines) + 1)).encode(), rng)
            else:
                (home / bad).unlink()
                _place(home / bad, _npy(np.zeros((9, 9, 3), np.uint8)), rng)
            spec = DataSpec(
                dataset="retina", data_root=folder, partition="iid", clients=2, min_size=1, image_size=8
            )
            return lambda: load(spec)
        case "pth":
            _place(folder / "w.pth", _pth(rng), rng)
            return lambda: _weights(folder / "w.pth")
        case "safetensors":
            _place(folder / "w.safetensors", save({"a.weight": torch.ones(3, 4), "b": torch.ones(2)}), rng)
            read_both = rng.random() < 0.5
            return lambda: (file_source if read_both else _weights)(
                [folder / "w.safetensors"] if read_both else folder / "w.safetensors"
            )
        case "model":
            file = folder / "model.safetensors"
            _place(file, model_bytes({"fc.weight": torch.ones(3, 4)}, {"round": "1", "fedld": "{}"}), rng)
            return lambda: _sound_model(file)
        case "npy":
            _place(folder / "u.npy", _npy(np.ones((7,), np.float32)), rng)
            return lambda: file_source([folder / "u.npy"])
        case "toml":
            text = make_experiment({"method": "fedprox"}).to_toml().encode()
            _place(folder / "config.toml", text, rng)
            return lambda: make_experiment(read_toml(folder / "config.toml"))
        case _:
            line = {"round": 1, "accuracy": 0.5, "loss": 1.0, "clients": 2, "seconds": 0.1}
            texts = {
                "config.toml": make_experiment({}).to_toml(),
                "rounds.jsonl": sealed(json.dumps(line).encode(), "")[0].decode() + "\n",
                "summary.json": json.dumps({"final_accuracy": 0.5}),
                "study.json": json.dumps({"name": "x", "runs": [{"path": "runs/a", "seed": 0}]}),
            }
            bad = rng.choice(list(texts))
            for name, text in texts.items():
                if name == bad:
                    _place(folder / name, text.encode(), rng)
                elif name != "study.json":
                    (folder / name).write_text(text)
            return lambda: [_sound_run(run, line) for run in read([folder]).runs]


def _sound_run(run: Run, written: dict[str, object]) -> object:
    """A line that is read has the numbers that were written, unless its checksum's own name was changed."""
    for line in run.rounds.lines:
        assert line == written or line.keys() != written.keys()
    return run.summary, run.failure, run.series("accuracy")


def _sound_model(path: Path) -> object:
    """A model file with a checksum is as it was written, or it is refused."""
    found = read_model(path)
    if found.checked:
        assert (found.tensors["fc.weight"] == 1).all()
        assert {**found.metadata, "sha256": ""} == {"round": "1", "fedld": "{}", "sha256": ""}
    return found


def _weights(path: Path) -> object:
    return load_weights(build("cnn", classes=3, channels=1, image_size=8, seed=0), path)
