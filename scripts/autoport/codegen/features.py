"""The feature table of a port's README: what is implemented, and what has been run and passed."""

import msgspec

from autoport.files import sha256
from autoport.port_state import Port
from autoport.schema.plan import Plan

STATE_FILE = "features.json"
NOT_VERIFIED, NOT_IMPLEMENTED, NOT_APPLICABLE = "not verified", "❌", "N/A"

# Rows of the table, in the plugin's order: feature -> (status before anything was run, note).
FEATURES = {
    "TP (head sharding)": (NOT_VERIFIED, ""),
    "SP (sequence parallel)": (NOT_VERIFIED, "prefill only"),
    "DP (data parallel)": (NOT_IMPLEMENTED, "the factory refuses it"),
    "Dependent DP": (NOT_IMPLEMENTED, "the factory refuses it"),
    "EP (expert parallel)": (NOT_APPLICABLE, "dense model"),
    "Cross-DP EP": (NOT_APPLICABLE, "dense model"),
    "Eagle3 spec decode": (
        NOT_VERIFIED,
        "the target's part: hidden states for a drafter, verification of drafts",
    ),
    "FP8 KV cache": (NOT_IMPLEMENTED, "bind_kv_cache refuses it"),
    "Segmented prefill": (NOT_VERIFIED, ""),
    "On-device sampling": (NOT_VERIFIED, ""),
    "Prompt embeds": (NOT_IMPLEMENTED, "forward refuses them"),
}


EXPERT_PARALLEL = ("EP (expert parallel)", "Cross-DP EP")


class FeatureResult(msgspec.Struct, frozen=True):
    """A feature that was run. `note` says where and how, e.g. ``"simulator, TP 1 and 2, bfloat16"``."""

    passed: bool
    note: str


class FeatureResults(msgspec.Struct):
    """Results by row of `FEATURES`; they hold for the model's files with this hash only."""

    model_hash: str
    results: dict[str, FeatureResult]


def feature_rows(port: Port, plan: Plan) -> list[tuple[str, str, str]]:
    """Rows of the table: feature, status, note. ✅ stands for what was run with the files as they are now."""
    results = current_results(port)
    notes = {"TP (head sharding)": f"by the rules: TP {tp_sizes(plan)}"}
    moe = plan.architecture.moe
    expert_parallel = (NOT_IMPLEMENTED, "the factory refuses it; each expert is split by TP")
    rows = []
    for feature, (status, note) in FEATURES.items():
        if moe and feature in EXPERT_PARALLEL:
            status, note = expert_parallel
        note = notes.get(feature, note)
        if feature in results:
            result = results[feature]
            status, note = ("✅" if result.passed else "❌ failed"), result.note
        rows.append((feature, status, note))
    composed = {
        "Fused attention": plan.architecture.attention.composed,
        "Fused experts in decode": moe.composed if moe else (),
    }
    for feature, reasons in composed.items():
        if reasons:
            note = f"composed of smaller operators, which is slower: {'; '.join(reasons)}"
            rows.append((feature, NOT_IMPLEMENTED, note))
    return rows


def tp_sizes(plan: Plan) -> str:
    """The valid tensor-parallel sizes as text; ``none`` if there are none."""
    return ", ".join(str(candidate.tp_size) for candidate in plan.tp.candidates if candidate.valid) or "none"


def current_results(port: Port) -> dict[str, FeatureResult]:
    """Results that were recorded for the model's files as they are now."""
    if not port.has_state(STATE_FILE):
        return {}
    recorded = port.read_state(STATE_FILE, FeatureResults, "prove")
    return recorded.results if recorded.model_hash == model_hash(port) else {}


def model_hash(port: Port) -> str:
    """Hash of the Python files of the port's model."""
    folder = port.workspace.model_dir(port.name)
    files = sorted(folder.glob("*.py"))
    return sha256(b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files))
