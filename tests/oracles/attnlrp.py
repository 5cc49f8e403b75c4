"""AttnLRP (Achtibat et al. 2024) and CP-LRP (Ali et al. 2022) of three transformers, in relevance form.

In: a `transformers` model (only its weights and configuration are read), token ids, the relevance of the logits (seed).
Out: the relevance of every component of the token embeddings, `[batch, tokens, hidden]`.

Each network is written twice, one below the other: the forward pass, which keeps every activation, and the backward
pass, which hands the relevance of each activation to the activations it was computed from.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Method:
    """How a product of two activations divides its relevance; the shares of one product sum to one."""

    weights: float  # A in A v
    values: float  # v in A v
    gate: float  # act(g) in act(g) * u
    signal: float  # u in act(g) * u


ATTNLRP = Method(weights=0.5, values=0.5, gate=0.5, signal=0.5)
CP_LRP = Method(weights=0.0, values=1.0, gate=0.0, signal=1.0)


# ---------------------------------------------------------------- rules: relevance of the output -> of the operands


def per_unit(r: Tensor, z: Tensor) -> Tensor:
    """R / z, and 0 where z is exactly 0 (there R is 0 too: a masked attention weight)."""
    return torch.where(z == 0, torch.zeros_like(r), r / torch.where(z == 0, torch.ones_like(z), z))


def linear_rule(r: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """LRP-0: R_i = sum_j x_i W_ji / z_j R_j. The bias is in z and keeps its part."""
    z = linear(x, weight, bias)
    return x * (per_unit(r, z) @ weight)


def add_rule(r: Tensor, *terms: Tensor) -> list[Tensor]:
    """Each term in proportion to its value."""
    unit = per_unit(r, sum(terms))
    return [term * unit for term in terms]


def matmul_rule(r: Tensor, a: Tensor, b: Tensor, share_a: float, share_b: float) -> tuple[Tensor, Tensor]:
    """o = a b: R_a,ij = share * sum_p a_ij b_jp / o_ip R_ip, and the same for b. AttnLRP: both shares 1/2."""
    unit = per_unit(r, a @ b)
    return share_a * a * (unit @ b.mT), share_b * b * (a.mT @ unit)


def softmax_rule(r: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """Taylor expansion of softmax at x: R_i = x_i (R_i - p_i sum_j R_j)."""
    return x * (r - p * r.sum(-1, keepdim=True))


def layer_norm_rule(r: Tensor, x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """y = (x - mean(x)) / std * w + b with std a constant: affine, then a linear map that subtracts the mean."""
    centred = x - x.mean(-1, keepdim=True)
    std = torch.sqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
    scaled = centred / std * norm.weight
    r_centred = r * scaled * per_unit(torch.ones_like(r), scaled + norm.bias)  # the bias keeps its part
    n = x.shape[-1]
    centring = torch.eye(n, dtype=x.dtype) - torch.full((n, n), 1 / n, dtype=x.dtype)
    return linear_rule(r_centred, x, centring)


def rms_norm_rule(r: Tensor) -> Tensor:
    """y = x / rms * w with rms a constant: one factor per component, so relevance stays where it is."""
    return r


def activation_rule(r: Tensor) -> Tensor:
    """An elementwise function passes relevance on."""
    return r


def rotary_rule(r: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """z = x cos + rotate_half(x) sin: a sum, whose second term holds the two halves of x exchanged."""
    r_straight, r_rotated = add_rule(r, x * cos, rotate_half(x) * sin)
    first, second = r_rotated.chunk(2, dim=-1)
    return r_straight + torch.cat([second, first], dim=-1)


# ---------------------------------------------------------------- forward pieces


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    z = x @ weight.T
    return z if bias is None else z + bias


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias


def rms_norm(x: Tensor, norm) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def split_heads(x: Tensor, heads: int) -> Tensor:
    batch, tokens, _ = x.shape
    return x.reshape(batch, tokens, heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    batch, _, tokens, _ = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, -1)


def causal_mask(tokens: int) -> Tensor:
    """True where query i may look at key j."""
    return torch.ones(tokens, tokens).tril().bool()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> SimpleNamespace:
    """Attention of q `[batch, heads, queries, d]` to k, v; `mask` is True where a key may be seen."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return SimpleNamespace(q=q, k=k, v=v, scores=scores, weights=weights, output=weights @ v)


def attend_rule(r: Tensor, at: SimpleNamespace, method: Method) -> tuple[Tensor, Tensor, Tensor]:
    """Relevance of q, k and v. The division by sqrt(d) is a constant factor: it moves nothing."""
    r_weights, r_v = matmul_rule(r, at.weights, at.v, method.weights, method.values)
    r_scores = softmax_rule(r_weights, at.scores, at.weights)
    r_q, r_kt = matmul_rule(r_scores, at.q, at.k.mT, 0.5, 0.5)
    return r_q, r_kt.mT, r_v


# ---------------------------------------------------------------- the three networks


class Llama:
    """Pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases: `LlamaForCausalLM`."""

    def __init__(self, model, method: Method = ATTNLRP):
        self.net, self.head, self.config, self.method = model.model, model.lm_head, model.config, method

    @torch.no_grad()
    def forward(self, ids: Tensor) -> SimpleNamespace:
        tokens = ids.shape[1]
        cos, sin = self.rotary_table(tokens)
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        x = embeddings = self.net.embed_tokens.weight[ids]
        layers = []
        for layer in self.net.layers:
            kept = SimpleNamespace(x=x)
            attention, mlp = layer.self_attn, layer.mlp
            kept.normed = rms_norm(x, layer.input_layernorm)
            kept.q = split_heads(linear(kept.normed, attention.q_proj.weight), heads)
            kept.k = split_heads(linear(kept.normed, attention.k_proj.weight), kv_heads)
            kept.v = split_heads(linear(kept.normed, attention.v_proj.weight), kv_heads)
            q = kept.q * cos + rotate_half(kept.q) * sin
            k = kept.k * cos + rotate_half(kept.k) * sin
            k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, kept.v))
            kept.attended = attend(q, k, v, causal_mask(tokens))
            kept.merged = merge_heads(kept.attended.output)
            kept.projected = linear(kept.merged, attention.o_proj.weight)
            kept.middle = x + kept.projected
            kept.normed2 = rms_norm(kept.middle, layer.post_attention_layernorm)
            kept.gate = silu(linear(kept.normed2, mlp.gate_proj.weight))
            kept.up = linear(kept.normed2, mlp.up_proj.weight)
            kept.product = kept.gate * kept.up
            kept.down = linear(kept.product, mlp.down_proj.weight)
            x = kept.middle + kept.down
            layers.append(kept)
        normed = rms_norm(x, self.net.norm)
        logits = linear(normed, self.head.weight)
        return SimpleNamespace(embeddings=embeddings, layers=layers, last=x, normed=normed, logits=logits)

    @torch.no_grad()
    def relevance(self, ids: Tensor, seed: Tensor) -> Tensor:
        kept_all = self.forward(ids)
        tokens = ids.shape[1]
        cos, sin = self.rotary_table(tokens)
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        r = linear_rule(seed, kept_all.normed, self.head.weight)
        r = rms_norm_rule(r)
        for layer, kept in zip(reversed(self.net.layers), reversed(kept_all.layers), strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            r_middle, r_down = add_rule(r, kept.middle, kept.down)
            r_product = linear_rule(r_down, kept.product, mlp.down_proj.weight)
            r_gate, r_up = self.method.gate * r_product, self.method.signal * r_product
            r_normed2 = linear_rule(r_up, kept.normed2, mlp.up_proj.weight)
            r_normed2 = r_normed2 + linear_rule(activation_rule(r_gate), kept.normed2, mlp.gate_proj.weight)
            r_middle = r_middle + rms_norm_rule(r_normed2)

            r_x, r_projected = add_rule(r_middle, kept.x, kept.projected)
            r_merged = linear_rule(r_projected, kept.merged, attention.o_proj.weight)
            r_q, r_k, r_v = attend_rule(split_heads(r_merged, heads), kept.attended, self.method)
            r_k, r_v = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in (r_k, r_v))  # a copied head sums its copies
            r_q, r_k = rotary_rule(r_q, kept.q, cos, sin), rotary_rule(r_k, kept.k, cos, sin)
            r_normed = linear_rule(merge_heads(r_q), kept.normed, attention.q_proj.weight)
            r_normed = r_normed + linear_rule(merge_heads(r_k), kept.normed, attention.k_proj.weight)
            r_normed = r_normed + linear_rule(merge_heads(r_v), kept.normed, attention.v_proj.weight)
            r = r_x + rms_norm_rule(r_normed)
        return r

    def rotary_table(self, tokens: int) -> tuple[Tensor, Tensor]:
        """cos and sin `[tokens, d]`; in float32, as transformers computes them."""
        d = self.config.hidden_size // self.config.num_attention_heads
        frequency = 1.0 / self.config.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2).float() / d)
        angle = torch.arange(tokens).float()[:, None] * torch.cat([frequency, frequency])
        dtype = self.head.weight.dtype
        return angle.cos().to(dtype), angle.sin().to(dtype)


class GPT2:
    """Pre-LayerNorm, learned positions, causal attention, tanh-GELU, biases everywhere: `GPT2LMHeadModel`."""

    def __init__(self, model, method: Method = ATTNLRP):
        self.net, self.head, self.config, self.method = model.transformer, model.lm_head, model.config, method

    @torch.no_grad()
    def forward(self, ids: Tensor) -> SimpleNamespace:
        tokens = ids.shape[1]
        embeddings = self.net.wte.weight[ids]
        positions = self.net.wpe.weight[:tokens].expand_as(embeddings)
        x = embeddings + positions
        layers = []
        for block in self.net.h:
            kept = SimpleNamespace(x=x)
            kept.normed = layer_norm(x, block.ln_1)
            qkv = linear(kept.normed, block.attn.c_attn.weight.T, block.attn.c_attn.bias)
            q, k, v = (split_heads(t, self.config.n_head) for t in qkv.chunk(3, dim=-1))
            kept.attended = attend(q, k, v, causal_mask(tokens))
            kept.merged = merge_heads(kept.attended.output)
            kept.projected = linear(kept.merged, block.attn.c_proj.weight.T, block.attn.c_proj.bias)
            kept.middle = x + kept.projected
            kept.normed2 = layer_norm(kept.middle, block.ln_2)
            kept.inner = new_gelu(linear(kept.normed2, block.mlp.c_fc.weight.T, block.mlp.c_fc.bias))
            kept.outer = linear(kept.inner, block.mlp.c_proj.weight.T, block.mlp.c_proj.bias)
            x = kept.middle + kept.outer
            layers.append(kept)
        normed = layer_norm(x, self.net.ln_f)
        logits = linear(normed, self.head.weight)
        return SimpleNamespace(
            embeddings=embeddings, positions=positions, layers=layers, last=x, normed=normed, logits=logits
        )

    @torch.no_grad()
    def relevance(self, ids: Tensor, seed: Tensor) -> Tensor:
        kept_all = self.forward(ids)
        r = linear_rule(seed, kept_all.normed, self.head.weight)
        r = layer_norm_rule(r, kept_all.last, self.net.ln_f)
        for block, kept in zip(reversed(self.net.h), reversed(kept_all.layers), strict=True):
            r_middle, r_outer = add_rule(r, kept.middle, kept.outer)
            r_inner = linear_rule(r_outer, kept.inner, block.mlp.c_proj.weight.T, block.mlp.c_proj.bias)
            r_normed2 = linear_rule(
                activation_rule(r_inner), kept.normed2, block.mlp.c_fc.weight.T, block.mlp.c_fc.bias
            )
            r_middle = r_middle + layer_norm_rule(r_normed2, kept.middle, block.ln_2)

            r_x, r_projected = add_rule(r_middle, kept.x, kept.projected)
            r_merged = linear_rule(r_projected, kept.merged, block.attn.c_proj.weight.T, block.attn.c_proj.bias)
            r_qkv = attend_rule(split_heads(r_merged, self.config.n_head), kept.attended, self.method)
            r_qkv = torch.cat([merge_heads(t) for t in r_qkv], dim=-1)
            r_normed = linear_rule(r_qkv, kept.normed, block.attn.c_attn.weight.T, block.attn.c_attn.bias)
            r = r_x + layer_norm_rule(r_normed, kept.x, block.ln_1)
        r_embeddings, _ = add_rule(r, kept_all.embeddings, kept_all.positions)
        return r_embeddings


class Bert:
    """Post-LayerNorm, padding mask, GELU, a classifier on the first token: `BertForSequenceClassification`."""

    def __init__(self, model, method: Method = ATTNLRP):
        self.net, self.head, self.config, self.method = model.bert, model.classifier, model.config, method

    @torch.no_grad()
    def forward(self, ids: Tensor, padding: Tensor) -> SimpleNamespace:
        """`padding` is the tokenizer's attention mask: 1 for a token, 0 for padding."""
        table = self.net.embeddings
        embeddings = table.word_embeddings.weight[ids]
        types = table.token_type_embeddings.weight[0].expand_as(embeddings)
        positions = table.position_embeddings.weight[: ids.shape[1]].expand_as(embeddings)
        summed = embeddings + types + positions
        x = layer_norm(summed, table.LayerNorm)
        visible = padding.bool()[:, None, None, :]
        layers = []
        for layer in self.net.encoder.layer:
            kept = SimpleNamespace(x=x)
            projections = layer.attention.self
            q, k, v = (
                split_heads(linear(x, p.weight, p.bias), self.config.num_attention_heads)
                for p in (projections.query, projections.key, projections.value)
            )
            kept.attended = attend(q, k, v, visible)
            kept.merged = merge_heads(kept.attended.output)
            dense = layer.attention.output.dense
            kept.projected = linear(kept.merged, dense.weight, dense.bias)
            kept.summed = kept.projected + x
            kept.middle = layer_norm(kept.summed, layer.attention.output.LayerNorm)
            dense = layer.intermediate.dense
            kept.inner = gelu(linear(kept.middle, dense.weight, dense.bias))
            dense = layer.output.dense
            kept.outer = linear(kept.inner, dense.weight, dense.bias)
            kept.summed2 = kept.outer + kept.middle
            x = layer_norm(kept.summed2, layer.output.LayerNorm)
            layers.append(kept)
        dense = self.net.pooler.dense
        pooled = torch.tanh(linear(x[:, 0], dense.weight, dense.bias))
        logits = linear(pooled, self.head.weight, self.head.bias)
        return SimpleNamespace(
            embeddings=embeddings, types=types, positions=positions, summed=summed,
            layers=layers, last=x, pooled=pooled, logits=logits,
        )  # fmt: skip

    @torch.no_grad()
    def relevance(self, ids: Tensor, padding: Tensor, seed: Tensor) -> Tensor:
        kept_all = self.forward(ids, padding)
        r_pooled = linear_rule(seed, kept_all.pooled, self.head.weight, self.head.bias)
        dense = self.net.pooler.dense
        r = torch.zeros_like(kept_all.last)
        r[:, 0] = linear_rule(activation_rule(r_pooled), kept_all.last[:, 0], dense.weight, dense.bias)
        for layer, kept in zip(reversed(self.net.encoder.layer), reversed(kept_all.layers), strict=True):
            r_summed2 = layer_norm_rule(r, kept.summed2, layer.output.LayerNorm)
            r_outer, r_middle = add_rule(r_summed2, kept.outer, kept.middle)
            dense = layer.output.dense
            r_inner = linear_rule(r_outer, kept.inner, dense.weight, dense.bias)
            dense = layer.intermediate.dense
            r_middle = r_middle + linear_rule(activation_rule(r_inner), kept.middle, dense.weight, dense.bias)

            r_summed = layer_norm_rule(r_middle, kept.summed, layer.attention.output.LayerNorm)
            r_projected, r = add_rule(r_summed, kept.projected, kept.x)
            dense = layer.attention.output.dense
            r_merged = linear_rule(r_projected, kept.merged, dense.weight, dense.bias)
            r_qkv = attend_rule(split_heads(r_merged, self.config.num_attention_heads), kept.attended, self.method)
            projections = layer.attention.self
            for r_one, p in zip(r_qkv, (projections.query, projections.key, projections.value), strict=True):
                r = r + linear_rule(merge_heads(r_one), kept.x, p.weight, p.bias)
        r_summed = layer_norm_rule(r, kept_all.summed, self.net.embeddings.LayerNorm)
        r_embeddings, _, _ = add_rule(r_summed, kept_all.embeddings, kept_all.types, kept_all.positions)
        return r_embeddings
