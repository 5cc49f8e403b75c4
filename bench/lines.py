"""Lines of the engine: what relevance is made with, without verbs, inputs and results.

python bench/lines.py
"""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "dynamiclrp"
# Verbs, their inputs and their results.
OTHERS = frozenset(
    [
        "__init__",
        "generation",
        "image",
        "audio",
        "multimodal",
        "text",
        "table",
        "tasks",
        "heads",
        "tokens",
        "media",
        "geometry",
        "parts",
        "uploads",
        "comparison",
        "attribution",
        "archive",
        "timing",
        "explain",
    ]
)


def engine() -> dict[str, int]:
    """Lines by file."""
    top = [path for path in SOURCE.glob("*.py") if path.stem not in OTHERS]
    files = [*top, *(SOURCE / "ops").glob("*.py"), *(SOURCE / "rules").glob("*.py")]
    return {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in files}


if __name__ == "__main__":
    found = engine()
    for name, count in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{count:6} {name}")
    print(f"{sum(found.values()):6} in all")
