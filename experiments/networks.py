"""The CIFAR-10 networks: ResNet-20 (He et al. 2016), VGG16 with batch norm, a small ViT. Definitions only, no weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class _Block(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (option A: strided, padded with zero channels)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.stride, self.pad = stride, (outside - inside) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad)) if self.pad else x
        return self.relu2(y + short)


class ResNet20(nn.Module):
    """Names as in torchvision's ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(*(_Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(_Block(16, 32, 2), _Block(32, 32, 1), _Block(32, 32, 1))
        self.layer3 = nn.Sequential(_Block(32, 64, 2), _Block(64, 64, 1), _Block(64, 64, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.avgpool(self.layer3(self.layer2(self.layer1(x)))).flatten(1))


class VGG16(nn.Module):
    """Configuration D of Simonyan & Zisserman with batch norm; one linear layer ends it, as is usual on CIFAR-10."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for outside in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            if outside == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
            inside = outside
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class _Encoder(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        x = x + self.proj(y)
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """A pre-norm vision transformer: 4x4 patches by one convolution, a class token, learnt positions."""

    def __init__(
        self, classes: int = 10, width: int = 320, depth: int = 8, heads: int = 5, hidden: int = 640, patch: int = 4
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(_Encoder(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(x)[:, 0]))


CIFAR_NETWORKS = {"resnet20": ResNet20, "vgg16": VGG16, "vit": ViT}
