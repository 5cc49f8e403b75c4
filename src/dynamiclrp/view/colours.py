"""Zero-centred colours: one hue speaks for, one against, and zero is the background's own colour, in light and in dark."""

from __future__ import annotations

from dataclasses import dataclass

RGB = tuple[int, int, int]


@dataclass(frozen=True)
class Palette:
    """The two hues on a light and on a dark page, and inks of the same hues that can be read as text."""

    positive: tuple[RGB, RGB]
    negative: tuple[RGB, RGB]
    positive_ink: tuple[str, str]
    negative_ink: tuple[str, str]


# orange-blue and purple-green are safe for all common colour blindnesses (Okabe & Ito; ColorBrewer's PRGn).
PALETTES = {
    "red-blue": Palette(
        ((214, 40, 40), (240, 76, 64)), ((38, 98, 217), (84, 142, 255)), ("#b3201d", "#ff8a7c"), ("#1b4fb8", "#8fb4ff")
    ),
    "orange-blue": Palette(
        ((213, 94, 0), (245, 140, 40)), ((0, 114, 178), (70, 165, 235)), ("#a84a00", "#ffb066"), ("#005a8f", "#86c8f5")
    ),
    "purple-green": Palette(
        ((123, 50, 148), (190, 120, 215)),
        ((0, 136, 55), (60, 185, 110)),
        ("#6a2783", "#d9a5ea"),
        ("#006b2b", "#7fd9a2"),
    ),
}

_PAPER = (
    "--paper:#fbfaf7;--card:#fff;--ink:#1d1c1a;--soft:#6b6862;--line:#e4e0d8;--bar:#b9b4aa;--glow:0 0 0;"
    "--under:grayscale(1) contrast(.55) brightness(1.35)",
    "--paper:#131416;--card:#1a1b1e;--ink:#eceae5;--soft:#9c9992;--line:#2e2f33;--bar:#5c5b58;--glow:255 255 255;"
    "--under:grayscale(1) contrast(.6) brightness(.62)",
)


def palette(name: str) -> Palette:
    """A palette by name."""
    if name not in PALETTES:
        raise ValueError(f"palette {name!r}: expected one of {', '.join(PALETTES)}")
    return PALETTES[name]


def theme_css() -> str:
    """Custom properties of every palette, light and dark (by the system's choice, or `data-theme` on the root)."""

    def block(dark: int) -> list[tuple[str, str]]:
        rows = [("", _PAPER[dark])]
        for name, p in PALETTES.items():
            hues = (" ".join(map(str, p.positive[dark])), " ".join(map(str, p.negative[dark])))
            inks = f"--pos-ink:{p.positive_ink[dark]};--neg-ink:{p.negative_ink[dark]}"
            rows.append((f'[data-palette="{name}"]', f"--pos:{hues[0]};--neg:{hues[1]};{inks}"))
        return rows

    light = "\n".join(f":root{which}{{{body}}}" for which, body in block(0))
    system = "\n".join(f':root:not([data-theme="light"]){which}{{{body}}}' for which, body in block(1))
    chosen = "\n".join(f':root[data-theme="dark"]{which}{{{body}}}' for which, body in block(1))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{system}\n}}\n{chosen}\n"
