"""explain_image: geometry undone, preprocessing found, several targets and presets, names, and bad input."""

import numpy
import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
import oracles  # noqa: F401  mends torchvision before anything imports it
from dynamiclrp.geometry import seen_part
from dynamiclrp.image import keep_picture
from dynamiclrp.media import Picture

Image = pytest.importorskip("PIL.Image")
CLASSES = ["cat", "dog", "tripod, camera stand", "lynx"]


def network():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()  # fmt: skip


def picture(width=90, height=60):
    generator = numpy.random.default_rng(1)
    return Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=numpy.uint8))


def tensor(image):
    return (torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() - 120) / 60


def resize_and_crop(image, short=48, side=40):
    scale = short / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return tensor(image.crop((left, top, left + side, top + side)))


def letterbox(image, side=64):
    scale = side / max(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    out = Image.new("RGB", (side, side), (114, 114, 114))
    out.paste(small, ((side - small.width) // 2, (side - small.height) // 2))
    return tensor(out)


def squash(image):
    return tensor(image.resize((32, 32), Image.Resampling.BILINEAR))


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        # 90 x 60 to 72 x 48 (by 0.8), then the middle 40 x 40
        (resize_and_crop, (16 / 0.8, 4 / 0.8, 56 / 0.8, 44 / 0.8)),
        (squash, (0, 0, 90, 60)),
        # 90 x 60 to 64 x 43 (by 0.7111), 10 rows of gray above, 11 below
        (letterbox, (0, -10 * 60 / 43, 90, 54 * 60 / 43)),
        (lambda image: tensor(image.crop((7, 11, 57, 51))), (7, 11, 57, 51)),
        (lambda image: tensor(image.convert("L").convert("RGB").resize((45, 30))), (0, 0, 90, 60)),
    ],
)
def test_the_part_that_preprocessing_took_is_found(process, expected):
    assert seen_part(process, 90, 60) == pytest.approx(expected, abs=0.6)


@pytest.mark.parametrize("size", [(341, 256), (256, 341), (1200, 801)])
def test_usual_sizes_are_found_to_a_pixel(size):
    scale = 256 / min(size)
    wide, high = round(size[0] * scale), round(size[1] * scale)
    left, top = (wide - 224) // 2, (high - 224) // 2
    expected = [
        left * size[0] / wide,
        top * size[1] / high,
        (left + 224) * size[0] / wide,
        (top + 224) * size[1] / high,
    ]
    found = seen_part(lambda image: resize_and_crop(image, 256, 224), *size)
    assert found == pytest.approx(expected, abs=0.6 * size[0] / wide)


@pytest.mark.parametrize(
    "process", [lambda image: tensor(image.rotate(30)), lambda image: torch.randn(3, 20, 20), lambda image: torch.zeros(3, 8, 8)]
)  # fmt: skip
def test_what_is_no_resize_crop_or_pad_is_not_guessed(process):
    torch.manual_seed(0)
    assert seen_part(process, 90, 60) is None


def test_an_impulse_lands_where_it_came_from():
    """Relevance of one input pixel is back on those original pixels that made it, nowhere else."""
    seen = seen_part(resize_and_crop, 90, 60)
    shown = keep_picture(picture(), seen)
    for y, x in ((0, 0), (7, 31), (39, 39), (20, 3)):
        heat = torch.zeros(40, 40)
        heat[y, x] = 1
        found = shown.original(heat)
        assert found.shape == (60, 90)
        ys, xs = (found > 0.05 * found.max()).nonzero().T
        center = (20 + (x + 0.5) / 0.8, 5 + (y + 0.5) / 0.8)
        assert abs(xs.double().mean() + 0.5 - center[0]) < 1.0 and abs(ys.double().mean() + 0.5 - center[1]) < 1.0
        assert xs.max() - xs.min() <= 4 and ys.max() - ys.min() <= 4
        if 0 < y < 39 and 0 < x < 39:  # at the edge a half of it is extrapolated
            assert float(found.sum()) == pytest.approx(1, abs=0.15)


def test_a_smooth_map_keeps_its_sum_and_its_place():
    seen = seen_part(resize_and_crop, 90, 60)
    heat = torch.outer(torch.hann_window(40), torch.hann_window(40))
    found = keep_picture(picture(), seen).original(heat)
    assert float(found.sum()) == pytest.approx(float(heat.sum()), rel=0.01)
    assert not found[:, :20].any() and not found[:5].any()  # cropped away


def test_relevance_equals_explain_and_names_are_found():
    model, image = network(), picture()
    a = dlrp.explain_image(model, image, target="Tripod", processor=resize_and_crop, classes=CLASSES)
    plain = dlrp.explain(model, resize_and_crop(image)[None], target=2)
    assert torch.equal(a.relevance, plain.relevance)
    assert a.answers[0].label == "tripod, camera stand" and a.target == 2
    assert a.heat_map().shape == (60, 90) and a.heat_map(original=False).shape == (40, 40)
    assert isinstance(a.media["input"][0], Picture)
    assert a.pool(4).shape == (1, 10, 10) and float(a.pool(4).sum()) == pytest.approx(
        float(a.relevance.sum()), abs=1e-5
    )


def test_contrast_is_the_difference_of_two():
    model, image = network(), picture()
    make = {"processor": squash, "classes": CLASSES}
    a = dlrp.explain_image(model, image, target="cat", contrast="dog", **make)
    one, other = (dlrp.explain_image(model, image, target=t, **make).relevance for t in ("cat", "dog"))
    assert torch.allclose(a.relevance, one - other, atol=1e-6)
    assert str(a.answers[0]) == "cat rather than dog"


def test_several_targets_and_presets_side_by_side():
    model, image = network(), picture()
    c = dlrp.explain_image(model, image, targets=2, processor=squash, classes=CLASSES)
    order = model(squash(image)[None])[0].topk(2).indices.tolist()
    assert [a.target for _, a in c.items()] == order
    d = dlrp.explain_image(model, image, target=1, presets=["epsilon", "gamma"], processor=squash, classes=CLASSES)
    assert list(d) == ["epsilon", "gamma"] and d["gamma"].preset.name == "gamma"
    e = dlrp.explain_image(
        model, image, targets=["cat", "dog"], presets=["epsilon", "gamma"], processor=squash, classes=CLASSES
    )
    assert list(e) == ["cat · epsilon", "dog · epsilon", "cat · gamma", "dog · gamma"]


def test_files_are_read_as_the_camera_says(tmp_path):
    image = picture(90, 60)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.save(tmp_path / "turned.jpg", exif=exif)
    a = dlrp.explain_image(network(), tmp_path / "turned.jpg", processor=squash, target=0)
    assert (a.media["input"][0].width, a.media["input"][0].height) == (60, 90)


def test_tensors_count_as_preprocessed():
    x = torch.rand(3, 24, 30)
    a = dlrp.explain_image(network(), x, target=1)
    assert torch.equal(a.relevance, dlrp.explain(network(), x[None], target=1).relevance)
    assert a.heat_map().shape == (24, 30)


def test_large_pictures_are_carried_smaller():
    shown = keep_picture(picture(2048, 1024), (0, 0, 2048, 1024))
    assert (shown.width, shown.height, shown.seen) == (1024, 512, (0, 0, 1024, 512))


def test_timm_says_how_pictures_are_prepared():
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet18", pretrained=False).eval()
    a = dlrp.explain_image(model, picture(300, 200), target=3, preset="epsilon")
    assert a.relevance.shape == (1, 3, 224, 224)
    left, top, right, bottom = a.media["x"][0].seen
    assert (top + bottom) / 2 == pytest.approx(100, abs=2) and (left + right) / 2 == pytest.approx(150, abs=2)
    assert right - left == pytest.approx(bottom - top, abs=2)


def test_transformers_processors_are_taken():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8, num_labels=3,
        id2label={0: "ant", 1: "bee", 2: "fly"},
    )  # fmt: skip
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    a = dlrp.explain_image(
        transformers.ViTForImageClassification(config).eval(), picture(), target="bee", processor=processor
    )
    assert a.relevance.shape == (1, 3, 32, 32) and a.media["pixel_values"][0].seen == pytest.approx(
        (0, 0, 90, 60), abs=1
    )
    with pytest.raises(ValueError, match="Pass processor="):
        dlrp.explain_image(transformers.ViTForImageClassification(config), picture())


def test_bad_input_is_refused(tmp_path):
    model, image = network(), picture()
    with pytest.raises(ValueError, match=r"does not say how pictures are prepared for it\. Pass processor="):
        dlrp.explain_image(model, image)
    with pytest.raises(FileNotFoundError, match="no picture at"):
        dlrp.explain_image(model, tmp_path / "none.png", processor=squash)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match="not a picture"):
        dlrp.explain_image(model, tmp_path / "text.png", processor=squash)
    with pytest.raises(TypeError, match="expected a path, a PIL picture or a tensor, got int"):
        dlrp.explain_image(model, 3, processor=squash)
    with pytest.raises(ValueError, match=r"expected floats \[3, H, W\]"):
        dlrp.explain_image(model, torch.rand(24, 30))
    with pytest.raises(TypeError, match="counts as preprocessed"):
        dlrp.explain_image(model, torch.rand(3, 24, 30), processor=squash)
    with pytest.raises(TypeError, match="not both"):
        dlrp.explain_image(model, image, target=1, targets=2, processor=squash)
    with pytest.raises(dlrp.TargetError, match=r"no class of the model is called 'lyn'\. Close: lynx"):
        dlrp.explain_image(model, image, target="lyn", processor=squash, classes=CLASSES)
    with pytest.raises(dlrp.TargetError, match="the model has 4 answers, there is no place 5"):
        dlrp.explain_image(model, image, targets=9, processor=squash)
    with pytest.raises(TypeError, match="the processor returned ndarray"):
        dlrp.explain_image(model, image, processor=lambda im: numpy.array(im))
    with pytest.raises(dlrp.TargetError, match=r"expected one row of class scores"):
        dlrp.explain_image(nn.Conv2d(3, 2, 3), image, processor=squash)


def test_torchvision_weights_prepare_pictures_and_name_classes():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model, weights = torchvision.models.squeezenet1_1().eval(), torchvision.models.SqueezeNet1_1_Weights.DEFAULT
    a = dlrp.explain_image(model, picture(300, 200), target="tabby", processor=weights, preset="epsilon")
    assert a.target == 281 and a.relevance.shape == (1, 3, 224, 224)
    with pytest.raises(ValueError, match="the weights it was built with"):
        dlrp.explain_image(model, picture())
