import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import ExifTags, Image
from transformers import BertConfig, ConvNextImageProcessorPil, ViTConfig, ViTImageProcessorPil

from samerun.errors import InputError
from samerun.images import transforms
from samerun.images.transforms import (
    Augmentation,
    crop_box,
    decode,
    decode_mask,
    processing_of,
    read_header,
    row_generator,
)

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 80, 3), np.uint8))
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


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp", "a.tif"])
def test_a_truncated_image_is_named(tmp_path, name):
    whole = saved(tmp_path / name, IMAGE).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    reason = r"(broken or truncated image \(.+\)|cannot be opened|is no image)"
    with pytest.raises(InputError, match=f"^the name: {reason}"):
        decode(tmp_path / name, "the name", "RGB")


@pytest.mark.parametrize(
    ("colours", "channels", "mode"), [(2, 3, "RGB;16B"), (4, 2, "LA;16B"), (6, 4, "RGBA;16B")]
)
def test_colours_of_16_bits_are_refused_although_pillow_cuts_them_to_8(colours, channels, mode):
    def chunk(kind, content):
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, colours, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + np.full(2 * channels, 1000, dtype=">u2").tobytes()))
    image = b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")
    assert read_header(image, "a").mode == mode
    with pytest.raises(InputError, match=f"a: has more than 8 bits a pixel .Pillow's mode {mode}"):
        decode(image, "a", "RGB")


def test_a_mask_of_any_kind_gives_its_class_numbers(tmp_path):
    numbers = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    palette = Image.fromarray(numbers)
    palette.putpalette([200, 100, 0, 5, 5, 5])
    deep = np.array([[0, 1], [300, 65535]], dtype=np.uint16)
    for mask in (palette, *map(Image.fromarray, (numbers, numbers.astype(bool), deep))):
        found = np.asarray(decode_mask(saved(tmp_path / "mask.png", mask), "x"))
        np.testing.assert_array_equal(found, deep if found.max() > 1 else numbers)
    with pytest.raises(InputError, match="x: a JPEG file, which changes class numbers"):
        decode_mask(saved(tmp_path / "mask.jpg", Image.fromarray(numbers)), "x")


def varied(augmentation, row, image, mask=None):
    return [part and np.asarray(part) for part in augmentation(image, mask, row_generator(0, 0, row))]


def test_row_0_does_not_share_the_random_numbers_of_the_order_of_rows():
    assert row_generator(1, 2, 0).random() != np.random.default_rng([1, 2]).random()


SCALES = [{"scales": scales, "native": native, "flip": True}
          for scales in [(1.0, 1.0), (0.3, 0.4), (1.5, 3.0)] for native in (True, False)]  # fmt: skip


@pytest.mark.parametrize("changes", [{"crop": 0.3, "flip": True, "rotation": 20}, *SCALES])
def test_a_mask_goes_where_its_image_goes(changes):
    # The image shows its own mask, so they agree after any variation, but for the edges that the image blurs.
    numbers = np.kron(np.random.default_rng(0).integers(0, 2, (4, 4)), np.ones((32, 32))).astype(np.uint8)
    image, mask = Image.fromarray(numbers * 255), Image.fromarray(numbers)
    moves, seen = Augmentation((64, 64), fill=255, colour=7, **changes), set()
    for row in range(20):
        shown, there = varied(moves, row, image, mask)
        assert np.array_equal(shown, varied(moves, row, image, mask)[0])
        assert shown.shape == there.shape == (64, 64)
        outside = there == 255
        assert set(np.unique(there[~outside])) <= {0, 1}
        assert ((shown > 127) == (there == 1))[~outside].mean() > 0.95
        if "scales" in changes:
            assert (shown[outside] == 7).all()
            assert outside.any() == (changes["scales"][1] < 0.5)
        seen.add(shown.tobytes())
    is_whole = changes.get("scales") == (1.0, 1.0) and not changes["native"]
    if is_whole:
        assert len(seen) == 2  # flipped or not
    else:
        assert len(seen) > 10  # enlarged parts may be of one value


@pytest.mark.parametrize(
    ("mode", "colour", "corner"), [("L", 7, 7), ("RGB", (7, 8, 9), [7, 8, 9]), ("RGB", 0, [0, 0, 0])]
)
def test_corners_of_rotated_images_have_the_colour_outside(mode, colour, corner):
    turned = Augmentation((64, 64), rotation=40, colour=colour)
    pixels, _ = varied(turned, 1, Image.new(mode, (64, 64), "white"))
    assert pixels[0, 0].tolist() == corner


def test_a_crop_lies_in_the_image_and_keeps_the_share_of_its_area():
    for row in range(200):
        left, top, right, bottom = crop_box((200, 100), 0.5, row_generator(0, 0, row))
        assert 0 <= left < right <= 200
        assert 0 <= top < bottom <= 100
        # Less than half only where the image is too narrow for the ratio.
        assert (right - left) * (bottom - top) >= 0.6 * (0.5 * 200 * 100)


SQUARE = {"height": 16, "width": 16}
PROCESSORS = [
    ViTImageProcessorPil(size={"height": 32, "width": 24}, image_mean=[0.1, 0.2, 0.3]),
    ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    ViTImageProcessorPil(size=SQUARE, do_normalize=False),
    ViTImageProcessorPil(size=SQUARE, do_rescale=False, do_normalize=False),
]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_input_is_what_a_saved_image_processor_gives(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    given = {"from_scratch": False, "model_name_or_path": str(tmp_path), "hub_options": lambda name: {}}
    processing = processing_of(transforms.load_processor(SimpleNamespace(**given), None, None), 3)
    found = processing.normalize(processing.fit(IMAGE)[None])[0]
    expected = np.asarray(processor(IMAGE)["pixel_values"][0], dtype=np.float32)
    assert processing.size == expected.shape[1:]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_model_of_one_channel_gets_one():
    processing = processing_of(ViTImageProcessorPil(size=SQUARE), 1)
    assert processing.normalize(processing.fit(IMAGE.convert("L"))[None]).shape == (1, 1, 16, 16)


def test_a_processor_without_a_fixed_size_and_other_channels_are_refused():
    with pytest.raises(InputError, match="ViTImageProcessorPil gives images of several sizes"):
        processing_of(ViTImageProcessorPil(do_resize=False), 3)
    with pytest.raises(InputError, match="the model sees 4 channels; expected 1 "):
        processing_of(ViTImageProcessorPil(), 4)


def test_a_processor_that_needs_a_missing_package_is_refused(tmp_path, monkeypatch):
    def needs_torchvision():
        raise ImportError("ViTImageProcessorPil requires the torchvision library")

    monkeypatch.setattr(transforms, "IMAGE_PROCESSOR_MAPPING", {ViTConfig: {"pil": needs_torchvision}})
    arguments = SimpleNamespace(from_scratch=True, config_name=str(tmp_path), model_name_or_path="")
    with pytest.raises(InputError, match=f"^image processor {tmp_path}: .*requires the torchvision library"):
        transforms.load_processor(arguments, ViTConfig(), None)
    with pytest.raises(InputError, match="json, and transformers knows none for a bert model"):
        transforms.load_processor(arguments, BertConfig(), None)
