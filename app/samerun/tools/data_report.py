"""Checks data before training: duplicate rows, test rows that are in the training data, equal rows with
different labels, rare labels, lengths. Every finding comes with advice.

    samerun data-report [--output report.html] classify --train_file train.csv \\
        --test_file test.csv

ARGS are the training command's arguments for files, columns and model. --output_dir is optional and stays
untouched. Without --model_name_or_path, text lengths are in words instead of tokens. Files that a training
would reject end the report.

    --output FILE   also write a page (.html) or the numbers (.json)

Exit codes: 0 done, with or without findings; 2 bad input.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from samerun import task_scripts
from samerun.console import plain_table
from samerun.errors import InputError
from samerun.files import write_json, write_text
from samerun.reports.figures import as_image
from samerun.reports.page import render
from samerun.runtime import Launch
from samerun.task import Section
from samerun.tools.examining.report import DataReport, examine
from samerun.tools.examining.rows import rows_of

MAX_CELL_WIDTH = 100  # characters of a printed cell


def write_page(path: Path, report: DataReport, notes: list[str]) -> None:
    """Writes the report as one self-contained page."""
    plots = {}
    for name, figure in report.shown.figures.items():
        file = io.BytesIO()
        Image.fromarray(as_image(figure)).save(file, "PNG")
        plots[name] = file.getvalue()
    more = [Section("Notes of the readers", "", ["note"], [[note] for note in notes])] if notes else []
    findings = [list(finding) for finding in report.findings] or [["nothing unusual", ""]]
    found = Section("Findings", "", ["found", "what to do"], findings)
    page = {
        "title": "Data report",
        "summary": [f"{len(report.findings)} finding(s), each with advice, are below the figures."],
        "sections": [found, *more, *report.shown.sections],
    }
    write_text(path, render("layout.html.j2", plots=plots, **page))


def main(argv: list[str]) -> int:
    parser = task_scripts.tool_parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    output = options.output
    if output is not None and (output.suffix not in (".html", ".json") or not output.parent.is_dir()):
        parser.error(
            f"--output {output}: expected a name that ends in .html or .json, in a folder that exists"
        )
    task, modes = task_scripts.task_to_read(options.script, options.arguments)
    rows, notes = rows_of(task, Launch(), modes)
    if not rows:
        raise InputError(f"{options.script}: a data report needs a task of texts, images or volumes")
    report = examine(rows)
    for table in report.shown.sections:
        rows = [[str(cell)[:MAX_CELL_WIDTH] for cell in row] for row in table.rows]
        print(table.title, *plain_table(table.header, rows), "", sep="\n")
    print(*(f"note           {note}" for note in notes), sep="\n")
    for finding in report.findings or [("nothing unusual", "")]:
        print(f"found          {finding[0]}. {finding[1]}".rstrip(". "))
    if output is not None and output.suffix == ".html":
        write_page(output, report, notes)
    elif output is not None:
        tables = {
            table.title: [dict(zip(table.header, row, strict=True)) for row in table.rows]
            for table in report.shown.sections
        }
        findings = [finding._asdict() for finding in report.findings]
        write_json(output, {"findings": findings, "notes": notes, **tables})
    return 0
