"""What an instance offers: one table of constants, each with where it is said, or marked as an assumption."""

import re

import msgspec

from autoport.errors import Problem, Refusal

GB = 1_000_000_000
GUIDE = (
    "the porting guide: 96 GB per Neuron device, 24 GB per logical core at LNC 2, world size 64 on a full "
    "trn2.48xlarge"
)
CORES_PER_DEVICE = 8  # physical; the guide: 96 GB / 24 GB = 4 logical cores of 2 physical ones
WEIGHT_SHARE = (
    20 / 24
)  # the guide: more than about 20 GB of weights in the 24 GB of a rank asks for a larger TP
RESERVE_GB = 2
SETTINGS = {"devices": "devices", "hbm-gb": "hbm_gb", "reserve-gb": "reserve_gb"}


class Instance(msgspec.Struct, frozen=True):
    """An instance type at one LNC (physical cores that make up one logical core).

    Attributes:
        name: As the user gave it, with what was set.
        devices: Neuron devices of the instance.
        hbm_gb: Memory of one device.
        reserve_gb: Memory of each logical core that is kept for compiled graphs, activations and collectives.
        source: Where devices and memory are said.
        assumed: What of the hardware no document at hand says; empty for nothing.
        reserve_assumed: Whether the user left the reserve as it is, which nobody has measured.
    """

    name: str
    devices: int
    hbm_gb: int
    lnc: int
    source: str
    assumed: str = ""
    reserve_gb: int = RESERVE_GB
    reserve_assumed: bool = True

    @property
    def cores(self) -> int:
        """Logical cores, one per rank."""
        return self.devices * CORES_PER_DEVICE // self.lnc

    @property
    def bytes_per_core(self) -> int:
        """Share of a device's memory that one logical core has, in bytes."""
        return self.hbm_gb * GB * self.lnc // CORES_PER_DEVICE

    @property
    def weight_limit_bytes(self) -> int:
        return int(self.bytes_per_core * WEIGHT_SHARE)

    @property
    def reserve_bytes(self) -> int:
        return self.reserve_gb * GB

    @property
    def assumptions(self) -> list[str]:
        """What the numbers rest on and no document says, with how to say it."""
        found = (
            [f"{self.assumed}; set it with {_example(self.name, 'devices=N,hbm-gb=N')}"]
            if self.assumed
            else []
        )
        if self.reserve_assumed:
            found.append(
                f"{self.reserve_gb} GB of each logical core are kept for compiled graphs, activations and "
                f"collectives: assumed, not measured; set it with {_example(self.name, 'reserve-gb=N')}"
            )
        return found


def _example(name: str, setting: str) -> str:
    return f"--instance {name},{setting}"


# Name -> devices, GB per device, source, and what of the two is assumed, with the reason.
HARDWARE: dict[str, tuple[int, int, str, dict[str, str]]] = {
    "trn2.48xlarge": (16, 96, GUIDE, {}),
    "trn2.3xlarge": (
        1,
        96,
        GUIDE,
        {"devices": "trn2.3xlarge has one Neuron device: assumed, the guide is about trn2.48xlarge"},
    ),
    "trn3": (
        1,
        144,
        "no document at hand",
        {
            "devices": "one Trainium3 device is used: assumed, check your instance",
            "hbm_gb": "a Trainium3 device has 8 physical cores and 144 GB: assumed, check your instance",
        },
    ),
}
DEFAULT = "trn2.48xlarge"


def find_instance(text: str = DEFAULT, lnc: int = 2) -> Instance:
    """Look an instance type up.

    Args:
        text: A name, and what is to be set differently: ``trn3,devices=4,hbm-gb=144,reserve-gb=3``.

    Raises:
        Refusal: TP-INSTANCE for a type that is not in the table and for what cannot be set, TP-LNC for an LNC other
            than 1 or 2.
    """
    name, *settings = text.split(",")
    problems = []
    if name not in HARDWARE:
        step = f"use one of {', '.join(HARDWARE)}"
        problems.append(Problem("TP-INSTANCE", f"unknown instance {name!r}", "option --instance", step))
    given: dict[str, int] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if (
            key not in SETTINGS
            or not re.fullmatch(r"[1-9]\d{0,3}|0", value)
            or (value == "0" and key != "reserve-gb")
        ):
            step = f"set {', '.join(f'{key}=N' for key in SETTINGS)} with whole numbers"
            problems.append(Problem("TP-INSTANCE", f"{setting!r} sets nothing", "option --instance", step))
        else:
            given[SETTINGS[key]] = int(value)
    if lnc not in (1, 2):
        problems.append(Problem("TP-LNC", f"LNC {lnc}", "option --lnc", "use 1 or 2"))
    if problems:
        raise Refusal(*problems)
    devices, hbm, source, assumed = HARDWARE[name]
    left = [text for key, text in assumed.items() if key not in given]
    if {"devices", "hbm_gb"} & given.keys():
        source = f"{text} as given, else {source}"
    return Instance(
        text,
        given.get("devices", devices),
        given.get("hbm_gb", hbm),
        lnc,
        source,
        "; ".join(left),
        given.get("reserve_gb", RESERVE_GB),
        "reserve_gb" not in given,
    )
