"""Small configurations of `transformers` models, made from the library's own config classes.

In: a config class. Out: an instance of it in which every size is small and the sizes still fit each other. Most follow
from the names of the fields; the few that do not stand in `RECIPES`. It knows no models.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

WIDTH, HEADS, HEAD_DIM, FFN, VOCAB, IMAGE, PATCH = 64, 4, 16, 96, 128, 32, 8

# The first pattern that matches a field's name says what becomes of an int.
_RULES: tuple[tuple[str, Any], ...] = (
    (r".*token_(id|index)", "token"),
    (r"chunk_size_feed_forward|initializer|.*coefficient|.*_cost|.*_loss.*|mask_(time|feature)_.*|.*_seed|seed|.*rate|.*temperature|"
     r"pretraining_tp|num_beams|.*ignore.*|.*_index(es)?|.*_offset|rescale_every|.*stride.*|.*dilation.*|.*padding.*|compress|"
     r".*factor.*|.*expand.*|.*ratio.*|.*_times|.*_iters|.*merge_size|num_labels|reduction.*|num_channels|in_channels|audio_channels|"
     r"(in|out)put_channels|input_dim|feature_projection_input_dim|num_mel_bins|.*mel.*|mel_dim|.*frequency|first_k_dense_replace|tubelet_size|"
     r"temporal_patch_size|.*_period|.*interval|.*pattern|.*sparse_step|max_depth|min_depth|ngram|.*_lookahead.*|n_langs|input_size|channels|"
     r"sub_batch|.*scale|type_vocab_size", None),
    (r"rotary_dim", lambda v: HEAD_DIM // 2),
    (r"index_topk", lambda v: 16),
    (r"model_in_dim|chunk_length|num_windows", None),
    (r"upsample_groups", lambda v: WIDTH),
    (r".*experts?_per_tok|top_k.*|.*topk(_experts)?|moe_k", lambda v: min(v, 2)),
    (r"n_group|topk_group|moe_topk|num_expert_groups|num_limited_groups", lambda v: 1),
    (r".*(num|n)(_local|_routed|_sparse)?_experts|num_experts.*|n_routed.*|moe_num_experts", lambda v: min(v, 4)),
    (r"zero_expert_num", lambda v: min(v, 2)),
    (r"head_dim|.*_head_dim|kv_channels|d_kv|d_head|dim_head|.*head_size|.*dim_head|key_dim|.*_d_head|qk_.*dim|v_head_dim", lambda v: v and HEAD_DIM),
    (r".*(num|n)_?(key_value|kv)_?(attention_)?heads|num_kv_heads|.*_key_heads|multi_query_group_num", lambda v: min(v, 2)),
    (r".*mamba.*heads|mamba_n_heads", lambda v: 8),
    (r"num_heads|n_heads?|.*heads|nhead", lambda v: min(v, HEADS)),
    (r"sliding_window|attention_window|window_attention.*|local_attention|attention_window_size|sliding_window_size", lambda v: min(v, 8)),
    (r".*conv_pos_embedding_groups", lambda v: 2),
    (r".*conv_pos_embeddings|conv_pos_kernel_size", lambda v: min(v, 15)),
    (r".*kernel.*|.*d_conv|conv_L_cache|conv1d_width", None),
    (r"num_hidden_groups|inner_group_num", None),
    (r"num_.*_layers_per_.*", lambda v: 1),
    (r".*layers?|n_layer|depth|num_blocks|.*_depth|.*_num_layers|num_.*_blocks|num_res_blocks|csp_num_blocks|l_layers|x_layers|r_layers|"
     r"num_self_attends_per_block", lambda v: min(v, 2)),
    (r".*vocab_?size.*|.*vocab|num_embeddings|codebook_size|num_embeds|mel_vocab_size|n_vocab|num_centroids", lambda v: min(v, VOCAB)),
    (r".*max_.*position.*|n_positions|n_ctx|max_seq_len|.*max_length|seq_len|context_length|max_rel.*|position_buckets|max_num_patches|"
     r"num_position_embeddings|position_embedding_size|max_.*positions", lambda v: min(v, 128)),
    (r".*chunk_?size|block_size|.*chunk_length", lambda v: min(v, 16)),
    (r"patch_size", lambda v: min(v, PATCH)),
    (r".*(image|crop|img)_size|image_resolution|resolution", lambda v: min(v, IMAGE)),
    (r"window_size", lambda v: min(v, 4)),
    (r"num_frames", lambda v: min(v, 4)),
    (r"num_queries|num_query_tokens|.*num_latents|resampler_n_latents|num_proposals|.*num_proposals|latent_query_num|query_length|"
     r"num_image_tokens|image_seq_length|mm_tokens_per_image|.*soft_tokens_per_image|num_landmarks|.*_num_points", lambda v: min(v, 16)),
    (r"num_denoising|num_prototypes|num_.*tokens|num_prompts", lambda v: min(v, 4)),
    (r".*rank|lora.*", lambda v: v and min(v, 16)),
    (r".*state_size|mamba_d_state|.*d_state|ssm_state_size", lambda v: min(v, 8)),
    (r".*(intermediate|ffn|feed_?forward|mlp|inner|d_ff|dff|dim_ff).*", lambda v: v and min(v, FFN)),
    (r".*_id", "token"),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|.*hidden_?(size|dim)|.*_(size|dim|dims|channels?|units|width|features?|filters)|"
     r"emb_dim|num_(filters|features|pos_feats)|base_channels", lambda v: v and min(v, WIDTH)),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)
_DEPTHS = re.compile(
    r"depths?|num_block_repeats|stage_num_blocks|n_attn_blocks|stage_numb_of_layers|block_sizes|layers"
)
_LIST_WIDTHS = re.compile(
    r".*(hidden_sizes?|embed_dims?|channels|conv_dim|tdnn_dim|feature_dims|hidden_sizes|unit_dims|dims)$"
)


class Ids:
    """Token ids below the vocabulary, a different one for each special token."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}

    def __call__(self, name: str, value: int) -> int:
        if value < 90:
            return value
        if name not in self.given:
            self.given[name] = 90 + len(self.given) % 36
        return self.given[name]


def tiny_config(config_class: Any, ids: Ids | None = None, gentle: bool = False, **given: Any) -> Any:
    """An instance with small sizes. `gentle` keeps widths and heads, and makes only counts small.

    `given` are values that another configuration asks for, in place of the class's own defaults.
    """
    ids = ids or Ids()
    fields = {field.name: given.get(field.name, _default(field)) for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = dict(given)
    for name, default in fields.items():
        small = _shrink(name, default, ids, gentle)
        if name in given or (small is not default and small != default):
            values[name] = small
    _keep_equal(fields, values)
    if not gentle:
        _fill(fields, values, ids)
    _stages(fields, values, given)
    for name, spec in getattr(config_class, "sub_configs_defaults", {}).items():
        values[name] = _sub_config(name, spec, ids, gentle)
    values.update(_of_the_whole(config_class, fields, values, gentle))
    recipe = RECIPES.get(getattr(config_class, "model_type", ""), {})
    values.update({k: v(values) if callable(v) else v for k, v in recipe.items()} if not gentle else {})
    made = config_class(**values)
    if not gentle:
        _fit_rotary(made)
    return made


def _fit_rotary(config: Any) -> None:
    """Rotary sections of time, height and width that fill a small head (models have large ones as a default)."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    heads, width, head = (vars(config).get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    dim = head or (width // heads if isinstance(heads, int) and isinstance(width, int) else HEAD_DIM)
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and "rope_type" in part:
            half = int(dim * (part.get("partial_rotary_factor") or 1.0)) // 2
            quarter = max(1, half // 4)
            part["mrope_section"] = [half - 2 * quarter, quarter, quarter]


def _keep_equal(fields: dict[str, Any], values: dict[str, Any]) -> None:
    """Keys and values have as many heads as queries where they had before."""
    for heads, shared in (("num_attention_heads", "num_key_value_heads"), ("num_heads", "num_key_value_heads")):
        if shared in values and fields.get(heads) == fields.get(shared):
            values[shared] = values.get(heads, fields.get(heads))


# What a missing size means to a mixture of experts that needs it.
_MISSING = {
    "num_experts_per_tok": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": FFN,
    "num_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1,
}  # fmt: skip


def _fill(fields: dict[str, Any], values: dict[str, Any], ids: Ids) -> None:
    for name, value in fields.items():
        if value is None and name == "head_dim":
            values.setdefault(name, HEAD_DIM)
        elif value is None and name == "num_key_value_heads":
            values.setdefault(name, values.get("num_attention_heads", fields.get("num_attention_heads")))
        elif value is None and name == "vocab_size":
            values |= {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 4}
        elif value is None and re.fullmatch(r"(image|video|audio)_token_(id|index)", name):
            values.setdefault(name, ids(name, 1000))
    if any("expert" in name for name in fields):
        for name, value in _MISSING.items():
            if name in fields and fields[name] is None:
                values.setdefault(name, value)


def _stages(fields: dict[str, Any], values: dict[str, Any], given: dict[str, Any]) -> None:
    """Layers whose outputs were asked for must be among those that are left."""
    wanted = given.get("out_indices") or given.get("out_features")
    if not wanted or "num_hidden_layers" not in fields or "depths" in fields:
        return
    count = len(wanted)
    values["num_hidden_layers"] = max(2, count)
    if "out_indices" in given:
        values["out_indices"] = list(range(1, count + 1))
    if "out_features" in given:
        values["out_features"] = [f"stage{i}" for i in range(1, count + 1)]


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _sub_config(name: str, spec: Any, ids: Ids, gentle: bool) -> Any:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    given: dict[str, Any] = {}
    cls = spec
    if not isinstance(spec, type):
        given = dict(spec.init_kwargs)
        cls = spec.config_class
        if not issubclass(cls, PretrainedConfig):
            cls = CONFIG_MAPPING[spec.model_type]
    given = {k: v for k, v in given.items() if not isinstance(v, dict)}
    return tiny_config(cls, ids, gentle, **given)


def _shrink(name: str, value: Any, ids: Ids, gentle: bool) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        for pattern, rule in _COMPILED:
            if pattern.fullmatch(name):
                if rule is None:
                    return value
                if rule == "token":
                    return ids(name, value)
                if gentle and not _is_count(name):
                    return value
                return rule(value) if value > 0 else value
        return value
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    ):
        return type(value)(_shrink_list(name, list(value), gentle))
    return value


def _is_count(name: str) -> bool:
    return bool(re.fullmatch(r".*layers?|n_layer|depth|.*vocab_?size|.*experts.*|num_queries|.*max_position.*", name))


def _shrink_list(name: str, value: list[int], gentle: bool) -> list[int]:
    if _DEPTHS.fullmatch(name):
        return [min(v, 2) for v in value]
    if gentle:
        return value
    if re.fullmatch(r"num_heads|num_attention_heads|decoder_num_heads", name):
        return [max(1, v // min(value)) for v in value]
    if _LIST_WIDTHS.fullmatch(name) and min(value) >= 16:
        return [min(128, max(16, 16 * v // min(value) // 8 * 8)) for v in value]
    if name == "image_size":
        return [min(v, IMAGE) for v in value]
    if name == "patch_size" and min(value) > PATCH:
        return [PATCH for _ in value]
    return value


def _of_the_whole(config_class: Any, fields: dict[str, Any], values: dict[str, Any], gentle: bool) -> dict[str, Any]:
    """What only the published configuration as a whole says: its kinds of layers, its rotary sections."""
    try:
        whole = config_class(**{k: v for k, v in values.items() if "config" in k})
    except Exception:
        return {}
    found: dict[str, Any] = {}
    kinds = _layer_kinds(whole, fields)
    found.update(kinds)
    rope = getattr(whole, "rope_parameters", None)
    if not gentle and isinstance(rope, dict) and "mrope_section" in rope:
        dim = values.get("head_dim") or HEAD_DIM
        half = int(dim * (rope.get("partial_rotary_factor") or 1.0)) // 2
        found["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
    return found


def _layer_kinds(whole: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, where kinds are listed layer by layer."""
    listed = [n for n in ("layer_types", "mlp_layer_types", "layers_block_type") if n in fields]
    lists = {n: kinds for n in listed if isinstance(kinds := getattr(whole, n, None), (list, tuple)) and kinds}
    if not lists or "num_hidden_layers" not in fields:
        return {}
    rows = list(dict.fromkeys(zip(*lists.values())))[:4]
    rows = rows * 2 if len(rows) == 1 else rows
    return {n: [row[i] for row in rows] for i, n in enumerate(lists)} | {"num_hidden_layers": len(rows)}


# Fields that do not follow from their names, by model type.
RECIPES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "mamba_n_heads": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "autoformer": {"prediction_length": 4, "context_length": 24, "num_time_features": 1},
    "informer": {"prediction_length": 4, "context_length": 24, "num_time_features": 1},
    "time_series_transformer": {"prediction_length": 4, "context_length": 24, "num_time_features": 1},
    "efficientnet": {"width_coefficient": 1.0, "depth_coefficient": 0.5, "hidden_dim": 1280, "image_size": 64},
    "align_vision_model": {"width_coefficient": 1.0, "depth_coefficient": 0.5, "hidden_dim": 1280, "image_size": 64},
    "align": {"projection_dim": 1280},
    "align_text_model": {"hidden_size": 64},
    "qwen2_5_vl_vision": {"window_size": 32, "fullatt_block_indexes": [1]},
    "qwen2_5_omni_vision_encoder": {"window_size": 32, "fullatt_block_indexes": [1]},
    "exaone4_5_vision": {"window_size": 32, "fullatt_block_indexes": [1]},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [FFN, FFN]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64},
    "depth_pro": {"patch_size": 32},
    "lw_detr_vit": {"num_windows": 4, "window_block_indices": [0]},
    "sam2_hiera_det_model": {"hidden_size": 96, "image_size": [64, 64]},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "vits": {"noise_scale": 0.0, "noise_scale_duration": 0.0},  # the same speech every time
    "cvt": {"depth": [1, 2, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
}
