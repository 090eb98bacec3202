"""The commands of oracle.py, their data, and the differences that are allowed.

Arguments name files relative to the working folder, which has text/, titles/, images/, masks/ and volumes/.
The folder of a run is runs/NAME. `{repo}` is the version's own folder.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

OLD_COMMIT = "7e83d99"
# Runs in OLD_COMMIT's tests/ with its scripts/ and app/, which do not change.
MAKE_DATA = """
import json, sys
from pathlib import Path
home, tree = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(tree / name) for name in ("tests", "scripts", "app")]
import launchers, title_job, images_job, masks_job, nibabel
from sampling import volumes
from transformers import BartConfig
(home / "text").mkdir(parents=True)
launchers.write_corpus(home / "text")
title_job.write_corpus(home / "titles")
BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
           decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
           vocab_size=1500, max_position_embeddings=256).save_pretrained(home / "bart")
images_job.write_folder(home / "images" / "train", rows=31)
images_job.write_folder(home / "images" / "valid", rows=11, seed=1)
images_job.write_idx(home / "mnist", "train"), images_job.write_idx(home / "mnist", "t10k", rows=10, seed=1)
sizes = ((32, 48), (40, 36))
masks_job.write(home / "masks" / "train", rows=9, sizes=sizes)
masks_job.write(home / "masks" / "valid", rows=5, first=20, sizes=sizes)
masks_job.segformer(home / "segformer"), masks_job.deeplab(home / "deeplab")
volumes.EXTENT, volumes.RADII, volumes.COUNTS = 30.0, (3.0, 5.0), {"train": 4, "validation": 2, "test": 2}
volumes.main(["--output_dir", str(home / "volumes")])
partitioned = json.loads((tree / "ds_configs" / "zero3.json").read_text())
partitioned["zero_optimization"]["stage3_param_persistence_threshold"] = 0
(home / "partitioned.json").write_text(json.dumps(partitioned))
bad = home / "bad"
bad.mkdir()
(bad / "torn.jsonl").write_text('{"text": "a b", "labels": "a"}\\n{"text": "c"\\n{"text": 3}\\n')
(bad / "latin.csv").write_bytes("text,labels\\nd\\u00e9j\\u00e0 vu,a\\n".encode("latin-1"))
(bad / "empty.csv").write_text("text,labels\\n")
(bad / "unknown.csv").write_text("text,labels\\na b c,a|zebra\\nd e,yak\\n")
(bad / "twice.csv").write_text("id,text,labels\\n1,a,a\\n1,b,b\\n")
(bad / "flags.csv").write_text("text,x,y\\na,1,0\\nb,2,maybe\\n")
(bad / "wrong.yaml").write_text("learning_rat: 1\\nmax_steps: many\\n")
(bad / "ds.json").write_text(json.dumps({"train_batch_size": 7, "bf16": 3}))
(bad / "photos" / "dark").mkdir(parents=True), (bad / "photos" / "light").mkdir()
(bad / "photos" / "dark" / "1.png").write_bytes(b"no image")
(bad / "photos" / "light" / "2.png").write_bytes(b"")
masks_job.write(bad / "pairs", rows=3)
(bad / "pairs" / "masks" / "001.png").unlink()
(bad / "pairs" / "classes.txt").write_text("ground\\n")
(bad / "volumes.csv").write_text("image,label\\nmissing.nii.gz,missing.nii.gz\\n")
(bad / "file").write_text("in the way")
"""
# As MAKE_DATA, into more/.
MAKE_MORE = """
import csv, gzip, json, sys
from pathlib import Path
home, tree = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(tree / "app"))
import pyarrow, pyarrow.parquet
from finetune.arguments.trainer_names import TRAINER_NAMES
more = home / "more"
more.mkdir(exist_ok=True)
rows = list(csv.DictReader((home / "text" / "train.csv").open(encoding="utf-8")))
lists = [{"text": row["text"], "labels": row["labels"].split("|") if row["labels"] else []} for row in rows]
for name, part in (("a", lists[:20]), ("b", lists[20:])):
    (more / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in part))
(more / "valid.json").write_text(json.dumps(lists[:12], indent=1))
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lists), more / "train.parquet")
with gzip.open(more / "test.tsv.gz", "wt", encoding="utf-8") as file:
    writer = csv.writer(file, delimiter="\\t")
    writer.writerow(["name", "text", "labels"])
    writer.writerows([number, row["text"], row["labels"]] for number, row in enumerate(rows[5:20]))
with (more / "flags.csv").open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["text", *"abcdef"])
    writer.writerows([row["text"], *(int(x in row["labels"].split("|")) for x in "abcdef")] for row in rows)
for kind, names in (("images", ("dark", "light")), ("masks", ("masks",))):
    with (more / f"{kind}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label"])
        for name in names:
            for path in sorted((home / kind / "train" / name).iterdir()):
                image = path if kind == "images" else home / "masks" / "train" / "images" / path.name
                label = name if kind == "images" else f"../masks/train/masks/{path.name}"
                writer.writerow([f"../{image.relative_to(home)}", label])
(more / "trainer.yaml").write_text("".join(f"{name}: strange\\n" for name in sorted(TRAINER_NAMES)))
"""


@dataclass(frozen=True)
class Command:
    """A command. `first`: the run whose folder is copied to this one's before the start. `stop`: a signal
    that its launcher gets after three lines of history."""

    name: str
    script: str
    arguments: str = ""
    launcher: str = "python"
    first: str | None = None
    stop: str | None = None
    output_dir: bool = True
    needs: tuple[str, ...] = field(init=False, default=())  # names of commands that must have run

    def __post_init__(self) -> None:
        runs = {word.split("/")[1] for word in shlex.split(self.arguments) if word.startswith("runs/")}
        object.__setattr__(
            self, "needs", tuple(sorted((runs | ({self.first} if self.first else set())) - {self.name}))
        )


STEPS = "--max_steps 6 --logging_steps 1 --eval_strategy steps --eval_steps 3 --save_steps 2 --report_to none"
TEXT_FILES = "--train_file text/train.csv --validation_file text/valid.csv --test_file text/test.csv"
BERT = "--config_name text/bert/config.json --from_scratch --tokenizer_type train --vocab_size 300"
CLASSIFY = (
    f"--do_train --do_predict {BERT} {TEXT_FILES} {STEPS} --per_device_eval_batch_size 7 "
    "--learning_rate 1e-3 --optim_args eps=1e-6 --head_bias zero --warmup_steps 2 --max_grad_norm 0.05 "
    "--metric_for_best_model loss --global_batch_size 15"
)
LONG = f"{CLASSIFY} --max_steps 300 --eval_steps 100 --save_steps 1000"
TITLE_FILES = (
    "--train_file titles/train.jsonl --validation_file titles/valid.jsonl --test_file titles/test.jsonl"
)
TITLES = (
    f"--do_train --do_predict --from_scratch --tokenizer_type train --vocab_size 1500 {TITLE_FILES} {STEPS} "
    "--max_length 160 --max_title_length 16 --num_beams 2 "
    "--per_device_eval_batch_size 3 --global_batch_size 15 --learning_rate 2e-3 --optim_args eps=1e-6 "
    "--max_grad_norm 0.5 --metric_for_best_model loss"
)
BIGBIRD = f"{TITLES} --config_name titles/bigbird/config.json --decoder_layers 1 --min_title_length 2"
IMAGES = (
    f"--do_train --do_predict {STEPS} --train_file images/train --validation_file images/valid "
    "--test_file images/valid --global_batch_size 12 --learning_rate 1e-2"
)
MASKS = (
    f"--do_train --do_predict {STEPS} --from_scratch --train_file masks/train --validation_file masks/valid "
    "--test_file masks/valid --global_batch_size 4 --learning_rate 5e-3 --image_size 32,48"
)
SEGFORMER = f"{MASKS} --config_name segformer"
VOLUMES = (
    f"--do_train --do_predict {STEPS} --max_steps 4 --eval_steps 2 --train_file volumes "
    "--class_names bright,dark --channels 4,8 --strides 2 --patch_size 16,16,16 --patches_per_volume 2 "
    "--global_batch_size 4 --learning_rate 1e-2 --dropout 0.1 --random_rotation 20 --random_noise 0.1"
)
ALL_WRONG = "--learning_rate -1 --warmup_stepps 3 --optim adamm --max_steps x --loss bcee --num_beams 2"

COMMANDS = [
    Command("classify", "classify", CLASSIFY),
    Command("classify_report", "classify", f"{CLASSIFY} --report_to tensorboard --loss focal --keep_best 2"),
    Command("classify_lora", "classify",
            f"--do_train --do_predict {TEXT_FILES} {STEPS} --model_name_or_path runs/classify/best "
            "--global_batch_size 15 --lora_r 2 --lora_target_modules query,value"),
    Command("classify_ema", "classify", f"{CLASSIFY} --ema_decay 0.5 --per_device_train_batch_size 4"),
    Command("classify_tokens", "classify",
            f"{CLASSIFY} --max_tokens_per_micro_batch 100 --pos_weight balanced --calibration temperature"),
    Command("classify_windows", "classify",
            f"{CLASSIFY} --max_length 16 --long_documents windows --stride 4 --threshold 0.4"),
    Command("classify_stream", "classify", f"{CLASSIFY} --streaming true --streaming_buffer_rows 31"),
    Command("classify_epochs", "classify",
            "--do_train --model_name_or_path runs/classify/best --train_file text/train.csv "
            "--validation_split 0.2 --num_train_epochs 2 "
            "--global_batch_size 8 --lr_scheduler_type cosine --warmup_ratio 0.2 "
            "--label_smoothing_factor 0.1 --freeze embeddings --sampling class_balanced --report_to none"),
    Command("classify_formats", "classify",
            f"{CLASSIFY} --train_file more/a.jsonl more/b.jsonl --mixing_weights 0.7 0.3 "
            "--validation_file more/valid.json --test_file more/test.tsv.gz --id_column name"),
    Command("classify_parquet", "classify",
            f"{CLASSIFY} --train_file more/train.parquet --max_train_samples 25 --dataloader_num_workers 2 "
            "--lr_scheduler_type warmup_stable_decay"),
    Command("classify_flags", "classify",
            f"{CLASSIFY} --train_file more/flags.csv --validation_file more/flags.csv "
            "--test_file more/flags.csv --label_columns c,b,a --early_stopping_patience 1 "
            "--eval_steps 1 --learning_rate 1e-9"),
    Command("classify_again", "classify",
            "--do_eval --do_predict --model_name_or_path runs/classify/best --validation_file text/valid.csv "
            "--test_file text/test.csv"),
    Command("classify_bf16", "classify", f"{CLASSIFY} --mixed_precision bf16 --gradient_checkpointing"),
    Command("classify_torchrun", "classify", f"{CLASSIFY} --per_device_train_batch_size 4", "torchrun"),
    Command("classify_cpu_ddp", "classify", f"{CLASSIFY} --max_tokens_per_micro_batch 100 --ema_decay 0.5",
            "accelerate cpu_ddp.yaml"),
    Command("classify_fsdp", "classify", CLASSIFY, "accelerate fsdp.yaml"),
    Command("classify_zero2", "classify", f"{CLASSIFY} --deepspeed {{repo}}/ds_configs/zero2.json",
            "deepspeed"),
    Command("classify_zero3", "classify", f"{CLASSIFY} --deepspeed partitioned.json", "deepspeed"),
    Command("resume_python", "classify",
            f"{CLASSIFY} --resume_from_checkpoint runs/classify_torchrun/checkpoints/step_4"),
    Command("resume_torchrun", "classify",
            f"{CLASSIFY} --resume_from_checkpoint runs/classify_zero2/checkpoints/step_4", "torchrun"),
    Command("resume_fsdp", "classify",
            f"{CLASSIFY} --resume_from_checkpoint runs/classify/checkpoints/step_4", "accelerate fsdp.yaml"),
    Command("resume_zero3", "classify",
            f"{CLASSIFY} --resume_from_checkpoint runs/classify_fsdp/checkpoints/step_4 "
            "--deepspeed partitioned.json", "deepspeed"),
    Command("resume_longer", "classify", f"{CLASSIFY} --max_steps 8 --resume_from_checkpoint auto",
            first="classify"),
    Command("resume_finished", "classify", f"{CLASSIFY} --resume_from_checkpoint auto", first="classify"),
    Command("resume_other_seed", "classify", f"{CLASSIFY} --seed 1 --resume_from_checkpoint auto",
            first="classify"),
    Command("resume_other_batch", "classify",
            f"{CLASSIFY} --resume_from_checkpoint auto --global_batch_size 8",
            "torchrun", first="classify"),
    Command("existing_run", "classify", CLASSIFY, first="classify"),
    Command("overwritten", "classify", f"{CLASSIFY} --overwrite_output_dir", first="classify_report"),
    Command("stop_python", "classify", LONG, stop="SIGTERM"),
    Command("stop_torchrun", "classify", LONG, "torchrun", stop="SIGTERM"),
    Command("stop_interrupt", "classify", LONG, "accelerate cpu_ddp.yaml", stop="SIGINT"),
    Command("after_stop", "classify", f"{LONG} --resume_from_checkpoint auto", first="stop_torchrun"),
    Command("after_stop_torchrun", "classify", f"{LONG} --resume_from_checkpoint auto", "torchrun",
            first="stop_python"),
    Command("titles", "titlegen", BIGBIRD),
    Command("titles_bart", "titlegen", f"{TITLES} --config_name bart --rouge_tokenizer characters"),
    Command("titles_torchrun", "titlegen", f"{BIGBIRD} --label_smoothing_factor 0.1", "torchrun"),
    Command("titles_resume_zero3", "titlegen",
            f"{BIGBIRD} --label_smoothing_factor 0.1 --resume_from_checkpoint "
            "runs/titles_torchrun/checkpoints/step_4 --deepspeed partitioned.json", "deepspeed"),
    Command("images", "image_classify", IMAGES),
    Command("images_mnist", "image_classify",
            f"--do_train --do_eval {STEPS} --train_file mnist --validation_file mnist --global_batch_size 8"),
    Command("images_table", "image_classify",
            f"{IMAGES} --train_file more/images.csv --validation_split 0.2 --random_rotation 10"),
    Command("images_torchrun", "image_classify", f"{IMAGES} --ema_decay 0.5", "torchrun"),
    Command("images_resume", "image_classify",
            f"{IMAGES} --resume_from_checkpoint runs/images/checkpoints/step_4", "accelerate zero2.yaml"),
    Command("segment", "segment", SEGFORMER),
    Command("segment_deeplab", "segment", f"{MASKS} --config_name deeplab --per_device_train_batch_size 2"),
    Command("segment_table", "segment",
            f"{SEGFORMER} --train_file more/masks.csv --class_names ground,red,blue"),
    Command("segment_torchrun", "segment", SEGFORMER, "torchrun"),
    Command("segment_resume", "segment",
            f"{SEGFORMER} --resume_from_checkpoint runs/segment_torchrun/checkpoints/step_4"),
    Command("segment3d", "segment3d", VOLUMES),
    Command("segment3d_resume", "segment3d",
            f"{VOLUMES} --resume_from_checkpoint runs/segment3d/checkpoints/step_2", "torchrun"),
    Command("predict_text", "predict", "runs/classify/best --text 'a1 b2 c3' --text d4", output_dir=False),
    Command("predict_file", "predict",
            "runs/classify_lora/best text/unlabelled.csv --output runs/predict_file/out.csv",
            output_dir=False),
    Command("predict_torchrun", "predict", "runs/classify/best text/test.csv", "torchrun"),
    Command("predict_titles", "predict", "runs/titles/best titles/test.jsonl", output_dir=False),
    Command("predict_images", "predict", "runs/images/best images/valid", output_dir=False),
    Command("predict_masks", "predict", "runs/segment/best masks/valid"),
    Command("predict_volumes", "predict", "runs/segment3d/best volumes"),
    Command("predict_by_task", "classify",
            "--do_predict --model_name_or_path runs/classify/best --test_file text/unlabelled.csv"),
    Command("bad_arguments", "classify", f"{TEXT_FILES} {ALL_WRONG}"),
    Command("bad_arguments_torchrun", "titlegen", f"{TITLE_FILES} {ALL_WRONG}", "torchrun"),
    Command("bad_yaml", "classify", f"--config bad/wrong.yaml {TEXT_FILES}"),
    Command("bad_trainer_names", "titlegen", f"--config more/trainer.yaml {TITLE_FILES}"),
    *(Command(f"help_{script}", script, "--help all", output_dir=False)
      for script in ("classify", "titlegen", "image_classify", "segment", "segment3d", "predict", "serve")),
    Command("bad_file_missing", "classify",
            f"{BERT} --train_file nowhere.csv --validation_file text/vald.csv"),
    Command("bad_column", "classify", f"{CLASSIFY} --text_column txt --label_column label"),
    Command("bad_torn", "classify", f"{BERT} --train_file bad/torn.jsonl"),
    Command("bad_encoding", "classify", f"{BERT} --train_file bad/latin.csv"),
    Command("bad_empty", "classify", f"{BERT} --train_file bad/empty.csv"),
    Command("bad_labels", "classify", f"{CLASSIFY} --validation_file bad/unknown.csv", "torchrun"),
    Command("bad_ids", "classify", f"{CLASSIFY} --test_file bad/twice.csv"),
    Command("bad_flags", "classify", f"{BERT} --train_file bad/flags.csv --label_columns x,y"),
    Command("bad_folder", "classify", f"{CLASSIFY} --output_dir bad/file", output_dir=False),
    Command("bad_batch", "classify",
            f"{CLASSIFY} --per_device_train_batch_size 4 --gradient_accumulation_steps 3"),
    Command("bad_deepspeed", "classify", f"{CLASSIFY} --deepspeed bad/ds.json", "deepspeed"),
    Command("bad_checkpoint", "classify", f"{CLASSIFY} --resume_from_checkpoint text"),
    Command("bad_title_column", "titlegen", f"{BIGBIRD} --title_column headline"),
    Command("bad_images", "image_classify", f"{IMAGES} --train_file bad/photos"),
    Command("bad_masks", "segment", f"{SEGFORMER} --train_file bad/pairs"),
    Command("bad_volumes", "segment3d", f"{VOLUMES} --train_file bad/volumes.csv --strides 2,2"),
    Command("bad_predict", "predict", "text/bert titles/test.jsonl", output_dir=False),
]  # fmt: skip

# Regular expressions for "NAME: difference", and why such a difference is allowed.
ALLOWED = [
    (r"file - bootstrap_\w+\.npz", "intervals are computed by compare.py"),
    (r"number \S+ \S*_(low|high): \S+ -> missing", "intervals are computed by compare.py"),
    (r"\.reference\S*: missing -> ", "labelled rows have their truth"),
    (r"titles\S*: number \S+ \S*gen_len: ", "the length of titles has no special tokens (it was a fault)"),
    (
        r"^help_\w+: message - --(average_checkpoints|checkpoint_format|attention)$",
        "now a command, or removed",
    ),
    (r"^help_serve: message \+ --allowed_hosts$", "new: other sites' pages are refused"),
    (r"^bad_trainer_names: message . \S* ?\S*: auto_find_batch_size", "memory is tried at the start alone"),
    (
        r": file . (\S+/)?\.(files\.json|written\.json|predictions)$",
        "lists of a run's own files, one per folder",
    ),
    (r"^existing_run: message . error: .* already holds a run \(", "the names stand in another order"),
]
