"""One row of the image tables: a model and its pictures → the methods' perturbation curves → a result file."""

from __future__ import annotations

import argparse
from typing import Any

from images import ImageTask, mended
from options import chosen, half_when_scoring, write_comparison

import methods as m
from dynamiclrp import evaluate as ev


def batch_sizes(task: ImageTask, options: argparse.Namespace) -> tuple[int, int]:
    """Perturbed inputs and explained inputs that run together: many small pictures, fewer large ones."""
    perturbed, explained = (4096, 256) if task.inputs.shape[-1] < 100 else (512, 32)
    if options.device == "cpu":
        perturbed, explained = perturbed // 16, explained // 8
    return options.batch_size or perturbed, options.explain_batch_size or explained


def run(
    task: ImageTask, options: argparse.Namespace, title: str, *, unit: Any, fill: Any, step: int, vit: bool = False
) -> ev.Comparison:
    mended("torchvision")  # which Zennit imports
    methods: m.Methods = {}
    if not options.only_candidates:
        methods |= m.image_presets(task.mean, task.std) | m.former_defaults()
        methods |= m.image_peers(task.mean, task.std, convolutional=not vit)
    if options.candidates or options.only_candidates:
        methods |= m.vit_candidates() if vit else m.conv_candidates()
    model = half_when_scoring(task.model) if options.half else task.model
    batch_size, explain_batch_size = batch_sizes(task, options)
    found = ev.compare(
        model,
        task.inputs,
        chosen(methods, options),
        unit=unit,
        fill=fill,
        step=step,
        measure="probability",
        batch_size=batch_size,
        explain_batch_size=explain_batch_size,
        seed=options.seed,
    )
    write_comparison(
        found, options, title, model=task.name, data=task.source, note=task.note, scored_in_half=options.half
    )
    return found
