"""Inputs for a `transformers` model, from the signature of its forward and the sizes in its configuration.

In: a model. Out: keyword arguments to try, the fullest first. It knows the names of arguments, not models.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .fields import configs, find

ROWS, TOKENS, DECODED = 2, 12, 6
_LARGEST_SIDE = 256  # a configuration that asks for more was not made small
IMAGE_TOKENS = (
    "image_token_id",
    "image_token_index",
    "img_token_id",
    "im_patch_id",
    "image_patch_id",
    "media_token_id",
)
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")
VIDEO_TOKENS = ("video_token_id", "video_token_index")


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return size["height"], size["width"]
    return (int(size), int(size)) if isinstance(size, (int, float)) else tuple(int(n) for n in size)[-2:]  # type: ignore[return-value]


class Inputs:
    """Makes each argument by name, from one generator, so that a model gets the same inputs every time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.generator = torch.Generator().manual_seed(0)
        self.signature = inspect.signature(model.forward).parameters
        self.image_side: tuple[int, int] | None = None

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ints(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def tokens(self, length: int) -> Tensor:
        vocab = find(self.config, "vocab_size", "text_vocab_size", "src_vocab_size", within="text", default=64)
        vocab = vocab if isinstance(vocab, int) else 64
        return self.ints(min(vocab, 88), ROWS, length, low=min(10, vocab - 1))

    def image(self) -> Tensor:
        channels = find(
            self.config, "num_channels", "in_channels", "in_chans", "num_input_channels", within="vision", default=3
        )
        channels = channels if isinstance(channels, int) and channels < 16 else 3
        return self.floats(ROWS, channels, *self.side())

    def side(self) -> tuple[int, int]:
        if self.image_side is not None:
            return self.image_side
        size = find(self.config, "image_size", "img_size", "crop_size", "input_size", within="vision")
        height, width = _pair(size) if size is not None and not isinstance(size, str) and size != 1 else (64, 64)
        return min(height, _LARGEST_SIDE), min(width, _LARGEST_SIDE)

    def video(self) -> Tensor:
        frames = find(self.config, "num_frames", "frames_per_clip", within="vision", default=4)
        image = self.image()
        return self.floats(ROWS, int(frames), *image.shape[1:])

    def audio(self) -> Tensor:
        if any(hasattr(c, "conv_stride") for c in configs(self.config)):
            return self.floats(ROWS, 2400)
        return self.floats(ROWS, 3200)

    def mel(self) -> int:
        return find(self.config, "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_projection_input_dim",
                    "input_feat_size", "input_dim", "mel_dim", "feature_size", "n_mel_bins", "input_size", within="audio", default=80)  # fmt: skip

    def patch(self) -> int:
        size = find(self.config, "patch_size", within="vision", default=8)
        return size if isinstance(size, int) else size[-1]

    def patches(self, argument: str) -> Iterator[tuple[dict[str, Any], bool, str]]:
        """Patches of two images in one list, and the grid that they stand on."""
        time = find(self.config, "temporal_patch_size", within="vision", default=1)
        merge = find(self.config, "spatial_merge_size", "merge_size", within="vision", default=2)
        merge = merge if isinstance(merge, int) else 2
        channels = find(self.config, "in_channels", "in_chans", "num_channels", within="vision", default=3)
        side = 2 * merge
        area, patch = channels * self.patch() ** 2, self.patch()
        for shape in ((area * time,), (area,), (2 * area,), (channels, patch, patch)):
            grid = {"grid_thw": torch.tensor([[1, side, side]] * ROWS)}
            yield (
                {argument: self.floats(ROWS * side * side, *shape)} | grid,
                False,
                "patches of both rows stand in one list",
            )

    def make(self, name: str) -> Any:
        """The value of one argument, or None where nothing is known about it."""
        rows = ROWS
        match name:
            case "input_ids" | "decoder_input_ids" | "text_input_ids" | "labels":
                return self.tokens(TOKENS if name != "decoder_input_ids" else DECODED)
            case "attention_mask" | "text_attention_mask":
                return torch.ones(rows, TOKENS, dtype=torch.long)
            case "token_type_ids":
                return torch.zeros(rows, TOKENS, dtype=torch.long)
            case "pixel_values" | "pixel_values_images" | "images" | "image" | "input":
                return self.image()
            case "pixel_values_videos" | "video":
                return self.video()
            case "pixel_mask":
                return torch.ones(rows, *self.side(), dtype=torch.long)
            case "bbox":
                return torch.tensor([1, 2, 6, 9]).expand(rows, TOKENS, 4).clone()
            case "input_values":
                return self.audio()
            case "input_features":
                return self.floats(rows, self.mel(), 64)
            case "qformer_input_ids" | "classes_input_ids" | "tasks_input_ids" | "inputs" | "audio_input_ids":
                return self.tokens(TOKENS)
            case "classes_attention_mask" | "tasks_attention_mask" | "qformer_attention_mask":
                return torch.ones(rows, TOKENS, dtype=torch.long)
            case "query_embeds":
                return self.floats(rows, 4, find(self.config, "hidden_size", default=64))
            case "encoder_hidden_states":
                return self.floats(rows, 5, find(self.config, "encoder_hidden_size", "hidden_size", default=64))
            case "spectrogram":
                return self.floats(rows, 20, find(self.config, "model_in_dim", "num_mel_bins", default=80))
            case "audio_mel":
                return self.floats(rows, 64, self.mel())
            case "audio_mel_mask":
                return torch.zeros(rows, 64, dtype=torch.bool)
            case "input_features_mask":
                return torch.ones(rows, 64, dtype=torch.long)
            case "mask":
                return torch.ones(rows, TOKENS, dtype=torch.bool)
            case "context" | "context_hidden_states" | "noise_embeds":
                return self.floats(rows, TOKENS, find(self.config, "hidden_size", default=64))
            case "flattened_patches":
                patches = self.floats(
                    rows, 9, 2 + find(self.config, "patch_embed_hidden_size", default=3 * self.patch() ** 2)
                )
                patches[..., 0] = torch.arange(9) // 3 + 1
                patches[..., 1] = torch.arange(9) % 3 + 1
                return patches
            case "aspect_ratio_ids":
                return torch.ones(rows, 1, dtype=torch.long)
            case "aspect_ratio_mask":
                return torch.tensor([[[1, 0, 0, 0]]] * rows)[..., : find(self.config, "max_num_tiles", default=4)]
            case "inputs_embeds" | "hidden_states":
                width = find(self.config, "hidden_size", "d_model", "n_embd", default=32)
                return self.floats(rows, TOKENS, width)
            case "visual_embeds" | "visual_feats":
                return self.floats(rows, 4, find(self.config, "visual_embedding_dim", "visual_feat_dim", default=32))
            case "visual_pos":
                return self.floats(rows, 4, 4).abs()
            case "past_values":
                length = find(self.config, "context_length", default=32)
                channels = find(self.config, "num_input_channels", "input_size", default=1)
                return self.floats(rows, length, channels)
        return None

    def candidates(self) -> Iterator[tuple[dict[str, Any], bool, str]]:
        """Keyword arguments, whether they can be cut into rows, and a note."""
        yield from _special(self)
        main = getattr(self.model, "main_input_name", "input_ids")
        main = main[0] if isinstance(main, (list, tuple)) else main
        required = [
            n for n, p in self.signature.items()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]  # fmt: skip
        named = list(self.signature)
        if "grid_thw" in required:
            yield from self.patches(required[0])
        wanted = list(dict.fromkeys([*([main] if main in named else named[:1]), *required]))
        encoder_decoder = "decoder_input_ids" in named
        if encoder_decoder and main != "decoder_input_ids":
            wanted.append("decoder_input_ids")
        if "bbox" in named and "bbox" not in wanted:
            wanted.append("bbox")
        multimodal = "input_ids" in wanted and any(
            n in named
            for n in ("pixel_values", "input_features", "input_values", "pixel_values_videos", "image_grid_thw")
        )
        if multimodal:
            yield from _multimodal(self, wanted)
        for shape in _shapes(self, wanted):
            given = {n: shape.get(n, self.make(n)) for n in wanted}
            given = {n: v for n, v in given.items() if v is not None}
            if given:
                yield given, True, "text only" if multimodal else ""
        extra = [n for n in _OPTIONAL if n in named and n not in wanted]
        for shape in _shapes(self, wanted) if extra else ():
            given = {n: v for n in wanted if (v := shape.get(n, self.make(n))) is not None}
            if given:
                yield given | self._optional(extra, next(iter(given.values()))), True, "text only" if multimodal else ""

    def _optional(self, names: list[str], first: Tensor) -> dict[str, Tensor]:
        """Masks that cover the first argument, and whatever else a model may insist on."""
        made: dict[str, Tensor] = {}
        for name in names:
            if name.endswith("_mask"):
                along = 1 if first.dim() < 3 or name == "attention_mask" else -1
                made[name] = torch.ones(ROWS, first.shape[along], dtype=torch.long)
            elif (value := self.make(name)) is not None:
                made[name] = value
        return made


def _shapes(inputs: Inputs, wanted: list[str]) -> Iterator[dict[str, Tensor]]:
    """Other shapes of the arguments that models disagree about."""
    rows, mel = ROWS, inputs.mel()
    if "pixel_values" in wanted:
        yield {}
        yield {"pixel_values": inputs.video()}
        for side in ((64, 64), (32, 32), (128, 128)):
            inputs.image_side = side
            yield {"pixel_values": inputs.image()}
            yield {"pixel_values": inputs.video()}
        inputs.image_side = None
    elif "input_features" in wanted:
        for length in (64, 100, 128):
            yield {"input_features": inputs.floats(rows, mel, length)}
            yield {"input_features": inputs.floats(rows, length, mel)}
        yield {"input_features": inputs.floats(rows, 1, 64, mel)}
        yield {"input_features": inputs.floats(rows, 1, 1024, 64)}
    elif "input_values" in wanted:
        yield {}
        yield {"input_values": inputs.floats(rows, 1, 3200)}
        yield {"input_values": inputs.floats(rows, 64, mel)}
        yield {"input_values": inputs.floats(rows, find(inputs.config, "max_length", default=64), mel)}
        yield {"input_values": inputs.floats(rows, 2, 3200)}
        yield {"input_values": inputs.tokens(TOKENS)}
        yield {"input_values": inputs.floats(rows, 16000)}
    elif "hidden_states" in wanted or "decoder_input_ids" in wanted or "input_ids" in wanted:
        yield {}
        books = find(inputs.config, "num_codebooks", "num_code_groups")
        if isinstance(books, int) and "input_ids" in wanted:
            yield {"input_ids": inputs.tokens(TOKENS).repeat(books, 1)}
            yield {"input_ids": inputs.tokens(books)}
            yield {"input_ids": inputs.ints(60, rows, TOKENS, books, low=10)}
            yield {"input_ids": inputs.ints(60, rows, books, TOKENS, low=10)}
        for width in (find(inputs.config, "input_dim"), find(inputs.config, "input_size"), mel):
            if "hidden_states" in wanted and isinstance(width, int):
                yield {"hidden_states": inputs.floats(rows, TOKENS, width)}
        if "decoder_input_ids" in wanted:
            channels = find(inputs.config, "num_channels", default=9)
            yield {"decoder_input_ids": inputs.ints(60, rows, DECODED, channels, low=10)}
    else:
        yield {}


_OPTIONAL = (
    "attention_mask", "input_features_mask", "pixel_mask", "encoder_hidden_states", "feature_lens", "feature_attention_mask",
)  # fmt: skip


def _special(inputs: Inputs) -> Iterator[tuple[dict[str, Any], bool, str]]:
    from .recipes import INPUTS

    recipe = INPUTS.get(inputs.config.model_type)
    for given, batched in recipe(inputs) if recipe is not None else ():
        yield given, batched, ""


def _multimodal(inputs: Inputs, wanted: list[str]) -> Iterator[tuple[dict[str, Any], bool, str]]:
    """Text with an image (or sound) whose place the text holds with special tokens."""
    named = list(inputs.signature)
    base = [n for n in wanted if n not in ("pixel_values", "input_features", "input_values", "pixel_values_videos")]
    text = {n: v for n in base if (v := inputs.make(n)) is not None}
    rows = ROWS
    image = find(inputs.config, *IMAGE_TOKENS)
    if "pixel_values" in named and "image_grid_thw" in named:
        patch = find(inputs.config, "patch_size", within="vision", default=8)
        time = find(inputs.config, "temporal_patch_size", within="vision", default=1)
        merge = find(inputs.config, "spatial_merge_size", within="vision", default=1)
        channels = find(inputs.config, "in_channels", "in_chans", "num_channels", within="vision", default=3)
        side = 2 * merge
        for shape in ((channels * time * patch * patch,), (channels * patch * patch,), (channels, patch, patch)):
            given = dict(text)
            given["pixel_values"] = inputs.floats(rows * side * side, *shape)
            given["image_grid_thw"] = torch.tensor([[1, side, side]] * rows)
            given["input_ids"] = _with(text["input_ids"], image, 4)
            if "mm_token_type_ids" in named:
                given["mm_token_type_ids"] = (given["input_ids"] == image).long()
            yield given, False, "patches of both rows stand in one list"
    if "pixel_values" in named:
        for pixels in (inputs.image(), inputs.image()[:, None], inputs.image()[:, None].repeat(1, 2, 1, 1, 1)):
            for count in (4, 16, 1, 17, 5):
                given = dict(text)
                given["pixel_values"] = pixels
                if image is not None:
                    given["input_ids"] = _with(text["input_ids"], image, count)
                yield given, True, ""
                if "image_sizes" in named:
                    yield given | {"image_sizes": torch.tensor([list(pixels.shape[-2:])] * rows)}, True, ""
                if image is None:
                    break
    sound = find(inputs.config, *AUDIO_TOKENS)
    for name in ("input_features", "input_values"):
        if name not in named:
            continue
        sounds = [shape.get(name, inputs.make(name)) for shape in _shapes(inputs, [name])]
        for sound_values in sounds[:6]:
            given = text | {name: sound_values}
            if sound is not None:
                given["input_ids"] = _with(text["input_ids"], sound, 4)
            if "input_features_mask" in named:
                for along in (1, -1):
                    mask = torch.ones(rows, sound_values.shape[along], dtype=torch.long)
                    yield given | {"input_features_mask": mask}, True, ""
            yield given, True, ""
            if "feature_attention_mask" in named:
                yield (
                    given | {"feature_attention_mask": torch.ones(rows, sound_values.shape[-1], dtype=torch.long)},
                    True,
                    "",
                )


def _with(ids: Tensor, token: int | None, count: int) -> Tensor:
    """The same text with `count` places for features after its first token."""
    if token is None:
        return ids
    places = torch.full((len(ids), count), token)
    return torch.cat([ids[:, :1], places, ids[:, 1:]], 1)


_LENGTH = re.compile(r"input features to be of length (\d+)")
_MISMATCH = re.compile(r"tokens?:? ?(\d+).*features:? ?(\d+)", re.S | re.I)


def refit(given: dict[str, Any], config: Any, error: str) -> dict[str, Any] | None:
    """The same inputs with as many places as the model says it has features; None where it did not say so."""
    length = _LENGTH.search(error)
    if length is not None and "input_features" in given and int(length.group(1)) <= 4000:
        features = given["input_features"]
        generator = torch.Generator().manual_seed(0)
        return given | {"input_features": torch.randn(*features.shape[:2], int(length.group(1)), generator=generator)}
    found = _MISMATCH.search(error)
    if found is None or "input_ids" not in given:
        return None
    held, features = (int(n) for n in found.groups())
    ids = given["input_ids"]
    for token in (find(config, *IMAGE_TOKENS), find(config, *AUDIO_TOKENS), find(config, *VIDEO_TOKENS)):
        per_row = int((ids[0] == token).sum()) if token is not None else 0
        if per_row == 0:
            continue
        total = per_row * len(ids)
        if held == total and features % len(ids) == 0:
            wanted = features // len(ids)
        elif held != total and held and (features * total) % (held * len(ids)) == 0:
            wanted = features * total // held // len(ids)  # counted in elements
        else:
            return None
        if wanted == per_row or wanted > 700:
            return None
        plain = torch.stack([row[row != token] for row in ids])
        refitted = dict(given)
        refitted["input_ids"] = _with(plain, token, wanted)
        for name in ("mm_token_type_ids",):
            if name in given:
                refitted[name] = (refitted["input_ids"] == token).long()
        if "attention_mask" in given and given["attention_mask"].shape == ids.shape:
            refitted["attention_mask"] = torch.ones_like(refitted["input_ids"])
        return refitted
    return None
