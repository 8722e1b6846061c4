"""Decode over a paged cache against attention over the whole sequences, computed in float64 complex RoPE."""

from dataclasses import dataclass, field

import pytest
import torch
import vllm_neuron.functional as NF

BLOCK_LEN = 32
NUM_BLOCKS = 24


def fp8(x):
    return x.clamp(-240, 240).to(torch.float8_e4m3fn)


@dataclass
class Case:
    """One decode step of `len(prior)` sequences; tensors are float64 masters."""

    prior: tuple[int, ...] = (70, 200)
    new: int = 1
    hidden: int = 256
    head_dim: int = 64
    q_heads: int = 4
    kv_heads: int = 1
    context: int = 256
    window: int | None = None
    rope: str | None = "halves"
    qk_norm: str | None = None
    has_norm: bool = False
    has_bias: bool = False
    has_sink: bool = False
    kv_scales: tuple[float, float] | None = None
    w: dict = field(default_factory=dict)

    def __post_init__(self):
        g = torch.Generator().manual_seed(1)

        def normal(*shape, scale=1.0, mean=0.0):
            return torch.randn(*shape, generator=g, dtype=torch.float64) * scale + mean

        H, D = self.hidden, self.head_dim
        columns = (self.q_heads + 2 * self.kv_heads) * D
        self.w = {
            "x": normal(len(self.prior), self.context, H),
            "gamma": normal(1, H, scale=0.3, mean=1.0),
            "qkv": normal(H, columns, scale=2 * H**-0.5),
            "qkv_bias": normal(1, columns),
            "q_norm": normal(1, D, scale=0.3, mean=1.5),
            "k_norm": normal(1, D, scale=0.3, mean=1.5),
            "sink": normal(self.q_heads, 1, mean=2.0),
            "out": normal(self.q_heads * D, H, scale=H**-0.5),
            "out_bias": normal(1, H),
        }

    def angles(self, positions):
        D = self.head_dim
        return positions[..., None] / 10000.0 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)

    def rotate(self, x):
        """x [heads, length, D] at positions 0, 1, ..."""
        if self.rope is None:
            return x
        turn = torch.exp(1j * self.angles(torch.arange(x.shape[1])))
        if self.rope == "halves":
            half = self.head_dim // 2
            y = torch.complex(x[..., :half], x[..., half:]) * turn
            return torch.cat([y.real, y.imag], dim=-1)
        y = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.view_as_real(y).flatten(-2)

    def qkv(self, b):
        """q [q, length, D] and k, v [kv, length, D] of sequence b, new tokens last."""
        x = self.w["x"][b, : self.prior[b] + self.new]
        if self.has_norm:
            x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w["gamma"]
        y = x @ self.w["qkv"] + (self.w["qkv_bias"] if self.has_bias else 0)
        heads = y.unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        q, k, v = heads.split([self.q_heads, self.kv_heads, self.kv_heads])

        def norm(t, weight):
            return t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

        if self.qk_norm == "pre":
            q, k = norm(q, self.w["q_norm"]), norm(k, self.w["k_norm"])
        q, k = self.rotate(q), self.rotate(k)
        if self.qk_norm == "post":
            q, k = norm(q, self.w["q_norm"]), norm(k, self.w["k_norm"])
        if self.kv_scales:
            k, v = (fp8(t * scale).double() / scale for t, scale in zip((k, v), self.kv_scales, strict=True))
        return q, k, v

    def expected(self):
        """[B * new, H] by one softmax per token over the tokens it may see."""
        rows = []
        for b, prior in enumerate(self.prior):
            q, k, v = self.qkv(b)
            for t in range(prior, prior + self.new):
                first = max(0, t + 1 - self.window) if self.window else 0
                group = self.q_heads // self.kv_heads
                heads = []
                for h in range(self.q_heads):
                    logits = k[h // group, first : t + 1] @ q[h, t] * self.head_dim**-0.5
                    if self.has_sink:
                        logits = torch.cat([logits, self.w["sink"][h]])
                    weights = logits.softmax(0)[: t + 1 - first]
                    heads.append(weights @ v[h // group, first : t + 1])
                rows.append(torch.cat(heads) @ self.w["out"])
        return torch.stack(rows) + (self.w["out_bias"] if self.has_bias else 0)

    def arguments(self, dtype=torch.float32, mask="mask"):
        """Arguments of `attention_decode` with the history in the cache, blocks in a scrambled order."""
        B, S, D = len(self.prior), self.new, self.head_dim
        w = {name: tensor.to(dtype) for name, tensor in self.w.items()}
        g = torch.Generator().manual_seed(2)
        free = (torch.randperm(NUM_BLOCKS - 1, generator=g) + 1).tolist()
        table = torch.full((B, self.context // BLOCK_LEN), -1, dtype=torch.int32)
        k_cache = torch.full((NUM_BLOCKS, self.kv_heads, BLOCK_LEN, D), 3.0, dtype=dtype)
        v_cache = k_cache.clone()
        slots = torch.empty(B, S, dtype=torch.int64)
        for b, prior in enumerate(self.prior):
            _, k, v = self.qkv(b)
            for t in range(prior + S):
                if t % BLOCK_LEN == 0:
                    table[b, t // BLOCK_LEN] = free.pop()
                block, offset = table[b, t // BLOCK_LEN], t % BLOCK_LEN
                if t < prior:
                    k_cache[block, :, offset], v_cache[block, :, offset] = (
                        k[:, t].to(dtype),
                        v[:, t].to(dtype),
                    )
                else:
                    slots[b, t - prior] = block * BLOCK_LEN + offset
        pos = torch.tensor(self.prior)[:, None] + torch.arange(S)
        start = (pos - self.window + 1).clamp(min=0).float() if self.window else None
        x = torch.stack([w["x"][b, p : p + S] for b, p in enumerate(self.prior)])
        arguments = dict(
            X=x, W_qkv=w["qkv"], active_blocks_table=table, K_cache=k_cache, V_cache=v_cache, W_out=w["out"]
        )
        if self.has_norm:
            arguments |= dict(rmsnorm_X_enabled=True, rmsnorm_X_eps=1e-5, rmsnorm_X_gamma=w["gamma"])
        if self.has_bias:
            arguments |= dict(bias_qkv=w["qkv_bias"], bias_out=w["out_bias"])
        if self.has_sink:
            arguments |= dict(sink=w["sink"].float())
        if self.rope:
            angles = self.angles(pos.double()).permute(2, 0, 1)
            arguments |= dict(cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))
            arguments |= dict(rope_contiguous_layout=self.rope == "halves")
        if self.qk_norm:
            name = f"rmsnorm_QK_{self.qk_norm}_rope"
            arguments |= {f"{name}_enabled": True, f"{name}_W_Q": w["q_norm"], f"{name}_W_K": w["k_norm"]}
        if mask == "mask":
            arguments["attention_mask"] = NF.gen_attention_decode_mask(
                pos.float().view(1, -1),
                bs=B,
                q_head=self.q_heads,
                s_active=S,
                s_prior=self.context,
                start_pos=None if start is None else start.view(1, -1),
                block_len=BLOCK_LEN,
            )
        else:
            arguments |= dict(pos_ids=pos.float(), swa_start_pos_ids=start)
        arguments |= dict(update_cache=True, kv_cache_update_idx=slots)
        return arguments


FEATURES = {
    "plain": {},
    "no_rope": dict(rope=None),
    "interleaved_rope": dict(rope="pairs"),
    "gqa": dict(kv_heads=2),
    "norm_and_biases": dict(has_norm=True, has_bias=True),
    "qk_norm_pre": dict(qk_norm="pre", kv_heads=2),
    "qk_norm_post": dict(qk_norm="post"),
    "sink": dict(has_sink=True, kv_heads=4),
    "window": dict(window=48),
    "window_and_sink": dict(window=48, has_sink=True, kv_heads=2, new=3),
    "three_new_tokens": dict(new=3),
    "nothing_cached": dict(prior=(0, 31)),
    "context_divided_over_cores": dict(prior=(300,), context=512),
    "context_full": dict(prior=(255, 254)),
}


@pytest.mark.parametrize("mask", ["mask", "pos_ids"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_equals_attention_over_the_whole_sequence(features, mask):
    case = Case(**features)
    output = NF.attention_decode(**case.arguments(mask=mask))
    torch.testing.assert_close(output.double(), case.expected(), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("features", ["gqa", "norm_and_biases", "qk_norm_pre", "window_and_sink"])
def test_bfloat16_is_within_its_rounding(features):
    case = Case(**FEATURES[features])
    output = NF.attention_decode(**case.arguments(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    expected = case.expected()
    error = (output.double() - expected).norm() / expected.norm()
    assert error < 0.02


def test_the_oracle_notices_a_wrong_window():
    case = Case(window=48)
    arguments = case.arguments(mask="pos_ids")
    arguments["swa_start_pos_ids"] -= 1
    error = (NF.attention_decode(**arguments).double() - case.expected()).abs().max()
    assert error > 1e-3


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else():
    case = Case(kv_heads=2, new=2, prior=(70, 126))
    arguments = case.arguments()
    before = arguments["K_cache"].clone(), arguments["V_cache"].clone()
    NF.attention_decode(**arguments)
    slots = arguments["kv_cache_update_idx"]
    for b, prior in enumerate(case.prior):
        _, k, v = case.qkv(b)
        for j in range(2):
            block, offset = divmod(int(slots[b, j]), BLOCK_LEN)
            for cache, new in ((arguments["K_cache"], k), (arguments["V_cache"], v)):
                torch.testing.assert_close(
                    cache[block, :, offset].double(), new[:, prior + j], rtol=1e-5, atol=1e-5
                )
            for cache, old in zip((arguments["K_cache"], arguments["V_cache"]), before, strict=True):
                cache[block, :, offset] = old[block, :, offset]
    assert torch.equal(arguments["K_cache"], before[0])
    assert torch.equal(arguments["V_cache"], before[1])


@pytest.mark.parametrize("slot", [-1, NUM_BLOCKS * BLOCK_LEN, 0xFFFFFFFF])
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("other", ["elsewhere", "last_slot"])
def test_slots_outside_the_cache_are_skipped(slot, other, skipped):
    case = Case()
    arguments = case.arguments()
    last = NUM_BLOCKS * BLOCK_LEN - 1
    slots = arguments["kv_cache_update_idx"]
    slots[skipped] = slot
    if other == "last_slot":
        slots[1 - skipped] = last
    if slot > 0:
        arguments["kv_cache_update_idx"] = slots.to(torch.uint32)
    block, offset = divmod(int(slots[1 - skipped]), BLOCK_LEN)
    before = arguments["K_cache"].clone()
    NF.attention_decode(**arguments)
    assert not torch.equal(arguments["K_cache"][block, :, offset], before[block, :, offset])
    arguments["K_cache"][block, :, offset] = before[block, :, offset]
    assert torch.equal(arguments["K_cache"], before)


def test_without_update_the_new_keys_and_values_come_back():
    case = Case(kv_heads=2, new=3)
    arguments = case.arguments() | dict(update_cache=False, kv_cache_update_idx=None)
    before = arguments["K_cache"].clone()
    output, k, v = NF.attention_decode(**arguments)
    torch.testing.assert_close(output.double(), case.expected(), rtol=1e-5, atol=3e-5)
    assert k.shape == (64, 2 * 2, 3)
    assert v.shape == (2, 2, 3, 64)
    assert torch.equal(arguments["K_cache"], before)
    _, k1, v1 = case.qkv(1)
    torch.testing.assert_close(
        k.view(64, 2, 2, 3)[:, 1].permute(1, 2, 0).double(), k1[:, -3:], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(v[1].double(), v1[:, -3:], rtol=1e-5, atol=1e-5)


def test_without_output_projection_heads_come_back():
    case = Case(new=2)
    arguments = case.arguments()
    projected = NF.attention_decode(**arguments)
    w_out = arguments.pop("W_out")
    heads = NF.attention_decode(**arguments)
    assert heads.shape == (2, 4, 64, 2)
    torch.testing.assert_close(heads.permute(0, 3, 1, 2).reshape(4, -1) @ w_out, projected)


def test_one_kv_head_may_come_without_its_axis():
    arguments = Case().arguments()
    expected = NF.attention_decode(**arguments)
    arguments |= dict(K_cache=arguments["K_cache"].squeeze(1), V_cache=arguments["V_cache"].squeeze(1))
    assert torch.equal(NF.attention_decode(**arguments), expected)


def test_block_table_per_head():
    case = Case(kv_heads=2)
    arguments = case.arguments()
    expected = NF.attention_decode(**arguments)
    table = arguments["active_blocks_table"][:, None, :]
    head = torch.arange(2, dtype=torch.int32)[:, None]
    arguments["active_blocks_table"] = torch.where(table < 0, table, table * 2 + head)
    assert torch.equal(NF.attention_decode(**arguments), expected)
    _, k, _ = NF.attention_decode(**arguments | dict(update_cache=False, kv_cache_update_idx=None))
    assert k.shape == (64, 2, 2, 1)


def test_norm_epsilon_is_one_thousandth_unless_given():
    arguments = Case(has_norm=True).arguments()
    arguments["X"] *= 0.03
    given = NF.attention_decode(**arguments | dict(rmsnorm_X_eps=1e-3))
    assert torch.equal(NF.attention_decode(**arguments | dict(rmsnorm_X_eps=None)), given)
    assert not torch.allclose(NF.attention_decode(**arguments | dict(rmsnorm_X_eps=1e-6)), given)


@pytest.mark.parametrize("packed", [False, True])
def test_fp8_cache_holds_scaled_values_that_the_caller_scales_back(packed):
    case = Case(kv_heads=2, prior=(70, 127), kv_scales=(4.0, 16.0))
    arguments = case.arguments(torch.bfloat16)
    k_cache = fp8(arguments["K_cache"] * 4.0)
    if packed:
        plain = k_cache.view(torch.uint8)
        k_cache = torch.stack([plain[:, :, 0::2], plain[:, :, 1::2]], dim=-1).view(torch.float8_e4m3fn)
    arguments |= dict(
        K_cache=k_cache,
        V_cache=fp8(arguments["V_cache"] * 16.0),
        k_scale=torch.full((1, 1), 4.0),
        v_scale=torch.full((128, 1), 16.0),
        softmax_scale=64**-0.5 / 4.0,
        W_out=arguments["W_out"] / 16.0,
        fp8_packed=packed,
    )
    output = NF.attention_decode(**arguments)
    expected = case.expected()
    assert (output.double() - expected).norm() / expected.norm() < 0.02
    _, k, _ = case.qkv(1)
    block, offset = divmod(int(arguments["kv_cache_update_idx"][1, 0]), BLOCK_LEN)
    stored = k_cache.float()
    row = stored[block, :, offset // 2, :, offset % 2] if packed else stored[block, :, offset]
    # One step of e4m3: bf16 rounding before the cast may cross a border.
    torch.testing.assert_close(row.double() / 4.0, k[:, -1], rtol=0.13, atol=1e-3)
