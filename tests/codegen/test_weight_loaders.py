"""Weight loaders that a port gets of its own, against slices of checkpoint tensors."""

import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from autoport.codegen.context import architecture_context
from autoport.codegen.render import render
from autoport.resources import simulator_dir
from autoport.schema.architecture import Architecture, Attention, Mlp, Norm, QkNorm, Rope, Storage
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


def loaders(arch: Architecture, **changes) -> SimpleNamespace:
    """The functions of the port's weight_loaders.py; `changes` are of what the templates see."""
    context = architecture_context(arch) | {"per_head_keys": False} | changes
    names = {"name": "x", "prefix": "X", "package": "vllm_neuron", "arch": arch}
    text = render("boilerplate/weight_loaders.py.j2", **(context | names))
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


def heads_of(rank: int, tp: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A rank's columns [HIDDEN, ...]: its query heads, and its KV heads, which ranks share at TP 4 (two of them)."""
    size, count = q.shape[0] // tp, max(1, k.shape[0] // tp)
    first = rank * k.shape[0] // tp
    return torch.cat(
        [*q[rank * size : (rank + 1) * size], *k[first : first + count], *v[first : first + count]]
    ).T


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["concat", "groups", "codegen"])
@pytest.mark.parametrize("bias", [False, True])
def test_each_rank_gets_its_heads_of_a_fused_tensor(bias, layout, transposed, tp):
    k, v = (heads(HEADS, 1e4), heads(HEADS, 2e4)) if layout == "codegen" else (K, V)
    config = SimpleNamespace(**(vars(CONFIG) | {"num_key_value_heads": k.shape[0]}))
    attention = Attention(HEADS, k.shape[0], SIZE, qkv_bias=bias)
    storage = Storage(qkv=layout, transposed=transposed)
    loader = loaders(architecture(attention=attention, storage=storage)).qkv_weight_loader(config, tp)
    stored = fused(layout, Q, k, v)
    for rank in range(tp):
        expected = heads_of(rank, tp, Q, k, v)
        assert torch.equal(loader.load([Stored(stored.T if transposed else stored)], rank), expected)
        if bias:
            assert torch.equal(loader.load([Stored(stored[:, 0])], rank), expected[0])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_rank_gets_its_heads_of_three_tensors(transposed, tp):
    """Of a Conv1D, or where q and k are reordered; the reordering is undone before the comparison."""
    rope = None if transposed else Rope("default", 10000.0, pairing="interleaved")
    module = loaders(architecture(storage=Storage(transposed=transposed), rope=rope))
    loader = module.qkv_weight_loader(CONFIG, tp)
    stored = [part.flatten(0, 1) for part in (Q, K, V)]
    order = list(range(SIZE)) if transposed else module.head_order(CONFIG)
    for rank in range(tp):
        expected = heads_of(rank, tp, Q[:, order], K[:, order], V)
        tensors = [Stored(part.T if transposed else part) for part in stored]
        assert torch.equal(loader.load(tensors, rank), expected)
        assert torch.equal(loader.load([Stored(part[:, 0]) for part in stored], rank), expected[0])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_of_three_tensors_are_fused_by_head(tp):
    q, k, v = (part[:, :, 0].flatten() for part in (Q, K, V))
    kv_size = max(1, KV_HEADS // tp) * SIZE
    loader = loaders(architecture()).fused_qkv_bias_loader(
        HEADS // tp * SIZE, kv_size, tp, max(1, tp // KV_HEADS)
    )
    for rank in range(tp):
        assert torch.equal(loader.load([q, k, v], rank), heads_of(rank, tp, Q, K, V)[0])


def test_the_layout_of_another_class_gives_other_heads():
    loader = loaders(architecture(storage=Storage(qkv="concat"))).qkv_weight_loader(CONFIG, 2)
    loaded = loader.load([fused("groups", Q, K, V)], 1)
    assert loaded.shape == heads_of(1, 2, Q, K, V).shape
    assert not torch.equal(loaded, heads_of(1, 2, Q, K, V))


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


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("count", [HEADS, KV_HEADS])
@pytest.mark.parametrize("stored", ["one vector", "rows", "keys"])
def test_a_norm_with_a_vector_for_each_head_is_split_by_head(stored, count, tp):
    """Norms of k, too, whose heads ranks share at TP 4."""
    qk_norm = QkNorm(Norm("rms", 1e-6), width="full" if stored == "one vector" else "each_head")
    attention = Attention(HEADS, KV_HEADS, SIZE, qkv_bias=False, qk_norm=qk_norm)
    module = loaders(architecture(attention=attention), per_head_keys=stored == "keys")
    loader = module.heads_norm_loader(CONFIG, tp, count)
    rows = torch.arange(count * SIZE, dtype=torch.float32).view(count, SIZE)
    slices = {"one vector": [Stored(rows.flatten())], "rows": [Stored(rows)], "keys": [*map(Stored, rows)]}
    for rank in range(tp):
        first = rank * count // tp
        expected = rows[first : first + max(1, count // tp)]
        assert torch.equal(loader.load(slices[stored], rank), expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("inner", [12, 13, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_are_cut_out_of_one_tensor(bias, inner, tp):
    """Sizes that four ranks divide, and that they do not: zeros then fill the last ranks up, of biases too."""
    mlp = Mlp("gated", "silu", inner, bias=bias)
    module = loaders(architecture(storage=Storage(gate_up="concat"), mlp=mlp))
    stored = 1 + torch.arange(2 * inner * HIDDEN, dtype=torch.float32).view(2 * inner, HIDDEN)
    shard = -(-inner // tp)
    for part in (0, 1):
        loader = module.gate_up_loader(SimpleNamespace(intermediate_size=inner), tp, part=part)
        whole = torch.cat([loader.load([Stored(stored)], rank) for rank in range(tp)], dim=1)
        expected = torch.zeros(HIDDEN, shard * tp)
        expected[:, :inner] = stored[part * inner : (part + 1) * inner].T
        assert torch.equal(whole, expected)
        if bias:
            biases = torch.cat([loader.load([Stored(stored[:, 0])], rank) for rank in range(tp)])
            assert torch.equal(biases, expected[0])


def test_a_tensor_without_dimensions_is_read():
    module = loaders(architecture(mlp=Mlp("plain", "xielu", 12)))
    assert module.scalar_loader().load([Stored(torch.tensor(0.5))], 3).shape == ()


def test_one_plus_w_is_computed_in_the_given_dtype():
    module = loaders(architecture(norm=Norm("rms", 1e-6, weight="one_plus")))
    loaded = module.plus_one_loader(torch.float32).load([torch.tensor([0.001], dtype=torch.bfloat16)], 0)
    assert loaded.dtype == torch.float32
    assert 1.0005 < float(loaded) < 1.0015
