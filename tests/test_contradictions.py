"""Arguments that contradict each other: each is one problem, told before anything is read."""

import classify
import pytest
import segment
import segment3d
import tag
import titlegen
from refusals import problems_of

from samerun.parsing import validate

STREAM = {"train_file": "a", "validation_file": "b", "streaming": 9, "max_steps": 3}
TEXTS = [
    ({"optim": "sgd", "optim_args": "momentum=1.5"},
     "momentum: '1.5' is not a number at least 0 and below 1"),
    ({"optim": "sgd", "optim_args": "nesterov=true"}, "nesterov=true needs a momentum above 0"),
    ({"optim": "rmsprop", "optim_args": "beta=1"}, "rmsprop has no beta; it has alpha, eps, momentum, c"),
    ({"optim": "sgd", "optim_args": "weight_decay=0.1"}, "sgd has no weight_decay; give --weight_decay"),
    ({"optim_args": "momentum=0.9"}, "adamw_torch_fused has no momentum; it has beta1, beta2, eps"),
    ({"model_name_or_path": None, "config_name": "a", "model_revision": "v1"},
     "--model_revision is given but --model_name_or_path is not"),
    (STREAM | {"max_steps": None}, "--streaming needs --max_steps: the number of rows is unknown"),
    (STREAM | {"validation_file": None}, "--streaming needs --validation_file (or --do_eval false): "),
    (STREAM | {"max_train_samples": 9}, "--streaming and --max_train_samples are both given; "),
    (STREAM | {"train_file": ["a", "b"], "mixing_weights": (1.0, 1.0)},
     "--streaming and --mixing_weights are both given; "),
    (STREAM | {"sampling": "class_balanced"}, "--streaming and --sampling class_balanced are both given; "),
    (STREAM | {"do_train": False, "do_eval": True}, "--streaming is for training"),
    ({"loss": "focal", "pos_weight": "balanced"}, "--pos_weight needs --loss bce, but --loss is focal"),
    (
        {"sampling": "class_balanced", "train_file": ("a", "b"), "mixing_weights": (0.5, 0.5)},
        "--sampling class_balanced and --mixing_weights are both given; keep one",
    ),
    ({"loss": "asymmetric", "label_smoothing_factor": 0.1}, "--label_smoothing_factor needs --loss bce, but"),
    ({"loss_args": "gamma=1"}, "--loss_args: bce has no gamma; it has none"),
    ({"threshold": ("precision_at_recall",)}, "--threshold precision_at_recall needs a number above 0"),
    ({"threshold": ("precision_at_recall:2",)}, "--threshold: '2' is not a number above 0 and at"),
    ({"threshold": ("f1:0.5",)}, "--threshold: f1 has no 0.5"),
    ({"threshold": ("cost:3", "0.5")}, "--threshold cost:3 0.5: an objective stands alone"),
    ({"threshold": ("cost",), "do_eval": False}, "--threshold cost needs --do_train and --do_eval"),
    ({"calibration": "temperature", "do_eval": False}, "--calibration temperature needs --do_train and"),
    ({"calibration": "temperature", "lora_r": 4, "export": "adapter"},
     "--calibration temperature and --export adapter are both given"),
    ({"save_strategy": "steps"}, "--save_strategy steps needs --save_steps"),
    ({"eval_steps": 5}, "--eval_steps needs --eval_strategy steps, but --eval_strategy is epoch"),
    ({"eval_strategy": "steps"}, "--eval_strategy steps needs --eval_steps"),
    ({"early_stopping_patience": 2, "eval_strategy": "no"},
     "--early_stopping_patience needs evaluations during the training; --eval_strategy is no"),
    ({"overwrite_output_dir": True, "resume_from_checkpoint": "auto"},
     "--overwrite_output_dir and --resume_from_checkpoint are both given"),
    ({"train_file": ("a",), "mixing_weights": (0.7, 0.3)},
     "--mixing_weights has 2 value(s), but --train_file 1: give one"),
    ({"train_file": ("a",), "dataset_name": "b"}, "--train_file and --dataset_name are both given"),
    ({"dataset_split": "train[:80%]"}, "--dataset_split is given but --dataset_name is not"),
    ({"loss": "asymmetric", "loss_args": "margin=1"}, "--loss_args: margin: '1' is not a number at least 0"),
    ({"loss": "focal", "loss_args": "gamma=2,gamma=1"}, "--loss_args: gamma is given twice; keep one"),
    ({"truncation_side": "left", "long_documents": "windows"},
     "--truncation_side needs --long_documents truncate, but --long_documents is windows"),
    ({"user_dictionary": "x"}, "--user_dictionary needs --tokenizer_type jieba, but --tokenizer_type is"),
    ({"hub_private_repo": True}, "--hub_private_repo is given but --push_to_hub"),
]  # fmt: skip
TITLES = [
    (
        {"min_title_length": 9, "max_title_length": 8},
        "--min_title_length 9 is more than --max_title_length 8",
    ),
    ({"target_lang": "fr_XX"}, "--target_lang is given but --source_lang is not"),
    (
        {"decoder_layers": 1, "decoder_model_name_or_path": "e"},
        "--decoder_layers and --decoder_model_name_or_path are both given",
    ),
]
NOTHING = ({"dice_weight": 0.0, "cross_entropy_weight": 0.0}, "are both 0; there is nothing to learn")
MASKS = [
    NOTHING,
    ({"random_scale": (2.0, 1.0)}, "--random_scale 2.0,1.0: expected two numbers, the lower one first"),
    ({"random_scale": (1.0, 2.0), "random_crop": 0.5}, "--random_scale and --random_crop are both given"),
    ({"random_crop": 0.5, "inference": "sliding_window"}, "--random_crop resizes its crops"),
    ({"image_size": (1, 2, 3)}, "--image_size has 3 numbers, expected HEIGHT,WIDTH"),
]
TAGS = [({"truncation_side": "left"}, "--truncation_side: no sentence is cut")]
VOLUMES = [
    NOTHING,
    ({"strides": (2, 2)}, "--channels has 5 numbers and --strides 2; expected one fewer strides"),
    ({"patch_size": (16, 16, 20)}, "--patch_size 16,16,20: each must be a multiple of 16, the product"),
    ({"flip_axes": ("x", "none")}, "--flip_axes has none and an axis; keep one"),
    ({"do_predict": True, "test_file": "t"}, "--model_name_or_path is missing: name the folder of"),
]
ALL = {
    classify: ({"model_name_or_path": "m"}, TEXTS),
    titlegen: ({"model_name_or_path": "m"}, TITLES),
    tag: ({"model_name_or_path": "m"}, TAGS),
    segment: ({"config_name": "c", "from_scratch": True}, MASKS),
    segment3d: ({"train_file": "data"}, VOLUMES),
}
CASES = [(module, usual | given, said) for module, (usual, cases) in ALL.items() for given, said in cases]


@pytest.mark.parametrize(("module", "given", "said"), CASES)
def test_a_contradiction_is_named(module, given, said):
    (problem,) = problems_of(validate, module.Arguments(output_dir="run", **given))
    assert said in problem
