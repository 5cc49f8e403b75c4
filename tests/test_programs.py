"""Whole random programs: the engine gives what the slow oracle gives, and agrees with itself.

`make fuzz` draws many more, with other seeds, and shrinks what fails; shapes with known defects are left out here (`KNOWN`).
"""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dynamiclrp.presets import PRESETS
from oracles.programs.check import Discarded, check, shrink
from oracles.programs.draw import KNOWN, SHAPES, is_known, programs
from oracles.programs.exceptions import EXCEPTIONS
from oracles.programs.program import Part, kind

torch.set_num_threads(1)

PROGRAMS = 300
fixed = settings(
    max_examples=PROGRAMS, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)  # fmt: skip


def some(seed, count=2):
    """A few presets, others for every program: the checks of the engine with itself are the dear ones."""
    names = list(PRESETS)
    return [names[(seed + 5 * n) % len(names)] for n in range(count)]


def test_programs_have_the_oracles_relevance():
    seen = Counter()

    @fixed
    @given(programs())
    def run(program):
        seen["drawn"] += 1
        try:
            found = list(check(program, rest=some(program.seed)))
        except Discarded:
            seen["discarded"] += 1
            return
        failures = [f for f in found if not is_known(f.check, f.preset, f.text)]
        if failures:
            program = shrink(program, failures[0])
            pytest.fail("\n".join([f"{program!r}", *map(str, failures)]))

    run()
    assert seen["drawn"] >= PROGRAMS
    assert seen["discarded"] <= 0.1 * seen["drawn"], f"{seen['discarded']} of {seen['drawn']} programs were discarded"


def test_every_shape_is_drawn():
    seen = Counter()

    @settings(fixed, max_examples=1000)
    @given(programs(known=True))
    def run(program):
        seen.update(program.shapes())
        seen["drawn"] += 1

    run()
    rare = {shape: seen[shape] for shape in SHAPES if seen[shape] < 0.02 * seen["drawn"]}
    assert not rare, f"of {seen['drawn']} programs: {rare}"


@given(st.data())
@settings(fixed, max_examples=50)
def test_no_known_defect_is_drawn(data):
    assert not data.draw(programs()).shapes() & KNOWN.keys()


@pytest.mark.parametrize("row", EXCEPTIONS)
def test_exceptions_name_what_there_is(row):
    name, spelling, presets = row
    made = kind(Part(name, spelling), 1)
    assert spelling in made.spellings and set(presets) <= PRESETS.keys()
