"""Writes the table of model families in `docs/models.md` from `config/families/`.

python -m tools.families_table           # prints the page's table
python -m tools.families_table --write   # puts it into the page
"""

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from octavo.config import families
from octavo.config.family import Family

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_BEGIN, _END = "<!-- families -->\n", "<!-- end of families -->\n"
_HEADER = "| family | `architectures` in config.json | GGUF | experts | images |\n| --- | --- | --- | --- | --- |\n"


def rows() -> Iterator[str]:
    """Yield a line for each file in `config/families/`."""
    for module in sorted(iter_modules(families.__path__), key=lambda module: module.name):
        loaded = import_module(f"{families.__name__}.{module.name}")
        own: tuple[Family, ...] = loaded.FAMILIES
        first = (loaded.__doc__ or "").strip().split("\n")[0].rstrip(".")
        names = ", ".join(f"`{family.name}`" for family in own)
        files = (name for family in own if family.gguf is not None for name in family.gguf.architectures)
        gguf = ", ".join(dict.fromkeys(f"`{name}`" for name in files))
        experts = "yes" if any(_has_experts(family) for family in own) else ""
        towers = [family for family in own if family.read_tower is not None]
        images = "yes" if towers else "left out" if any(family.left_out for family in own) else ""
        yield f"| {first} | {names} | {gguf} | {experts} | {images} |\n"


def _has_experts(family: Family) -> bool:
    return family.moe is not None or any("{expert}" in name for name in family.weight_names)


def with_table(page: str) -> str:
    """Return the page with the table as it is now."""
    pattern = re.escape(_BEGIN) + ".*" + re.escape(_END)
    return re.sub(pattern, lambda _: _BEGIN + _HEADER + "".join(rows()) + _END, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(_HEADER + "".join(rows()), end="")


if __name__ == "__main__":
    main()
