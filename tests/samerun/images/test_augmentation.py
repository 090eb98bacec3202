import numpy as np
from PIL import Image

from samerun.images.augmentation import Augmentation, crop_box, row_generator

ALL = Augmentation((12, 10), crop=0.3, flip=True, rotation=20, jitter=0.3, fill=9)


def random_image(seed=0, size=(24, 18)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8))


def varied(augmentation, seed, epoch, row, image=None, mask=None):
    image, mask = augmentation(image or random_image(), mask, row_generator(seed, epoch, row))
    return np.asarray(image), None if mask is None else np.asarray(mask)


def test_a_variation_is_a_function_of_seed_epoch_and_row():
    first = varied(ALL, 1, 0, 0)[0]
    assert first.shape == (12, 10, 3)
    np.testing.assert_array_equal(first, varied(ALL, 1, 0, 0)[0])
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert not np.array_equal(first, varied(ALL, *other)[0])


def test_row_0_does_not_share_the_random_numbers_of_the_order_of_rows():
    assert row_generator(1, 2, 0).random() != np.random.default_rng([1, 2]).random()


def test_a_mask_goes_where_its_image_goes():
    # The image shows its own mask, so they agree after any variation, but for the edges that the image blurs.
    numbers = np.kron(np.random.default_rng(0).integers(0, 2, (4, 4)), np.ones((32, 32))).astype(np.uint8)
    image, mask = Image.fromarray(numbers * 255), Image.fromarray(numbers)
    moves = Augmentation((64, 64), crop=0.3, flip=True, rotation=20)
    moved = 0
    for row in range(20):
        shown, there = varied(moves, 0, 0, row, image, mask)
        assert set(np.unique(there)) <= {0, 1}
        assert ((shown > 127) == (there == 1)).mean() > 0.97
        moved += not np.array_equal(there, numbers[::2, ::2])
    assert moved == 20


def test_what_a_rotation_shows_from_outside_has_the_fill_in_the_mask():
    _, mask = varied(
        Augmentation((8, 8), rotation=45, fill=7),
        0,
        0,
        3,
        random_image(),
        Image.fromarray(np.ones((24, 18), np.uint8)),
    )
    assert set(np.unique(mask)) == {1, 7}


def test_half_of_the_images_are_flipped():
    flipped = Augmentation((1, 1), flip=True)
    same = [np.array_equal(varied(flipped, 0, 0, row)[0], np.asarray(random_image())) for row in range(400)]
    assert 160 < sum(same) < 240


def test_a_crop_lies_in_the_image_and_keeps_the_share_of_its_area():
    for row in range(200):
        left, top, right, bottom = crop_box((200, 100), 0.5, row_generator(0, 0, row))
        assert 0 <= left < right <= 200
        assert 0 <= top < bottom <= 100
        assert (right - left) * (
            bottom - top
        ) >= 0.5 * 200 * 100 * 0.6  # less only where the image is too narrow for the ratio


def test_nothing_is_varied_unless_requested():
    assert Augmentation((1, 1)).is_off
    assert not any(
        each.is_off for each in (ALL, Augmentation((1, 1), crop=1.0), Augmentation((1, 1), jitter=0.1))
    )
