"""Train a VGG16 or a small ViT on CIFAR-10: `python experiments/train/cifar10.py vit --out weights.safetensors`.

Everything, augmentation too, runs on the device. The learning rate follows the share of epochs or of minutes that is
used up, whichever is larger, so a time budget ends the training in good order. Weights are written in half precision.
`--teacher vgg16.safetensors` lets a trained VGG16 label what the ViT sees, mixed and distorted images too: a small ViT learns
from so few images what it would otherwise need many more for (Touvron et al. 2021; Beyer et al. 2022).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from images import cifar10, normalise
from networks import CIFAR_MEAN, CIFAR_NETWORKS, CIFAR_STD
from weights import load_half, save_half

SETTINGS = {  # epochs, batch, optimiser, peak rate, weight decay, strength of the augmentation, mixing
    "vgg16": {"epochs": 60, "batch": 512, "rate": 0.2, "decay": 5e-4, "strength": 0.0, "mix": 0.0},
    "vit": {"epochs": 200, "batch": 1024, "rate": 1.5e-3, "decay": 0.05, "strength": 1.0, "mix": 0.8},
}


def shifted(x: Tensor, pad: int = 4) -> Tensor:
    """Random crops of the padded images, flipped left to right half of the time."""
    n, _, h, w = x.shape
    padded = F.pad(x, (pad,) * 4, mode="reflect")
    dy, dx = (torch.randint(0, 2 * pad + 1, (n, 1), device=x.device) for _ in range(2))
    rows = dy + torch.arange(h, device=x.device)
    columns = dx + torch.arange(w, device=x.device)
    flip = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    index = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def erased(x: Tensor, side: int = 8) -> Tensor:
    """A square of each image set to the mean (cutout)."""
    n, _, h, w = x.shape
    y0, x0 = (torch.randint(0, size, (n, 1, 1, 1), device=x.device) for size in (h, w))
    rows, columns = torch.arange(h, device=x.device).view(1, 1, h, 1), torch.arange(w, device=x.device).view(1, 1, 1, w)
    hole = ((rows - y0).abs() <= side // 2) & ((columns - x0).abs() <= side // 2)
    return x.masked_fill(hole, 0)


def distorted(x: Tensor, strength: float) -> Tensor:
    """Random rotation, shear and scale of half of the images, and colour changes of half of them; pixels 0..1."""
    n, device = len(x), x.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, device=device).uniform_(low, high)

    angle, shear = strength * uniform(-0.4, 0.4), strength * uniform(-0.3, 0.3)
    scale = 1 + strength * uniform(-0.2, 0.2)
    zero = torch.zeros(n, device=device)
    theta = torch.stack(
        [scale * angle.cos(), shear - angle.sin(), zero, angle.sin(), scale * angle.cos(), zero], 1
    ).view(n, 2, 3)
    moved = F.grid_sample(x, F.affine_grid(theta, list(x.shape), False), padding_mode="reflection", align_corners=False)
    chosen = (uniform(0, 1) < 0.5).view(n, 1, 1, 1)
    x = torch.where(chosen, moved, x)

    def per_image(low: float, high: float) -> Tensor:
        return uniform(low, high).view(n, 1, 1, 1)

    y = x * per_image(1 - 0.5 * strength, 1 + 0.5 * strength)
    y = (y - y.mean((1, 2, 3), keepdim=True)) * per_image(1 - 0.6 * strength, 1 + 0.6 * strength) + y.mean(
        (1, 2, 3), keepdim=True
    )
    grey = y.mean(1, keepdim=True)
    y = (grey + (y - grey) * per_image(1 - 0.9 * strength, 1 + 0.9 * strength)).clamp(0, 1)
    solarised = torch.where(y > 0.6, 1 - y, y)
    y = torch.where((uniform(0, 1) < 0.1).view(n, 1, 1, 1), solarised, y)
    return torch.where((uniform(0, 1) < 0.5).view(n, 1, 1, 1), y, x)


def mixed(x: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mixup or cutmix of a batch with its reverse, in `share` of the batches."""
    if torch.rand(()).item() >= share:
        return x, targets
    part = torch.distributions.Beta(0.8, 0.8).sample().item()
    other, labels = x.flip(0), targets.flip(0)
    if torch.rand(()).item() < 0.5:
        return part * x + (1 - part) * other, part * targets + (1 - part) * labels
    h, w = x.shape[2:]
    height, width = int(h * (1 - part) ** 0.5), int(w * (1 - part) ** 0.5)
    y0, x0 = int(torch.randint(0, h - height + 1, ())), int(torch.randint(0, w - width + 1, ()))
    x = x.clone()
    x[:, :, y0 : y0 + height, x0 : x0 + width] = other[:, :, y0 : y0 + height, x0 : x0 + width]
    kept = 1 - height * width / (h * w)
    return x, kept * targets + (1 - kept) * labels


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    model.eval()
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), labels.split(1000)))
    model.train()
    return right / len(labels)


def taught(logits: Tensor, x: Tensor, teacher: nn.Module, temperature: float = 2.0) -> Tensor:
    """How far the answers are from a teacher's on the same images: KL divergence, softened, at the scale of the gradient."""
    with torch.no_grad():
        wanted = (teacher(x).float() / temperature).log_softmax(1)
    found = (logits.float() / temperature).log_softmax(1)
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True) * temperature**2


def rate_at(progress: float, warm: float = 0.1) -> float:
    return progress / warm if progress < warm else max(0.0, (1 - progress) / (1 - warm))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=sorted(SETTINGS))
    parser.add_argument("--local", action="store_true", help="CIFAR-10 from the files in --data, not from torchvision")
    parser.add_argument("--data", type=Path, help="folder of local data (or the environment variable DYNAMICLRP_DATA)")
    parser.add_argument("--out", type=Path, required=True, help="the weights to write, .safetensors")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--minutes", type=float, default=1e9, help="time budget of the training proper")
    parser.add_argument("--limit", type=int, help="train on so many images only (to try the script)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--start", type=Path, help="go on from these weights")
    parser.add_argument("--teacher", type=Path, help="weights of a VGG16 that teaches")
    parser.add_argument("--taught", type=float, default=0.8, help="the teacher's part of the loss, with --teacher")
    for name in ("rate", "strength", "mix"):
        parser.add_argument(f"--{name}", type=float, help=f"default: {[s[name] for s in SETTINGS.values()]}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True

    given = {k: getattr(options, k) for k in ("rate", "strength", "mix") if getattr(options, k) is not None}
    settings = SETTINGS[options.network] | given
    epochs = options.epochs or settings["epochs"]
    device = torch.device(options.device)
    images, labels = cifar10("train", options)
    images, labels = images[: options.limit].to(device), labels[: options.limit].to(device)
    test_images, test_labels = (t[: options.limit].to(device) for t in cifar10("test", options))
    test = normalise(test_images, CIFAR_MEAN, CIFAR_STD)
    pixels = images.float() / 255

    convolutional = options.network == "vgg16"
    layout = torch.channels_last if convolutional else torch.contiguous_format
    model = CIFAR_NETWORKS[options.network]().to(device, memory_format=layout)
    if options.start:
        model.load_state_dict(load_half(options.start)[0])
    if convolutional:
        optimiser: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), settings["rate"], momentum=0.9, weight_decay=settings["decay"], nesterov=True
        )
    else:
        optimiser = torch.optim.AdamW(
            model.parameters(),
            settings["rate"],
            betas=(0.9, 0.98),
            weight_decay=settings["decay"],
            fused=device.type == "cuda",
        )
    teacher = None
    if options.teacher:
        teacher = CIFAR_NETWORKS["vgg16"]()
        teacher.load_state_dict(load_half(options.teacher)[0])
        teacher = teacher.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
    run = torch.compile(model, dynamic=False) if options.compile else model
    if options.compile:  # before the clock starts, which the learning rate follows
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            run(test[:1].expand(min(int(settings["batch"]), len(images)), -1, -1, -1).contiguous()).sum().backward()
    current = [p for p in model.state_dict().values() if p.is_floating_point()]  # these share the model's memory
    averaged = [p.clone() for p in current]
    batch = min(int(settings["batch"]), len(images))
    steps, step, begin = max(1, int(epochs * (len(images) // batch))), 0, time.perf_counter()
    progress, losses = 0.0, torch.zeros((), device=device)
    order = torch.randperm(len(images), device=device)
    place = 0
    report = 0.0
    while progress < 1:
        if place + batch > len(images):
            order, place = torch.randperm(len(images), device=device), 0
        chosen = order[place : place + batch]
        place += batch
        x = shifted(pixels[chosen])
        if settings["strength"]:
            x = distorted(x, settings["strength"])
        x = normalise(255 * x, CIFAR_MEAN, CIFAR_STD)
        targets = F.one_hot(labels[chosen], 10).float()
        x, targets = mixed(x, targets, settings["mix"]) if settings["mix"] else (erased(x), targets)
        progress = max(step / steps, (time.perf_counter() - begin) / (60 * options.minutes))
        for group in optimiser.param_groups:
            group["lr"] = settings["rate"] * rate_at(progress)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = run(x.contiguous(memory_format=layout))
            loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
            if teacher is not None:
                lesson = taught(logits, x.contiguous(memory_format=torch.channels_last), teacher)
                loss = loss.lerp(lesson, options.taught)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 if not convolutional else 5.0)
        optimiser.step()
        torch._foreach_lerp_(averaged, current, 0.01)
        losses = losses.lerp(loss.detach(), 0.02)
        step += 1
        if progress >= report:
            spent = time.perf_counter() - begin
            print(
                f"{options.network} {100 * progress:5.1f} %  step {step}/{steps}  loss {losses.item():.3f}  {spent:.0f} s",
                flush=True,
            )
            report += 0.1
    plain = accuracy(model, test, test_labels)
    own = {k: v.clone() for k, v in model.state_dict().items()}
    smooth = dict(zip([k for k, v in own.items() if v.is_floating_point()], averaged))
    model.load_state_dict({**own, **smooth})
    # the averaged weights, always: choosing by test accuracy would be peeking
    facts = {
        "network": options.network,
        "test_accuracy": accuracy(model, test, test_labels),
        "test_accuracy_last_step": plain,
        "epochs": step * batch / len(images),
        "seconds": round(time.perf_counter() - begin),
        "started_from": options.start.name if options.start else None,
        "teacher": options.teacher.name if options.teacher else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": options.seed,
    }
    save_half(model.state_dict(), options.out, facts)
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
