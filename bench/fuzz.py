"""Many random programs against the slow oracle: what fails is shrunk and printed as a program that runs.

    make fuzz                                   # 1,000 programs, a few minutes
    make fuzz FUZZ='--programs 10000 --seed 1'
    make fuzz FUZZ='--all --dear'               # with the shapes that have known defects; every check under every preset
    python bench/fuzz.py --programs 500 --out fuzz.json

In: a number of programs and a seed. Out: failures, one for each cause as far as shrinking tells causes apart, on screen and as JSON. What a program
is, what it means and what is checked stands in tests/oracles/programs; this file only draws, collects and prints.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

import dynamiclrp
from dynamiclrp.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from oracles.programs.check import CHECKS, Discarded, Failure, check, shrink  # noqa: E402
from oracles.programs.draw import KNOWN, KNOWN_FAILURES, SHAPES, is_known, programs  # noqa: E402
from oracles.programs.program import Program  # noqa: E402

SCRIPT = """\
import sys; sys.path.insert(0, "tests")
from oracles.programs.check import check
from oracles.programs.program import Part, Program
for failure in check({program!r}, [{preset!r}]): print(failure)
"""


@dataclass
class Cause:
    """Failures that shrank to the same parts."""

    check: str
    program: Program
    text: str
    presets: set[str] = field(default_factory=set)
    programs: int = 0

    @property
    def parts(self) -> set[tuple[str, str]]:
        return {(part.name, part.spelling) for part in self.program.parts}

    def covers(self, program: Program, failure: Failure) -> bool:
        """Is this the cause of that failure, as far as parts and presets tell?"""
        held = {(part.name, part.spelling) for part in program.parts}
        return (
            failure.check == self.check and failure.preset in self.presets and self.parts - {("numbers", "x")} <= held
        )

    @property
    def known(self) -> set[str]:
        """Shapes with a known defect in it."""
        return set(self.program.shapes() & KNOWN.keys())

    def script(self) -> str:
        return SCRIPT.format(program=self.program, preset=sorted(self.presets)[0])


@dataclass
class Campaign:
    """What was drawn and what came of it."""

    everything: bool
    dear: bool
    limit: float
    begun: float = field(default_factory=time.perf_counter)
    seen: Counter[str] = field(default_factory=Counter)
    causes: list[Cause] = field(default_factory=list)
    late: int = 0

    def run(self, program: Program) -> None:
        if time.perf_counter() - self.begun > self.limit:
            self.late += 1
            return
        self.seen["programs"] += 1
        self.seen.update(program.shapes())
        names = list(PRESETS)
        rest = names if self.dear else [names[(program.seed + 5 * n) % len(names)] for n in range(3)]
        try:
            failures = list(check(program, rest=rest))
        except Discarded:
            self.seen["discarded"] += 1
            return
        for failure in failures:
            if self.everything or not is_known(failure.check, failure.preset, failure.text):
                self.enter(program, failure)
        self.seen["failed"] += bool(failures)

    def enter(self, program: Program, failure: Failure) -> None:
        """Under a known cause, or a new one."""
        cause = next((cause for cause in self.causes if cause.covers(program, failure)), None)
        if cause is None:
            small = shrink(program, failure)
            found = [f for f in check(small, [failure.preset], [failure.check]) if f.check == failure.check]
            text = found[0].text if found else failure.text
            cause = Cause(failure.check, small, text, {failure.preset})
            same = next((c for c in self.causes if c.check == cause.check and c.parts == cause.parts), None)
            if same is None:
                self.causes.append(cause)
                print(f"\n{failure.check} under {failure.preset}: {text}\n{cause.script()}", flush=True)
            cause = same or cause
            cause.presets.add(failure.preset)
        cause.programs += 1


def draw(campaign: Campaign, count: int, seed: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(known=campaign.everything))
    def run(program: Program) -> None:
        campaign.run(program)

    run()


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def report(campaign: Campaign, words: argparse.Namespace) -> dict[str, Any]:
    took = time.perf_counter() - campaign.begun
    seen, count = campaign.seen, max(1, campaign.seen["programs"])
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"node": platform.node(), "processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "hypothesis": hypothesis.__version__,
            "dynamiclrp": getattr(dynamiclrp, "__version__", "?"), "commit": commit(),
        },
        "seed": words.seed, "all": words.all, "dear": words.dear, "checks": list(CHECKS),
        "programs": seen["programs"], "discarded": seen["discarded"], "failed": seen["failed"], "not run": campaign.late,
        "seconds": round(took, 1), "per second": round(seen["programs"] / took, 2),
        "shapes": {shape: round(seen[shape] / count, 4) for shape in SHAPES},
        "left out": {} if words.all else KNOWN | {" ".join(key): why for key, why in KNOWN_FAILURES.items()},
        "known defects that were met": dict(Counter(shape for cause in campaign.causes for shape in sorted(cause.known))),
        "failures": [
            {
                "check": cause.check, "presets": sorted(cause.presets), "programs": cause.programs, "known": sorted(cause.known), "program": repr(cause.program),
                "text": cause.text, "script": cause.script(),
            }
            for cause in campaign.causes
        ],
    }  # fmt: skip


def summary(made: dict[str, Any]) -> str:
    by_check: dict[str, int] = defaultdict(int)
    for failure in made["failures"]:
        by_check[failure["check"]] += 1
    causes = ", ".join(f"{count} {name}" for name, count in by_check.items()) or "none"
    return (
        f"{made['programs']} programs in {made['seconds']} s ({made['per second']} per second), {made['discarded']} discarded, "
        f"{made['failed']} failed; causes: {causes}; known defects met: {made['known defects that were met']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="shapes with known defects too")
    parser.add_argument(
        "--dear", action="store_true", help="every check under every preset, not under three of each program"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop drawing after that time")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results" / "fuzz_cpu.json", help="write JSON there"
    )
    words = parser.parse_args()
    torch.set_num_threads(1)
    campaign = Campaign(words.all, words.dear, words.seconds)
    draw(campaign, words.programs, words.seed)
    made = report(campaign, words)
    print(summary(made))
    words.out.write_text(json.dumps(made, indent=1) + "\n")
    return 1 if made["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
