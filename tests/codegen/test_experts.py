"""Routing against the routers of transformers, and expert loaders against slices of whole tensors."""

import msgspec
import pytest
import torch
from autoport.codegen.moe import moe_context, moe_loaders, router_order
from autoport.codegen.render import render
from autoport.schema.architecture import Moe, Routing, SharedExperts
from plans import LLAMA3

E, H, I, T = 8, 32, 12, 64  # noqa: E741

SOFTMAX = Routing(
    num_experts=E, top_k=3, score="softmax", score_over="all", bias=False, correction_bias=False,
    correction_rows=False, groups=1, top_groups=1, normalise=True, epsilon=0.0, minimum=None, scaling=None,
    logit_softcap=None, threshold=None,
)  # fmt: skip
SIGMOID = msgspec.structs.replace(SOFTMAX, score="sigmoid", correction_bias=True, epsilon=1e-20, scaling=2.5)


def routing(base=SOFTMAX, **changes):
    return msgspec.structs.replace(base, **changes)


def architecture(moe):
    return msgspec.structs.replace(LLAMA3, moe=moe)


def moe(routing=SOFTMAX, **changes):
    return Moe(routing=routing, intermediate_size=I, activation="silu", **changes)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- routing --------------------------------------------------------------------------------------------------


def router_class(described):
    """The generated `route` as the only method of a class."""
    import vllm_neuron.functional as NF
    from vllm_neuron.functional.moe.router import RouterComputationOrder

    arch = architecture(moe(described))
    text = render("model/moe/route.py.j2", arch=arch, **moe_context(arch))
    namespace = {
        "torch": torch,
        "Tensor": torch.Tensor,
        "NF": NF,
        "RouterComputationOrder": RouterComputationOrder,
    }
    exec("class Router:\n" + text, namespace)
    return namespace["Router"]


def generated(described, weight, bias=None, correction=None):
    router = router_class(described)()
    router.router_weight, router.router_bias, router.correction_bias = weight, bias, correction
    router.top_k, router.num_groups, router.num_top_groups = (
        described.top_k,
        described.groups,
        described.top_groups,
    )
    router.routed_scaling, router.router_softcap = described.scaling, described.logit_softcap
    router.router_minimum, router.router_threshold = described.minimum, described.threshold
    return router.route


def hugging_face(model_type, class_name, **config):
    """The router of a class of transformers with known weights, as a function of [T, H] to weights [T, E]."""
    import importlib

    from transformers import AutoConfig

    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    values = {"hidden_size": H, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, **config}
    router = getattr(module, class_name)(AutoConfig.for_model(model_type, **values)).eval()
    with torch.no_grad():
        for name, tensor in router.state_dict(keep_vars=True).items():
            scale = 0.2 if "correction_bias" in name else 0.5
            tensor.copy_(normal(*tensor.shape, seed=len(name)) * scale)
    return router


def weights_of(router, x, *arguments):
    with torch.no_grad():
        found = router(x, *arguments)
    chosen = next(item for item in found if not item.is_floating_point())
    weights = next(item for item in found if item.is_floating_point() and item.shape == chosen.shape)
    return torch.zeros(T, E).scatter(1, chosen, weights.float())


def parameter(router, name):
    return next((tensor for key, tensor in router.state_dict().items() if key.endswith(name)), None)


GROUPED = {
    "n_routed_experts": E, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "n_shared_experts": 1,
}  # fmt: skip
EIGHT = {"num_experts": E, "num_experts_per_tok": 3}
LOCAL = {"num_local_experts": E, "num_experts_per_tok": 3}
ROUTERS = {
    "softmax, renormalised": (SOFTMAX, "mixtral", "MixtralTopKRouter", LOCAL),
    "softmax, not renormalised": (
        routing(normalise=False), "qwen2_moe", "Qwen2MoeTopKRouter", {**EIGHT, "norm_topk_prob": False},
    ),
    "softmax of the chosen, with a bias": (
        routing(score_over="chosen", normalise=False, bias=True), "gpt_oss", "GptOssTopKRouter", LOCAL,
    ),
    "sigmoid of the chosen": (
        routing(score="sigmoid", score_over="chosen", normalise=False), "cohere2_moe", "Cohere2MoeTopKRouter",
        {**EIGHT, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "sigmoid, renormalised": (
        routing(score="sigmoid", score_over="chosen"), "cohere2_moe", "Cohere2MoeTopKRouter",
        {**EIGHT, "expert_selection_fn": "sigmoid", "norm_topk_prob": True},
    ),
    "sigmoid with a correction bias": (
        SIGMOID, "glm4_moe", "Glm4MoeTopkRouter", {**GROUPED, "n_group": 1, "topk_group": 1},
    ),
    "groups": (routing(SIGMOID, groups=4, top_groups=2), "dots1", "Dots1TopkRouter", GROUPED),
    "groups, not renormalised": (
        routing(SIGMOID, groups=4, top_groups=2, normalise=False), "dots1", "Dots1TopkRouter",
        {**GROUPED, "norm_topk_prob": False},
    ),
    "softmax with a correction bias and a minimum": (
        routing(correction_bias=True, correction_rows=True, minimum=0.4), "ernie4_5_moe", "Ernie4_5_MoeTopKRouter",
        {"moe_num_experts": E, "moe_k": 3, "moe_norm_min": 0.4},
    ),
    "softcap of the logits": (
        routing(score="sigmoid", correction_bias=True, logit_softcap=1.5), "laguna", "LagunaTopKRouter",
        {**EIGHT, "moe_router_logit_softcapping": 1.5},
    ),
    "sparsemixer": (
        routing(score="sparsemixer", top_k=2, normalise=False, threshold=0.1, bias=True), "phimoe",
        "PhimoeTopKRouter", {"num_local_experts": E, "num_experts_per_tok": 2, "router_jitter_noise": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_is_that_of_transformers(name):
    described, model_type, class_name, config = ROUTERS[name]
    router, x = hugging_face(model_type, class_name, **config), normal(T, H, seed=9)
    correction = parameter(router, "correction_bias")
    bias = router.state_dict().get("bias")
    route = generated(
        msgspec.structs.replace(described, bias=described.bias and bias is not None),
        parameter(router, "weight"),
        bias,
        None if correction is None else correction.flatten(),
    )
    torch.testing.assert_close(route(x), weights_of(router, x), rtol=1e-5, atol=1e-6)


WRONG = {
    "correction bias in the weights": {"correction_bias": False},
    "groups left out": {"groups": 1, "top_groups": 1},
    "renormalisation dropped": {"normalise": False},
    "scaling dropped": {"scaling": None},
    "softmax for sigmoid": {"score": "softmax"},
}


@pytest.mark.parametrize("name", WRONG)
def test_another_routing_gives_other_weights(name):
    right = routing(SIGMOID, groups=4, top_groups=2)
    router, x = hugging_face("dots1", "Dots1TopkRouter", **GROUPED), normal(T, H, seed=9)
    arguments = parameter(router, "weight"), None, parameter(router, "correction_bias")
    expected = weights_of(router, x)
    assert (generated(right, *arguments)(x) - expected).abs().max() < 1e-5
    wrong = generated(msgspec.structs.replace(right, **WRONG[name]), *arguments)(x)
    assert (wrong - expected).abs().max() > 1e-2


def test_a_bfloat16_input_is_routed_in_float32():
    weight, x = normal(E, H) * 0.5, normal(T, H, seed=9).bfloat16()
    for described in (SOFTMAX, routing(normalise=False), SIGMOID):
        route = generated(described, weight, correction=normal(E, seed=2) * 0.2)
        assert route(x).dtype == torch.float32
        torch.testing.assert_close(route(x), route(x.float()))


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, "PRENORM_LINEAR_TOPK_ACT_SCATTER"),
        ({"normalise": False}, None),
        ({"score": "sigmoid"}, "PRENORM_LINEAR_ACT_TOPK_RENORM_SCATTER"),
        ({"correction_bias": True}, None),
        ({"groups": 4, "top_groups": 2}, None),
        ({"logit_softcap": 1.0}, None),
        ({"score": "sparsemixer"}, None),
    ],
)
def test_what_the_router_operator_expresses(changes, order):
    assert router_order(routing(**changes)) == order


# --- loaders --------------------------------------------------------------------------------------------------


def loaders(described, pads=False):
    """The generated loaders by name."""
    from vllm_neuron.utils.weight_loader import SafetensorsWeightLoader

    arch = architecture(described)
    text = render(
        "boilerplate/expert_loaders.py.j2",
        arch=arch,
        own_loaders=moe_loaders(arch),
        pads_experts=pads,
        pads_shared=pads,
    )
    namespace = {
        "torch": torch, "Tensor": torch.Tensor, "Any": object, "SafetensorsWeightLoader": SafetensorsWeightLoader,
        "nn": torch.nn,
    }  # fmt: skip
    exec(text, namespace)
    return namespace


class Slice:
    """A whole tensor behind the interface of a lazy slice."""

    def __init__(self, tensor):
        self.tensor = tensor

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, index):
        return self.tensor[index]


GATE, UP, DOWN = normal(E, H, I, seed=1), normal(E, H, I, seed=2), normal(E, I, H, seed=3)  # [in, out]
GATE_BIAS, UP_BIAS = normal(E, I, seed=4), normal(E, I, seed=5)
STORED = {
    "separate": ([*GATE.mT, *UP.mT], [*DOWN.mT]),
    "stacked": ([torch.cat((GATE, UP), dim=2).mT], [DOWN.mT]),
    "stacked_transposed": ([torch.cat((GATE, UP), dim=2)], [DOWN]),
    "interleaved": ([torch.stack((GATE, UP), dim=3).flatten(2)], [DOWN]),
}


@pytest.mark.parametrize("rank", [0, 1, 3, 4])
@pytest.mark.parametrize("storage", STORED)
def test_a_rank_gets_its_part_of_every_expert(storage, rank):
    shards, size = 4, I // 4
    generated = loaders(moe(storage=storage))
    part = slice(rank % shards * size, (rank % shards + 1) * size)
    gate_up, down = ([Slice(tensor) for tensor in tensors] for tensors in STORED[storage])
    loaded = generated["expert_gate_up_loader"](size, shards).load(gate_up, rank)
    assert torch.equal(loaded, torch.stack((GATE[:, :, part], UP[:, :, part]), dim=2))  # [E, H, 2, I/TP]
    assert loaded.is_contiguous()
    assert torch.equal(generated["expert_down_loader"](size, shards).load(down, rank), DOWN[:, part])


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("storage", STORED)
def test_zeros_fill_up_what_the_ranks_do_not_divide(storage, shards):
    """The ranks together hold every column once, then zeros; at TP 4 the last rank holds nothing else."""
    size = 4 if shards == 4 else 16 // shards  # 12 columns are stored
    gate_up, down = ([Slice(tensor) for tensor in tensors] for tensors in STORED[storage])
    described = moe(storage=storage, bias=storage in ("stacked", "interleaved"), up_offset=1.0)
    generated = loaders(described, pads=True)
    ranks, held = range(shards), size * shards
    weight, inner = torch.zeros(E, H, 2, held), torch.zeros(E, held, H)
    weight[..., :I], inner[:, :I] = torch.stack((GATE, UP), dim=2), DOWN
    load = generated["expert_gate_up_loader"](size, shards).load
    assert torch.equal(torch.cat([load(gate_up, rank) for rank in ranks], dim=3), weight)
    load = generated["expert_down_loader"](size, shards).load
    assert torch.equal(torch.cat([load(down, rank) for rank in ranks], dim=1), inner)
    if described.bias:
        interleaved = torch.stack((GATE_BIAS, UP_BIAS), dim=2).flatten(1)
        stored = interleaved if storage == "interleaved" else torch.cat((GATE_BIAS, UP_BIAS), dim=1)
        load = generated["expert_gate_up_bias_loader"](size, shards).load
        bias = torch.cat([load([Slice(stored)], rank) for rank in ranks], dim=2)
        torch.testing.assert_close(bias[:, :, :I], torch.stack((GATE_BIAS, UP_BIAS + 1.0), dim=1))
        assert bias.isfinite().all()  # beyond, whatever: the down projection has zeros there


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_zeros_fill_up_the_shared_experts(shards):
    shared = SharedExperts(
        intermediate_size=13, activation="silu", gated=False, combine="sum", storage="concat"
    )
    load = loaders(moe(shared=shared), pads=True)["shared_gate_up_loader"]
    stored, size = normal(26, H, seed=6), -(-13 // shards)
    for part in (0, 1):
        loaded = [load(size, shards, part).load([Slice(stored)], rank) for rank in range(shards)]
        expected = torch.zeros(H, size * shards)
        expected[:, :13] = stored[13 * part : 13 * part + 13].T
        assert torch.equal(torch.cat(loaded, dim=1), expected)


@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("storage", ["stacked", "interleaved"])
def test_biases_follow_the_weights(storage, offset):
    interleaved = torch.stack((GATE_BIAS, UP_BIAS), dim=2).flatten(1)
    stored = interleaved if storage == "interleaved" else torch.cat((GATE_BIAS, UP_BIAS), dim=1)
    load = loaders(moe(storage=storage, bias=True, up_offset=offset))["expert_gate_up_bias_loader"](I // 2, 2)
    part = slice(I // 2, I)
    expected = torch.stack((GATE_BIAS[:, part], UP_BIAS[:, part] + (offset or 0)), dim=1)
    torch.testing.assert_close(load.load([Slice(stored)], 1), expected)


def test_shared_experts_in_one_tensor_and_a_correction_bias_in_a_row():
    shared = SharedExperts(
        intermediate_size=I, activation="silu", gated=False, combine="sum", storage="concat"
    )
    generated = loaders(moe(routing(correction_bias=True, correction_rows=True), shared=shared))
    stored = normal(2 * I, H, seed=6)
    for part in (0, 1):
        first = part * I + I // 2
        load = generated["shared_gate_up_loader"](I // 2, 2, part)
        assert torch.equal(load.load([Slice(stored)], 1), stored[first : first + I // 2].T)
    assert generated["flat_loader"]().load([Slice(GATE_BIAS[:1])], 0).shape == (I,)
