from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers import ConvNextImageProcessorPil, ViTConfig, ViTImageProcessorPil

from samerun.errors import InputError
from samerun.images.processing import processing_of
from samerun.models import processors

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 80, 3), np.uint8))


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(size={"height": 32, "width": 24}, image_mean=[0.1, 0.2, 0.3]),
        ConvNextImageProcessorPil(size={"shortest_edge": 32}),
        ViTImageProcessorPil(size={"height": 16, "width": 16}, do_normalize=False),
        ViTImageProcessorPil(size={"height": 16, "width": 16}, do_rescale=False, do_normalize=False),
    ],
)
def test_the_input_is_what_the_image_processor_gives(processor):
    processing = processing_of(processor, 3)
    found = processing.normalize(processing.fit(IMAGE)[None])[0]
    expected = np.asarray(processor(IMAGE)["pixel_values"][0], dtype=np.float32)
    assert processing.size == expected.shape[1:]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_model_of_one_channel_gets_one():
    processing = processing_of(ViTImageProcessorPil(size={"height": 16, "width": 16}), 1)
    assert processing.normalize(processing.fit(IMAGE.convert("L"))[None]).shape == (1, 1, 16, 16)


def test_a_processor_without_a_fixed_size_is_refused():
    with pytest.raises(InputError, match="ViTImageProcessorPil gives images of several sizes"):
        processing_of(ViTImageProcessorPil(do_resize=False), 3)


def test_a_processor_that_needs_a_missing_package_is_refused(tmp_path, monkeypatch):
    def needs_torchvision():
        raise ImportError("ViTImageProcessorPil requires the torchvision library")

    monkeypatch.setattr(processors, "IMAGE_PROCESSOR_MAPPING", {ViTConfig: {"pil": needs_torchvision}})
    arguments = SimpleNamespace(from_scratch=True, config_name=str(tmp_path), model_name_or_path="")
    with pytest.raises(InputError, match=f"^image processor {tmp_path}: .*requires the torchvision library"):
        processors.load_processor(arguments, ViTConfig(), None)
