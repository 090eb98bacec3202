"""Makes sample data without a download: texts from the docstrings of the libraries in requirements.txt, or
drawn images.

    python scripts/make_sample_data.py [--output_dir sample_data] [--packages numpy scipy ...] [--force]
    python scripts/make_sample_data.py titles [--output_dir sample_titles]     descriptions of parameters
    python scripts/make_sample_data.py names [--output_dir sample_names]       short news with tagged names
    python scripts/make_sample_data.py images [--output_dir sample_images]     digits (sampling/digits.py)
    python scripts/make_sample_data.py masks [--output_dir sample_masks]       shapes with masks
    python scripts/make_sample_data.py volumes [--output_dir sample_volumes]   balls in NIfTI volumes

The first command writes train.jsonl, validation.jsonl and test.jsonl (about 80/10/10), labels.txt (the label
order) and sample_data.json (versions, counts, checksums). One row per documented object:

    {"id": "numpy.linalg.qr", "title": the summary line, "text": the body without it,
     "labels": ["has:examples", ...]}

Labels: `library:` of the object, `topic:` (from the module path), `kind:` of object, `has:` sections of the
docstring. Removed from the text, because they reveal labels: headings, signatures, types, code, reference
lists and names of libraries (`[library]`). The sources are parsed, not imported, and a hash of the text
decides the split, so the same versions yield the same bytes. A second run reuses the files.

`titles` writes the same files except labels.txt. A row is {"id", "title", "text"}: the text describes a
parameter, the title is its name in words, "max iter". Rows of a module are in the same split (about 90/5/5),
and no two texts share half of their phrases. Most titles of test rows also occur in training, because many
functions have parameters of the same name.
"""

import argparse
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sampling import docstrings
from sampling.digits import draw_digits
from sampling.docstrings import NAME_PART, described_parameters, documented, is_prose, title_and_text
from sampling.names import write_names
from sampling.shapes import draw_shapes

PACKAGES = [
    *("numpy", "scipy", "pandas", "sklearn", "torch", "transformers", "accelerate", "datasets", "evaluate"),
    *("huggingface_hub", "tokenizers", "nltk", "networkx", "sympy", "deepspeed"),
]
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # import name -> other name on PyPI
SOURCES = (Path(__file__), Path(docstrings.__file__))
SPLITS = ("train", "validation", "test")
ROWS = tuple(f"{split}.jsonl" for split in SPLITS)
MIN_CHARACTERS = 300  # of a docstring's body
MIN_DESCRIBED_CHARACTERS, MAX_DESCRIBED_CHARACTERS = 60, 600  # of a parameter's description
MIN_LABEL_ROWS = 40  # training rows; rarer labels cannot be learnt and are dropped

LABELLED = ("parameters", "returns", "raises", "examples", "references", "notes")
# Topic -> pattern for an object's dotted path in lower case. An object has all matching topics.
TOPICS = {
    "audio": r"audio|speech|whisper|wav2vec|spectr",
    "clustering": r"cluster|neighbors|manifold|mixture",
    "compilers": r"_dynamo|_inductor|torch\.fx|export|onnx|torch\.jit|codegen|f2py|functorch|_higher_order",
    "data frames": r"pandas\.core\.(frame|series|generic|groupby|"
    r"reshape|indexing|strings|window|methods|apply)|arrow",
    "dates and times": r"tseries|datetime|timedelta|timestamp|(?<!a)period(?!ic)|tslibs|resample",
    "distributed computing": r"distributed|deepspeed|accelerate|parallel|fsdp|tensor_parallel|rpc",
    "files and formats": r"\.io\b|npyio|parquet|json|csv|"
    r"serializ|packaged_modules|download|filesystem|upload",
    "geometry and physics": r"sympy\.(geometry|physics|vector|diffgeom)|spatial|constants",
    "graphs": r"networkx|graph",
    "images": r"image|vision|video|pixel|ndimage|detection|segment",
    "integration and equations": r"integrat(?!ions)|\bode|solvers|fsolve|pde|quadrature",
    "language": r"nltk|tokeniz|feature_extraction\.text|generation|translation|chat",
    "linear algebra": r"linalg|matri|decomposition|lapack|blas|cross_decomposition",
    "metrics": r"metric|scorer|distance|score",
    "neural networks": r"torch\.nn|\.modeling_|modular_|neural_network|activations|layers?\b",
    "number theory and algebra": r"ntheory|combinatorics|polys|polynomial|"
    r"crypto|liealgebras|sympy\.(sets|logic)",
    "optimization": r"optim|linear_model|lr_scheduler|zero\b",
    "plotting": r"plot|visual|_display|formats\.style|inspection|drawing",
    "quantization": r"quanti|bitsandbytes|\.ao\.|awq|gptq",
    "random numbers": r"random|distributions|sampler|bootstrap",
    "signals": r"signal|fft|filter|wavelet|convol",
    "special functions": r"special|functions\.elementary|sympy\.functions",
    "statistics": r"scipy\.stats|sympy\.stats|probability|covariance|naive_bayes|gaussian_process|statist",
    "supervised learning": r"ensemble|\.svm|\.tree|linear_model|neighbors|"
    r"discriminant|model_selection|naive_bayes",
}


def package_rows(root: Path) -> Iterator[dict]:
    """Yields the rows (id, title, text, labels) of a package folder, with duplicates."""
    for _, name, kind, doc in documented(root, MIN_CHARACTERS):
        title, text, sections = title_and_text(doc)
        if not title or len(text) < MIN_CHARACTERS or not is_prose(text):
            continue
        topics = [f"topic:{topic}" for topic, pattern in TOPICS.items() if re.search(pattern, name.lower())]
        has = [f"has:{section}" for section in LABELLED if section in sections]
        labels = [*has, f"kind:{kind}", f"library:{root.name}", *topics]
        yield {"id": name, "title": title, "text": text, "labels": labels}


def title_rows(root: Path) -> Iterator[dict]:
    """Yields the rows (id, module, title, text) of a package folder, with duplicates."""
    for module, name, _, doc in documented(root, MIN_DESCRIBED_CHARACTERS):
        for parameter, text in dict(described_parameters(doc)).items():
            title, text = " ".join(NAME_PART.findall(parameter)).lower(), text.lstrip(" ,;:.-")
            usable = (
                len(title) > 2
                and parameter not in ("args", "kwargs")
                and text[:1].isalpha()
                and is_prose(text)
            )
            if usable and MIN_DESCRIBED_CHARACTERS <= len(text) <= MAX_DESCRIBED_CHARACTERS:
                yield {"id": f"{name}.{parameter}", "module": module, "title": title, "text": text}


def without_duplicates(rows: Iterable[dict]) -> list[dict]:
    """Keeps the first of all rows with the same id, the same text, or texts that share half of their phrases.

    A phrase is a run of five words. The 64 smallest CRC-32 values of a text's phrases are a bottom-k sketch,
    whose overlap with another sketch estimates the Jaccard similarity of the phrase sets. The 8 smallest
    values find candidates.
    """
    kept, seen, sketches, buckets = [], set(), [], defaultdict(list)
    for row in rows:
        words = normalised(row["text"]).split()
        keys = {row["id"], " ".join(words), normalised(row["title"] + " " + row["text"][:200])}
        if seen & keys:
            continue
        phrases = {
            zlib.crc32(" ".join(words[start : start + 5]).encode()) for start in range(max(len(words) - 4, 1))
        }
        sketch = sorted(phrases)[:64]
        candidates = {index for value in sketch[:8] for index in buckets[value]}
        if any(similarity(sketch, sketches[index]) >= 0.5 for index in candidates):
            continue
        for value in sketch[:8]:
            buckets[value].append(len(kept))
        seen |= keys
        kept.append(row)
        sketches.append(frozenset(sketch))
    return kept


def similarity(sketch: list[int], other: frozenset[int]) -> float:
    """Estimated Jaccard similarity of two phrase sets from their bottom-k sketches."""
    smallest = sorted(other.union(sketch))[:64]
    return len(other.intersection(sketch).intersection(smallest)) / len(smallest)


def normalised(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def split_rows(
    rows: Iterable[dict], min_label_rows: int = MIN_LABEL_ROWS
) -> tuple[dict[str, list[dict]], list[str]]:
    """Splits and sorts rows by the MD5 of their normalised text, and drops labels that are rare in
    training."""
    hashed = sorted(
        (hashlib.md5(normalised(row["text"]).encode()).hexdigest(), row["id"], row) for row in rows
    )
    splits: dict[str, list[dict]] = {name: [] for name in SPLITS}
    for digest, _, row in hashed:
        share = int(digest[:8], 16) % 10
        splits[SPLITS[max(share - 7, 0)]].append(row)
    counts = Counter(label for row in splits["train"] for label in row["labels"])
    labels = sorted(label for label, count in counts.items() if count >= min_label_rows)
    for row in chain(*splits.values()):
        row["labels"] = [label for label in row["labels"] if label in labels]
    return splits, labels


def split_titles(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """Splits rows by the MD5 of their module and sorts them by the MD5 of their text."""
    hashed = sorted(
        (hashlib.md5(normalised(row["text"]).encode()).hexdigest(), row["id"], row) for row in rows
    )
    splits: dict[str, list[dict]] = {name: [] for name in SPLITS}
    for _, _, row in hashed:
        share = int(hashlib.md5(row.pop("module").encode()).hexdigest()[:8], 16) % 20
        splits[SPLITS[max(share - 17, 0)]].append(row)
    return splits


def installed(packages: Iterable[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """(folders, versions) of the installed packages; version "" if unknown."""
    roots, versions = {}, {}
    for package in packages:
        spec = (
            importlib.util.find_spec(package) if package.isidentifier() else None
        )  # does not import a top-level package
        if spec is None or not spec.submodule_search_locations:
            print(f"{package}: not installed, left out")
            continue
        roots[package] = Path(next(iter(spec.submodule_search_locations)))
        try:
            versions[package] = importlib.metadata.version(DISTRIBUTIONS.get(package, package))
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return roots, versions


def file_digests(folder: Path) -> dict[str, str]:
    names = (*ROWS, "labels.txt")
    return {
        name: hashlib.md5((folder / name).read_bytes()).hexdigest()
        for name in names
        if (folder / name).is_file()
    }


def reusable(folder: Path, origin: dict) -> dict | None:
    """The content of sample_data.json if origin and checksums match, else None."""
    try:
        manifest = json.loads((folder / "sample_data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = manifest.get("origin") == origin and manifest.get("files") == file_digests(folder)
    return manifest if same and all(origin["versions"].values()) else None


def claim(folder: Path) -> None:
    """Deletes the script's earlier files and empties sample_data.json until the new files are complete.

    Raises `FileExistsError` if the folder has files of these names from elsewhere.
    """
    existing = file_digests(folder)
    if existing and not (folder / "sample_data.json").exists():
        raise FileExistsError(f"it holds {', '.join(existing)} from elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sample_data.json").write_text("{}\n", encoding="utf-8")
    for name in existing:
        (folder / name).unlink()


def write_corpus(folder: Path, splits: dict[str, list[dict]], labels: list[str], origin: dict) -> dict:
    """Writes the splits, labels.txt if there are labels and, last, sample_data.json. Returns its content."""
    lines = {
        f"{split}.jsonl": [json.dumps(row, ensure_ascii=False) for row in rows]
        for split, rows in splits.items()
    }
    for name, content in (lines | ({"labels.txt": labels} if labels else {})).items():
        (folder / name).write_text("".join(f"{line}\n" for line in content), encoding="utf-8", newline="\n")
    manifest = {"origin": origin, **counts(splits, labels), "files": file_digests(folder)}
    (folder / "sample_data.json.part").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    os.replace(folder / "sample_data.json.part", folder / "sample_data.json")
    return manifest


def counts(splits: dict[str, list[dict]], labels: list[str]) -> dict:
    """Rows per split, rows per label over all splits, and quantiles of the words per text."""
    rows = list(chain(*splits.values()))
    frequency = Counter(label for row in rows for label in row.get("labels", ()))
    words = sorted(len(row["text"].split()) for row in rows)
    ranks = {"min": 0, "median": len(words) // 2, "p95": len(words) * 95 // 100, "max": -1}
    return {
        "rows": {split: len(rows) for split, rows in splits.items()},
        "labels": {label: frequency[label] for label in labels},
        "words": {name: words[rank] for name, rank in ranks.items()}
        | {"rows_over_700": sum(count > 700 for count in words)},
    }


def print_summary(folder: Path, manifest: dict) -> None:
    print(f"{folder}: " + ", ".join(f"{split} {count} rows" for split, count in manifest["rows"].items()))
    print("words in a text: " + ", ".join(f"{name} {value}" for name, value in manifest["words"].items()))
    if labels := manifest["labels"]:
        print(f"{len(labels)} labels: " + ", ".join(f"{label} {count}" for label, count in labels.items()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("texts", "titles", "names", "images", "masks", "volumes"),
        default="texts",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--output_dir", type=lambda p: Path(p).expanduser(), help="default: sample_data or sample_WHAT"
    )
    parser.add_argument(
        "--packages", nargs="+", default=PACKAGES, help="import names (default: those of requirements.txt)"
    )
    parser.add_argument(
        "--min_label_rows", type=int, default=MIN_LABEL_ROWS, help="drop labels with fewer training rows"
    )
    parser.add_argument("--force", action="store_true", help="build again, even from the same versions")
    args = parser.parse_args()
    if args.output_dir is None:
        args.output_dir = Path("sample_data" if args.what == "texts" else f"sample_{args.what}")
    return make_texts(parser, args) if args.what in ("texts", "titles") else make_images(parser, args)


def make_images(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        if args.what == "names":
            rows = write_names(args.output_dir)
        elif args.what == "volumes":
            from sampling.volumes import write_volumes  # imports nibabel, which is optional

            rows = write_volumes(args.output_dir)
        else:
            rows = (draw_digits if args.what == "images" else draw_shapes)(args.output_dir, args.force)
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: pip install -r requirements-vision.txt")
    except OSError as error:
        parser.error(f"cannot write to --output_dir {args.output_dir} ({error}); choose another folder")
    print(f"{args.output_dir}: " + ", ".join(f"{split} {count} rows" for split, count in rows.items()))
    return 0


def make_texts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in other people's strings
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.disable()  # parsing creates millions of objects without cycles: saves an eighth of the time
    roots, versions = installed(args.packages)
    if not roots:
        parser.error("none of the packages is installed; run: pip install -r requirements.txt")
    origin = {
        "what": args.what,
        "versions": versions,
        "python": ".".join(map(str, sys.version_info[:2])),
        "script": hashlib.md5(b"".join(map(Path.read_bytes, SOURCES))).hexdigest(),
        "min_label_rows": args.min_label_rows,
    }
    manifest = None if args.force else reusable(args.output_dir, origin)
    if manifest is None:
        try:
            claim(args.output_dir)
            read = package_rows if args.what == "texts" else title_rows
            rows = without_duplicates(chain.from_iterable(read(root) for root in roots.values()))
            if not rows:
                parser.error(f"found no long docstring in {', '.join(roots)}; name other --packages")
            splits, labels = (
                split_rows(rows, args.min_label_rows) if args.what == "texts" else (split_titles(rows), [])
            )
            manifest = write_corpus(args.output_dir, splits, labels, origin)
        except OSError as error:
            parser.error(f"cannot write to --output_dir {args.output_dir} ({error}); choose another folder")
    else:
        print("made before from the same versions, nothing to do (--force builds it again)")
    print_summary(args.output_dir, manifest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
