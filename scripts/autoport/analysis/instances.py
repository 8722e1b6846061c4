"""What an instance offers: one table of constants, each with where it is said, or marked as an assumption."""

import msgspec

from autoport.errors import refuse

GB = 1_000_000_000
GUIDE = (
    "the porting guide: 96 GB per Neuron device, 24 GB per logical core at LNC 2, world size 64 on a full "
    "trn2.48xlarge"
)
CORES_PER_DEVICE = 8  # physical; the guide: 96 GB / 24 GB = 4 logical cores of 2 physical ones
WEIGHT_SHARE = (
    20 / 24
)  # the guide: more than about 20 GB of weights in the 24 GB of a rank asks for a larger TP
RESERVE_BYTES = 2 * GB
RESERVE_ASSUMPTION = (
    "2 GB of each logical core are kept for compiled graphs, activations and collectives: not measured"
)


class Instance(msgspec.Struct, frozen=True):
    """An instance type at one LNC (physical cores that make up one logical core).

    Attributes:
        devices: Neuron devices of the instance.
        hbm_gb: Memory of one device.
        source: Where devices and memory are said.
        assumed: What of it no document at hand says.
    """

    name: str
    devices: int
    hbm_gb: int
    lnc: int
    source: str
    assumed: str = ""

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
    def assumptions(self) -> list[str]:
        """What the numbers rest on and no document says."""
        return [*([self.assumed] if self.assumed else []), RESERVE_ASSUMPTION]


# Name -> devices, GB per device, source, what is assumed.
HARDWARE = {
    "trn2.48xlarge": (16, 96, GUIDE, ""),
    "trn2.3xlarge": (
        1,
        96,
        GUIDE,
        "trn2.3xlarge has one Neuron device: assumed, the guide is about trn2.48xlarge",
    ),
    "trn3": (
        1,
        144,
        "no document at hand",
        "a Trainium3 device has 8 physical cores and 144 GB, and one device is used: assumed; check your instance",
    ),
}
DEFAULT = "trn2.48xlarge"


def find_instance(name: str = DEFAULT, lnc: int = 2) -> Instance:
    """Look an instance type up.

    Raises:
        Refusal: TP-INSTANCE for a type that is not in the table, TP-LNC for an LNC other than 1 or 2.
    """
    if name not in HARDWARE:
        known = ", ".join(HARDWARE)
        raise refuse("TP-INSTANCE", f"unknown instance {name!r}", "option --instance", f"use one of {known}")
    if lnc not in (1, 2):
        raise refuse("TP-LNC", f"LNC {lnc}", "option --lnc", "use 1 or 2")
    devices, hbm, source, assumed = HARDWARE[name]
    return Instance(name, devices, hbm, lnc, source, assumed)
