"""The command `samerun`.

    samerun classify --train_file train.csv ...
    accelerate launch -m samerun classify ...      torchrun --nproc_per_node 2 -m samerun classify ...
    deepspeed --module samerun classify ...

`samerun NAME` runs a task as `python app/NAME.py` does, or a tool of samerun/tools/. Tools take a task by its
name or its path: `samerun plan classify ARGS`. `samerun configs FOLDER` copies the configuration files of
launchers. `samerun completion` prints what a shell needs to complete names and arguments:
eval "$(samerun completion)" in ~/.bashrc, after `autoload bashcompinit; bashcompinit` in ~/.zshrc.
"""

import importlib
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

from samerun import __version__
from samerun.console import survive_a_lost_console
from samerun.errors import nearest
from samerun.files import shipped
from samerun.task_scripts import parser, run_tool, scripts, tools

CONFIGS = ("accelerate_configs", "ds_configs")
COPIED = "accelerate_configs/, ds_configs/ and app/recipes/"
COMPLETION = """_samerun() {{
  local name=${{COMP_WORDS[1]}} word=${{COMP_WORDS[COMP_CWORD]}} words=
  if [ "$COMP_CWORD" = 1 ]; then words="{names}"
  elif [[ $word == -* ]]; then words=$(samerun "$name" --help all | grep -o -e '--[a-z0-9_]*' | sort -u); fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _samerun samerun"""


def main() -> None:
    """Entry point of `samerun` and of `python -m samerun`."""
    if sys.stdout is sys.__stdout__:  # else the caller reads what is printed
        survive_a_lost_console()
    files = scripts() | tools()
    # deepspeed inserts --local_rank before the name
    given = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    name = given.replace("-", "_")
    if name in {*files, "configs"}:
        sys.argv.remove(given)
    if name in {*tools(), "configs"}:
        sys.argv[0] = f"samerun {dashed(name)}"  # by which argparse names it
        sys.exit(run_tool(copy_configs if name == "configs" else partial(call, name), sys.argv[1:]))
    elif name in files:
        sys.argv[0] = str(files[name])  # in whose folder the task is
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif name == "completion":
        print(COMPLETION.format(names=" ".join([*map(dashed, files), "configs"])))
    elif not given and "--version" in sys.argv:
        print(f"samerun {__version__}")
    elif not given and {"--help", "-h"} & {*sys.argv}:
        print(usage(files))
    else:
        near = nearest(name, [*files, "configs"])
        error = f"error: no command {given}" + (f"; did you mean {dashed(near)}?" if near else "")
        sys.exit(f"{error if given else usage(files)}\n\nsamerun --help lists all")


def call(tool: str, argv: list[str]) -> int:
    """Imports a tool, which may lack a library, and runs it."""
    return importlib.import_module(f"samerun.tools.{tool}").main(argv)


def dashed(name: str) -> str:
    return name.replace("_", "-")


def usage(files: dict[str, Path]) -> str:
    """The commands with the first sentence of their scripts."""
    lines = []
    for name, path in files.items():
        first = re.search(r'"""(.+?)(\.\s|\.?"""|\n\n)', path.read_text(encoding="utf-8"), re.DOTALL)
        lines.append(f"  {dashed(name):<16}{' '.join(first[1].split())}")
    return "\n".join(
        [
            "usage: samerun COMMAND ARGUMENTS",
            "",
            *lines,
            f"  {'configs':<16}Copies {COPIED} to a folder (default: here)",
            f'  {"completion":<16}Completion of names and arguments: eval "$(samerun completion)"',
            "",
            "samerun COMMAND --help lists the arguments. Several GPUs: accelerate launch -m samerun ...",
        ]
    )


def copy_configs(argv: list[str]) -> int:
    """Copies the launchers' configuration files and the recipes to a folder. Replaces none."""
    own = parser(f"Copies {COPIED} to FOLDER (default: here). Replaces no file.")
    own.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER")
    folder = own.parse_args(argv).folder
    recipes = next(iter(scripts().values())).parent / "recipes"
    for name, source in {**{name: shipped(name) for name in CONFIGS}, "app/recipes": recipes}.items():
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            target = folder / name / file.relative_to(source)
            if target.exists():
                print(f"kept {target}")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
            print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    main()
