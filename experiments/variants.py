"""Is there a better rule for convolutions than `default`'s? Variants of it, one change each, on the search half.

    python experiments/variants.py --local --data DIR --half --model mobilenetv2 --limit 200 --out docs/results/search/variants_mobilenetv2.json

They set out from `default` as it was then: the generalised gamma rule, 0.25, on the folded convolution. Contributions of the
output's own sign count 1 + gamma times, the bias takes part. The variants ask what each of these words is worth: the classic
rule on weights, positive contributions only, the bias out of the denominator, another gamma for depthwise convolutions or by
depth, clipped units, the first layer, what is explained and how relevance is pooled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from image_rows import batch_sizes
from images import ImageTask, mended, task
from options import chosen, half_when_scoring, parser, write_comparison
from torch import Tensor, nn
from vgg16_imagenette import LOCAL

import dynamiclrp as dlrp
import methods as m
from dynamiclrp import evaluate as ev
from dynamiclrp.kernel import sgn
from dynamiclrp.rules import AbsoluteShare, Box, Flat, Gamma, Gradient, WSquare
from dynamiclrp.rules.base import OUT, stabilise
from dynamiclrp.rules.linear import LinearRule

START = dlrp.preset("default", gamma=0.25, last=None, linear=0.0) | {
    "first-conv": Flat()
}  # what the search set out from
FAVOURS = ("output", "output without bias", "relevance", "positive", "positive weights")
BIAS = ("in", "out", "first")


@dataclass(frozen=True)
class Variant(LinearRule):
    """Gamma written out, for trying: contributions that `favours` names count 1 + gamma times.

    `favours`: those of the sign of the output, of the output without its bias, of relevance; positive ones; or all of positive
    weights, whatever the sign of the input (the classic rule). `share`: the bias in the denominator, out of it, or it takes
    |b| / (|x·W| + |b|) first. `relative`: a stabiliser, in units of the outputs' root mean square. `depthwise`: their gamma.
    `wide`, `narrow`: gamma of maps wider than 28 pixels and not wider than 7. `last`: that of the last convolution
    that has the rule, from the first of them on by equal factors.
    """

    gamma: float = 0.25
    favours: str = "output"
    share: str = "in"
    relative: float = 0.0
    depthwise: float | None = None
    wide: float | None = None
    narrow: float | None = None
    last: float | None = None

    def needs(self, step: Any) -> Iterable[int]:
        yield OUT
        yield from step.factors
        if step.has_bias:
            yield step.bias

    def before(self, here: Any, s: Tensor) -> Tensor:
        here.stash = here.relevance(s, here.output)
        return s

    def after(self, here: Any, grads: Any, s: Tensor) -> Any:
        r, z, (x, w) = here.stash, here.output, here.factors
        gamma = self.gamma_at(z, w) if self.last is None else self.gamma_by_depth(here, self.last)
        bias = here.bias if here.step.has_bias else z.new_zeros(())
        linear = z - bias
        if self.share == "first":
            r = r * linear.abs() / (linear.abs() + bias.abs() + self.eps)
        if self.share != "in":
            bias = torch.zeros_like(bias)
        if self.favours == "positive weights":
            w = w + gamma * w.clamp(min=0)
            d = here.product(x, w) + bias + gamma * bias.clamp(min=0)
            found = here.transposed(r / self.stable(d, z), x, w)
            return here.on_live(grads, lambda _: found)
        deciding = {"output": z, "output without bias": linear, "relevance": r}.get(self.favours)
        up = torch.full_like(z, 1 + gamma) if deciding is None else torch.where(deciding >= 0, 1 + gamma, 1.0)
        down = torch.ones_like(z) if deciding is None else torch.where(deciding >= 0, 1.0, 1 + gamma)
        magnitude = here.product(x.abs(), w.abs())
        positive, negative = (linear + magnitude) / 2 + bias.clamp(min=0), (linear - magnitude) / 2 + bias.clamp(max=0)
        u = r / self.stable(up * positive + down * negative, z)
        same = here.transposed((up + down) / 2 * u, x, w)
        apart = here.transposed((up - down) / 2 * u, x.abs(), w.abs())
        return here.on_live(grads, lambda _: same + sgn(x) * apart)

    def gamma_at(self, z: Tensor, w: Tensor) -> float:
        if self.depthwise is not None and w.shape[1] == 1:
            return self.depthwise
        if self.wide is not None and z.shape[-1] > 28:
            return self.wide
        return self.narrow if self.narrow is not None and z.shape[-1] <= 7 else self.gamma

    def gamma_by_depth(self, here: Any, last: float) -> float:
        nodes = sorted(step.node for step in here._values.plan.steps if step.rule == self)  # from the input on
        depth = nodes.index(here.step.node) / max(1, len(nodes) - 1)
        return self.gamma ** (1 - depth) * last**depth

    def stable(self, d: Tensor, z: Tensor) -> Tensor:
        spread = z.square().mean(tuple(range(1, z.dim())), keepdim=True).sqrt()
        return stabilise(d, self.eps) + self.relative * spread * sgn(d)


class Magnitudes:
    """Relevance without its sign."""

    def __call__(self, model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        return ev.relevance_of(START, model, x, targets).abs()


@dataclass(frozen=True)
class Contrast:
    """The answer against all other classes, each by its probability: what a step in log-odds stands on."""

    gamma: float = 0.25

    def __call__(self, model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        def seed(logits: Tensor) -> Tensor:
            others = logits.detach().scatter(1, targets[:, None].to(logits.device), -torch.inf).softmax(1)
            answer = torch.zeros_like(others).scatter(1, targets[:, None].to(logits.device), 1.0)
            return ((answer - others) * logits).sum()

        return dlrp.explain(model, x, target=seed, preset=START | {"conv": Gamma(self.gamma)}).relevance


def variants(mean: Any, std: Any) -> m.Methods:
    default = START

    def conv(**what: Any) -> dlrp.Preset:
        return default | {"conv": Variant(**what)}

    found: m.Methods = {
        "default, gamma 0.25 at every depth": default,
        "default, written out": conv(),
        "classic gamma on weights": conv(favours="positive weights"),
        "classic gamma on weights, bias out": conv(favours="positive weights", share="out"),
        "positive contributions": conv(favours="positive"),
        "positive contributions, bias out": conv(favours="positive", share="out"),
        "by the output's sign, bias out": conv(share="out"),
        "by the output's sign, the bias first": conv(share="first"),
        "by the sign without bias": conv(favours="output without bias"),
        "by the sign without bias, bias out": conv(favours="output without bias", share="out"),
        "by the sign of relevance": conv(favours="relevance"),
        "stabiliser 0.1": conv(relative=0.1),
        "stabiliser 0.1, gamma 0.1": conv(relative=0.1, gamma=0.1),
        "gamma 0.1": default | {"conv": Gamma(0.1)},
        "gamma 0.15": default | {"conv": Gamma(0.15)},
        "gamma 0.2": default | {"conv": Gamma(0.2)},
        "gamma 0.35": default | {"conv": Gamma(0.35)},
        "depthwise 0": conv(depthwise=0.0),
        "depthwise 1": conv(depthwise=1.0),
        "depthwise 1, others 0.15": conv(depthwise=1.0, gamma=0.15),
        "depthwise 0.1, others 0.35": conv(depthwise=0.1, gamma=0.35),
        "wide 0.5, narrow 0.1": conv(wide=0.5, narrow=0.1),
        "wide 0.1, narrow 0.5": conv(wide=0.1, narrow=0.5),
        "wide 1": conv(wide=1.0),
        "narrow 1": conv(narrow=1.0),
        "narrow 0": conv(narrow=0.0),
        "gamma 0.5 to 0.05": conv(gamma=0.5, last=0.05),
        "gamma 0.5 to 0.07": conv(gamma=0.5, last=0.07),
        "gamma 0.5 to 0.1": conv(gamma=0.5, last=0.1),
        "gamma 0.35 to 0.05": conv(gamma=0.35, last=0.05),
        "gamma 0.25 to 0.05": conv(gamma=0.25, last=0.05),
        "gamma 0.05 to 0.5": conv(gamma=0.05, last=0.5),
        "gradient of ReLU6": default | {"Hardtanh": Gradient()},
        "absolute sums": default | {"sum": AbsoluteShare()},
        "first w2": default | {"first-conv": WSquare()},
        "first box": default | {"first-conv": Box(*m.bounds(mean, std))},
        "magnitudes": Magnitudes(),
        "contrast": Contrast(),
        "contrast, gamma 0.15": Contrast(0.15),
        "contrast, gamma 0.5": Contrast(0.5),
    }
    return found


def measure(options: argparse.Namespace, methods: Callable[[ImageTask], m.Methods], title: str) -> None:
    """A model's inputs ranked by each of the methods, and by Zennit's EpsilonGammaBox; written to `--out`."""
    mended("torchvision")
    found = task(options.model, options)
    side, vit = found.inputs.shape[-1], options.model.startswith("vit")
    peers = {k: v for k, v in m.image_peers(found.mean, found.std, not vit).items() if k == "Zennit EpsilonGammaBox"}
    batch_size, explain_batch_size = batch_sizes(found, options)
    compared = ev.compare(
        half_when_scoring(found.model) if options.half else found.model,
        found.inputs,
        chosen(methods(found) | peers, options),
        unit=ev.Patches(4, "max") if vit else ev.Regions(side // 16),
        fill=ev.Blur(51, 20) if side == 224 else ev.Blur(7, 20 * side / 224),
        step=2 if vit else 16,
        measure="probability",
        batch_size=batch_size,
        explain_batch_size=explain_batch_size,
        seed=options.seed,
    )
    title = f"{title}, {found.name} on {found.source}"
    write_comparison(
        compared, options, title, model=found.name, data=found.source, note=found.note, scored_in_half=options.half
    )


def main() -> None:
    options = parser(__doc__, LOCAL, limit=200).parse_args()
    measure(options, lambda found: variants(found.mean, found.std), "Variants of default")


if __name__ == "__main__":
    main()
