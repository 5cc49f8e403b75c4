"""The paper's tables 4 to 6: promises, coverage and uncovered operations of its fifteen architectures.

    python experiments/coverage_tables.py --out docs/coverage

This is `dynamiclrp coverage --paper`, which builds each architecture at its published size from its configuration (random
weights: the graph is what counts), so no hub is needed. Writes paper.md and paper.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--out", type=Path, default=Path("docs/coverage"), help="the folder to write to")
    command.add_argument("--match", default="*", help="names to take, as a shell pattern")
    options = command.parse_args()
    call = [sys.executable, "-m", "dynamiclrp.cli", "coverage", "--paper", "--out", str(options.out)]
    raise SystemExit(subprocess.run([*call, "--match", options.match]).returncode)


if __name__ == "__main__":
    main()
