"""Prefill attention in one step and in segments against a softmax per query and head."""

import pytest
import torch
import vllm_neuron.functional as NF

D = 64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(q, k, v, prior=0, window=None, sink=None, causal=True, scale=D**-0.5):
    """q [heads, Sq, D] at positions prior, prior + 1, ...; k, v [kv_heads, Sk, D] at 0, 1, ..."""
    group = q.shape[0] // k.shape[0]
    output = torch.empty_like(q)
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            last = prior + i + 1 if causal else k.shape[1]
            first = max(0, last - window) if window else 0
            logits = k[h // group, first:last] @ q[h, i] * scale
            if sink is not None:
                logits = torch.cat([logits, sink[h]])
            output[h, i] = logits.softmax(0)[: last - first] @ v[h // group, first:last]
    return output


OPTIONS = {
    "plain": {},
    "window": dict(window=10),
    "sink": dict(sink=normal(4, 1, seed=9) + 2),
    "window_and_sink": dict(window=10, sink=normal(4, 1, seed=9) + 2),
    "scale": dict(scale=0.3),
    "not_causal": dict(causal=False),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flash_attention(options, kv_heads):
    q, k, v = normal(4, 40, D), normal(kv_heads, 40, D, seed=1), normal(kv_heads, 40, D, seed=2)
    sink = options.get("sink")
    output = NF.flash_attention(
        q.float(),
        k.float().transpose(1, 2),
        v.float(),
        scale=options.get("scale"),
        causal_mask=options.get("causal", True),
        sliding_window=options.get("window"),
        sink=None if sink is None else sink.float(),
    )
    torch.testing.assert_close(output.double(), expected(q, k, v, **options), rtol=1e-5, atol=1e-5)


def test_flash_attention_layouts():
    q, k, v = normal(4, 40, D).float(), normal(4, 40, D, seed=1).float(), normal(4, 40, D, seed=2).float()
    plain = NF.flash_attention(q, k.transpose(1, 2), v)
    turned = NF.flash_attention(q.transpose(1, 2), k, v, tp_q=False, tp_k=True, tp_out=True)
    torch.testing.assert_close(turned.transpose(1, 2), plain)


def test_flash_attention_in_bfloat16_rounds_scores_and_weights_only():
    q, k, v = (normal(4, 40, D, seed=s).bfloat16() for s in range(3))
    output = NF.flash_attention(q, k.transpose(1, 2), v)
    exact = expected(q.double(), k.double(), v.double())
    assert output.dtype == torch.bfloat16
    assert (output.double() - exact).norm() / exact.norm() < 0.01


def test_flash_attention_after_a_prefix():
    q, k, v = normal(4, 24, D), normal(2, 64, D, seed=1), normal(2, 64, D, seed=2)
    k_prior, v_prior = k[:, :48].clone(), v[:, :48].clone()
    k_prior[:, 40:] = v_prior[:, 40:] = 99.0  # not used
    output = NF.flash_attention(
        q.float(),
        k[:, 40:].float().transpose(1, 2),
        v[:, 40:].float(),
        sliding_window=30,
        k_prior=k_prior.float().transpose(1, 2),
        v_prior=v_prior.float(),
        prior_used_len=torch.tensor([40]),
    )
    torch.testing.assert_close(output.double(), expected(q, k, v, prior=40, window=30), rtol=1e-5, atol=1e-5)


def test_flash_attention_within_bounds():
    q, k, v = normal(2, 12, D), normal(2, 12, D, seed=1), normal(2, 12, D, seed=2)
    low = torch.tensor([0] * 5 + [5] * 7).view(1, 12, 1)
    high = torch.tensor([5] * 5 + [12] * 7).view(1, 12, 1)
    output = NF.flash_attention(
        q,
        k.transpose(1, 2),
        v,
        causal_mask=False,
        bound_min=low.expand(2, -1, -1),
        bound_max=high.expand(2, -1, -1),
    )
    two = [expected(q[:, s], k[:, s], v[:, s], causal=False) for s in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(output, torch.cat(two, dim=1))


def paged(k, v, block_size, length):
    """Caches with k, v [kv_heads, Sk, D] in scrambled blocks, and a block table whose row 1 is noise."""
    kv_heads, tokens, _ = k.shape
    count = length // block_size
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(3)) + 1
    caches = []
    for x in (k, v):
        padded = torch.cat([x, torch.full((kv_heads, length - tokens, D), 7.0)], dim=1)
        cache = torch.full((count + 1, kv_heads, block_size, D), 5.0)
        cache[ids] = padded.view(kv_heads, count, block_size, D).transpose(0, 1).float()
        caches.append(cache)
    table = ids.to(torch.int32)
    table[-(-tokens // block_size) :] = -1
    return *caches, torch.stack([table, torch.zeros_like(table)])


@pytest.mark.parametrize(
    "options", [o for o in OPTIONS.values() if "causal" not in o and o.get("window") != 10]
)
@pytest.mark.parametrize("window", [None, 64])
def test_segmented_attention(options, window):
    prior, segment = 64, 512
    tokens = prior + segment
    q, k, v = normal(4, segment, D), normal(2, tokens, D, seed=1), normal(2, tokens, D, seed=2)
    k_cache, v_cache, table = paged(k, v, 32, 1024)
    sink = options.get("sink")
    arguments = dict(
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=table,
        prior_tokens=torch.tensor([[prior]], dtype=torch.int32),
        block_size=32,
        kv_segment_size=segment,
        scale=options.get("scale"),
        sliding_window=window,
        sink=None if sink is None else sink.float(),
    )
    output = NF.segmented_attention(q.float(), **arguments)
    some = [0, 1, 63, 64, 200, 511]
    rows = [expected(q[:, i : i + 1], k, v, prior=prior + i, window=window, **options) for i in some]
    torch.testing.assert_close(output[:, some].double(), torch.cat(rows, dim=1), rtol=1e-5, atol=1e-5)
    turned = NF.segmented_attention(q.float().transpose(1, 2), **arguments, tp_q=False, tp_out=True)
    torch.testing.assert_close(turned.transpose(1, 2), output)


def test_segments_equal_one_step():
    q, k, v = (
        normal(4, 1024, D).float(),
        normal(2, 1024, D, seed=1).float(),
        normal(2, 1024, D, seed=2).float(),
    )
    k_cache, v_cache, table = paged(k, v, 32, 1024)
    segments = [
        NF.segmented_attention(
            q[:, start : start + 512],
            k_cache,
            v_cache,
            table,
            torch.tensor([[start]]),
            block_size=32,
            kv_segment_size=512,
        )
        for start in (0, 512)
    ]
    whole = NF.flash_attention(q, k.transpose(1, 2), v)
    torch.testing.assert_close(torch.cat(segments, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_segmented_attention_reads_packed_fp8_keys():
    q, k, v = normal(4, 512, D).bfloat16(), normal(2, 512, D, seed=1), normal(2, 512, D, seed=2)
    k_cache, v_cache, table = paged(k, v, 32, 512)
    fp8 = torch.float8_e4m3fn
    k_cache, v_cache = k_cache.to(fp8), v_cache.to(fp8)
    plain = k_cache.view(torch.uint8)
    packed = torch.stack([plain[:, :, 0::2], plain[:, :, 1::2]], dim=-1).view(fp8)
    rest = (v_cache, table, torch.zeros(1, 1, dtype=torch.int32), 32, 512)
    output = NF.segmented_attention(q, packed, *rest, fp8_packed=True)
    assert torch.equal(output, NF.segmented_attention(q, k_cache, *rest))
