"""How parallel plans are shown to a person."""

from autoport.cli.output import print_table
from autoport.schema.parallel import EpPlan, TpPlan
from autoport.units import size_text


def hardware_text(plan: TpPlan) -> str:
    """The instance that a plan is for."""
    assumed = " (assumed)" if plan.hardware_assumed else ""
    cores = f"{plan.cores} logical cores of {plan.bytes_per_core / 1e9:.0f} GB{assumed}"
    return (
        f"{plan.instance} at LNC {plan.lnc}: {cores}, "
        f"{plan.weight_limit_bytes / 1e9:.0f} GB of it for weights"
    )


def print_experts(experts: EpPlan, plan: TpPlan) -> None:
    """The splits of the world, all broken rules of each, and whether one is needed."""
    needed = plan.recommended is None
    rows = [
        (
            item.tp_size,
            item.ep_degree,
            ("yes" if item.valid else "no")
            + (" (recommended)" if needed and item.tp_size == experts.recommended else ""),
            "\n".join(f"{v.rule}: {v.text}" for v in item.violations),
            item.experts_per_group,
            size_text(item.weight_bytes_per_rank),
        )
        for item in experts.candidates
    ]
    title = f"Expert parallelism: {experts.num_experts} experts, world {experts.world_size}"
    title += " (assumed)" if plan.hardware_assumed else ""
    columns = ("TP sub-group", "ep_degree", "Valid", "Why", "Experts per group", "Weights per rank")
    print_table(columns, rows, title=title)
    if needed and experts.recommended is None:
        print("Expert parallelism does not help: no split of the world is valid either.")
    else:
        print(
            f"Expert parallelism is {'needed' if needed else 'not needed: a TP size fits'}; {experts.note}."
        )
