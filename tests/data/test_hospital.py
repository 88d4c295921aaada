"""Sites' data as they are: scanners' files, deep grey values, one class, patients in file names."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedld.data import DataSpec, load
from fedld.data.datasets import open_table
from fedld.data.folder import name_patients
from fedld.data.pixels import read_dicom, read_image, read_nifti
from fedld.errors import FedLDError

RAMP = np.linspace(0, 4095, 100).astype(np.uint16).reshape(10, 10)


def test_dicom_grey_values_are_spread_by_the_stored_bits(write_dicom, tmp_path):
    write_dicom(tmp_path / "a.dcm", RAMP, bits=12)
    assert np.array_equal(read_dicom(tmp_path / "a.dcm"), np.floor(RAMP / 4095 * 255 + 0.5).astype(np.uint8))


def test_dicom_white_as_zero_is_turned_round(write_dicom, tmp_path):
    write_dicom(tmp_path / "a.dcm", RAMP, bits=12)
    write_dicom(tmp_path / "b.dcm", 4095 - RAMP, bits=12, kind="MONOCHROME1")
    difference = read_dicom(tmp_path / "a.dcm").astype(int) - read_dicom(tmp_path / "b.dcm")
    assert abs(difference).max() <= 1  # rounding


def test_dicom_values_are_rescaled_and_windowed(write_dicom, tmp_path):
    """A CT in Hounsfield units, lung window: linear between -1350 and 150 as the standard's formula says."""
    facts = {"RescaleSlope": 1, "RescaleIntercept": -1024, "WindowCenter": -600, "WindowWidth": 1500}
    write_dicom(tmp_path / "a.dcm", RAMP, bits=12, **facts)
    units = RAMP.astype(float) - 1024
    share = ((units - (-600 - 0.5)) / (1500 - 1) + 0.5).clip(0, 1)
    found = read_dicom(tmp_path / "a.dcm").astype(int)
    assert abs(found - share * 255).max() <= 0.51


def test_dicom_colour_and_what_is_refused(write_dicom, tmp_path):
    colour = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)
    write_dicom(tmp_path / "a.dcm", colour, kind="RGB")
    assert np.array_equal(read_dicom(tmp_path / "a.dcm"), colour)
    write_dicom(tmp_path / "b.dcm", RAMP, NumberOfFrames=3)
    with pytest.raises(FedLDError, match="3 frames"):
        read_dicom(tmp_path / "b.dcm")


def nifti(values, *, order="<", slope=0.0, display=(0.0, 0.0), dims=None):
    head = bytearray(352)
    struct.pack_into(f"{order}i", head, 0, 348)
    dims = dims or (2, values.shape[1], values.shape[0], 1, 1, 1, 1, 1)
    struct.pack_into(f"{order}8h", head, 40, *dims)
    struct.pack_into(f"{order}2h", head, 70, 512, 16)
    struct.pack_into(f"{order}3f", head, 108, 352.0, slope, -1024.0)
    struct.pack_into(f"{order}2f", head, 124, display[1], display[0])
    head[344:348] = b"n+1\0"
    return bytes(head) + values.astype(np.dtype("u2").newbyteorder(order)).tobytes()


@pytest.mark.parametrize("order", ["<", ">"])
def test_nifti_slices_are_read_in_either_order_and_packed(tmp_path, order):
    (tmp_path / "a.nii").write_bytes(nifti(RAMP, order=order))
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(nifti(RAMP, order=order)))
    expected = np.floor(RAMP / 4095 * 255 + 0.5).astype(np.uint8)[::-1]
    assert np.array_equal(read_nifti(tmp_path / "a.nii"), expected)
    assert np.array_equal(read_nifti(tmp_path / "b.nii.gz"), expected)


def test_nifti_display_range_and_volumes(tmp_path):
    (tmp_path / "a.nii").write_bytes(nifti(RAMP, slope=1.0, display=(-1024.0, 1024.0)))
    assert (read_nifti(tmp_path / "a.nii") == 255).mean() == pytest.approx((RAMP > 2044).mean(), abs=0.02)
    (tmp_path / "b.nii").write_bytes(nifti(RAMP, dims=(3, 10, 10, 40, 1, 1, 1, 1)))
    with pytest.raises(FedLDError, match="a volume of shape"):
        read_nifti(tmp_path / "b.nii")


@pytest.mark.parametrize("kind", ["png", "tif"])
def test_twelve_bits_in_sixteen_are_asked_about_and_then_spread(tmp_path, kind):
    Image.fromarray(RAMP).save(tmp_path / f"a.{kind}")
    with pytest.raises(FedLDError, match="end at 4095, as those of 12-bit scanners do"):
        read_image(tmp_path / f"a.{kind}", 10)
    found = read_image(tmp_path / f"a.{kind}", 10, bits=12)[..., 0]
    assert np.array_equal(found, np.floor(RAMP / 4095 * 255 + 0.5).astype(np.uint8))


def test_a_tiff_that_says_its_largest_value_is_believed(tmp_path):
    Image.fromarray(RAMP // 2).save(tmp_path / "a.tif", tiffinfo={281: 4095})
    assert read_image(tmp_path / "a.tif", 10).max() == 127


def _picture(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 9), value, np.uint8)).save(path)


def test_a_folder_of_one_class_is_a_sites_data_but_no_federation(tmp_path):
    for k in range(5):
        _picture(tmp_path / "own/sick" / f"{k}.png", k)
    spec = DataSpec(dataset=f"folder:{tmp_path / 'own'}")
    assert open_table(spec, tmp_path / "cache").classes == ("sick",)
    with pytest.raises(FedLDError, match="holds only one class, 'sick'"):
        load(spec, tmp_path / "cache")


@pytest.fixture
def ward(tmp_path):
    """Twenty patients, three pictures each, in two classes; one picture twice, a note, a link to nowhere."""
    for k in range(60):
        _picture(tmp_path / "own" / ("sick" if k // 3 % 2 else "well") / f"p{k // 3:02d}_{k}.png", k)
    (tmp_path / "own/sick/notes.txt").write_text("the scanner was repaired in May")
    (tmp_path / "own/sick/gone.png").symlink_to("nowhere.png")
    return lambda **options: load(
        DataSpec(
            dataset=f"folder:{tmp_path / 'own'}",
            clients=2,
            partition="iid",
            image_size=8,
            min_size=1,
            **options,
        ),
        tmp_path / "cache",
    )


def test_what_lies_beside_the_images_is_counted(ward):
    notes = " ".join(ward().notes)
    assert "1 links lead nowhere, the first is" in notes
    assert "1 files are no images and are not read" in notes


def test_patients_are_found_in_file_names(ward):
    federation = ward(patient=r"^(p\d+)_")
    patients = federation.patients
    train = np.concatenate([client.train for client in federation.clients])
    assert len(set(patients)) == 20
    assert not set(patients[train]) & set(patients[federation.test])
    with pytest.raises(FedLDError, match=r"finds no patient in the name of .*_\d+\.png"):
        ward(patient=r"^(x)_")
    with pytest.raises(FedLDError, match="of patients is none"):
        ward(patient="(")


def test_pictures_in_two_places_are_reported(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), np.uint8)
    images[50], images[1] = images[0], images[2]
    site, split = np.array(["oslo", "rome"])[np.arange(60) % 2], np.where(np.arange(60) < 50, "train", "test")
    patient = (np.arange(60) % 55).astype(str)
    own = {"labels": np.arange(60) % 3, "site": site, "split": split, "patient": patient}
    np.savez(tmp_path / "own.npz", images=images, **own)
    notes = load(DataSpec(dataset=f"npz:{tmp_path / 'own.npz'}"), tmp_path / "cache").notes
    assert notes == (
        "1 of 10 test images are also training images, to the last pixel",
        "1 different images are held by more than one client",
        "5 patients have images in training and test, the first is '0'",
    )


def test_a_pattern_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr("fedld.data.folder.SECONDS", 1)
    with pytest.raises(FedLDError, match=r"is not done with 1 names after 1 s"):
        name_patients([Path(f"{'a' * 60}.png")], r"^((a+)+)+\.jpeg$")
