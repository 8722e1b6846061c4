"""qkv_proj, o_proj and mlp against torch's own layers."""

import pytest
import torch
import torch.nn.functional as F
import vllm_neuron.functional as NF
from nkilib.core.utils.common_types import ActFnType, NormType, QKVOutputLayout

B, S, H, D, NQ, NKV = 2, 5, 256, 64, 4, 2
COLUMNS = (NQ + 2 * NKV) * D


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


X = normal(B, S, H)
W = normal(H, COLUMNS, seed=1) / 16
BIAS = normal(1, COLUMNS, seed=2)
GAMMA = normal(1, H, seed=3) + 1


def rope_tables(seed=4):
    angles = normal(B, S, D // 2, seed=seed)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotated(x, cos, sin):
    """x [B, S, heads, D] turned as complex numbers."""
    turn = torch.complex(cos, sin)[..., : D // 2].unsqueeze(2)
    y = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
    return torch.cat([y.real, y.imag], dim=-1)


def test_qkv_is_a_linear_layer():
    torch.testing.assert_close(NF.qkv_proj(X, W, bias=BIAS), F.linear(X, W.T, BIAS[0]))


def test_qkv_adds_residuals_before_the_norm():
    mlp_prev, attn_prev = normal(B, S, H, seed=7), normal(B, S, H, seed=8)
    output = NF.qkv_proj(
        X,
        W,
        norm_weights=GAMMA,
        norm_type=NormType.RMS_NORM,
        eps=1e-5,
        mlp_prev=mlp_prev,
        attn_prev=attn_prev,
    )
    summed = X + mlp_prev + attn_prev
    torch.testing.assert_close(output, F.rms_norm(summed, (H,), GAMMA[0], 1e-5) @ W)


def test_qkv_layer_norm():
    beta = normal(1, H, seed=9)
    output = NF.qkv_proj(X, W, norm_weights=GAMMA, norm_b=beta, norm_type=NormType.LAYER_NORM, eps=1e-5)
    torch.testing.assert_close(output, F.layer_norm(X, (H,), GAMMA[0], beta[0], 1e-5) @ W)


def test_qkv_norm_divides_by_the_unpadded_size():
    padded, weights = X.clone(), GAMMA.clone()
    padded[..., 200:] = 0
    output = NF.qkv_proj(
        padded, W, norm_weights=weights, norm_type=NormType.RMS_NORM, eps=1e-5, hidden_actual=200
    )
    torch.testing.assert_close(output, F.rms_norm(X[..., :200], (200,), GAMMA[0, :200], 1e-5) @ W[:200])


def test_qkv_norm_runs_in_the_inputs_dtype():
    x, gamma = X.bfloat16(), GAMMA.bfloat16()
    eye = torch.eye(H, dtype=torch.bfloat16)
    output = NF.qkv_proj(x, eye, norm_weights=gamma, norm_type=NormType.RMS_NORM)
    mean = (x * x).sum(-1, keepdim=True) / H
    assert torch.equal(output, x * torch.rsqrt(mean + 1e-6) * gamma @ eye)


@pytest.mark.parametrize("where", [None, "pre", "post"])
def test_qkv_rotates_and_norms_query_and_key_heads_only(where):
    cos, sin = rope_tables()
    q_gamma, k_gamma = normal(D, seed=5) + 1, normal(1, D, seed=6) + 1
    options = {}
    if where:
        name = f"qk_norm_{where}_rope"
        options = {f"{name}_q_norm": NormType.RMS_NORM, f"{name}_k_norm": NormType.RMS_NORM}
        options |= {f"{name}_q_gamma": q_gamma, f"{name}_k_gamma": k_gamma, f"{name}_eps": 1e-5}
    output = NF.qkv_proj(
        X, W, bias=BIAS, cos_cache=cos, sin_cache=sin, num_q_heads=NQ, num_kv_heads=NKV, d_head=D, **options
    )
    q, k, v = (X @ W + BIAS).view(B, S, -1, D).split([NQ, NKV, NKV], dim=2)

    def norm(x, gamma):
        return F.rms_norm(x, (D,), gamma.view(-1), 1e-5)

    if where == "pre":
        q, k = norm(q, q_gamma), norm(k, k_gamma)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if where == "post":
        q, k = norm(q, q_gamma), norm(k, k_gamma)
    torch.testing.assert_close(output, torch.cat([q, k, v], dim=2).flatten(2), rtol=1e-5, atol=1e-5)


def test_qkv_head_layouts():
    plain = NF.qkv_proj(X, W).view(B, S, -1, D)
    by_head = NF.qkv_proj(X, W, d_head=D, output_layout=QKVOutputLayout.NBSd)
    transposed = NF.qkv_proj(X, W, d_head=D, output_layout=QKVOutputLayout.NBdS)
    assert torch.equal(by_head, plain.permute(2, 0, 1, 3))
    assert torch.equal(transposed, plain.permute(2, 0, 3, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_qkv_writes_the_cache(dtype):
    cos, sin = rope_tables()
    caches = [torch.zeros(6, NKV, 16, D).to(dtype) for _ in range(2)]
    slots = torch.tensor([[3, 17, 16, 40, 41], [95, 0, 64, 65, 66]], dtype=torch.int32)
    heads = dict(d_head=D, num_q_heads=NQ, num_kv_heads=NKV, cos_cache=cos, sin_cache=sin)
    write = dict(k_cache=caches[0], v_cache=caches[1], use_block_kv=True, block_size=16, slot_mapping=slots)
    if dtype == torch.float8_e4m3fn:
        scale = torch.full((1, 1), 0.5)
        write |= dict(k_scale=scale, v_scale=scale, fp8_max=240.0, fp8_min=-240.0)
    q, k_cache, v_cache = NF.qkv_proj(X, W, **heads, **write)
    assert k_cache is caches[0]
    assert v_cache is caches[1]
    plain = NF.qkv_proj(X, W, **heads)
    assert torch.equal(q, plain[..., : NQ * D])
    for cache, start in ((k_cache, NQ), (v_cache, NQ + NKV)):
        expected = torch.zeros(6, NKV, 16, D)
        new = plain.view(B * S, -1, D)[:, start : start + NKV]
        for row, slot in zip(new, slots.flatten().tolist(), strict=True):
            expected[slot // 16, :, slot % 16] = row
        if dtype == torch.float8_e4m3fn:
            expected = (expected / 0.5).clamp(-240, 240).to(dtype).float()
        assert torch.equal(cache.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_o_proj(dtype):
    active, weight = normal(B, NQ, D, S, dtype=dtype), normal(NQ * D, H, seed=1, dtype=dtype)
    bias = normal(1, H, seed=2, dtype=dtype)
    flat = active.permute(0, 3, 1, 2).reshape(B, S, NQ * D)
    expected = flat @ weight + bias
    torch.testing.assert_close(NF.o_proj(active, weight, bias), expected)
    torch.testing.assert_close(NF.o_proj(flat.contiguous(), weight, bias), expected)
    with pytest.raises(ValueError, match="3 or 4 dimensions"):
        NF.o_proj(active[0, 0], weight)


I = 512  # noqa: E741
TOKENS = normal(7, H)
GATE, UP, DOWN = normal(H, I, seed=1) / 16, normal(H, I, seed=2) / 16, normal(I, H, seed=3) / 16
ACTIVATIONS = {
    ActFnType.SiLU: F.silu,
    ActFnType.Swish: F.silu,
    ActFnType.GELU: F.gelu,
    ActFnType.GELU_Tanh_Approx: lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("act_fn", ACTIVATIONS)
def test_mlp_activations_and_biases(act_fn):
    gate_b, up_b, down_b = normal(1, I, seed=4), normal(1, I, seed=5), normal(1, H, seed=6)
    output = NF.mlp(TOKENS, GATE, UP, DOWN, act_fn=act_fn, gate_b=gate_b, up_b=up_b, down_b=down_b)
    inner = ACTIVATIONS[act_fn](TOKENS @ GATE + gate_b) * (TOKENS @ UP + up_b)
    torch.testing.assert_close(output, inner @ DOWN + down_b)


def test_mlp_without_a_gate():
    output = NF.mlp(TOKENS, None, UP, DOWN, skip_gate=True, act_fn=ActFnType.GELU)
    torch.testing.assert_close(output, F.gelu(TOKENS @ UP) @ DOWN)


def test_mlp_norms():
    beta = normal(1, H, seed=9)
    expected = {
        NormType.RMS_NORM: (F.rms_norm(TOKENS, (H,), GAMMA[0], 1e-5), dict(ln_w=GAMMA)),
        NormType.RMS_NORM_SKIP_GAMMA: (F.rms_norm(TOKENS, (H,), None, 1e-5), {}),
        NormType.LAYER_NORM: (
            F.layer_norm(TOKENS, (H,), GAMMA[0], beta[0], 1e-5),
            dict(ln_w=GAMMA, norm_b=beta),
        ),
    }
    for norm_type, (x, weights) in expected.items():
        output = NF.mlp(TOKENS, GATE, UP, DOWN, norm_type=norm_type, eps=1e-5, **weights)
        torch.testing.assert_close(output, F.silu(x @ GATE) * (x @ UP) @ DOWN)


def test_mlp_returns_the_sum_it_normed():
    added = normal(7, H, seed=8)
    norm = dict(norm_type=NormType.RMS_NORM, ln_w=GAMMA)
    output, summed = NF.mlp(
        TOKENS, GATE, UP, DOWN, **norm, fused_add_tensor=added, store_fused_add_result=True
    )
    assert torch.equal(summed, TOKENS + added)
    torch.testing.assert_close(output, NF.mlp(TOKENS + added, GATE, UP, DOWN, **norm))
