"""What the device does not allow in a model: each rule met and kept."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from vllm_neuron.simulator import rules
from vllm_neuron.simulator.guards import check_loaded, guard_forward

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning")


@pytest.fixture(autouse=True)
def clean_records():
    rules.reset()
    yield
    rules.reset()


X = torch.arange(4.0)

MOVES = {
    "to a device": lambda: X.to(torch.device("cpu")),
    "to a device by name": lambda: X.to("cpu"),
    "to a device by keyword": lambda: X.to(device="cpu", dtype=torch.float16),
    "cpu": lambda: X.cpu(),
    "a module": lambda: nn.Linear(2, 2).to("cpu"),
}
READS = {
    "item": lambda: X[0].item(),
    "int": lambda: int(X[0]),
    "branch": lambda: 1 if X.sum() > 0 else 2,
    "slice": lambda: X[: torch.tensor(2)],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
}
ALLOWED = {
    "cast": lambda: X.to(torch.float16),
    "cast like another": lambda: X.to(torch.zeros(1, dtype=torch.int32)),
    "shape": lambda: X.view(int(X.shape[0]) // 2, -1).reshape(-1)[: len(X) // 2],
    "index": lambda: X.index_select(0, torch.tensor([1, 2])).masked_fill(torch.tensor([True, False]), 0),
    "where": lambda: torch.where(X > 1, X, 0).softmax(-1),
}


@pytest.mark.parametrize("call", MOVES.values(), ids=MOVES)
def test_moving_to_a_device(call):
    with pytest.raises(NotImplementedError, match="unimplemented _copy_from"), guard_forward():
        call()


@pytest.mark.parametrize("call", READS.values(), ids=READS)
def test_reading_a_value(call):
    with pytest.raises(RuntimeError, match=r"Unsupported Tensor\.\w+\(\) call"), guard_forward():
        call()


@pytest.mark.parametrize("call", ALLOWED.values(), ids=ALLOWED)
def test_what_stays_on_the_device(call):
    with guard_forward():
        call()
    assert rules.records() == []


def test_the_guards_end_with_the_forward():
    with guard_forward():
        pass
    assert X.to("cpu")[1].item() == 1


def test_operators_may_do_both():
    @rules.operator
    def operator():
        return X.cpu()[1].item() + X.to("cpu").tolist()[2]

    with guard_forward():
        assert operator() == 3


def test_not_strict_records_and_goes_on(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_SIM_STRICT", "0")
    with guard_forward():
        assert [x.cpu().item() for x in X] == [0, 1, 2, 3]
    assert {(r.operator, r.kind, r.rule, r.count) for r in rules.records()} == {
        ("model", "error", "to-device", 4),
        ("model", "error", "item", 4),
    }


# --- Collectives ------------------------------------------------------------------------------------------


def test_collectives_are_counted_by_kind(groups):
    _, pair, other_pair, _ = groups
    with guard_forward() as report:
        dist.all_reduce(torch.ones(2), group=pair)
        dist.all_reduce(torch.ones(2), group=other_pair)
        all_gather_tensor(torch.ones(2), 0, pair).wait()
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group=pair)
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2), group=pair)
    assert report.collectives == {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 1}
    assert report.group_sizes == {2}


def test_a_group_of_one_is_no_collective(groups):
    single, _, _, world = groups
    with guard_forward() as report:
        dist.all_reduce(torch.ones(2), group=single)
        dist.all_reduce(torch.ones(2), group=world)
    assert report.collectives == {"all_reduce": 1}


def test_two_group_sizes_in_one_forward(groups):
    _, pair, _, world = groups
    message = r"NEFF Warmup failed with status 1006: .* groups of 2 and 4 ranks"
    with guard_forward():
        dist.all_reduce(torch.ones(2), group=world)
        with pytest.raises(RuntimeError, match=message):
            all_gather_tensor(torch.ones(2), 0, pair)


def test_two_group_sizes_inside_an_operator(groups):
    _, pair, _, world = groups
    reduce = rules.operator(lambda group: dist.all_reduce(torch.ones(2), group=group))
    with guard_forward():
        reduce(pair)
        with pytest.raises(RuntimeError, match="status 1006"):
            reduce(world)


def test_two_forwards_may_use_two_sizes(groups):
    _, pair, _, world = groups
    for group in (pair, world):
        with guard_forward():
            dist.all_reduce(torch.ones(2), group=group)


# --- Meta tensors -----------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("inv_freq", torch.ones(2))
        self.table = torch.ones(2)
        self.caches = {"k": [None, torch.ones(1)]}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda part: setattr(part, "weight", nn.Parameter(torch.empty(2, device="meta"))), "part.weight"),
        (lambda part: part.register_buffer("inv_freq", torch.ones(2, device="meta")), "part.inv_freq"),
        (lambda part: setattr(part, "table", torch.ones(2, device="meta")), "part.table"),
        (
            lambda part: part.caches["k"].append(torch.ones(2, device="meta")),
            r"part.caches\['k'\]\[2\]",
        ),
    ],
)
def test_tensors_left_on_the_meta_device_are_named(change, name):
    model = nn.Module()
    model.part = Part()
    check_loaded(model)
    change(model.part)
    with pytest.raises(NotImplementedError, match=f"Cannot copy out of meta tensor; no data! .*: {name}$"):
        check_loaded(model)


def test_all_meta_tensors_are_named_at_once():
    with torch.device("meta"):
        model = Part()
    with pytest.raises(NotImplementedError, match=r": weight, inv_freq; .*: table, caches\['k'\]\[1\]$"):
        check_loaded(model)


def test_the_stop_for_a_plain_attribute_is_called_the_simulators_own():
    model = nn.Module()
    model.steps = torch.ones(2, device="meta")
    assert model.to("cpu").steps.is_meta  # what the device's runner calls passes over it
    with pytest.raises(
        NotImplementedError, match=r"no data! plain attributes are .*the simulator stops .*: steps$"
    ):
        check_loaded(model)
