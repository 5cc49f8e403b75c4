"""How good is an explanation? Perturbation curves, metrics with intervals, baselines, sanity checks.

`compare` explains the same inputs with several methods and measures all of them; everything else is a part of it, or
answers another question about the same explanations:

    compare            methods against each other: table, intervals, plot, resumable → Comparison
    perturb            MoRF and LeRF curves for relevance from anywhere → Curves
    randomisation      does relevance change when the weights do? → Randomisation
    conservation       does it add up to the score, and who kept the rest?
    cost               milliseconds and peak memory beside gradient x input
    span_agreement     does it sit on the answer of a question (TGS, TPS, top-2, IoU)? exact_match, f1: is that right?
    relevance_of       relevance by any method; quantus_explain: the same for Quantus

Scale: areas (ABPC, comprehensiveness, sufficiency) are means over the curve, in the units of the score. The names that end
in `_paper` are 4 times that, as in the DynamicLRP paper's tables; those that begin with `eraser_` are ERASER's.

>>> import torch
>>> from dynamiclrp import evaluate
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()
>>> found = evaluate.compare(model, torch.randn(6, 8), methods=["epsilon", "gradient", "random"])
>>> len(found.rows)
3
"""

from .answers import exact_match, f1, normalise_answer, span_agreement, span_iou, top_in_span
from .baselines import Captum, Zennit
from .compare import compare
from .comparison import Comparison
from .conservation import Conservation, conservation
from .cost import Cost, cost
from .fills import Blur, Fill, Mean, Token, Zero
from .methods import Function, Method, Ours, Random, find_method, relevance_of
from .metrics import ERASER_BINS, METRICS, PAPER_SCALE, Interval, bootstrap, paired_difference
from .perturb import Curves, perturb
from .quantus import quantus_explain
from .randomise import Randomisation, randomisation, spearman
from .units import Features, Patches, Pixels, Regions, Tokens, Unit

__all__ = [
    "ERASER_BINS",
    "METRICS",
    "PAPER_SCALE",
    "Blur",
    "Captum",
    "Comparison",
    "Conservation",
    "Cost",
    "Curves",
    "Features",
    "Fill",
    "Function",
    "Interval",
    "Mean",
    "Method",
    "Ours",
    "Patches",
    "Pixels",
    "Random",
    "Randomisation",
    "Regions",
    "Token",
    "Tokens",
    "Unit",
    "Zennit",
    "Zero",
    "bootstrap",
    "compare",
    "conservation",
    "cost",
    "exact_match",
    "f1",
    "find_method",
    "normalise_answer",
    "paired_difference",
    "perturb",
    "quantus_explain",
    "randomisation",
    "relevance_of",
    "span_agreement",
    "span_iou",
    "spearman",
    "top_in_span",
]
