"""Sounds, tables and several modalities: relevance equals explain's, moments are found, names are kept, bad input is refused."""

import functools
import io
import wave

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
import words  # first: makes transformers' import of torchvision work
from dynamiclrp.audio import heard, read_audio
from dynamiclrp.media import Picture, Sound, Tokens

transformers = pytest.importorskip("transformers")
RATE = 8000


def samples(seconds=1.0):
    torch.manual_seed(1)
    t = torch.arange(int(seconds * RATE)) / RATE
    return torch.sin(2000 * t) * torch.exp(-((t - 0.4) ** 2) / 0.01) + 0.01 * torch.randn(len(t))


def listener():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 6, 40, 10), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 3)
    ).eval()  # fmt: skip


def frames(x, window=256, hop=80, padded=0):
    """A log spectrogram [1, bands, frames]."""
    made = torch.stft(x, window, hop, window=torch.hann_window(window), center=True, return_complex=True)
    made = made.abs().clamp_min(1e-5).log()[None]
    return nn.functional.pad(made, (0, padded), value=float(made.min())) if padded >= 0 else made[..., :padded]


# Sound ---------------------------------------------------------------------------------------------------------------


def test_samples_are_explained_themselves():
    x = samples()
    a = dlrp.explain_audio(listener(), x, rate=RATE, target="bird", classes=["dog", "bird", "car"])
    assert torch.equal(a.relevance, dlrp.explain(listener(), x[None], target=1).relevance)
    assert a.answers[0].label == "bird" and a.media["input"][0].moments() == (0.0, 1.0)
    parts = a.parts()
    assert len(parts) == 50 and sum(p.relevance for p in parts) == pytest.approx(float(a.relevance.sum()), abs=1e-5)
    assert parts[20].label == "0.40 s"


@pytest.mark.parametrize("padded", [0, 60, -30])
def test_the_moments_of_features_are_found(padded):
    x = samples()
    features = frames(x, padded=padded)
    sound = heard(x, RATE, features, lambda s: frames(s, padded=padded))
    assert sound.axis == 1 and sound.features.shape == features.shape[1:]
    begin, end = sound.moments()
    # frame k stands at k hops, so the axis begins half a hop before 0
    assert begin == pytest.approx(-0.005, abs=0.012) and end == pytest.approx(
        begin + features.shape[2] * 80 / RATE, abs=0.02
    )


def test_features_are_explained_as_bands_and_frames():
    torch.manual_seed(3)
    x, bands = samples(), 129
    model = nn.Sequential(
        nn.Conv1d(bands, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    a = dlrp.explain_audio(model, x, rate=RATE, processor=frames, target=1, contrast=0)
    plain = dlrp.explain(model, frames(x), target=lambda out: out[0, 1] - out[0, 0])
    assert torch.allclose(a.relevance, plain.relevance, atol=1e-6)
    sound = a.media["input"][0]
    assert torch.allclose(sound.line(a.relevance[0]), a.relevance[0].sum(0))
    assert sum(p.relevance for p in a.parts()) == pytest.approx(float(a.relevance.sum()), abs=1e-4)


def test_transformers_feature_extractors():
    config = transformers.Wav2Vec2Config(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_labels=2, id2label={0: "yes", 1: "no"}, classifier_proj_size=8, mask_time_prob=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    a = dlrp.explain_audio(model, samples(0.3), rate=RATE, processor=extractor, target="no")
    assert list(a.relevances) == ["input_values"] and a.media["input_values"][0].features is None
    with pytest.raises(ValueError, match="has 16000 samples a second, the model wants 8000: resample"):
        dlrp.explain_audio(model, samples(0.3), rate=16000, processor=extractor)


@pytest.mark.parametrize(("width", "kind"), [(1, torch.uint8), (2, torch.int16), (4, torch.int32)])
def test_wav_files_are_read(tmp_path, width, kind):
    x = 0.5 * torch.sin(torch.arange(800) / 9)
    whole = (x * 127 + 128) if width == 1 else x.double() * (2 ** (8 * width - 1) - 1)
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(whole.to(kind)[:, None].expand(-1, 2).contiguous().numpy().tobytes())
    found, rate = read_audio(tmp_path / "x.wav", None)
    assert rate == RATE and torch.allclose(found, x, atol=0.01 if width > 1 else 0.02)


def test_bad_sounds_are_refused(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 2))
    with pytest.raises(ValueError, match="no axis follows the recording's time"):
        dlrp.explain_audio(model, samples(), rate=RATE, processor=lambda x: x.std().expand(1, 4, 5).clone())
    with pytest.raises(FileNotFoundError, match="no recording at"):
        dlrp.explain_audio(listener(), tmp_path / "none.wav")
    (tmp_path / "x.wav").write_text("nothing")
    with pytest.raises(ValueError, match=r"not a PCM \.wav file"):
        dlrp.explain_audio(listener(), tmp_path / "x.wav")
    with pytest.raises(ValueError, match="need their rate="):
        dlrp.explain_audio(listener(), samples())
    with pytest.raises(ValueError, match=r"expected float samples \[time\], mono"):
        dlrp.explain_audio(listener(), torch.zeros(2, 50), rate=RATE)
    with pytest.raises(TypeError, match="the processor returned list"):
        dlrp.explain_audio(listener(), samples(), rate=RATE, processor=lambda x: x.tolist())


# Tables --------------------------------------------------------------------------------------------------------------


def judge():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()


def test_tables_of_every_form():
    rows = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
    a = dlrp.explain_table(judge(), rows, columns=["age", "income", "rooms"], target="dear", classes=["cheap", "dear"])
    assert torch.equal(a.relevance, dlrp.explain(judge(), rows, target=1).relevance)
    assert [p.label for p in a[0].parts()] == ["age", "income", "rooms"] and a.media["input"][0].cells == (
        "0.5",
        "−1",
        "2",
    )
    b = dlrp.explain_table(judge(), {"age": 0.5, "income": -1.0, "rooms": 2.0}, target=1)
    assert torch.allclose(b.relevance, a.relevance[:1], atol=1e-7) and b.answers[0].label == "1"
    pandas = pytest.importorskip("pandas")
    c = dlrp.explain_table(judge(), pandas.DataFrame(rows.numpy(), columns=["age", "income", "rooms"]), target=1)
    assert torch.allclose(c.relevance, a.relevance, atol=1e-7)
    d = dlrp.explain_table(judge(), rows[0], cells=[["34", "low", "2"]], target=1, contrast=0)
    assert d.media["input"][0].cells == ("34", "low", "2") and d.answers[0].contrast == "0"


def test_bad_tables_are_refused():
    with pytest.raises(ValueError, match="2 names for 3 columns"):
        dlrp.explain_table(judge(), torch.randn(3), columns=["a", "b"])
    with pytest.raises(ValueError, match=r"expected floats \[rows, columns\]"):
        dlrp.explain_table(judge(), torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="expected 1 rows of 3 cells"):
        dlrp.explain_table(judge(), torch.randn(3), cells=[["a"]])
    with pytest.raises(dlrp.TargetError, match="is the target itself"):
        dlrp.explain_table(judge(), torch.randn(3), target=1, contrast=1)


# Several -------------------------------------------------------------------------------------------------------------


def clip():
    torch.manual_seed(5)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {
        **small,
        "vocab_size": 24,
        "max_position_embeddings": 32,
        "eos_token_id": 3,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {**small, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = transformers.CLIPProcessor(
        image_processor=transformers.CLIPImageProcessor(**sizes), tokenizer=words.wordpiece()
    )
    return transformers.CLIPModel(config).eval(), processor


@functools.cache
def photo():
    image = pytest.importorskip("PIL.Image")
    return image.effect_noise((80, 60), 60).convert("RGB")


def test_clip_explains_picture_and_words_together():
    model, processor = clip()
    texts = ["bob opened the drawer", "a cake"]
    a = dlrp.explain_multimodal(model, processor, image=photo(), text=texts, target="a cake", contrast=0)
    inputs = processor(text=texts, images=photo(), return_tensors="pt", padding=True)
    assert set(a.relevances) == {"input_ids", "pixel_values"} == set(a.media) and a.target == (1, 0)
    assert str(a.answers[0]) == "a cake rather than bob opened the drawer"
    scores = model(**inputs).logits_per_image[0]
    assert a.relevances["pixel_values"].shape == (1, 3, 32, 32) and a.relevances["input_ids"].shape == (2, 7)
    picture, read = a.media["pixel_values"][0], a.media["input_ids"]
    assert isinstance(picture, Picture) and picture.seen == pytest.approx((10, 0, 70, 60), abs=1.5)
    assert read[1].kinds[-1] == "padding" and read[0].words()
    assert float(a.score.sum()) == pytest.approx(float((scores[1] - scores[0]).detach()), abs=1e-3)
    page = a.html()
    assert page.count('class="figure tokens"') == 2 and page.count('class="figure image"') == 1


def test_bad_multimodal_input_is_refused():
    model, processor = clip()
    with pytest.raises(TypeError, match="has no tokenizer"):
        dlrp.explain_multimodal(model, processor.image_processor, text="a")
    with pytest.raises(TypeError, match="nothing to explain"):
        dlrp.explain_multimodal(model, processor)
    with pytest.raises(TypeError, match="text or messages, not both"):
        dlrp.explain_multimodal(model, processor, text="a", messages=[])
    with pytest.raises(dlrp.TargetError, match="expected one of the texts, or its number below 2"):
        dlrp.explain_multimodal(model, processor, image=photo(), text=["a", "bob"], target="carol")


def llava():
    torch.manual_seed(6)
    text = {
        "model_type": "llama", "vocab_size": 345, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 128,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 16, "image_size": 32, "patch_size": 8, "projection_dim": 8,
    }  # fmt: skip
    tokenizer = words.bytelevel()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.eos_token
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16, vision_feature_layer=-1,
    )  # fmt: skip
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(**sizes), tokenizer=tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config).eval(), processor


def test_llava_explains_the_next_word_by_picture_and_text():
    model, processor = llava()
    a = dlrp.explain_multimodal(model, processor, image=photo(), text="<image>Bob opened the", target="drawer")
    assert set(a.relevances) == {"input_ids", "pixel_values"} == set(a.media)
    inputs = processor(text="<image>Bob opened the", images=photo(), return_tensors="pt")
    plain = dlrp.explain(model, **inputs, target=processor.tokenizer(" drawer")["input_ids"][0])
    for name, relevance in a.relevances.items():
        assert relevance.any() and relevance.shape == plain.relevances[name].shape
    assert a.answers[0].label == "drawer" and "image" in a.html()


def test_media_print_briefly():
    assert repr(Sound(torch.zeros(80), 8000)) == "Sound(0.01 s at 8000 Hz)"
    assert (
        repr(Picture(io.BytesIO(b"x").getvalue() * 999, "image/png", 3, 2, (0, 0, 3, 2)))
        == "Picture(3 x 2, image/png, seen=(0, 0, 3, 2))"
    )
    assert isinstance(Tokens.of(["a"]), Tokens)
