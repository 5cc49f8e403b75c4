"""Photograph the demo's page for the README and the documentation: `python docs/scripts/screenshots.py demo.html`.

Needs Chromium. Writes docs/img/demo.png and docs/img/demo-dark.png: the photo and the next word.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).parent.parent / "img"
WIDE, TOP, HIGH = 1280, 300, 1390
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=8000"]  # fmt: skip
DARK = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]


def photograph(page: Path, out: Path, dark: bool) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if browser is None:
        raise SystemExit("this needs Chromium: install it, for example with apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        shot = Path(profile) / "shot.png"
        size = [f"--window-size={WIDE},{HIGH + 1500}", f"--screenshot={shot}", f"--user-data-dir={profile}/profile"]
        subprocess.run(
            [browser, *QUIET, *size, *(DARK if dark else []), page.resolve().as_uri()], check=True, capture_output=True
        )
        with Image.open(shot) as taken:
            taken.convert("RGB").crop((0, TOP, WIDE, HIGH)).save(out, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for name, dark in (("demo.png", False), ("demo-dark.png", True)):
        photograph(Path(sys.argv[1]), IMAGES / name, dark)
