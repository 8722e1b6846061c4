"""Weight loaders that a port gets of its own, against slices of checkpoint tensors."""

import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from autoport.codegen.context import architecture_context
from autoport.codegen.render import render_python
from autoport.resources import simulator_dir
from autoport.schema import Architecture, Attention, Mlp, Norm, QkNorm, Rope, Storage
from plans import YI

HEADS, KV_HEADS, SIZE, HIDDEN = 8, 2, 6, 10
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=SIZE,
    rotary_dim=4,
    intermediate_size=12,
)


def architecture(**changes) -> Architecture:
    attention = Attention(HEADS, KV_HEADS, SIZE, qkv_bias=True)
    return msgspec.structs.replace(YI, **({"attention": attention} | changes))


def loaders(arch: Architecture) -> SimpleNamespace:
    """The functions of the port's weight_loaders.py."""
    context = architecture_context(arch) | {"per_head_keys": False}
    names = {"name": "x", "prefix": "X", "package": "vllm_neuron", "arch": arch}
    text = render_python("boilerplate/weight_loaders.py.j2", **(context | names))
    text = text.replace("from .config import XConfig", "XConfig = object")
    if str(simulator_dir()) not in sys.path:
        sys.path.insert(0, str(simulator_dir()))
    namespace: dict[str, object] = {}
    exec(compile(text, "weight_loaders.py", "exec"), namespace)
    return SimpleNamespace(**namespace)


class Stored:
    """A tensor of a checkpoint, as safetensors hands it out."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.tensor[index]


def heads(count: int, first: float) -> torch.Tensor:
    """[count, SIZE, HIDDEN] of numbers that occur nowhere else."""
    return first + torch.arange(count * SIZE * HIDDEN, dtype=torch.float32).view(count, SIZE, HIDDEN)


Q, K, V = heads(HEADS, 0), heads(KV_HEADS, 1e4), heads(KV_HEADS, 2e4)
GROUP = HEADS // KV_HEADS


def fused(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One tensor [rows, HIDDEN] in a checkpoint's layout, head by head."""
    kv_heads, group = k.shape[0], q.shape[0] // k.shape[0]
    if layout == "concat":
        parts = [*q, *k, *v]
    elif layout == "groups":
        parts = [part for g in range(kv_heads) for part in (*q[g * group : (g + 1) * group], k[g], v[g])]
    else:
        block = q.shape[0] // 4
        cut = [slice(b * block, (b + 1) * block) for b in range(4)]
        parts = [part for c in cut for part in (*q[c], *v[c], *k[c])]
    return torch.cat(parts)


@pytest.mark.parametrize("layout", ["concat", "groups"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_heads_of_a_fused_tensor(layout, transposed, rank):
    arch = architecture(storage=Storage(qkv=layout, transposed=transposed))
    loader = loaders(arch).qkv_weight_loader(CONFIG, 2)
    stored = fused(layout, Q, K, V)
    expected = torch.cat([*Q[4 * rank : 4 * rank + 4], K[rank], V[rank]]).T
    assert torch.equal(loader.load([Stored(stored.T if transposed else stored)], rank), expected)
    assert torch.equal(loader.load([Stored(stored[:, 0])], rank), expected[0])


@pytest.mark.parametrize("rank", range(4))
def test_kv_heads_are_copied_to_the_ranks_that_share_them(rank):
    loader = loaders(architecture(storage=Storage(qkv="groups"))).qkv_weight_loader(CONFIG, 4)
    expected = torch.cat([*Q[2 * rank : 2 * rank + 2], K[rank // 2], V[rank // 2]]).T
    assert torch.equal(loader.load([fused("groups", Q, K, V)], rank), expected)


def test_four_blocks_of_q_v_k():
    k, v = heads(HEADS, 1e4), heads(HEADS, 2e4)
    config = SimpleNamespace(**(vars(CONFIG) | {"num_key_value_heads": HEADS}))
    loader = loaders(architecture(storage=Storage(qkv="codegen"))).qkv_weight_loader(config, 2)
    expected = torch.cat([*Q[4:], *k[4:], *v[4:]]).T
    assert torch.equal(loader.load([fused("codegen", Q, k, v)], 1), expected)


def rotate_as_stored(x: torch.Tensor, pairing: str, rotary_dim: int, angle: float) -> torch.Tensor:
    """Rotate a head [SIZE] the way the checkpoint's class does, pair j by j + 1 times the angle."""
    out = x.clone()
    for j in range(rotary_dim // 2):
        a, b = (2 * j, 2 * j + 1) if pairing == "interleaved" else (j, j + rotary_dim // 2)
        cos, sin = torch.cos(torch.tensor((j + 1) * angle)), torch.sin(torch.tensor((j + 1) * angle))
        out[a], out[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return out


def rotate_halves(x: torch.Tensor, rotary_dim: int, angle: float) -> torch.Tensor:
    """Rotate a head [SIZE] by halves, the dimensions that do not rotate by an angle of zero."""
    angles = torch.tensor([(j + 1) * angle if j < rotary_dim // 2 else 0.0 for j in range(SIZE // 2)])
    first, second = x.chunk(2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin))


@pytest.mark.parametrize(("pairing", "rotary_dim"), [("interleaved", None), ("interleaved", 4), ("half", 4)])
def test_reordered_heads_have_the_scores_of_the_class(pairing, rotary_dim):
    rope = Rope("default", 10000.0, pairing=pairing, rotary_dim=rotary_dim)
    order = loaders(architecture(rope=rope)).head_order(CONFIG)
    assert sorted(order) == list(range(SIZE))
    q, k = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))
    dims = rotary_dim or SIZE
    expected = rotate_as_stored(q, pairing, dims, 0.7) @ rotate_as_stored(k, pairing, dims, 0.2)
    found = rotate_halves(q[order], dims, 0.7) @ rotate_halves(k[order], dims, 0.2)
    assert torch.allclose(found, expected, atol=1e-6)
    wrong = rotate_halves(q, dims, 0.7) @ rotate_halves(k, dims, 0.2)
    assert not torch.allclose(wrong, expected, atol=1e-3)


def test_q_and_k_are_reordered_with_their_biases_and_v_is_not():
    module = loaders(architecture(rope=Rope("default", 10000.0, pairing="interleaved")))
    order = module.head_order(CONFIG)
    loader = module.qkv_weight_loader(CONFIG, 2)
    q, k, v = (part[:, :, 0].flatten() for part in (Q, K, V))
    expected = torch.cat([*Q[:4, order, 0], K[0, order, 0], V[0, :, 0]])
    assert torch.equal(loader.load([q, k, v], 0), expected)


def test_a_norm_of_the_heads_is_reordered_and_one_is_added():
    qk_norm = QkNorm(Norm("rms", 1e-6, weight="one_plus"))
    attention = Attention(HEADS, KV_HEADS, SIZE, qkv_bias=False, qk_norm=qk_norm)
    module = loaders(architecture(attention=attention, rope=Rope("default", 1e4, pairing="interleaved")))
    vector = torch.arange(SIZE, dtype=torch.bfloat16)
    loaded = module.head_norm_loader(CONFIG).load([vector], 0)
    assert loaded.tolist() == [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]
    assert loaded.dtype == torch.float32


@pytest.mark.parametrize("rank", [0, 1])
def test_a_norm_over_all_heads_is_split_by_head(rank):
    qk_norm = QkNorm(Norm("rms", 1e-6), width="full")
    attention = Attention(HEADS, KV_HEADS, SIZE, qkv_bias=False, qk_norm=qk_norm)
    loader = loaders(architecture(attention=attention)).heads_norm_loader(CONFIG, 2, HEADS)
    vector = torch.arange(HEADS * SIZE, dtype=torch.float32)
    assert torch.equal(loader.load([vector], rank), vector.view(HEADS, SIZE)[4 * rank : 4 * rank + 4])


def test_gate_and_up_are_cut_out_of_one_tensor():
    module = loaders(architecture(storage=Storage(gate_up="concat"), mlp=Mlp("gated", "silu", 12)))
    stored = torch.arange(24 * HIDDEN, dtype=torch.float32).view(24, HIDDEN)
    assert torch.equal(module.gate_up_loader(CONFIG, 2, part=0).load([stored], 1), stored[6:12].T)
    assert torch.equal(module.gate_up_loader(CONFIG, 2, part=1).load([stored], 1), stored[18:24].T)


def test_one_plus_w_is_computed_in_the_given_dtype():
    module = loaders(architecture(norm=Norm("rms", 1e-6, weight="one_plus")))
    loaded = module.plus_one_loader(torch.float32).load([torch.tensor([0.001], dtype=torch.bfloat16)], 0)
    assert loaded.dtype == torch.float32
    assert 1.0005 < float(loaded) < 1.0015
