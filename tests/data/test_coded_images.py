"""Tests of JPEG and PNG images in folders and tar shards: reading, decoding and errors."""

import io
import json
import struct
import tarfile
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe_hpc.data import CorruptSampleError, DataFacts, open_data
from gpipe_hpc.data.images.folder import ImageFolderConfig
from gpipe_hpc.data.images.shards import ImageShardsConfig
from gpipe_hpc.errors import DataError

PLAIN = {
    "height": 8,
    "width": 10,
    "resize": 12,
    "num_classes": 3,
    "mean": [0.0] * 3,
    "std": [1.0] * 3,
    "augment": "none",
}


def folder(root: Path, **settings) -> ImageFolderConfig:
    return ImageFolderConfig(str(root), **PLAIN | settings)


def shards(*paths: Path | str, **settings) -> ImageShardsConfig:
    return ImageShardsConfig([str(path) for path in paths], **PLAIN | settings)


def greys(images: torch.Tensor) -> list[int]:
    """Return the gray value of each image; assert that each has only one."""
    assert (images.amax((1, 2, 3)) - images.amin((1, 2, 3))).max() < 2.5 / 255
    return (images.mean((1, 2, 3)) * 255).round().int().tolist()


def test_folder_gives_images_and_classes_by_name(files, tmp_path):
    source = open_data(folder(files.write_folder(tmp_path)))
    assert (source.train.num_samples, source.validation.num_samples) == (12, 12)
    images = source.train.read_inputs([0, 1, 5, 11])
    assert images.shape == (4, 3, 8, 10) and images.dtype == torch.float32
    assert greys(images) == [0, 5, 25, 55]
    assert source.train.read_targets([0, 1, 5, 11]).tolist() == [0, 0, 1, 2]


def test_classes_of_validation_are_those_of_training(files, tmp_path):
    """Validation may lack a class of training, but may not have an additional class."""
    root = files.write_folder(tmp_path)
    for path in (root / "val" / "n00").iterdir():
        path.unlink()
    (root / "val" / "n00").rmdir()
    assert open_data(folder(root)).validation.read_targets([0, 7]).tolist() == [1, 2]
    (root / "val" / "n77").mkdir()
    with pytest.raises(DataError, match=r"class 'n77'"):
        open_data(folder(root))


def test_other_files_are_passed_over(files, tmp_path):
    root = files.write_folder(tmp_path)
    (root / "train" / "n00" / "readme.txt").write_text("no image")
    (root / "train" / "n00" / "._000.JPEG").write_text("a note of another system")
    (root / "train" / ".cache").mkdir()
    assert open_data(folder(root)).train.num_samples == 12


def test_share_of_training_is_held_back_by_name(files, tmp_path):
    root = files.write_folder(tmp_path, num_classes=3, per_class=40)
    source = open_data(folder(root, validation=None, validation_percent=25))
    names = [set(part.store.names) for part in (source.train, source.validation)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 120
    assert 12 < len(names[1]) < 48
    (root / "train" / "n01" / "added.png").write_bytes(files.coded(1, form="PNG"))
    later = open_data(folder(root, validation=None, validation_percent=25)).validation
    assert set(later.store.names) - {"n01/added.png"} == names[1]


def test_folder_that_is_missing_is_named(files, tmp_path):
    with pytest.raises(DataError, match=r"data\.path.* is not a folder"):
        open_data(folder(tmp_path / "none"))
    with pytest.raises(DataError, match=r"data\.train.* is not a folder"):
        open_data(folder(tmp_path))
    root = files.write_folder(tmp_path)
    with pytest.raises(DataError, match=r"data\.validation.* is not a folder"):
        open_data(folder(root, validation="test"))


def test_more_classes_than_the_model_has_are_refused(files, tmp_path):
    with pytest.raises(DataError, match=r"3 folders .*data\.num_classes=2"):
        open_data(folder(files.write_folder(tmp_path), num_classes=2))


def in_16_bits(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "I;16"])
def test_every_mode_becomes_colour_or_grey(files, tmp_path, mode):
    """ImageNet has a CMYK image and a PNG named .JPEG. Regression: 16-bit images became white."""
    root = files.write_folder(tmp_path)
    stream = io.BytesIO()
    image = Image.new("RGB", (30, 30), (90, 90, 90))
    converted = {"P": lambda: image.quantize(2), "I;16": lambda: in_16_bits(image)}
    image = converted.get(mode, lambda: image.convert(mode))()
    image.save(stream, "JPEG" if mode == "CMYK" else "PNG")
    (root / "train" / "n00" / "000.JPEG").write_bytes(stream.getvalue())
    (value,) = greys(open_data(folder(root)).train.read_inputs([0]))
    assert abs(value - 90) <= 2
    grey = folder(root, channels=1, mean=[0.0], std=[1.0])
    (value,) = greys(open_data(grey).train.read_inputs([0]))
    assert abs(value - 90) <= 2


def test_validation_sees_the_centre(files, tmp_path):
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, 40:80] = 200
    root = files.write_folder(tmp_path)
    (root / "val" / "n00" / "000.JPEG").write_bytes(files.coded(pixels))
    image = open_data(folder(root)).validation.read_inputs([0])[0]
    assert image[:, :, 1:-1].min() > 190 / 255


def test_training_images_depend_on_seed_epoch_and_sample_alone(files, tmp_path):
    root = files.write_folder(tmp_path)
    gradient = np.linspace(0, 255, 60 * 40 * 3).reshape(40, 60, 3).astype(np.uint8)
    for path in (root / "train").rglob("*.*"):
        path.write_bytes(files.coded(gradient, form="PNG"))
    varied = {"augment": "resized_crop_flip"}
    data = open_data(folder(root, **varied), seed=1).train
    whole = data.read_inputs(range(12), epoch=2)
    assert torch.equal(data.read_inputs([7, 3], epoch=2), whole[[7, 3]])
    assert len({image.sum().item() for image in whole}) == 12
    assert not torch.equal(data.read_inputs([7, 3], epoch=3), whole[[7, 3]])
    other = open_data(folder(root, **varied), seed=2).train
    assert not torch.equal(other.read_inputs([7, 3], epoch=2), whole[[7, 3]])


def spoil(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("name", ["000.JPEG", "001.png"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"GIF89a" + bytes(50), None])
def test_corrupt_image_is_named(files, tmp_path, name, content):
    root = files.write_folder(tmp_path)
    path = root / "train" / "n01" / name
    spoil(path) if content is None else path.write_bytes(content)
    index = 4 + int(name[:3])
    with pytest.raises(CorruptSampleError) as caught:
        open_data(folder(root)).train.read_inputs([0, index, 2])
    assert caught.value.sample == str(path)
    assert f"data: {path} is corrupt: expected a JPEG or PNG image, got" in str(caught.value)
    assert "data.corrupt=skip" in str(caught.value)
    assert " at 0x" not in str(caught.value)  # an address would differ between ranks


def test_huge_image_is_not_decoded(files, tmp_path):
    root = files.write_folder(tmp_path)
    bomb = root / "train" / "n00" / "001.png"
    bomb.write_bytes(files.coded(0, size=(3000, 2000), form="PNG"))
    assert bomb.stat().st_size < 100_000
    with pytest.raises(CorruptSampleError, match=r"3000x2000 .*data\.max_pixels=100000"):
        open_data(folder(root, max_pixels=100_000)).train.read_inputs([1])
    with pytest.raises(CorruptSampleError, match="more than the 1048976 allowed"):
        bomb.write_bytes(bytes(2**20 + 1000))
        open_data(folder(root, max_pixels=100)).train.read_inputs([1])


def test_bomb_beyond_all_bounds_is_refused_in_silence(files, tmp_path):
    """Pillow's own limit is reported as a corrupt image, without a warning."""
    root = files.write_folder(tmp_path)
    path = root / "train" / "n00" / "001.png"
    content = bytearray(files.coded(0, form="PNG"))
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(bytes(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CorruptSampleError, match="decompression bomb"):
            open_data(folder(root)).train.read_inputs([1])


def test_file_that_is_gone_is_no_corrupt_one(files, tmp_path):
    """A missing file stops the run: it must not be replaced as a corrupt sample is."""
    root = files.write_folder(tmp_path)
    source = open_data(folder(root))
    (root / "train" / "n00" / "000.JPEG").unlink()
    with pytest.raises(DataError, match=r"000\.JPEG cannot be read") as caught:
        source.train.read_inputs([0])
    assert not isinstance(caught.value, CorruptSampleError)


def test_digest_tells_names_and_settings_apart(files, tmp_path):
    root = files.write_folder(tmp_path)
    before = open_data(folder(root)).train.digest()
    assert open_data(folder(root)).train.digest() == before
    assert open_data(folder(root, width=9)).train.digest() != before
    (root / "train" / "n00" / "000.JPEG").rename(root / "train" / "n00" / "0.JPEG")
    assert open_data(folder(root)).train.digest() != before


def test_shards_give_images_and_classes_by_offset(files, tmp_path):
    root = files.write_shards(tmp_path)
    source = open_data(shards(root, validation_percent=0))
    assert (source.train.num_samples, source.validation.num_samples) == (12, 0)
    assert greys(source.train.read_inputs([11, 0, 6])) == [110, 0, 60]
    assert source.train.read_targets([11, 0, 6, 1]).tolist() == [2, 0, 0, 1]
    assert source.corrupt == {} and source.baseline() is None
    assert sorted(path.name for path in root.iterdir()) == ["00.tar", "01.tar"]


def test_shards_of_validation_are_given_or_held_back(files, tmp_path):
    files.write_shards(tmp_path / "train", num_shards=4, per_shard=30)
    files.write_shards(tmp_path / "val", num_shards=1)
    given = shards(tmp_path / "train" / "*.tar", validation_paths=[str(tmp_path / "val")])
    source = open_data(given)
    assert (source.train.num_samples, source.validation.num_samples) == (120, 6)
    source = open_data(shards(tmp_path / "train", validation_percent=25))
    held = set(source.validation.store.names)
    assert 12 < len(held) < 48 and not held & set(source.train.store.names)
    assert source.validation.read_targets([0]) == int(next(iter(source.validation.store.names))) % 3


def test_names_up_to_the_first_dot_make_a_sample(files, tmp_path):
    image = files.coded(50)
    tar = files.write_tar(
        tmp_path / "a.tar",
        [
            ("readme", b"about this set"),
            ("x/a.b/1.cls", b"2"),
            ("x/a.b/1.seg.png", b"another layer"),
            ("x/a.b/1.JPG", image),
            ("x/a.c/1.jpeg", image),
            ("x/a.c/1.json", json.dumps({"class": 1}).encode()),
            ("x/notes.json", b"{}"),
        ],
    )
    source = open_data(shards(tar, label_key="class", validation_percent=0))
    assert list(source.train.store.names) == ["x/a.b/1", "x/a.c/1"]
    assert source.train.read_targets([0, 1]).tolist() == [2, 1]
    assert greys(source.train.read_inputs([0, 1])) == [50, 50]


def test_names_that_lead_elsewhere_lead_nowhere(files, tmp_path):
    (tmp_path / "data").mkdir()
    tar_path = tmp_path / "data" / "a.tar"
    image = files.coded(50)
    with tarfile.open(tar_path, "w") as tar:
        for name, content in [("../../1.jpg", image), ("../../1.cls", b"1")]:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("2.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    source = open_data(shards(tar_path, validation_percent=0))
    assert greys(source.train.read_inputs([0])) == [50]
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "a.tar"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("7.jpg", b"j")], r"a\.tar: 7 is corrupt.*got no class \(\.jpg\)"),
        ([("7.cls", b"1")], r"a\.tar: 7 is corrupt.*got 0 images instead of one \(\.cls\)"),
        ([("7.jpg", b"j"), ("7.png", b"p"), ("7.cls", b"1")], "got 2 images"),
        ([("7.jpg", b"j"), ("7.cls", b"cat")], "got no class in 7.cls: 'cat'"),
        ([("7.jpg", b"j"), ("7.cls", b"1.5")], "got no class in 7.cls"),
        ([("7.jpg", b"j"), ("7.json", b'{"label": true}')], "got no class in 7.json"),
        ([("7.jpg", b"j"), ("7.json", b'{"id": 1}')], "got no class in 7.json"),
    ],
)
def test_sample_without_image_or_class_is_named_or_left_out(files, tmp_path, members, words):
    good = [("1.jpg", files.coded(50)), ("1.cls", b"1")]
    tar = files.write_tar(tmp_path / "a.tar", [*members, *good])
    with pytest.raises(DataError, match=words):
        open_data(shards(tar, validation_percent=0))
    source = open_data(shards(tar, validation_percent=0, corrupt="skip"))
    assert list(source.train.store.names) == ["1"] and list(source.corrupt) == [f"{tar}: 7"]


def test_class_out_of_range_stops_even_where_corrupt_ones_do_not(files, tmp_path):
    """Classes out of range mean that data.num_classes is wrong, not that samples are corrupt."""
    tar = files.write_tar(tmp_path / "a.tar", [("1.jpg", files.coded(50)), ("1.cls", b"3")])
    with pytest.raises(DataError, match=r"a\.tar .*0 to 2, got 3"):
        open_data(shards(tar, corrupt="skip"))


def cut_in_image(content: bytes) -> bytes:
    return content[: 512 * 9 + 100]


def cut_between_members(content: bytes) -> bytes:
    return content[: 512 * 10]


def broken_header(content: bytes) -> bytes:
    place = content.index(b"000002.jpg")
    return content[:place] + b"\xff" * 512 + content[place + 512 :]


@pytest.mark.parametrize("change", [cut_in_image, cut_between_members, broken_header])
def test_damaged_shard_is_named_or_used_up_to_the_damage(files, tmp_path, change):
    """tarfile treats each of these damages as the end of the archive."""
    (path,) = files.write_shards(tmp_path, num_shards=1).iterdir()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"{path} is corrupt"):
        open_data(shards(tmp_path, validation_percent=0))
    source = open_data(shards(tmp_path, validation_percent=0, corrupt="skip"))
    assert 1 <= source.train.num_samples < 6
    assert list(source.corrupt) == [str(path)]
    assert DataFacts.of(source).corrupt == source.corrupt


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 300, bytes(100)])
def test_what_is_no_tar_file_is_named(tmp_path, content):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar is corrupt"):
        open_data(shards(tmp_path))


def test_shard_that_changed_is_named(files, tmp_path):
    (path,) = files.write_shards(tmp_path, num_shards=1).iterdir()
    source = open_data(shards(tmp_path, validation_percent=0))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=f"{path} has changed"):
        source.train.read_inputs([5])


def test_no_more_than_max_corrupt_are_left_out(files, tmp_path):
    members = [(f"{number}.jpg", b"x") for number in range(3)]
    tar = files.write_tar(tmp_path / "a.tar", [*members, ("9.jpg", b"x"), ("9.cls", b"1")])
    assert open_data(shards(tar, corrupt="skip", max_corrupt=3)).corrupt.keys() == {
        f"{tar}: {number}" for number in range(3)
    }
    with pytest.raises(DataError, match=r"data\.max_corrupt=2"):
        open_data(shards(tar, corrupt="skip", max_corrupt=2))
