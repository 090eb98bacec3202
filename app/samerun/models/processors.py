"""Image processors of transformers, computed with Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.utils import logging

from samerun.errors import InputError
from samerun.models.pretrained import explain_failed_load

FILE = "preprocessor_config.json"


def load_processor(arguments: Any, config: Any, image_size: int | None) -> Any:
    """The model's image processor; with --from_scratch and a folder without one, the default of the model
    type. `image_size`: overrides its size, for models without a fixed one. Raises `InputError` if it cannot
    be loaded or the size is fixed."""
    logging.set_verbosity_error()  # each process would warn that torchvision is not installed
    name = (arguments.from_scratch and arguments.config_name) or arguments.model_name_or_path
    folder = Path(name)
    if arguments.from_scratch and folder.exists() and not (folder / FILE).is_file():
        processor = _default_processor(name, config)
    else:
        try:
            processor = AutoImageProcessor.from_pretrained(name, backend="pil", **arguments.hub_options(name))
        except Exception as error:
            raise InputError(explain_failed_load("image processor", name, error)) from error
    own = getattr(config, "image_size", None)
    if image_size is not None and own not in (None, image_size, [image_size] * 2):
        raise InputError(f"--image_size {image_size}: {name} takes images of {own} pixels only; leave it out")
    if image_size is not None:
        _set_size(processor, image_size)
    return processor


def _default_processor(name: str, config: Any) -> Any:
    try:
        processor = IMAGE_PROCESSOR_MAPPING[type(config)]["pil"]()
    except KeyError:
        raise InputError(
            f"{name}: has no {FILE}, and transformers knows none for a {config.model_type} model"
        ) from None
    except ImportError as error:  # SegFormer's needs torchvision before transformers 5.22
        raise InputError(explain_failed_load("image processor", name, error)) from error
    if isinstance(getattr(config, "image_size", None), int):
        _set_size(processor, config.image_size)
    return processor


def _set_size(processor: Any, size: int) -> None:
    """Sets the output size to size x size pixels."""
    square = {"height": size, "width": size}
    processor.size = {"shortest_edge": size} if "shortest_edge" in processor.size else square
    if getattr(processor, "do_center_crop", False):
        processor.crop_size = square
