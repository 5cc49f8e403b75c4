"""The few `transformers` models whose inputs do not follow from their argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .inputs import Inputs

Recipe = list[tuple[dict[str, Any], bool]]  # arguments to try, each with whether they can be cut into rows


def _time_series(i: Inputs) -> Recipe:
    c = i.config
    past = c.context_length + max(c.lags_sequence)
    given = {
        "past_values": i.floats(2, past),
        "past_time_features": i.floats(2, past, c.num_time_features or 1),
        "past_observed_mask": torch.ones(2, past, dtype=torch.long),
        "future_values": i.floats(2, c.prediction_length),
        "future_time_features": i.floats(2, c.prediction_length, c.num_time_features or 1),
    }
    return [(given, True)]


def _decision(i: Inputs) -> Recipe:
    c, length = i.config, 5
    given = {
        "states": i.floats(2, length, c.state_dim),
        "actions": i.floats(2, length, c.act_dim),
        "rewards": i.floats(2, length, 1),
        "returns_to_go": i.floats(2, length, 1),
        "timesteps": i.ints(10, 2, length),
        "attention_mask": torch.ones(2, length, dtype=torch.long),
    }
    return [(given, True)]


def _pair_of_images(i: Inputs) -> Recipe:
    return [({"pixel_values": i.floats(2, 2, 3, 64, 64)}, True)]


def _pair_that_matches(i: Inputs) -> Recipe:
    # random features match weakly and anywhere: with the library's defaults all scores would be zero
    i.config.coarse_matching_threshold, i.config.coarse_matching_border_removal = 0.0, 0
    return _pair_of_images(i)


def _lxmert(i: Inputs) -> Recipe:
    given = {
        "input_ids": i.tokens(8),
        "visual_feats": i.floats(2, 4, i.config.visual_feat_dim),
        "visual_pos": i.floats(2, 4, 4).abs(),
    }
    return [(given, True)]


def _image_text(i: Inputs) -> Recipe:
    return [({"input_ids": i.tokens(8), "pixel_values": i.image()}, True)]


def _instruct_blip(i: Inputs) -> Recipe:
    tokens = i.config.num_query_tokens
    ids = torch.cat([torch.full((2, tokens), i.config.image_token_index), i.tokens(6)], 1)
    video = i.floats(2, 4, *i.image().shape[1:])
    tries: Recipe = []
    for pixels, count in ((i.image(), 1), (video, 4)):
        given = {"pixel_values": pixels, "qformer_input_ids": i.tokens(5)}
        given["input_ids"] = torch.cat([torch.full((2, tokens * count), ids[0, 0].item()), i.tokens(6)], 1)
        tries += [(given, True), (given | {"decoder_input_ids": i.tokens(4)}, True)]
    return tries


def _clap(i: Inputs) -> Recipe:
    size = i.config.audio_config.spec_size if hasattr(i.config, "audio_config") else i.config.spec_size
    mel = i.config.audio_config.num_mel_bins if hasattr(i.config, "audio_config") else i.config.num_mel_bins
    return [({"input_ids": i.tokens(8), "input_features": i.floats(2, 1, size, mel)}, True)]


def _idefics(i: Inputs) -> Recipe:
    given = {
        "input_ids": i.tokens(8),
        "pixel_values": i.image()[:, None],
        "image_attention_mask": torch.ones(2, 8, 1, dtype=torch.long),
    }
    return [(given, True)]


def _kosmos(i: Inputs) -> Recipe:
    count = i.config.latent_query_num
    mask = torch.zeros(2, count + 8, dtype=torch.long)
    mask[:, 1 : count + 1] = 1
    given = {"input_ids": i.tokens(count + 8), "image_embeds_position_mask": mask}
    patches = i.make("flattened_patches")
    return [(given | {"pixel_values": i.image()}, True), (given | {"flattened_patches": patches}, True)]


def _mllama(i: Inputs) -> Recipe:
    tiles = i.config.max_num_tiles if hasattr(i.config, "max_num_tiles") else i.config.vision_config.max_num_tiles
    vision = {
        "pixel_values": i.floats(2, 1, tiles, *i.image().shape[1:]),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1] + [0] * (tiles - 1)]] * 2),
    }
    if "input_ids" not in i.signature:
        return [(vision, True)]
    ids = i.tokens(8)
    mask = torch.ones(2, 8, 1, tiles, dtype=torch.long)
    return [({"input_ids": ids, "cross_attention_mask": mask, **vision}, True)]


def _query(i: Inputs) -> Recipe:
    return [({"query_embeds": i.make("query_embeds"), "encoder_hidden_states": i.make("encoder_hidden_states")}, True)]


def _depth_tokens(i: Inputs) -> Recipe:
    width = i.config.hidden_size if not hasattr(i.config, "input_size") else i.config.input_size
    return [({"input_ids": i.tokens(i.config.num_codebooks), "last_hidden_state": i.floats(2, 1, width)}, True)]


def _without_cache(i: Inputs) -> Recipe:
    return [({"input_ids": i.tokens(12), "use_cache": False}, True)]  # its cache is written in place, over saved values


# model type → the arguments to try
INPUTS: dict[str, Callable[[Inputs], Recipe]] = {
    "autoformer": _time_series,
    "informer": _time_series,
    "time_series_transformer": _time_series,
    "decision_transformer": _decision,
    "lightglue": _pair_of_images,
    "efficientloftr": _pair_that_matches,
    "superglue": _pair_of_images,
    "lxmert": _lxmert,
    "instructblip": _instruct_blip,
    "instructblipvideo": _instruct_blip,
    "align": _image_text,
    "bridgetower": _image_text,
    "clap": _clap,
    "idefics": _idefics,
    "kosmos-2": _kosmos,
    "kosmos-2.5": _kosmos,
    "mllama": _mllama,
    "mllama_vision_model": _mllama,
    "blip_2_qformer": _query,
    "instructblip_qformer": _query,
    "instructblipvideo_qformer": _query,
    "moshi_depth": _depth_tokens,
    "rwkv": _without_cache,
}
