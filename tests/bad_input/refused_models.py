"""Models, tokenizers and paths that must be rejected."""

import os
import shutil
from pathlib import Path

from catalogue_case import Case

CLASSIFY, TITLEGEN = "classify", "titlegen"
PRETRAINED = {"from_scratch": None, "config_name": None, "tokenizer_type": None}
PREDICT = {"do_predict": "true", "test_file": "test.csv"}
UNLABELLED = {"test.csv": "text\nred wine\n"}


def model(name: str, *said: str, task: str | None = None, **changed: object) -> Case:
    """A case that starts from a model of `catalogue_models`."""
    asked = PRETRAINED | {"model_name_or_path": f"models/{name}"} | changed
    return Case(f"model {name}", list(said), task, asked)


FOLDERS = [
    model("no_config",
          r"models/no_config: .* `model_type` key in its config\.json.*\(the folder holds: model\.s"),
    model("broken_config",
          r"configuration models/broken_config: .*models/broken_config/config\.json' is not a valid JSON"),
    model("unknown_type",
          r"configuration models/unknown_type: .* model type `bertt` .* does not recognize"),
    model("text_for_a_size", r"configuration models/text_for_a_size: .*hidden_size.*many"),
    model("negative_layers",
          r"configuration models/negative_layers: num_hidden_layers is -1, expected at least 1"),
    model("wrong_sizes", r"model models/wrong_sizes: .*hidden size \(15\) is not a multiple of the number"),
    model("fewer_layers",
          r"model models/fewer_layers: the weights have more layers .*: 16 weights, such as \S+layer\.1\."),
    Case("decoder with fewer layers", [r"model models/fewer_layers: the weights have more layers"], TITLEGEN,
         {"decoder_model_name_or_path": "models/fewer_layers", "decoder_layers": None, "tokenizer_type": None,
          "tokenizer_name": "models/classifier"}),
    model("adapter", r"models/adapter/adapter_config\.json: names no base model"),
    model("gaps_in_labels",
          r"model models/gaps_in_labels: id2label in its config\.json numbers its 2 label\(s\) 0, 2, so",
          task=CLASSIFY),
    model("no_weights", r"model models/no_weights: the folder holds no weights, such as .*--from_scratch"),
    model("cut_weights",
          r"models/cut_weights/model\.safetensors: is no whole safetensors file .*copy it again"),
    model("part_missing",
          r"models/part_missing/part-2\.safetensors: is missing; the folder's index of weights names it"),
    model("broken_index",
          r"models/broken_index/model\.safetensors\.index\.json: cannot be read as an index of weights"),
    model("other_sizes",
          r"model models/other_sizes: the weights are not those of its config\.json: \S+ is \(.*\) in the"),
    model("more_layers",
          r"model models/more_layers: the weights are not those of its config\.json: 16 of \d+ are missing"),
    model("nan_weights", r"model models/nan_weights: its weight \S+ holds NaN or infinity", task=CLASSIFY),
    model("harmful_pickle",
          r"model models/harmful_pickle: its weights are a pickle .*convert them to safetensors"),
    model("no_tokenizer",
          r"tokenizer models/no_tokenizer: its vocabulary is empty; the folder lacks tokenizer\.json"),
    model("copied_in_part", r"tokenizer models/copied_in_part: tokenizer\.model is missing, which"),
    model("broken_tokenizer", r"tokenizer models/broken_tokenizer: .*the folder holds: "),
    model("larger_vocabulary",
          r"token ids up to \d+, the model only \d+ embeddings; they do not belong together"),
    model("vision", r"models/vision: the model \(vit\) cannot classify texts", task=CLASSIFY),
    model("vision", r"models/vision: the model \(vit\) cannot read texts", task=TITLEGEN),
    model("gpt2", r"models/gpt2: gpt2 has a decoder only; titles need an encoder-decoder model",
          task=TITLEGEN),
    model("bigbird_decoder", r"models/bigbird_decoder: its decoder is a BigBird", task=TITLEGEN),
]  # fmt: skip

NAMES = [
    Case("no model", [r"no model: give --model_name_or_path"], arguments={"config_name": None}),
    Case("no weights named", [r"no weights: give --model_name_or_path, or --from_scratch"],
         arguments=PRETRAINED | {"config_name": "models/config"}),
    Case("no tokenizer named", [r"no tokenizer: give --model_name_or_path, --tokenizer_name or"],
         arguments={"tokenizer_type": None}),
    Case("folder misspelt", [r"is no folder here \(did you mean 'models/classifier'\?\)"],
         arguments=PRETRAINED | {"model_name_or_path": "models/clasifier"}),
    Case("hub model offline", [r"some/model: is no folder here, and could not be had from the hub"],
         arguments=PRETRAINED | {"model_name_or_path": "some/model"}),
    Case("model with code of its own",
         [r"models/own_code: it has Python code of its own, .* --trust_remote_code"],
         arguments=PRETRAINED | {"model_name_or_path": "models/own_code"},
         files={"models/own_code/config.json":
                '{"model_type": "own", "auto_map": {"AutoConfig": "code.Configuration"}}',
                "models/own_code/code.py": ""}),
    Case("jieba over letters", [r"models/classifier has no WordPiece vocabulary that holds Chinese words"],
         arguments={"tokenizer_type": "jieba", "tokenizer_name": "models/classifier"}),
    Case("decoder of another vocabulary", [r"token ids up to \d+, the decoder only \d+ embeddings"], TITLEGEN,
         {"decoder_model_name_or_path": "models/encoder", "decoder_layers": None, "tokenizer_type": None,
          "tokenizer_name": "models/larger_tokenizer"}),
    Case("adapter of a new decoder", [r"--export adapter: the base model would have no decoder"],
         TITLEGEN, PRETRAINED | {"model_name_or_path": "models/encoder", "lora_r": 2, "export": "adapter"}),
    Case("titles longer than the decoder's positions",
         [r"--max_title_length 31 is more than the decoder can write; give at most 30"],
         TITLEGEN, PRETRAINED | {"model_name_or_path": "models/titles", "max_title_length": 31}),
    Case("layers for a decoder that is there",
         [r"--decoder_layers is for encoders, but the model has a decoder; leave it out"],
         TITLEGEN, PRETRAINED | {"model_name_or_path": "models/titles"}),
    Case("predicting with an encoder",
         [r"models/encoder: has no decoder, so it cannot write titles; train first"],
         TITLEGEN, PRETRAINED | PREDICT | {"model_name_or_path": "models/encoder"}, UNLABELLED, late=True),
    Case("predicting without a classifier",
         [r"models/encoder: has no trained classifier \(classifier\.\w+ is missing\); train first"],
         CLASSIFY, PRETRAINED | PREDICT | {"model_name_or_path": "models/encoder"}, UNLABELLED, late=True),
]  # fmt: skip


PREDICTIONS = {"do_train": "true", "do_predict": "true", "test_file": "valid.csv"}


def copied(folder: Path) -> None:
    """A model in the folder of a run's best model."""
    shutil.rmtree(folder / "run" / "best")
    shutil.copytree(folder / "models" / "classifier", folder / "run" / "best")


PLACES = [
    Case("output_dir a file", [r"error: --output_dir train\.csv: is"], arguments={"output_dir": "train.csv"}),
    Case("output_dir where nobody writes", [r"--output_dir /proc/run: cannot be written"],
         arguments={"output_dir": "/proc/run"}),
    Case("output_dir of another run",
         [r"--output_dir run already holds a run \(run\.json, history\.jsonl, checkpoints, best\)",
         r"--resume_from_checkpoint auto"], arguments={"overwrite_output_dir": None}),
    Case("lock that is a link", [r"--output_dir run: its file \.lock is a link; remove it"],
         files={"mine.txt": "mine"}, make=lambda folder: (folder / "run/.lock").symlink_to("../mine.txt")),
    Case("lock of somebody else's", [r"--output_dir run: its file \.lock is not a run's; move it away"],
         files={"mine.txt": "mine"}, make=lambda folder: os.link(folder / "mine.txt", folder / "run/.lock")),
    Case("metrics that are no JSON", [r"run/metrics\.json: cannot be read \(Expecting value.*; move it away"],
         arguments={"overwrite_output_dir": None, "resume_from_checkpoint": "auto"},
         files={"run/metrics.json": "oops"}),
    Case("metrics of somebody else", [r"new: metrics\.json would be replaced"],
         arguments=PRETRAINED | PREDICT | {"model_name_or_path": "models/classifier", "output_dir": "new"},
         files={"new/metrics.json": "{}", "test.csv": "text\nred\n"}, task=CLASSIFY),
    Case("model inside the run that is replaced",
         [r"--overwrite_output_dir would remove --model_name_or_path run/best, which is read"],
         arguments=PRETRAINED | {"model_name_or_path": "run/best"}, make=copied),
    Case("data inside the run that is replaced", [r"would remove --train_file run/checkpoints/train\.csv"],
         arguments={"train_file": "run/checkpoints/train.csv"},
         files={"run/checkpoints/train.csv": "text,TARGET\na,red\n"}),
    Case("predictions a folder", [r"--predictions_file run: exists and does not hold predictions"],
         arguments=PREDICTIONS | {"predictions_file": "run"}),
    Case("checkpoint missing",
         [r"step_9: is not a checkpoint; give auto or a checkpoint of this run \(run/checkpoints/step_1\)"],
         arguments={"overwrite_output_dir": None, "resume_from_checkpoint": "run/checkpoints/step_9"}),
    Case("every checkpoint damaged",
         [r"checkpoint run/checkpoints/step_1: manifest", r"no complete checkpoint is left"],
         arguments={"overwrite_output_dir": None, "resume_from_checkpoint": "auto"}),
]  # fmt: skip

CASES = [*FOLDERS, *NAMES, *PLACES]
