"""Build sample data without a download: a corpus of real text from the docstrings of the libraries that requirements.txt
installs anyway, or pictures.

    python scripts/make_sample_data.py [--output_dir sample_data] [--packages numpy scipy ...] [--force]
    python scripts/make_sample_data.py titles [--output_dir sample_titles]   more and shorter docstrings, for titles
    python scripts/make_sample_data.py images [--output_dir sample_images] [--force]
    python scripts/make_sample_data.py masks [--output_dir sample_masks] [--force]   shapes with masks (sampling/shapes.py)
    python scripts/make_sample_data.py volumes [--output_dir sample_volumes]      spheres in NIfTI volumes (drawing/volumes.py)

The third writes digits drawn with a font, a folder per class: train/0/00000.png and so on (sampling/digits.py). The first
writes train.jsonl, validation.jsonl and test.jsonl (about 80/10/10), labels.txt (the label order) and sample_data.json
(versions, counts, checksums). One row per documented object:

    {"id": "numpy.linalg.qr", "title": the summary line, "text": the body without it, "labels": ["has:examples", ...]}

Labels are of four kinds: `library:` where it comes from, `topic:` what it is about (by its module path), `kind:` of
object and `has:` the sections it has. What would give them away is taken out of the text: headings, signatures, types,
code, reference lists and the libraries' names (`[library]`). Nothing is imported, downloaded or drawn at random: the
sources are parsed and the split is a hash of the text, so the same versions give the same bytes. A second run reuses
them.

`titles` writes the same files but labels.txt. A row is {"id", "title", "text"}: a text begins with the object's name in words,
"get feature names out", as its page in a manual does; a title is a summary of plain words, and no two rows have the same. A
module's rows stay together (about 90/5/5), and a title of the validation or test rows differs from every training title by
more than one word.
"""

import argparse
import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
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

from sampling.digits import draw_digits
from sampling.shapes import draw_shapes

PACKAGES = [
    *("numpy", "scipy", "pandas", "sklearn", "torch", "transformers", "accelerate", "datasets", "evaluate"),
    *("huggingface_hub", "tokenizers", "nltk", "networkx", "sympy", "deepspeed"),
]
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # where the name to install is not the name to import
SPLITS = ("train", "validation", "test")
ROWS = tuple(f"{split}.jsonl" for split in SPLITS)
MIN_CHARACTERS = 300  # of a body; shorter ones are hardly texts
MIN_TITLED_CHARACTERS = 100  # the same where titles are wanted: names and titles say much, and more rows teach more
MAX_TITLE_WORDS = 14
MIN_LABEL_ROWS = 40  # training rows below which a label is dropped: nothing could be learnt from fewer
SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "_vendored", "vendored", "externals", "third_party"}

# Searched in the dotted path of an object, in lower case; an object has every topic that matches.
TOPICS = {
    "audio": r"audio|speech|whisper|wav2vec|spectr",
    "clustering": r"cluster|neighbors|manifold|mixture",
    "compilers": r"_dynamo|_inductor|torch\.fx|export|onnx|torch\.jit|codegen|f2py|functorch|_higher_order",
    "data frames": r"pandas\.core\.(frame|series|generic|groupby|reshape|indexing|strings|window|methods|apply)|arrow",
    "dates and times": r"tseries|datetime|timedelta|timestamp|(?<!a)period(?!ic)|tslibs|resample",
    "distributed computing": r"distributed|deepspeed|accelerate|parallel|fsdp|tensor_parallel|rpc",
    "files and formats": r"\.io\b|npyio|parquet|json|csv|serializ|packaged_modules|download|filesystem|upload",
    "geometry and physics": r"sympy\.(geometry|physics|vector|diffgeom)|spatial|constants",
    "graphs": r"networkx|graph",
    "images": r"image|vision|video|pixel|ndimage|detection|segment",
    "integration and equations": r"integrat(?!ions)|\bode|solvers|fsolve|pde|quadrature",
    "language": r"nltk|tokeniz|feature_extraction\.text|generation|translation|chat",
    "linear algebra": r"linalg|matri|decomposition|lapack|blas|cross_decomposition",
    "metrics": r"metric|scorer|distance|score",
    "neural networks": r"torch\.nn|\.modeling_|modular_|neural_network|activations|layers?\b",
    "number theory and algebra": r"ntheory|combinatorics|polys|polynomial|crypto|liealgebras|sympy\.(sets|logic)",
    "optimization": r"optim|linear_model|lr_scheduler|zero\b",
    "plotting": r"plot|visual|_display|formats\.style|inspection|drawing",
    "quantization": r"quanti|bitsandbytes|\.ao\.|awq|gptq",
    "random numbers": r"random|distributions|sampler|bootstrap",
    "signals": r"signal|fft|filter|wavelet|convol",
    "special functions": r"special|functions\.elementary|sympy\.functions",
    "statistics": r"scipy\.stats|sympy\.stats|probability|covariance|naive_bayes|gaussian_process|statist",
    "supervised learning": r"ensemble|\.svm|\.tree|linear_model|neighbors|discriminant|model_selection|naive_bayes",
}

SECTIONS = {
    "parameters": "args|arg|arguments|parameter|parameters|other parameters|param|keyword|keyword args|input|inputs",
    "returns": "returns|return|yields|yield|output|outputs|rtype",
    "raises": "raises|raise|throws|warns",
    "examples": "example|examples|usage|usage example|usage examples",
    "references": "references|reference|bibliography",
    "notes": "note|notes|important|tip|warning|warnings|caution",
    "attributes": "attributes|properties|class attributes|fields|type|var|ivar|cvar|vartype",
    "lists": "see also|seealso|methods",
    "other": "shape",
}
HEADINGS = {alias: section for section, aliases in SECTIONS.items() for alias in aliases.split("|")}
LABELLED = ("parameters", "returns", "raises", "examples", "references", "notes")
ENTRIES = {"parameters", "returns", "raises", "attributes"}  # sections of `name : type` items with a description below

UNDERLINE = re.compile(r"\s*([-=~^])\1{2,}\s*$")
COLON_HEADING = re.compile(r"\s*\**(\w[\w ]*?)\**:{1,2}\**\s*$")
FIELD = re.compile(r"\s*[:@](param|parameter|arg|keyword|raises?|returns?|(?:var|r)?type|[ic]?var)\b([^:]*):\s*")
ENTRY = re.compile(r"\s*[-*]?\s*[`*\[]*[\w.*]+[`\]]*(,\s*[`*]*\w+`*)*\s*(\(.*\))?\s*(:|--)(\s|$)")
SIGNATURE = re.compile(r"[\w.]+\(.*?\)\s*(->.*)?$")
PLAIN_TITLE = re.compile(r"[A-Z][A-Za-z0-9 ,'()/-]*")
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of get_HTMLName2: get, HTML, Name, 2
SENTENCE_END = re.compile(r"(?<=[a-z0-9)`'\]][.!?])\s+(?=[A-Z`*\"'])")
KEPT_DIRECTIVE = re.compile(r"\s*\.\. (note|warning|important|tip|caution|attention|hint|admonition)::")
LIBRARY = "numpy|scipy|pandas|scikit-learn|sklearn|pytorch|torch|nltk|networkx|sympy|deepspeed|hugging ?face"
MODULE = "numpy|scipy|pandas|sklearn|torch|nltk|networkx|sympy|deepspeed|transformers|accelerate|datasets|evaluate"
MARKUP = [  # in this order, over whole texts: none crosses a line
    (re.compile(r"(?::[\w:+-]+)?:[\w+-]+:`[~!]?([^`\n<]*)[^`\n]*`"), r"\1"),  # :role:`words <target>`
    (re.compile(r"\[([^\]\n]*)\]\([^)\n]*\)"), r"\1"),  # [words](address)
    (re.compile(r"`([^`<\n]*?)\s*<[^`>\n]*>`_+"), r"\1"),  # `words <address>`_
    (re.compile(r"https?://[^\s)]+|\[[\w#]+\]_+|</?\w+[^>\n]*>|🤗|%\(\w+\)s|::?(?=\n|$)|^#+ ", re.MULTILINE), ""),
    (re.compile(r"\[?`+~?([^`\n]*?)`+\]?_*"), r"\1"),
    (re.compile(r"(?<!\w)\*{1,2}([^*\s][^*\n]*)\*{1,2}(?!\w)"), r"\1"),
    (re.compile(r"\(?\bsee (?:the )?(?:notes|references|examples)\b[^.)\n]{0,20}\)?", re.IGNORECASE), ""),
    (re.compile(rf"\b(?:{MODULE}|tokenizers|huggingface_hub|np|pd|nx|sp|tf|jax|nn)\.(?:[a-z_]\w*\.)*(?=\w)"), ""),
]
LIBRARY_NAME = re.compile(rf"\b(?:{LIBRARY})\b(?!-)", re.IGNORECASE)


def module_sources(root: Path, shortest: int) -> Iterator[tuple[str, ast.Module]]:
    """Yield (dotted module name, parsed source) for a package folder, in a fixed order, without tests and copies.

    `shortest`: characters of a string below which a module is left out.
    """
    for path in sorted(chain(root.rglob("*.py"), root.rglob("*.pyi"))):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith("test_") for part in parts):
            continue
        source = path.read_bytes()
        longest = max(map(len, source.split(b'"""')[1::2]), default=0)  # parsing is what takes long: only where it pays
        if longest < shortest and b"'''" not in source:
            continue
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and files for other Python versions
            continue
        yield ".".join(parts).removesuffix(".__init__"), tree


def docstrings(module: str, tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, kind, docstring) of a module's objects, `add_newdoc` and `add_docstr` calls included."""

    def visit(node: ast.AST, name: str, kind: str) -> Iterator[tuple[str, str, str]]:
        if doc := ast.get_docstring(node):
            yield name, kind, doc
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{name}.{child.name}", "class")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, f"{name}.{child.name}", "method" if kind == "class" else "function")
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                yield from added_docstring(module, child.value)

    yield from visit(tree, module, "module")


def added_docstring(module: str, call: ast.Call) -> Iterator[tuple[str, str, str]]:
    """The docstring that a call such as `add_newdoc("numpy", "ndarray", ("sort", "..."))` gives a compiled object."""
    function = ast.unparse(call.func).rpartition(".")[2]
    if not function.startswith(("add_newdoc", "add_docstr")) or len(call.args) < 2:
        return
    *target, doc = call.args
    method = isinstance(doc, ast.Tuple) or function == "add_docstr_all"
    if isinstance(doc, ast.Tuple) and len(doc.elts) == 2:
        target, doc = [*target, doc.elts[0]], doc.elts[1]
    if text := literal_text(doc):
        path = ".".join(part.value if isinstance(part, ast.Constant) else ast.unparse(part) for part in target)
        name = path if path.startswith(module.partition(".")[0]) else f"{module}.{path}"
        yield name, "method" if method else "function", inspect.cleandoc(text)


def literal_text(node: ast.expr) -> str:
    """The string that literals, `+` and `.format()` spell, without its `{fields}`; "" for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal_text(node.left) + literal_text(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{\w*\}", "", literal_text(node.func.value))
    return ""


def without_code(lines: Iterable[str]) -> Iterator[str]:
    """Drop fenced and literal blocks, doctests, and every directive with its block, except notes and warnings."""
    fence, doctest, block = False, False, -1  # block: the indentation that ends the dropped block, -1 outside one
    for line in lines:
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        kept = False
        if stripped.startswith("```"):
            fence = not fence
        elif not fence and (block < 0 or (stripped and indent <= block)):
            note = KEPT_DIRECTIVE.match(line)
            directive = stripped.startswith(".. ") and not note
            doctest = stripped.startswith((">>>", "... ")) or (doctest and stripped != "")
            block = indent if not doctest and not note and (directive or stripped.endswith("::")) else -1
            kept = not doctest and not directive
        yield KEPT_DIRECTIVE.sub("", line) if kept else ""


def prose(doc: str) -> tuple[str, set[str]]:
    """The sentences of a docstring, one paragraph a line, and the names of the sections (in `HEADINGS`) that it has."""
    lines = list(without_code(doc.splitlines()))
    found = {"examples": ">>>" in doc or "```py" in doc, "notes": KEPT_DIRECTIVE.search(doc)}
    sections = {section for section, present in found.items() if present}
    section, heading_indent, kept = (
        "other",
        -1,
        [],
    )  # heading_indent: a line no deeper ends the section, -1 if none does
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        underlined, heading = stripped and UNDERLINE.match(following), COLON_HEADING.match(line)
        if underlined or (heading and heading[1].lower() in HEADINGS):
            section = HEADINGS.get(stripped.lower().strip("*:"), "other")
            heading_indent = -1 if underlined else indent
            sections.add(section)
            kept.append("")
        elif field := FIELD.match(line):
            sections.add(HEADINGS[field[1]])
            kept += ["", "" if "type" in field[1] else line[field.end() :]]
        else:
            if stripped and indent <= heading_indent:
                section, heading_indent = "other", -1
            kept += section_line(section, line, top=indent == 0)
    return paragraphs(kept), sections


def section_line(section: str, line: str, top: bool) -> list[str]:
    """What is left of one line of a section: lists and references go, an item loses its name and type."""
    if section in ("lists", "references"):
        return [""]
    if section in ENTRIES and (entry := ENTRY.match(line)):
        return ["", "" if top and " :" in entry[0] and not entry[2] else line[entry.end() :]]
    if section in ENTRIES and top and len(line.split()) < 5:
        return [""]
    return [line]


def paragraphs(lines: Iterable[str]) -> str:
    """Join wrapped lines; blank lines, bullets and table rules end a paragraph."""
    joined: list[list[str]] = [[]]
    for line in lines:
        stripped = line.strip()
        if not stripped or not re.search(r"\w", stripped):
            joined.append([])
        elif re.match(r"[-*+] |\d+[.)] ", stripped):
            joined.append([re.sub(r"^([-*+]|\d+[.)]) +", "", stripped)])
        else:
            joined[-1].append(stripped)
    return inline_text("\n".join(" ".join(words) for words in joined))


def inline_text(text: str) -> str:
    """Plain words: no roles, markup, links, citations or tags; dotted module names shortened to their last part."""
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())


def title_and_text(doc: str, mask_libraries: bool) -> tuple[str, str, set[str]]:
    """Split a docstring into its summary sentence, the rest, and the names of the sections (in `HEADINGS`) that it has.

    The title is "" where there is no usable summary. `mask_libraries`: whether their names give way to `[library]` in the text.
    """
    while SIGNATURE.match(doc.partition("\n")[0].strip()):
        doc = doc.partition("\n")[2].strip()
    summary, _, body = doc.partition("\n\n")
    if any(UNDERLINE.match(line) or COLON_HEADING.match(line) or FIELD.match(line) for line in summary.splitlines()):
        summary, body = summary.partition("\n")[0], summary.partition("\n")[2] + "\n\n" + body
    first, *rest = SENTENCE_END.split(paragraphs(summary.splitlines()).replace("\n", " "), maxsplit=1)
    text, sections = prose(body)
    text = "\n".join([*rest, text]).strip()
    text = LIBRARY_NAME.sub("[library]", text) if mask_libraries else text
    words = len(first.split())
    usable = 3 <= words <= 40 and first[0].isalpha() and first[-1] not in ":,;=" and not ENTRY.match(first)
    return (first if usable else ""), text.replace(first, ""), sections


def documented(root: Path, shortest: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield (module, dotted name, kind, docstring) of a package folder's objects, each docstring once.

    `shortest`: characters of a docstring.
    """
    seen: set[str] = set()
    for module, tree in module_sources(root, shortest):
        for name, kind, doc in docstrings(module, tree):
            if len(doc) < shortest or doc in seen or "licensed under" in doc.lower():
                continue
            seen.add(doc)
            yield module, name, kind, doc


def is_prose(text: str) -> bool:
    """Whether a text is neither table nor formula."""
    return sum(map(str.isalpha, text)) + text.count(" ") >= 0.8 * len(text)


def package_rows(root: Path) -> Iterator[dict]:
    """Yield the rows (id, title, text, labels) of one package folder; no duplicate is removed yet."""
    for _, name, kind, doc in documented(root, MIN_CHARACTERS):
        title, text, sections = title_and_text(doc, mask_libraries=True)
        if not title or len(text) < MIN_CHARACTERS or not is_prose(text):
            continue
        topics = [f"topic:{topic}" for topic, pattern in TOPICS.items() if re.search(pattern, name.lower())]
        has = [f"has:{section}" for section in LABELLED if section in sections]
        labels = [*has, f"kind:{kind}", f"library:{root.name}", *topics]
        yield {"id": name, "title": title, "text": text, "labels": labels}


def title_rows(root: Path) -> Iterator[dict]:
    """Yield the rows (id, module, title, text) of one package folder; no duplicate is removed yet."""
    for module, name, _, doc in documented(root, MIN_TITLED_CHARACTERS):
        title, text, _ = title_and_text(doc, mask_libraries=False)
        title, heading = title.rstrip(" ."), " ".join(NAME_PART.findall(name.rpartition(".")[2])).lower()
        usable = PLAIN_TITLE.fullmatch(title) and len(title.split()) <= MAX_TITLE_WORDS
        if usable and len(text) >= MIN_TITLED_CHARACTERS and is_prose(text):
            yield {"id": name, "module": module, "title": title, "text": f"{heading}\n{text}"}


def without_duplicates(rows: Iterable[dict]) -> list[dict]:
    """Keep the first of every group of rows with the same id, the same text, or texts half of whose phrases agree.

    Phrases are runs of five words; the 64 smallest of their CRC-32 values stand for the text (a bottom-k sketch:
    the share of common values estimates the Jaccard similarity of the phrase sets), the 8 smallest find candidates.
    """
    kept, seen, sketches, buckets = [], set(), [], defaultdict(list)
    for row in rows:
        words = normalised(row["text"]).split()
        keys = {row["id"], " ".join(words), normalised(row["title"] + " " + row["text"][:200])}
        if seen & keys:
            continue
        phrases = {zlib.crc32(" ".join(words[start : start + 5]).encode()) for start in range(max(len(words) - 4, 1))}
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


def split_rows(rows: Iterable[dict], min_label_rows: int = MIN_LABEL_ROWS) -> tuple[dict[str, list[dict]], list[str]]:
    """Share rows out by the MD5 of their normalised text, which also orders them; drop labels too rare in training."""
    hashed = sorted((hashlib.md5(normalised(row["text"]).encode()).hexdigest(), row["id"], row) for row in rows)
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
    """Share rows of different titles out by the MD5 of their module, ordered by that of their text.

    Of rows with the same title the first is kept. A validation or test row is dropped if its title becomes that of a training
    row by changing, adding or removing one word.
    """
    first = {normalised(row["title"]): row for row in reversed(list(rows))}
    hashed = sorted((hashlib.md5(normalised(row["text"]).encode()).hexdigest(), row["id"], row) for row in first.values())
    splits: dict[str, list[dict]] = {name: [] for name in SPLITS}
    for _, _, row in hashed:
        share = int(hashlib.md5(row.pop("module").encode()).hexdigest()[:8], 16) % 20
        splits[SPLITS[max(share - 17, 0)]].append(row)
    known = {form for row in splits["train"] for form in one_word_less(row["title"])}
    for split in ("validation", "test"):
        splits[split] = [row for row in splits[split] if known.isdisjoint(one_word_less(row["title"]))]
    return splits


def one_word_less(title: str) -> set[tuple[str, ...]]:
    """The words of a title, and those without each of them: titles that share a form differ by one word at most."""
    words = tuple(normalised(title).split())
    return {words, *(words[:place] + words[place + 1 :] for place in range(len(words)))}


def installed(packages: Iterable[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Folders and versions of the packages that can be imported; the version is "" where no distribution states one."""
    roots, versions = {}, {}
    for package in packages:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None  # of a top-level name: no import
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
    return {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).is_file()}


def reusable(folder: Path, origin: dict) -> dict | None:
    """What sample_data.json says, if it was made from the same versions by this script and its files are untouched."""
    try:
        made = json.loads((folder / "sample_data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = made.get("origin") == origin and made.get("files") == file_digests(folder)
    return made if known and all(origin["versions"].values()) else None


def claim(folder: Path) -> None:
    """Mark the folder as being written: a run that ends early leaves a sample_data.json that vouches for nothing.

    What was made before is deleted. Raises FileExistsError when it holds files of these names that this script has not made.
    """
    made = file_digests(folder)
    if made and not (folder / "sample_data.json").exists():
        raise FileExistsError(f"it holds {', '.join(made)} from elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sample_data.json").write_text("{}\n", encoding="utf-8")
    for name in made:
        (folder / name).unlink()


def write_corpus(folder: Path, splits: dict[str, list[dict]], labels: list[str], origin: dict) -> dict:
    """Write the splits, labels.txt if there are labels and, last, sample_data.json, whose content is returned."""
    lines = {f"{split}.jsonl": [json.dumps(row, ensure_ascii=False) for row in rows] for split, rows in splits.items()}
    for name, content in (lines | ({"labels.txt": labels} if labels else {})).items():
        (folder / name).write_text("".join(f"{line}\n" for line in content), encoding="utf-8", newline="\n")
    made = {"origin": origin, **counts(splits, labels), "files": file_digests(folder)}
    (folder / "sample_data.json.part").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    os.replace(folder / "sample_data.json.part", folder / "sample_data.json")
    return made


def counts(splits: dict[str, list[dict]], labels: list[str]) -> dict:
    """Rows per split, rows per label over all splits, and the quantiles of their words."""
    rows = list(chain(*splits.values()))
    frequency = Counter(label for row in rows for label in row.get("labels", ()))
    words = sorted(len(row["text"].split()) for row in rows)
    ranks = {"min": 0, "median": len(words) // 2, "p95": len(words) * 95 // 100, "max": -1}
    return {
        "rows": {split: len(rows) for split, rows in splits.items()},
        "labels": {label: frequency[label] for label in labels},
        "words": {name: words[rank] for name, rank in ranks.items()} | {"rows_over_700": sum(count > 700 for count in words)},
    }


def print_summary(folder: Path, made: dict) -> None:
    print(f"{folder}: " + ", ".join(f"{split} {count} rows" for split, count in made["rows"].items()))
    print("words in a text: " + ", ".join(f"{name} {value}" for name, value in made["words"].items()))
    if made["labels"]:
        print(f"{len(made['labels'])} labels: " + ", ".join(f"{label} {count}" for label, count in made["labels"].items()))


def main() -> int:
    if sys.argv[1:2] == ["volumes"]:
        from drawing import volumes  # needs requirements-vision.txt

        return volumes.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", choices=("texts", "titles", "images", "masks"), default="texts", help="default: %(default)s"
    )
    parser.add_argument("--output_dir", type=lambda p: Path(p).expanduser(), help="default: sample_data or sample_WHAT")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="import names (default: those of requirements.txt)")
    parser.add_argument("--min_label_rows", type=int, default=MIN_LABEL_ROWS, help="training rows that a label needs")
    parser.add_argument("--force", action="store_true", help="build again, even from the same versions")
    args = parser.parse_args()
    if args.output_dir is None:
        args.output_dir = Path("sample_data" if args.what == "texts" else f"sample_{args.what}")
    return make_texts(parser, args) if args.what in ("texts", "titles") else make_images(parser, args)


def make_images(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        rows = (draw_digits if args.what == "images" else draw_shapes)(args.output_dir, args.force)
    except OSError as error:
        parser.error(f"cannot write to --output_dir {args.output_dir} ({error}); choose another folder")
    print(f"{args.output_dir}: " + ", ".join(f"{split} {count} pictures" for split, count in rows.items()))
    return 0


def make_texts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in other people's strings
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.disable()  # parsing makes millions of objects and no cycles worth collecting: saves an eighth of the time
    roots, versions = installed(args.packages)
    if not roots:
        parser.error("none of the packages is installed; run: pip install -r requirements.txt")
    origin = {
        "what": args.what,
        "versions": versions,
        "python": ".".join(map(str, sys.version_info[:2])),
        "script": hashlib.md5(Path(__file__).read_bytes()).hexdigest(),
        "min_label_rows": args.min_label_rows,
    }
    made = None if args.force else reusable(args.output_dir, origin)
    if made is None:
        try:
            claim(args.output_dir)
            read = package_rows if args.what == "texts" else title_rows
            rows = without_duplicates(chain.from_iterable(read(root) for root in roots.values()))
            if not rows:
                parser.error(f"no docstring that is long enough in {', '.join(roots)}")
            splits, labels = split_rows(rows, args.min_label_rows) if args.what == "texts" else (split_titles(rows), [])
            made = write_corpus(args.output_dir, splits, labels, origin)
        except OSError as error:
            parser.error(f"cannot write to --output_dir {args.output_dir} ({error}); choose another folder")
    else:
        print("made before from the same versions, nothing to do (--force builds it again)")
    print_summary(args.output_dir, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
