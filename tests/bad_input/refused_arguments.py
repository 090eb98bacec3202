"""Arguments, run configurations (YAML) and DeepSpeed files (JSON) that must be rejected."""

import json

from catalogue_case import Case

ZERO = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}


def argument(what: str, *said: str, task: str | None = "classify", **changed: object) -> Case:
    return Case(what, list(said), task, changed)


def in_yaml(what: str, content: str | bytes, *said: str) -> Case:
    return Case(f"run.yaml {what}", list(said), "classify", {"config": "run.yaml"}, {"run.yaml": content})


def in_zero(what: str, *said: str, raw: str | None = None, **sections: object) -> Case:
    """`raw`: the content of the file, in place of `sections`."""
    content = json.dumps(ZERO | sections) if raw is None else raw
    return Case(f"ds.json {what}", list(said), "classify", {"deepspeed": "ds.json"}, {"ds.json": content})


COMMAND_LINE = [
    argument("with a dash", r"unknown argument --trian-file; did you mean --train_file\?",
             **{"trian-file": "x"}),
    argument("negative, with an exponent", r"--learning_rate: '-1e-3' is not a number above 0",
             learning_rate="-1e-3"),
    argument("value without a name", r"--vocab_size: expected one value, found 2: 128 train\.csv",
             **{"": "train.csv"}),
    argument("tracker misspelt", r"--report_to: 'tensorbord' is not one of .*did you mean tensorboard",
             report_to="tensorbord"),
    argument("none beside a tracker", r"--report_to none excludes other trackers",
             report_to="none,tensorboard"),
    argument("split to train on by name",
             r"--dataset_split: a dataset has no train; give the split to train on without a name",
             r"--dataset_split: a dataset has no eval; it has validation, test",
             train_file=None, dataset_name="some/data", dataset_split="train=a,eval=b"),
    argument("config missing", r"run\.yaml: cannot be read \(No such file", config="run.yaml"),
]  # fmt: skip

CONTRADICTIONS = [
    argument("setting of windows out of range", r"--long_documents: max: '0' is not a whole number at",
             long_documents="windows:max=0"),
    argument("way with a setting misspelt",
             r"--long_documents: 'windos' is not one of .*; did you mean windows\?",
             long_documents="windos:stride=3"),
    argument("limit of weights below 1", r"--pos_weight: '0' is not a number at least 1",
             pos_weight="balanced:0"),
    argument("warm-up longer than the run", r"--warmup_steps 9 is longer than the run \(2 optimizer steps\)",
             task=None, warmup_steps=9),
    argument("what needs evaluations", r"--early_stopping_patience needs evaluations; --do_eval is false",
             r"--metric_for_best_model needs evaluations", early_stopping_patience=2,
             metric_for_best_model="loss", do_train="true", do_eval="false"),
    argument("nothing to do", r"nothing to do: --do_train is false", task=None, do_train="false",
             from_scratch=None, tokenizer_type=None),
    argument("random weights to predict with", r"--from_scratch is for training", task=None,
             do_predict="true", test_file="valid.csv"),
    argument("new vocabulary to predict with", r"--tokenizer_type train is for training",
             do_predict="true", from_scratch=None, test_file="valid.csv",
             model_name_or_path="models/classifier"),
    argument("new vocabulary for trained weights",
             r"--tokenizer_type train does not fit pretrained weights",
             task=None, from_scratch=None, model_name_or_path="models/classifier"),
    argument("upload without a token", r"--push_to_hub: no token; log in first", push_to_hub="true"),
    argument("length beyond the model's", r"--max_length 99 is more than the model can read \(32 tokens\)",
             task=None, max_length=99),
]  # fmt: skip

YAML = [
    in_yaml("key misspelt", "learning_rat: 1\n",
            r"run\.yaml: unknown key learning_rat; did you mean learning_rate"),
    in_yaml("empty", "", r"run\.yaml: expected `name: value` lines, found nothing"),
    in_yaml("tab", "seed: 1\n\tmax_steps: 2\n", r"run\.yaml:2: not valid YAML: found character '\\t'"),
    in_yaml("key twice", "seed: 1\nseed: 2\n", r"run\.yaml:2: .*'seed' appears twice"),
    in_yaml("UTF-16", "seed: 1\n".encode("utf-16"), r"run\.yaml: not UTF-8 at byte 0; save it as UTF-8"),
    in_yaml("command", "seed: !!python/object/apply:os.system ['touch harmed']\n",
            r"run\.yaml: seed: 'touch harmed' is not a whole number"),
    in_yaml("section", "optimization:\n  seed: 1\n",
            r"run\.yaml: optimization is a section; write arguments without sections"),
    in_yaml("empty list", "report_to: []\n", r"run\.yaml: report_to: an empty list; write none, or leave"),
    in_yaml("time for a number", "max_steps: 1:30\n", r"run\.yaml: max_steps: '1:30' is not a whole number"),
    in_yaml("nothing for a number", "seed:\n", r"run\.yaml: seed: has no value, expected a whole number"),
    in_yaml("nested too deeply", "seed: " + "[" * 1000, r"run\.yaml: not valid YAML: nested too deeply"),
    in_yaml("contradiction", "warmup_steps: 1\nwarmup_ratio: 0.5\n",
            r"run\.yaml: warmup_steps and run\.yaml: warmup_ratio both set --warmup_steps"),
    in_yaml("nested aliases",
            "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a,
                                       b in zip("abcdefghij", "bcdefghijk", strict=True)),
            r"^11 errors:", r"unknown key k"),
]  # fmt: skip

DEEPSPEED = [
    Case("ds.json missing",
         [r"DeepSpeed file ds\.json does not exist \(the shipped ones are in ds_configs/\)"],
         arguments={"deepspeed": "ds.json"}),
    Case("ds.json a folder", [r"DeepSpeed file run is a folder"], "classify", {"deepspeed": "run"}),
    in_zero("no JSON", r"ds\.json:2: broken JSON", raw="{\noops}"),
    in_zero("stage 0", r"ds\.json: zero_optimization\.stage must be 1, 2 or 3",
            zero_optimization={"stage": 0}),
    in_zero("stage true", r"zero_optimization\.stage must be 1, 2 or 3", zero_optimization={"stage": True}),
    in_zero("section that is none", r"ds\.json: fp16 must be an object, found True", fp16=True),
    in_zero("precision that is none", r'ds\.json: bf16\.enabled must be true, false or "auto", found \'yes\'',
            bf16={"enabled": "yes"}),
    in_zero("other batch", r"ds\.json: train_batch_size is 99 but --global_batch_size is 2",
            train_batch_size=99),
    in_zero("two precisions", r"fp16 and bf16 are both enabled", fp16={"enabled": True},
            bf16={"enabled": True}),
    in_zero("auto that nothing fills in", r'ds\.json: steps_per_print is "auto"', steps_per_print="auto"),
    in_zero("unknown key of ZeRO", r"ds\.json: DeepSpeed refuses it: .*overlap_com Extra inputs are not",
            zero_optimization={"stage": 2, "overlap_com": True}),
    in_zero("weights that DeepSpeed mistakes", r"ds\.json: remove zero_optimization\.round_robin_gradients",
            zero_optimization={"stage": 2, "round_robin_gradients": True}),
    in_zero("no gradient norm", r"ds\.json: remove zero_optimization\.compute_grad_norm",
            zero_optimization={"stage": 2, "compute_grad_norm": False}),
    in_zero("section that DeepSpeed gave up", r"ds\.json: DeepSpeed refuses it: .*[Ee]lasticity",
            elasticity={"enabled": True}),
]  # fmt: skip

CASES = [*COMMAND_LINE, *CONTRADICTIONS, *YAML, *DEEPSPEED]
