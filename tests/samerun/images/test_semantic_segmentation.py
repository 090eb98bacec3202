from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from segment import Arguments
from thread_processes import run_with_collectives
from transformers import (
    AutoModelForSemanticSegmentation,
    BeitConfig,
    ConvNextConfig,
    DPTConfig,
    MobileNetV2Config,
    MobileNetV2ImageProcessorPil,
    UperNetConfig,
)

from samerun.errors import InputError
from samerun.images import semantic_segmentation as segmenter
from samerun.models.pretrained import head_names, labels_of, load_with_classes, set_labels


def pixelwise(pixel_values):
    """Logits that are the image's channels: what windows give must be what the whole image gives."""
    return SimpleNamespace(logits=pixel_values)


@pytest.mark.parametrize("size", [(20, 30), (8, 50), (16, 16), (5, 6)])
def test_windows_put_an_image_together_whatever_its_size(size):
    pixels = torch.rand(1, 3, 60, 60)
    windows = {"overlap": 0.25, "batch_size": 4, "equal_passes": False}
    (logits,) = segmenter.window_logits(pixelwise, pixels, [list(size)], (16, 16), **windows)
    torch.testing.assert_close(logits, pixels[..., : size[0], : size[1]])


def test_images_of_other_sizes_take_as_many_passes_where_weights_are_gathered(monkeypatch):
    def passes(gather, size):
        made = []

        def model(pixel_values):
            gather()
            made.append(len(pixel_values))
            return pixelwise(pixel_values)

        windows = {"overlap": 0.0, "batch_size": 1, "equal_passes": True}
        (logits,) = segmenter.window_logits(model, torch.rand(1, 3, *size), [size], (16, 16), **windows)
        assert list(logits.shape[2:]) == size
        return made

    assert run_with_collectives(passes, [([16, 16],), ([16, 48],)], monkeypatch) == [[1] * 3] * 2


def test_the_processor_gives_what_training_sees_and_cuts_nothing_off():
    own = MobileNetV2ImageProcessorPil()  # cuts the middle out
    assert segmenter.default_size(own) == (224, 224)
    processor = segmenter.processor_for(own, (32, 48), windows=False)
    processing = segmenter.processing_for(processor, (32, 48), 3, "a model")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 40, 3), dtype=np.uint8))
    theirs = torch.as_tensor(np.asarray(processor(image)["pixel_values"]))
    ours = processing.normalize(processing.fit(image)[None].copy())
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert own.do_center_crop  # a copy was changed
    large = segmenter.processor_for(own, (32, 48), windows=True)
    assert np.asarray(large(image)["pixel_values"]).shape == (1, 3, 61, 40)


def test_a_processor_that_does_more_is_refused():
    class Swapping(MobileNetV2ImageProcessorPil):
        def preprocess(self, images, **given):
            found = super().preprocess(images, **given)
            return {"pixel_values": [np.asarray(each)[::-1].copy() for each in found["pixel_values"]]}

    processor = segmenter.processor_for(Swapping(), (32, 48), windows=False)
    with pytest.raises(InputError, match="its Swapping does more than resize and normalise"):
        segmenter.processing_for(processor, (32, 48), 3, "a model")


def test_names_of_masks():
    names = segmenter.mask_names(["a/1.jpg", "b.v2", "1.png", "1.jpg"])
    assert names == ["a_1.png", "b.v2.png", "1.png", "1_3.png"]
    assert segmenter.mask_names(["a_2", "a", "a", ""]) == ["a_2.png", "a.png", "a_2_2.png", "_.png"]
    long = segmenter.mask_names(["ä" * 300, "ä" * 300, "a\0b"])
    assert len(set(long)) == 3
    assert all(len(name.encode()) < 255 and "\0" not in name for name in long)


SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 32}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "out_indices": [1, 2, 3, 4]}
WITH_AUXILIARY_HEADS = {
    "beit": lambda: BeitConfig(**SMALL, patch_size=8, out_indices=[1, 2, 3, 4], pool_scales=[1, 2]),
    "dpt": lambda: DPTConfig(**SMALL, patch_size=8, backbone_out_indices=[0, 1, 2, 3],
                             neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8),
    "upernet": lambda: UperNetConfig(backbone_config=ConvNextConfig(**STAGES), hidden_size=16,
                                     pool_scales=[1, 2], auxiliary_in_channels=16),
    "mobilenet_v2": lambda: MobileNetV2Config(depth_multiplier=0.1, min_depth=8),
}  # fmt: skip


# Other layers of both have 16 outputs, too; UperNet keeps no body by itself.
@pytest.mark.parametrize(
    ("before", "labels"), [("abc", "xya"), ("abc", "wbyz"), ("abcdefghijklmnop", "pABCDEFGHIJKLMNO")]
)
@pytest.mark.parametrize("kind", ["beit", "upernet"])
def test_other_classes_change_the_last_layer_but_for_rows_of_known_ones(kind, before, labels, tmp_path):
    config = WITH_AUXILIARY_HEADS[kind]()
    segmenter.configure(config, overlap=0.25, loss_settings={})
    set_labels(config, list(before))
    trained = AutoModelForSemanticSegmentation.from_config(config)
    trained.save_pretrained(tmp_path)
    arguments = Arguments(output_dir="run", model_name_or_path=str(tmp_path))
    classes = list(before), list(labels)
    model, new = load_with_classes(AutoModelForSemanticSegmentation, arguments, config, *classes)
    assert new <= head_names(model)
    known = trained.state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, known[name])}
    assert changed - {"decode_head.classifier.bias"} == {"decode_head.classifier.weight"}
    own, rows = known["decode_head.classifier.weight"], model.decode_head.classifier.weight
    kept = [bool((own == row).flatten(1).all(1).any()) for row in rows]
    assert kept == [label in before for label in labels]
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape[1] == len(labels)
    assert labels_of(config) == list(labels)


@pytest.mark.parametrize("kind", WITH_AUXILIARY_HEADS)
def test_auxiliary_heads_are_off(kind):
    config = WITH_AUXILIARY_HEADS[kind]()
    assert config.use_auxiliary_head if hasattr(config, "use_auxiliary_head") else kind == "mobilenet_v2"
    segmenter.configure(config, overlap=0.25, loss_settings={})
    model = AutoModelForSemanticSegmentation.from_config(config)
    assert not any("auxiliary" in name for name, _ in model.named_parameters())
