"""Small images of two classes that a few steps separate, as folders and as MNIST files; a small model."""

import gzip
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from samerun.models.small_cnn import SmallCNN, SmallCNNConfig

CLASSES = ("dark", "light")


def pixels(rows=24, size=16, seed=0, channels=1):
    """((rows, size, size[, 3]) uint8, (rows,) class numbers): noise around dark grey or light grey."""
    generator = np.random.default_rng(seed)
    classes = np.arange(rows) % 2
    shape = (rows, size, size) if channels == 1 else (rows, size, size, channels)
    middle = np.where(classes == 0, 64, 192).reshape(-1, *[1] * (len(shape) - 1))
    return (middle + generator.integers(-40, 40, shape)).astype(np.uint8), classes


def write_folder(folder: Path, **settings) -> Path:
    for row, (image, number) in enumerate(zip(*pixels(**settings), strict=True)):
        class_folder = folder / CLASSES[number]
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(class_folder / f"{row:03}.png")
    return folder


def idx(array: np.ndarray) -> bytes:
    shape = np.array(array.shape, ">i4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, split: str = "train", packed: bool = True, **settings) -> Path:
    """Writes a split's two files in MNIST's format."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(("images-idx3", "labels-idx1"), pixels(**settings), strict=True):
        content = idx(array)
        file = folder / f"{split}-{name}-ubyte{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(content) if packed else content)
    return folder


def small_cnn(folder: Path) -> None:
    """Saves an untrained model."""
    torch.manual_seed(0)
    SmallCNN(SmallCNNConfig(3, (16, 16), id2label=dict(enumerate(CLASSES)))).save_pretrained(folder)
