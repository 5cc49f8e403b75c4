"""The sentences of docs/results.md, the order of its rows, and the paper's numbers. No measured number of ours."""

ROWS = {  # result file: what the table calls its data
    "mobilenetv2": "ImageNet photos",
    "efficientnet_lite0": "ImageNet photos",
    "vgg16_cifar10": "CIFAR-10",
    "resnet20": "CIFAR-10",
    "vit_cifar10": "CIFAR-10",
    "smollm2_wikitext": "next token on WikiText-2",
    "smollm2_imdb": "sentiment on IMDb",
    "minilm_imdb": "sentiment on IMDb",
}
SPANS = ("minilm_squad", "smollm2_squad")

INTRODUCTION = ""
CHOICE = ""
PAPER = ""
