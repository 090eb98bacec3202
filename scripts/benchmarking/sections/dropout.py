"""What dropout by row costs: our own step with it against our own step with torch's dropout."""

from benchmarking.context import Bench
from benchmarking.ratios import compare, speed_row
from benchmarking.report import CPU, Goal, Report, Section, table
from benchmarking.sections.titles import prepare

COST = "{}: a step with dropout by row against one with torch's dropout"
LEGEND = """The task's own script with `--dropout_by row`, and the same command with `--dropout_by torch`.
Both train on the same batches and take turns, a step each."""
NAMES = {"short": "short texts", "mixed": "texts of mixed length", "titles": "titles"}


def measure(bench: Bench) -> Report:
    size, rows, compared, goals = bench.size("dropout"), [], [], {}
    for texts, name in NAMES.items():
        if texts == "titles":
            length = size["title_tokens"]
            batch_size = max(1, bench.size("titles")["tokens_per_step"] // length)
            settings, model = prepare(
                bench, {"max_steps": size["max_steps"], "train": [(length, batch_size)]}
            )
            settings |= {"length": length}
        else:
            settings = {name: bench.size(texts)[name] for name in ("batch_size", "max_length")}
            batch_size = settings["batch_size"]
            settings |= {
                "rows": batch_size * size["max_steps"],
                "eval_rows": batch_size,
                "learning_rate": 5e-5,
            }
            settings["train_file"] = bench.rows(texts, settings["rows"] + batch_size)
            settings, model = bench.with_classifier(settings | {"max_steps": size["max_steps"]})
        settings |= {"batch_size": batch_size, "warm_up": size["warm_up"]}
        module = "titles" if texts == "titles" else "classification"
        jobs = [(f"{module}.ours", {"choice": {"dropout_by": by}}) for by in ("row", "torch")]
        runs = bench.run(jobs, settings)
        for by, run in zip(("row", "torch"), runs, strict=True):
            rows.append(
                {
                    "texts": name,
                    "dropout by": by,
                    "model": model,
                    **speed_row(run, batch_size * bench.per_turn),
                }
            )
        compared.append({"texts": name, **compare(*runs)})
        goals[COST.format(name)] = 100 * (1 / compared[-1]["speed (quartiles)"]["median"] - 1), None
    return {
        "data": ", ".join(bench.source(texts).name for texts in NAMES),
        "model": "dropout 0.1; see the table",
        "about": f"{size['max_steps']} steps, the first {size['warm_up']} not counted",
        "tables": [
            table("Training", rows),
            table("Dropout by row against torch's", compared),
        ],
        "goals": goals,
    }


GOALS = tuple(Goal(COST.format(name), CPU, 3, is_minimum=False, unit=" %") for name in NAMES.values())
SECTION = Section("dropout", "Dropout by row", LEGEND, measure, GOALS)
