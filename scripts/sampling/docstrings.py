"""Reads docstrings from Python sources and turns them into plain text, sections and parameters."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "_vendored", "vendored", "externals", "third_party"}

SECTIONS = {
    "parameters": "args|arg|arguments|parameter|parameters|other parameters|param|keyword|keyword "
    "args|input|inputs",
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
ENTRIES = {
    "parameters",
    "returns",
    "raises",
    "attributes",
}  # sections of `name : type` items, each with a description

UNDERLINE = re.compile(r"\s*([-=~^])\1{2,}\s*$")
COLON_HEADING = re.compile(r"\s*\**(\w[\w ]*?)\**:{1,2}\**\s*$")
FIELD = re.compile(
    r"\s*[:@](param|parameter|arg|keyword|raises?|returns?|(?:var|r)?type|[ic]?var)\b([^:]*):\s*"
)
ENTRY = re.compile(r"\s*[-*]?\s*[`*\[]*[\w.*]+[`\]]*(,\s*[`*]*\w+`*)*\s*(\(.*\))?\s*(:|--)(\s|$)")
SIGNATURE = re.compile(r"[\w.]+\(.*?\)\s*(->.*)?$")
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of get_HTMLName2: get, HTML, Name, 2
SENTENCE_END = re.compile(r"(?<=[a-z0-9)`'\]][.!?])\s+(?=[A-Z`*\"'])")
KEPT_DIRECTIVE = re.compile(r"\s*\.\. (note|warning|important|tip|caution|attention|hint|admonition)::")
LIBRARY = "numpy|scipy|pandas|scikit-learn|sklearn|pytorch|torch|nltk|networkx|sympy|deepspeed|hugging ?face"
MODULE = (
    "numpy|scipy|pandas|sklearn|torch|nltk|networkx|sympy|deepspeed|transformers|accelerate|datasets|evaluate"
)
MARKUP = [  # in this order, over whole texts: none crosses a line
    (re.compile(r"(?::[\w:+-]+)?:[\w+-]+:`[~!]?([^`\n<]*)[^`\n]*`"), r"\1"),  # :role:`words <target>`
    (re.compile(r"\[([^\]\n]*)\]\([^)\n]*\)"), r"\1"),  # [words](address)
    (re.compile(r"`([^`<\n]*?)\s*<[^`>\n]*>`_+"), r"\1"),  # `words <address>`_
    (
        re.compile(
            r"https?://[^\s)]+|\[[\w#]+\]_+|</?\w+[^>\n]*>|🤗|%\(\w+\)s|::?(?=\n|$)|^#+ ", re.MULTILINE
        ),
        "",
    ),
    (re.compile(r"\[?`+~?([^`\n]*?)`+\]?_*"), r"\1"),
    (re.compile(r"(?<!\w)\*{1,2}([^*\s][^*\n]*)\*{1,2}(?!\w)"), r"\1"),
    (re.compile(r"\(?\bsee (?:the )?(?:notes|references|examples)\b[^.)\n]{0,20}\)?", re.IGNORECASE), ""),
    (
        re.compile(
            rf"\b(?:{MODULE}|tokenizers|huggingface_hub|np|pd|nx|sp|tf|jax|nn)\.(?:[a-z_]\w*\.)*(?=\w)"
        ),
        "",
    ),
]
LIBRARY_NAME = re.compile(rf"\b(?:{LIBRARY})\b(?!-)", re.IGNORECASE)
PARAMETER_FIELDS = ("param", "parameter", "arg", "keyword")
ITEM = re.compile(
    r"\s*[-*]?\s*[`*]*(\w+)[`*]*\s*(?:\([^)]*\))?\s*:(.*)$"
)  # of a section: `name : type`, `name (type): words`


def module_sources(root: Path, shortest: int) -> Iterator[tuple[str, ast.Module]]:
    """Yields (dotted module name, parsed source) of a package folder, in a fixed order, without tests and
    vendored code.

    Skips modules without a docstring of at least `shortest` characters.
    """
    for path in sorted(chain(root.rglob("*.py"), root.rglob("*.pyi"))):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith("test_") for part in parts):
            continue
        source = path.read_bytes()
        longest = max(
            map(len, source.split(b'"""')[1::2]), default=0
        )  # a cheap check, because parsing is slow
        if longest < shortest and b"'''" not in source:
            continue
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and files for other Python versions
            continue
        yield ".".join(parts).removesuffix(".__init__"), tree


def docstrings(module: str, tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yields (dotted name, kind, docstring) of a module's objects, including `add_newdoc` and `add_docstr`
    calls."""

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
    """The docstring of a compiled object in a call such as `add_newdoc("numpy", "ndarray", ("sort",
    "..."))`."""
    function = ast.unparse(call.func).rpartition(".")[2]
    if not function.startswith(("add_newdoc", "add_docstr")) or len(call.args) < 2:
        return
    *target, doc = call.args
    method = isinstance(doc, ast.Tuple) or function == "add_docstr_all"
    if isinstance(doc, ast.Tuple) and len(doc.elts) == 2:
        target, doc = [*target, doc.elts[0]], doc.elts[1]
    if text := literal_text(doc):
        path = ".".join(
            part.value if isinstance(part, ast.Constant) else ast.unparse(part) for part in target
        )
        name = path if path.startswith(module.partition(".")[0]) else f"{module}.{path}"
        yield name, "method" if method else "function", inspect.cleandoc(text)


def literal_text(node: ast.expr) -> str:
    """The value of a string expression of literals, `+` and `.format()`, without `{fields}`; "" for any other
    expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal_text(node.left) + literal_text(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{\w*\}", "", literal_text(node.func.value))
    return ""


def without_code(lines: Iterable[str]) -> Iterator[str]:
    """Drops fenced and literal blocks, doctests, and all directives with their blocks except notes and
    warnings."""
    fence, doctest, block = (
        False,
        False,
        -1,
    )  # block: the indentation that ends a dropped block; -1 outside of one
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
    """(the text of a docstring with one paragraph per line, its sections by their names in `HEADINGS`)."""
    lines = list(without_code(doc.splitlines()))
    markers = {"examples": ">>>" in doc or "```py" in doc, "notes": KEPT_DIRECTIVE.search(doc)}
    sections = {section for section, present in markers.items() if present}
    section, kept = "other", []
    heading_indent = -1  # a line with at most this indentation ends the section
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
    """One line of a section without names and types of items; drops lists and references."""
    if section in ("lists", "references"):
        return [""]
    if section in ENTRIES and (entry := ENTRY.match(line)):
        return ["", "" if top and " :" in entry[0] and not entry[2] else line[entry.end() :]]
    if section in ENTRIES and top and len(line.split()) < 5:
        return [""]
    return [line]


def paragraphs(lines: Iterable[str]) -> str:
    """Joins wrapped lines. Blank lines, bullets and table rules end a paragraph."""
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
    """Plain text without roles, markup, links, citations and tags; dotted module names are cut to their last
    part."""
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())


def title_and_text(doc: str) -> tuple[str, str, set[str]]:
    """(summary sentence, rest, sections by their names in `HEADINGS`) of a docstring.

    The summary is "" if it is not usable. `[library]` replaces names of libraries in the rest.
    """
    while SIGNATURE.match(doc.partition("\n")[0].strip()):
        doc = doc.partition("\n")[2].strip()
    summary, _, body = doc.partition("\n\n")
    if any(
        UNDERLINE.match(line) or COLON_HEADING.match(line) or FIELD.match(line)
        for line in summary.splitlines()
    ):
        summary, body = summary.partition("\n")[0], summary.partition("\n")[2] + "\n\n" + body
    first, *rest = SENTENCE_END.split(paragraphs(summary.splitlines()).replace("\n", " "), maxsplit=1)
    text, sections = prose(body)
    text = LIBRARY_NAME.sub("[library]", "\n".join([*rest, text]).strip())
    words = len(first.split())
    usable = 3 <= words <= 40 and first[0].isalpha() and first[-1] not in ":,;=" and not ENTRY.match(first)
    return (first if usable else ""), text.replace(first, ""), sections


def documented(root: Path, shortest: int) -> Iterator[tuple[str, str, str, str]]:
    """Yields (module, dotted name, kind, docstring) of a package folder's objects, each docstring once.

    `shortest`: the minimum characters of a docstring.
    """
    seen: set[str] = set()
    for module, tree in module_sources(root, shortest):
        for name, kind, doc in docstrings(module, tree):
            if len(doc) < shortest or doc in seen or "licensed under" in doc.lower():
                continue
            seen.add(doc)
            yield module, name, kind, doc


def is_prose(text: str) -> bool:
    """Whether a text consists mainly of letters and spaces, unlike tables and formulas."""
    return sum(map(str.isalpha, text)) + text.count(" ") >= 0.8 * len(text)


def described_parameters(doc: str) -> Iterator[tuple[str, str]]:
    """Yields (name, description) of the parameters and attributes in a docstring of NumPy, Google or Sphinx
    style."""
    parameters: list[tuple[str, list[str]]] = []
    lines = list(without_code(doc.splitlines()))
    # level: indentation of the section's items, -1 before the first; inside: whether a description may
    # continue.
    section, underlined, level, inside = "other", False, -1, False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        heading, over_a_line = COLON_HEADING.match(line), bool(stripped and UNDERLINE.match(following))
        if over_a_line or (heading and heading[1].lower() in HEADINGS):
            section, underlined, level, inside = (
                HEADINGS.get(stripped.lower().strip("*:"), "other"),
                over_a_line,
                -1,
                False,
            )
        elif field := FIELD.match(line):
            section, level, names = "other", indent, field[2].split()
            inside = field[1] in PARAMETER_FIELDS and bool(names)
            if inside:
                parameters.append((names[-1].strip("*"), [line[field.end() :]]))
        elif not stripped:
            inside = inside and section != "other"
        elif indent > level >= 0:
            if inside:
                parameters[-1][1].append(stripped)
        elif section in ("parameters", "attributes") and not UNDERLINE.match(line):
            level, item = indent, ITEM.match(line)
            inside = item is not None
            if item:
                parameters.append((item[1], [] if underlined else [item[2]]))
    for name, words in parameters:
        yield name, inline_text(" ".join(" ".join(words).split()))
