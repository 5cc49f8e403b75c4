"""Give methods of a result file other names, when a name has come to mean another rule.

    python experiments/relabel.py docs/results/minilm_imdb.json "default=default, linear LRP-0" "default + linear gamma 0.02=default"

The numbers stay as they were measured; "measured_as" remembers the names that they were measured under.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from options import write_json


def relabel(path: Path, pairs: list[tuple[str, str]]) -> None:
    row = json.loads(path.read_text("utf-8"))
    names = dict(pairs)
    missing = sorted(set(names) - set(row["methods"]))
    taken = sorted(set(names.values()) & (set(row["methods"]) - set(names)))
    if missing or taken or len(set(names.values())) < len(names):
        raise SystemExit(
            f"{path}: no method is called {missing}" if missing else f"{path}: {taken} would be overwritten"
        )
    row["methods"] = {names.get(name, name): found for name, found in row["methods"].items()}
    write_json(path, row | {"measured_as": row.get("measured_as", {}) | {new: old for old, new in pairs}})


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("file", type=Path)
    command.add_argument("names", nargs="+", metavar="OLD=NEW")
    options = command.parse_args()
    relabel(options.file, [(old, new) for old, _, new in (pair.partition("=") for pair in options.names)])


if __name__ == "__main__":
    main()
