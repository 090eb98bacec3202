"""app/serve.py under load."""

from benchmarking.context import Bench
from benchmarking.report import Report, Section, table

LABELS = 20
LEGEND = """One classifier behind HTTP. `ours` is app/serve.py; `pipeline` is transformers' pipeline behind
the same HTTP library, one text at a time. Each client sends its next request after the answer; server and
clients share the machine."""


def measure(bench: Bench) -> Report:
    size = bench.size("serving")
    settings, model = bench.with_classifier(size | {"train_file": bench.rows("short", size["rows"])})
    settings |= {"classifier": str(bench.folder / "head"), "labels": LABELS}
    bench.run([("prediction.model", {})], settings)
    settings["model"] = settings["classifier"]
    rows = [
        {"": name, **load}
        for name in ("ours", *bench.others("serving", ("pipeline",)))
        for load in bench.run([(f"serving.{name}", {})], settings)[0]["loads"]
    ]
    return {
        "data": bench.source("short").name,
        "model": model,
        "about": f"{size['rows']} texts",
        "tables": [table("Load", rows)],
        "goals": {},
    }


SECTION = Section("serving", "Serving", LEGEND, measure, needs={"aiohttp": "requirements-serve.txt"})
