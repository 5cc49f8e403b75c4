"""Small networks that Zennit can explain, and Zennit's explanation of them.

In: a network, a Zennit composite, an input, the relevance of the output. Out: the relevance of the input.

Zennit sees modules, in the order in which they were registered; the engine sees operations. So every network here
registers its modules in the order of its forward pass, uses a module for all that has a rule, and can add with
`zennit.layer.Sum`.
"""

import torch
from torch import Tensor, nn
from zennit import canonizers, composites, rules
from zennit.layer import Sum
from zennit.types import Linear


def zennit_relevance(net: nn.Module, composite: composites.Composite, x: Tensor, seed: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    with composite.context(net) as net_with_hooks:
        (relevance,) = torch.autograd.grad(net_with_hooks(x), x, grad_outputs=seed)
    return relevance.detach()


class MergeBatchNorm(canonizers.SequentialMergeBatchNorm):
    """Fold each batch-norm into the convolution or linear layer registered just before it.

    Zennit's own leaves the batch-norm dividing by sqrt(1 + eps): it explains a network that is 5e-6 off per layer.
    """

    def register(self, linears: tuple[nn.Module, ...], batch_norm: nn.Module) -> None:
        super().register(linears, batch_norm)
        self.eps, batch_norm.eps = batch_norm.eps, 0.0

    def remove(self) -> None:
        super().remove()
        self.batch_norm.eps = self.eps


def one_rule(rule: rules.BasicHook) -> composites.LayerMapComposite:
    """`rule` on every linear map, Zennit's base rules on the rest."""
    return composites.LayerMapComposite([*composites.layer_map_base(), (Linear, rule)], canonizers=[MergeBatchNorm()])


COMPOSITES = {
    "epsilon-plus": composites.EpsilonPlus,
    "epsilon-plus-flat": composites.EpsilonPlusFlat,
    "epsilon-gamma-box": lambda **options: composites.EpsilonGammaBox(low=-3.0, high=3.0, **options),
    "epsilon-alpha2-beta1": composites.EpsilonAlpha2Beta1,
    "epsilon-alpha2-beta1-flat": composites.EpsilonAlpha2Beta1Flat,
}


def composite(preset: str) -> composites.Composite:
    return COMPOSITES[preset](canonizers=[MergeBatchNorm()])


# ---------------------------------------------------------------- networks


def randomise(net: nn.Module, seed: int = 0) -> nn.Module:
    """float64, eval mode, and every parameter and statistic random, biases and batch-norm too."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    net = net.double().eval()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.copy_(1 + 0.5 * gaussian(module.weight))  # some negative: the fold turns a kernel's sign
                module.bias.copy_(0.5 * gaussian(module.bias))
                module.running_mean.copy_(0.5 * gaussian(module.running_mean))
                module.running_var.copy_(0.5 + gaussian(module.running_var).abs())
            elif isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.copy_(gaussian(module.weight) * (2 / module.weight[0].numel()) ** 0.5)
                if module.bias is not None:
                    module.bias.copy_(0.3 * gaussian(module.bias))
    return net


def vgg(activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=bias), activation(),
        nn.Conv2d(6, 6, 3, padding=1, bias=bias), activation(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1, bias=bias), activation(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 3 * 3, 10, bias=bias), activation(), nn.Linear(10, 5, bias=bias),
    )  # fmt: skip


def batch_norm_net() -> nn.Module:
    """Batch-norm behind convolutions with and without a bias, and behind a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 3 * 3, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5),
    )  # fmt: skip


def avg_pool_net(pool: str = "adaptive") -> nn.Module:
    """Average pooling by windows, then over the whole picture."""
    last = nn.AdaptiveAvgPool2d(1) if pool == "adaptive" else nn.AvgPool2d(6)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), last,
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def odd_convolutions() -> nn.Module:
    """Strided, grouped, dilated, depthwise and pointwise convolutions, an uneven kernel and uneven padding."""
    return nn.Sequential(
        nn.Conv2d(3, 6, (3, 5), stride=(1, 2), padding=(1, 2)), nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=3, bias=False), nn.ReLU(),
        nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=6), nn.ReLU(),
        nn.Conv2d(12, 8, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 6 * 3, 5),
    )  # fmt: skip


def mlp(activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 10, bias=bias), activation(),
        nn.Linear(10, 8, bias=bias), activation(),
        nn.Linear(8, 5, bias=bias),
    )  # fmt: skip


class Plus(nn.Module):
    """a + b: the sum of a stack for Zennit, whose rule for `Sum` then applies, or the plain add of a real model."""

    def __init__(self):
        super().__init__()
        self.sum, self.plain = Sum(), False

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b if self.plain else self.sum(torch.stack([a, b], dim=-1))


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.relu1 = nn.ReLU()
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        projection = nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))
        self.skip = nn.Identity() if channels == out else projection
        self.plus, self.relu2 = Plus(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(self.plus(self.skip(x), inner))


class ResNet(nn.Module):
    """A stem, a block with an identity skip, a block with a projected strided skip, global average pooling."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        self.block1, self.block2 = Block(6, 6, 1), Block(6, 8, 2)
        self.pool, self.flatten, self.head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        return self.head(self.flatten(self.pool(self.block2(self.block1(x)))))


def add_plainly(net: nn.Module, plain: bool = True) -> nn.Module:
    """Switch every `Plus` of the network to `a + b`, or back."""
    for module in net.modules():
        if isinstance(module, Plus):
            module.plain = plain
    return net


PICTURE = (2, 3, 12, 12)
VECTOR = (3, 12)

CONVOLUTIONAL = {
    "vgg": vgg,
    "vgg without biases": lambda: vgg(bias=False),
    "vgg with tanh": lambda: vgg(nn.Tanh),
    "vgg with gelu": lambda: vgg(nn.GELU),
    "vgg with leaky relu": lambda: vgg(nn.LeakyReLU),
    "batch-norm": batch_norm_net,
    "adaptive average pool": avg_pool_net,
    "average pool": lambda: avg_pool_net("windows"),
    "odd convolutions": odd_convolutions,
    "resnet": ResNet,
}
DENSE = {
    "mlp": mlp,
    "mlp without biases": lambda: mlp(bias=False),
    "mlp with tanh": lambda: mlp(nn.Tanh),
}
