"""What all tests share: a cache of their own, and an environment that is put back."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Nothing is read from the user's cache, nor written to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def denormals():
    """A run in this process flushes tiny numbers to zero for speed; other tests need them (IEEE 754)."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="session")
def write_dicom():
    """Writes a plain, uncompressed DICOM file, as a scanner's export does: path, pixels, facts."""
    return _write_dicom


def _write_dicom(path, pixels, **facts):
    pydicom = pytest.importorskip("pydicom")
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = pydicom.uid.generate_uid()
    data.Rows, data.Columns = pixels.shape[:2]
    data.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    data.PlanarConfiguration = 0
    data.PhotometricInterpretation = facts.pop("kind", "MONOCHROME2")
    data.BitsAllocated, data.BitsStored = 8 * pixels.itemsize, facts.pop("bits", 8 * pixels.itemsize)
    data.HighBit, data.PixelRepresentation = data.BitsStored - 1, int(pixels.dtype.kind == "i")
    for name, value in facts.items():
        setattr(data, name, value)
    data.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
