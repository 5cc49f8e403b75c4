"""How shall gamma fall with depth? The search for the numbers in `default`'s rule for convolutions.

    python experiments/depth.py --local --data DIR --half --model mobilenetv2 --limit 200 --out docs/results/search/depth_mobilenetv2.json
    python experiments/depth.py --local --data DIR --half --model vgg16-cifar10 --skip 1300 --limit 1000 --out docs/results/search/depth_vgg16_cifar10.json
    python experiments/depth.py --choose docs/results/search

This was written down before anything was measured.

*Inputs.* MobileNetV2 and EfficientNet-Lite0: the 200 photos of the search half (held-out rows: photos 200 to 450). VGG16 and ResNet-20:
1,000 test images that neither an earlier search nor a held-out row had (images 1,300 to 2,300; held-out rows: 300 to 1,300).

*Family.* `default` with Gamma(first, last=last) for convolutions, first in 0.2, 0.3, 0.5, 0.8, 1.2 and last in 0.03, 0.05, 0.07, 0.1, 0.15; one
gamma of 0.15, 0.2; LRP-0 in the classifier, and w² for the first convolution, each at three of the pairs. Outside of the family,
for they would need more than new numbers: other curves between the same ends, gamma by resolution, gamma by the count of
convolutions below (first / (1 + count)^power: deep networks end lower than shallow ones).

*Rule.* A candidate's score is the mean over the four models of its ABPC / the model's best ABPC. Out are candidates that are below the
present `default` (0.5 to 0.07) on any model with the whole paired 95 % interval. The best score wins; one from outside the family
must lead the best of the family by 0.01 or more.

*A second round*, written down after the first and before it was measured. The first left the family where it was: only LRP-0 in the
classifier scored above the present numbers, by 0.001. VGG16 wants gamma to fall earlier, ResNet-20 does not. On the same inputs, by the same rule, all
outside of the family: early falls and counts near the best of them; each with the box rule for the first convolution, within the
input's own extremes, so that nobody needs to name bounds; and max pooling, which VGG16 alone has, that shares relevance in
proportion to x or x² instead of handing all to the largest. A first layer that wins must not be surely worse on the ViT's search half either.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falls import Count, Curve, Resolution, SharedPool
from images import ImageTask
from options import parser
from variants import measure
from vgg16_imagenette import LOCAL

import dynamiclrp as dlrp
import methods as m
from dynamiclrp import evaluate as ev
from dynamiclrp.rules import Box, Gamma, WSquare

FIRST, LAST = (0.2, 0.3, 0.5, 0.8, 1.2), (0.03, 0.05, 0.07, 0.1, 0.15)
PAIRS = ((0.5, 0.07), (0.5, 0.1), (0.3, 0.1))  # what is tried beside the numbers, is tried at these
PRESENT = "gamma 0.5 to 0.07"
MARGIN = 0.01  # of the score, by which another form of rule must lead


def levels(found: ImageTask) -> int:
    """How many convolutions with the rule lie above each other."""
    graded = dlrp.preset("default", gamma=1.0, last=0.5, linear=0.0)
    steps = dlrp.explain(found.model, found.inputs[:1], preset=graded).plan.steps
    return len({step.rule.gamma for step in steps if isinstance(step.rule, Gamma)})


def candidates(found: ImageTask) -> m.Methods:
    default, side, count = m.equal_factors(), found.inputs.shape[-1], levels(found)

    def graded(a: float, b: float, **what: Any) -> dlrp.Preset:
        return m.equal_factors(a, b, **what)

    family: m.Methods = {f"gamma {a} to {b}": graded(a, b) for a in FIRST for b in LAST}
    family |= {f"gamma {a}": default | {"conv": Gamma(a)} for a in (0.15, 0.2)}
    family |= {f"gamma {a} to {b}, linear LRP-0": graded(a, b, linear=0.0) for a, b in PAIRS}
    family |= {f"gamma {a} to {b}, first w2": graded(a, b) | {"first-conv": WSquare()} for a, b in PAIRS}
    others: dict[str, Gamma] = {
        **{f"even fall, {a} to {b}": Curve(a, b, even=True) for a, b in PAIRS[:2]},
        **{f"early fall, {a} to {b}": Curve(a, b, 0.5) for a, b in PAIRS[:2]},
        **{f"late fall, {a} to {b}": Curve(a, b, 2.0) for a, b in PAIRS[:2]},
        **{
            f"by resolution, {a} · {f} an octave": Resolution(a, f, side)
            for a, f in ((0.5, 0.7), (0.5, 0.6), (0.35, 0.75))
        },
        **{f"by count, {a} / n^{p}": Count(a, p, count) for a in (0.5, 0.7, 1.0) for p in (0.5, 0.7)},
    }
    first = family | {name: default | {"conv": rule} for name, rule in others.items()}
    return first | second_round(default, count)


def second_round(default: dlrp.Preset, count: int) -> m.Methods:
    new: dict[str, Gamma] = {
        "early fall 0.7, 0.5 to 0.07": Curve(0.5, 0.07, 0.7),
        "early fall 0.7, 0.5 to 0.05": Curve(0.5, 0.05, 0.7),
        "early fall, 0.7 to 0.05": Curve(0.7, 0.05, 0.5),
        "by count, 0.4 / n^0.45": Count(0.4, 0.45, count),
        "by count, 0.6 / n^0.55": Count(0.6, 0.55, count),
        "by count, 0.8 / n^0.65": Count(0.8, 0.65, count),
    }
    known: dict[str, Gamma] = {
        PRESENT: Curve(0.5, 0.07),
        "early fall, 0.5 to 0.07": Curve(0.5, 0.07, 0.5),
        "by count, 0.5 / n^0.5": Count(0.5, 0.5, count),
    }
    found: m.Methods = {name: default | {"conv": rule} for name, rule in new.items()}
    for name, rule in (known | new).items():
        found[f"first own box, {name}"] = default | {"conv": rule, "first-conv": Box()}
    for power in (1.0, 2.0):
        for name in (PRESENT, "by count, 0.5 / n^0.5"):
            pool = {"conv": known[name], "MaxPool2DWithIndices": SharedPool(power)}
            found[f"pool x^{power:.0f}, {name}"] = default | pool
    return found


# ---------------------------------------------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Standing:
    """One candidate: its score, its ABPC on each model, and where it is surely below the present `default`."""

    name: str
    score: float
    areas: dict[str, float]
    below: tuple[str, ...]

    @property
    def in_family(self) -> bool:
        return self.name.startswith("gamma ")


def standings(rows: dict[str, Any]) -> list[Standing]:
    """Every candidate of the search, best score first. `rows`: result files by name."""
    found = []
    names = [n for n in next(iter(rows.values()))["methods"] if "Zennit" not in n]
    areas = {key: {n: row["methods"][n]["metrics"]["abpc"][0] for n in names} for key, row in rows.items()}
    for name in names:
        below = tuple(
            key
            for key, row in rows.items()
            if ev.paired_difference(row["methods"][name]["abpc"], row["methods"][PRESENT]["abpc"]).high < 0
        )
        score = sum(of[name] / max(of.values()) for of in areas.values()) / len(areas)
        found.append(Standing(name, score, {key: of[name] for key, of in areas.items()}, below))
    return sorted(found, key=lambda s: -s.score)


def family_best(found: list[Standing]) -> Standing:
    return next(s for s in found if s.in_family and not s.below)


def winner(found: list[Standing]) -> Standing:
    free, inside = [s for s in found if not s.below], family_best(found)
    return free[0] if free[0].score >= inside.score + MARGIN else inside


def searched(folder: Path) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("depth_*.json"))}


def choose(folder: Path) -> None:
    rows = searched(folder)
    found = standings(rows)
    print(f"{len(found)} candidates; {', '.join(rows)}")
    for s in found:
        print(f"{s.score:.4f}  {'  '.join(f'{v:.4f}' for v in s.areas.values())}  {s.name}  {' '.join(s.below)}")
    print("chosen:", winner(found).name)


def main() -> None:
    if sys.argv[1:2] == ["--choose"]:
        choose(Path(sys.argv[2]))
        return
    options: argparse.Namespace = parser(__doc__, (*LOCAL, "vit-cifar10"), limit=200).parse_args()
    measure(options, candidates, "Gamma by depth")


if __name__ == "__main__":
    main()
