"""Fused sliding-window attention, FP8 norm, all-to-all and process groups."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import vllm_neuron.functional as NF
from nkilib.core.utils.common_types import QuantizationType
from thread_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_tensor:FutureWarning")


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("prior", [0, 64])
def test_swa_fused_attention_is_the_chain_of_its_parts(prior):
    S, H, D, nq, nkv, block, window = 128, 64, 32, 4, 2, 32, 24
    columns = (nq + 2 * nkv) * D
    x, w, out = normal(1, S, H), normal(H, columns, seed=1, scale=0.2), normal(nq * D, H, seed=2, scale=0.1)
    qkv_bias, op_bias, sink = normal(1, columns, seed=3), normal(1, H, seed=4), normal(1, nq, seed=5)
    angles = normal(1, S, D // 2, seed=6)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    k_cache, v_cache = normal(9, nkv, block, D, seed=7), normal(9, nkv, block, D, seed=8)
    table = torch.tensor([[3, 1, 4, 8, 5, 2, 6]], dtype=torch.int32)

    k_ref, v_ref = k_cache.clone(), v_cache.clone()
    position = prior + torch.arange(S)
    q, _, _ = NF.qkv_proj(
        x, w, bias=qkv_bias, d_head=D, num_q_heads=nq, num_kv_heads=nkv, cos_cache=cos, sin_cache=sin,
        k_cache=k_ref, v_cache=v_ref, use_block_kv=True, block_size=block,
        slot_mapping=table[0, position // block] * block + position % block,
    )  # fmt: skip
    length = prior + S
    blocks = table[0, : length // block].long()
    k, v = (c[blocks].transpose(0, 1).reshape(nkv, length, D) for c in (k_ref, v_ref))
    attended = NF.flash_attention(
        q.view(S, nq, D).transpose(0, 1), k[:, prior:].transpose(1, 2), v[:, prior:],
        scale=0.3, sliding_window=window, sink=sink.T, tp_out=True,
        k_prior=k[:, :prior].transpose(1, 2), v_prior=v[:, :prior], prior_used_len=torch.tensor([prior]),
    )  # fmt: skip
    expected = NF.o_proj(attended[None], out, op_bias)

    output, k_out, v_out = NF.swa_fused_attention(
        x, w, out, k_cache, v_cache, table, cos, sin, sink, torch.tensor([[prior]]), qkv_bias, op_bias,
        scale=0.3, sliding_window=window, block_size=block, num_q_heads=nq, num_kv_heads=nkv, d_head=D,
    )  # fmt: skip
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k_out, k_ref)
    torch.testing.assert_close(v_out, v_ref)
    assert k_out is k_cache


def test_rmsnorm_quant_static():
    x, gamma = normal(5, 64), normal(1, 64, seed=1) + 1
    scale = torch.full((128, 1), 0.002)
    output = NF.rmsnorm_quant(x, gamma, scale, eps=1e-5)
    exact = (F.rms_norm(x, (64,), gamma[0], 1e-5) / 0.002).clamp(-240, 240)
    assert torch.equal(output.float(), exact.to(torch.float8_e4m3fn).float())
    assert output.float().abs().max() == 240
    for wrong in (None, torch.ones(1, 1)):
        with pytest.raises(ValueError, match="input_dequant_scale"):
            NF.rmsnorm_quant(x, gamma, wrong)
    with pytest.raises(NotImplementedError, match="MX"):
        NF.rmsnorm_quant(x, gamma, scale, quantization_type=QuantizationType.MX)
    with pytest.raises(ValueError, match="ln_w"):
        NF.rmsnorm_quant(x, gamma.T, scale)


def test_rmsnorm_quant_by_row_carries_its_scale():
    x, gamma = normal(2, 5, 64), normal(64, seed=1) + 1
    output = NF.rmsnorm_quant(x, gamma, eps=1e-5, quantization_type=QuantizationType.ROW)
    assert output.shape == (2, 5, 68)
    scale = output.view(torch.uint8)[..., 64:].contiguous().view(torch.float32)
    exact = F.rms_norm(x, (64,), gamma, 1e-5)
    torch.testing.assert_close(scale, exact.abs().amax(-1, keepdim=True) / 448)
    torch.testing.assert_close(output[..., :64].float() * scale, exact, rtol=0.07, atol=0.02)


def test_all_to_all_swaps_axes_and_back():
    whole = torch.arange(8 * 4 * 3.0).view(8, 4, 3)  # sharded over axis 0, then over axis 1

    def run(rank):
        mine = whole.chunk(4, dim=0)[rank]
        swapped = NF.all_to_all(mine, split_dim=1, concat_dim=0)
        assert torch.equal(NF.all_to_all(swapped, 0, -2), mine)
        with pytest.raises(ValueError, match="group size 4"):
            NF.all_to_all(mine, split_dim=2, concat_dim=0)
        return swapped

    for rank, swapped in enumerate(on_ranks(4, run)):
        assert torch.equal(swapped, whole.chunk(4, dim=1)[rank])


def test_row_and_column_groups():
    def run(rank):
        groups = NF.create_row_col_groups(2, 3, rank)
        return [dist.get_process_group_ranks(group) for group in groups]

    for rank, (row, column) in enumerate(on_ranks(6, run)):
        assert row == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert column == [rank % 2, rank % 2 + 2, rank % 2 + 4]


def test_items_of_a_group():
    def run(rank):
        group = dist.new_group([1, 3])
        return NF.get_group_slice_indices(8, 4, group, "cpu").tolist() if rank in (1, 3) else None

    assert on_ranks(4, run) == [None, [2, 3, 6, 7], None, [2, 3, 6, 7]]


def test_what_is_not_simulated_says_so():
    with pytest.raises(AttributeError, match="pack_tokens exists in the plugin but not in the simulator"):
        _ = NF.pack_tokens
    with pytest.raises(AttributeError, match="has no attribute 'flash_atention'"):
        _ = NF.flash_atention
