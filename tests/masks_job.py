"""Small images with masks (coloured rectangles on grey), configurations of tiny segmentation models."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    MobileNetV2Config,
    Sapiens2Config,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessorPil,
)

CLASSES = ("ground", "red", "blue")
COLOURS = np.array([(120, 120, 120), (210, 40, 40), (40, 40, 210)])
SIZE = (32, 48)  # height, width


def image(row: int, size: tuple[int, int] = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """(image (h, w, 3), mask (h, w)), uint8: two rectangles; one column of the second is ignored (255)."""
    generator = np.random.default_rng(row)
    mask = np.zeros(size, dtype=np.uint8)
    for number in (1, 2):
        top, left = (int(generator.integers(0, length // 2)) for length in size)
        place = (slice(top, top + size[0] // 2), slice(left, left + size[1] // 3))
        mask[place] = number
    mask[place[0], place[1].start] = 255
    shown = COLOURS[np.where(mask == 255, 0, mask)] + generator.integers(-30, 30, (*size, 3))
    return shown.clip(0, 255).astype(np.uint8), mask


def write(folder: Path, rows: int = 8, first: int = 0, sizes: tuple[tuple[int, int], ...] = (SIZE,)) -> Path:
    """Writes `rows` images and masks, whose sizes alternate, to images/ and masks/, and classes.txt."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for row in range(rows):
        shown, mask = image(first + row, sizes[row % len(sizes)])
        Image.fromarray(shown).save(folder / "images" / f"{first + row:03}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{first + row:03}.png")
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return folder


def segformer(folder: Path) -> Path:
    """Saves the configuration of a tiny SegFormer, whose head has batch norm."""
    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16, mlp_ratios=[1, 1, 1, 1],
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def segformer_model(folder: Path) -> None:
    """Saves that SegFormer, untrained, and its image processor."""
    config = SegformerConfig.from_pretrained(segformer(folder), id2label=dict(enumerate(CLASSES)))
    torch.manual_seed(0)
    SegformerForSemanticSegmentation(config).save_pretrained(folder)
    SegformerImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def deeplab(folder: Path) -> Path:
    """Saves the configuration of a tiny DeepLabV3+ with MobileNetV2."""
    MobileNetV2Config(depth_multiplier=0.1, min_depth=8, output_stride=8).save_pretrained(folder)
    return folder


def sapiens(folder: Path) -> Path:
    """Saves the configuration and the image processor of a tiny model without batch norm."""
    head = {"upsample_out_channels": [8], "upsample_kernel_sizes": [4], "conv_out_channels": [],
            "conv_kernel_sizes": []}  # fmt: skip
    config = Sapiens2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_attention_heads=2, patch_size=8, image_size=list(SIZE), num_register_tokens=1,
        pos_embed_rescale=None, head_config=head,
    )  # fmt: skip
    config.save_pretrained(folder)
    SegformerImageProcessorPil(size={"height": SIZE[0], "width": SIZE[1]}).save_pretrained(folder)
    return folder


def arguments(**changes: object) -> list[str]:
    """The arguments of a short training from random weights."""
    values = {
        "from_scratch": "true", "image_size": "32,48", "num_train_epochs": 2, "global_batch_size": 4,
        "learning_rate": 5e-3, "report_to": "none", **changes,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items() if value is not None]
