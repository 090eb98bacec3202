import numpy as np
import pytest
from PIL import ExifTags, Image

from samerun.errors import InputError
from samerun.images.decoding import decode, decode_mask, read_header

COLOURS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14


def saved(path, image, **settings):
    image.save(path, **settings)
    return path


def test_an_image_is_what_a_viewer_shows(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned to the right
    path = saved(tmp_path / "turned.png", Image.fromarray(COLOURS), exif=exif)
    assert read_header(path, "x") == (2, 3, "RGB")
    np.testing.assert_array_equal(np.asarray(decode(path, "x", "RGB")), np.rot90(COLOURS, -1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_mode_of_8_bits_is_read(tmp_path, mode):
    image = Image.fromarray(COLOURS).convert(mode)
    path = saved(tmp_path / f"a.{'tif' if mode == 'CMYK' else 'png'}", image)
    assert read_header(path, "x").is_grey == (mode in ("1", "L", "LA"))
    for wanted, shape in (("RGB", (2, 3, 3)), ("L", (2, 3))):
        found = decode(path.read_bytes(), "x", wanted)
        assert (found.mode, np.asarray(found).shape) == (wanted, shape)
    if mode == "RGBA":
        np.testing.assert_array_equal(np.asarray(decode(path, "x", "RGB")), COLOURS)


def test_a_palette_with_a_transparent_colour_is_read_without_a_warning(tmp_path, recwarn):
    path = saved(tmp_path / "a.png", Image.fromarray(COLOURS).convert("P"), transparency=b"\0\1\2")
    assert decode(path, "x", "RGB").mode == "RGB"
    assert [str(warning.message) for warning in recwarn] == []


def broken(path):
    whole = saved(
        path, Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8))
    ).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp", "a.tif"])
def test_a_truncated_image_is_named(tmp_path, name):
    with pytest.raises(
        InputError, match=r"^the name: (broken or truncated image \(.+\)|cannot be opened|is no image)"
    ):
        decode(broken(tmp_path / name), "the name", "RGB")


def test_more_than_8_bits_are_read_in_masks(tmp_path):
    values = np.array([[0, 1], [300, 65535]], dtype=np.uint16)
    path = saved(tmp_path / "deep.png", Image.fromarray(values))
    np.testing.assert_array_equal(np.asarray(decode_mask(path, "x")), values)


def test_a_mask_of_any_kind_gives_its_class_numbers(tmp_path):
    numbers = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    palette = Image.fromarray(numbers).convert("P")
    palette.putdata(numbers.reshape(-1).tolist())
    palette.putpalette([200, 100, 0, 5, 5, 5])
    for mask in (Image.fromarray(numbers), palette, Image.fromarray(numbers.astype(bool))):
        np.testing.assert_array_equal(
            np.asarray(decode_mask(saved(tmp_path / "mask.png", mask), "x")), numbers
        )
