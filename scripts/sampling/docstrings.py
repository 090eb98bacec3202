"""Reads docstrings from Python sources, and the parameters that they describe."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "_vendored", "vendored", "externals", "third_party"}

# Headings of sections in lower case: of described items, and others.
ITEMS = re.compile(
    "args?|arguments|parameters?|other parameters|param|keyword|keyword args|inputs?|attributes|properties|"
    "class attributes|fields|type|[ic]?var|vartype"
)
OTHERS = re.compile(
    "returns?|yields?|outputs?|rtype|raises?|throws|warns|examples?|usage|usage examples?|references?|"
    "bibliography|notes?|important|tip|warnings?|caution|see also|seealso|methods|shape"
)
UNDERLINE = re.compile(r"\s*([-=~^])\1{2,}\s*$")
COLON_HEADING = re.compile(r"\s*\**(\w[\w ]*?)\**:{1,2}\**\s*$")
FIELD = re.compile(
    r"\s*[:@](param|parameter|arg|keyword|raises?|returns?|(?:var|r)?type|[ic]?var)\b([^:]*):\s*"
)
PARAMETER_FIELDS = ("param", "parameter", "arg", "keyword")
ITEM = re.compile(  # `name : type`, `name (type): words`
    r"\s*[-*]?\s*[`*]*(\w+)[`*]*\s*(?:\([^)]*\))?\s*:(.*)$"
)
KEPT_DIRECTIVE = re.compile(r"\s*\.\. (note|warning|important|tip|caution|attention|hint|admonition)::")
MODULE = (
    "numpy|scipy|pandas|sklearn|torch|nltk|networkx|sympy|deepspeed|transformers|accelerate|datasets|"
    "evaluate|tokenizers|huggingface_hub|np|pd|nx|sp|tf|jax|nn"
)
# Roles, markup, links, citations and tags; dotted module names are cut to their last part. In this order.
MARKUP = [
    (re.compile(r"(?::[\w:+-]+)?:[\w+-]+:`[~!]?([^`\n<]*)[^`\n]*`"), r"\1"),  # :role:`words <target>`
    (re.compile(r"\[([^\]\n]*)\]\([^)\n]*\)"), r"\1"),  # [words](address)
    (re.compile(r"`([^`<\n]*?)\s*<[^`>\n]*>`_+"), r"\1"),  # `words <address>`_
    (re.compile(r"https?://[^\s)]+|\[[\w#]+\]_+|</?\w+[^>\n]*>|🤗|%\(\w+\)s|::?$|^#+ "), ""),
    (re.compile(r"\[?`+~?([^`\n]*?)`+\]?_*"), r"\1"),
    (re.compile(r"(?<!\w)\*{1,2}([^*\s][^*\n]*)\*{1,2}(?!\w)"), r"\1"),
    (re.compile(r"\(?\bsee (?:the )?(?:notes|references|examples)\b[^.)\n]{0,20}\)?", re.IGNORECASE), ""),
    (re.compile(rf"\b(?:{MODULE})\.(?:[a-z_]\w*\.)*(?=\w)"), ""),
]


def documented(root: Path, shortest: int) -> Iterator[tuple[str, str, str]]:
    """Yields (module, dotted name, docstring) of a package folder's objects, each docstring once, in a fixed
    order, without tests and vendored code.

    `shortest`: the minimum characters of a docstring.
    """
    seen: set[str] = set()
    for path in sorted(chain(root.rglob("*.py"), root.rglob("*.pyi"))):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith("test_") for part in parts):
            continue
        source = path.read_bytes()
        # A cheap check, because parsing is slow.
        if max(map(len, source.split(b'"""')[1::2]), default=0) < shortest and b"'''" not in source:
            continue
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and files for other Python versions
            continue
        module = ".".join(parts).removesuffix(".__init__")
        for name, doc in docstrings(module, tree):
            if len(doc) >= shortest and doc not in seen and "licensed under" not in doc.lower():
                seen.add(doc)
                yield module, name, doc


def docstrings(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, docstring) of a module's objects, including `add_newdoc` and `add_docstr`
    calls."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if doc := ast.get_docstring(node):
            yield name, doc
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, f"{name}.{child.name}")
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                yield from added_docstring(module, child.value)

    yield from visit(tree, module)


def added_docstring(module: str, call: ast.Call) -> Iterator[tuple[str, str]]:
    """The docstring of a compiled object in a call such as `add_newdoc("numpy", "ndarray", ("sort",
    "..."))`."""
    function = ast.unparse(call.func).rpartition(".")[2]
    if not function.startswith(("add_newdoc", "add_docstr")) or len(call.args) < 2:
        return
    *target, doc = call.args
    if isinstance(doc, ast.Tuple) and len(doc.elts) == 2:
        target, doc = [*target, doc.elts[0]], doc.elts[1]
    if text := literal_text(doc):
        parts = (part.value if isinstance(part, ast.Constant) else ast.unparse(part) for part in target)
        path = ".".join(parts)
        name = path if path.startswith(module.partition(".")[0]) else f"{module}.{path}"
        yield name, inspect.cleandoc(text)


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
    fence, doctest = False, False
    block = -1  # the indentation that ends a dropped block; -1 outside of one
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


def described_parameters(doc: str) -> Iterator[tuple[str, str]]:
    """Yields (name, description) of the parameters and attributes in a docstring of NumPy, Google or Sphinx
    style."""
    parameters: list[tuple[str, list[str]]] = []
    lines = list(without_code(doc.splitlines()))
    # items: in a section of items; level: their indentation, -1 before the first; inside: whether a
    # description may continue.
    items, underlined, level, inside = False, False, -1, False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        heading, over_a_line = COLON_HEADING.match(line), bool(stripped and UNDERLINE.match(following))
        heading = heading and heading[1].lower()
        if over_a_line or (heading and (ITEMS.fullmatch(heading) or OTHERS.fullmatch(heading))):
            items = bool(ITEMS.fullmatch(stripped.lower().strip("*:")))
            underlined, level, inside = over_a_line, -1, False
        elif field := FIELD.match(line):
            items, level, names = False, indent, field[2].split()
            inside = field[1] in PARAMETER_FIELDS and bool(names)
            if inside:
                parameters.append((names[-1].strip("*"), [line[field.end() :]]))
        elif not stripped:
            inside = inside and items
        elif indent > level >= 0:
            if inside:
                parameters[-1][1].append(stripped)
        elif items and not UNDERLINE.match(line):
            level, item = indent, ITEM.match(line)
            inside = item is not None
            if item:
                parameters.append((item[1], [] if underlined else [item[2]]))
    for name, words in parameters:
        text = " ".join(" ".join(words).split())
        for pattern, replacement in MARKUP:
            text = pattern.sub(replacement, text)
        yield name, " ".join(text.split())
