"""One row of the image tables: a model and its pictures → the methods' perturbation curves → a result file."""

from __future__ import annotations

import argparse
from typing import Any

from images import ImageTask, mended
from options import chosen, half_when_scoring, write_comparison

import methods as m
from dynamiclrp import evaluate as ev


def run(
    task: ImageTask, options: argparse.Namespace, title: str, *, unit: Any, fill: Any, step: int, vit: bool = False
) -> ev.Comparison:
    mended("torchvision")  # which Zennit imports
    methods: m.Methods = {}
    if not options.only_candidates:
        methods |= m.image_presets(task.mean, task.std) | m.image_peers(task.mean, task.std, convolutional=not vit)
    if options.candidates or options.only_candidates:
        methods |= m.vit_candidates() if vit else m.conv_candidates()
    model = half_when_scoring(task.model) if options.half else task.model
    small = task.inputs.shape[-1] < 100
    found = ev.compare(
        model,
        task.inputs,
        chosen(methods, options),
        unit=unit,
        fill=fill,
        step=step,
        measure="probability",
        batch_size=options.batch_size or (4096 if small else 512),
        explain_batch_size=options.explain_batch_size or (256 if small else 64),
        seed=options.seed,
    )
    write_comparison(
        found, options, title, model=task.name, data=task.source, note=task.note, scored_in_half=options.half
    )
    return found
