"""What this host has of EFA."""

from __future__ import annotations

from pathlib import Path

_SYSFS = Path("/sys/class/infiniband")


def devices(sysfs: Path = _SYSFS) -> list[str]:
    """Names of the EFA devices, sorted; the verbs devices of other drivers are none."""
    try:
        found = sorted(sysfs.iterdir())
    except OSError:
        return []
    return [device.name for device in found if (device / "device/driver").resolve().name == "efa"]
