"""One row of the text tables: a language model and token ids → the methods' perturbation curves → a result file."""

from __future__ import annotations

import argparse
from typing import Any

from options import chosen, half_when_scoring, write_comparison
from torch import nn

import methods as m
from dynamiclrp import evaluate as ev


def run(
    network: nn.Module,
    inputs: Any,
    options: argparse.Namespace,
    title: str,
    *,
    measure: str,
    step: int,
    skip: tuple[int, ...] = (),
    **facts: Any,
) -> None:
    methods: m.Methods = {}
    if not options.only_candidates:
        methods |= m.text_presets() | m.text_peers()
    if options.candidates or options.only_candidates:
        methods |= m.text_candidates()
    if options.half:
        half_when_scoring(network)
    found = ev.compare(
        network,
        inputs,
        chosen(methods, options),
        unit=ev.Tokens(skip=skip),
        fill="zero",
        step=step,
        measure=measure,
        batch_size=options.batch_size or 256,
        explain_batch_size=options.explain_batch_size or 8,
        seed=options.seed,
    )
    write_comparison(found, options, title, scored_in_half=options.half, **facts)
