"""Program: the process whose memory `kvx bench transport` reads and writes."""

from __future__ import annotations

import base64
import select

from kvx.bench.child import Lines
from kvx.bench.slab import Slab
from kvx.core.model import InstanceInfo, Layout, Op, Peer, Stamp
from kvx.plugins import make_transport

INITIATOR = Peer("bench-initiator", 0)
TARGET = Peer("bench-target", 0)
STAMPS = {op: Stamp(op.value, 1, 1) for op in Op}


def info(peer: Peer) -> InstanceInfo:
    return InstanceInfo(peer.instance, peer.rank, 1, "127.0.0.1:1", Layout("bench", "bytes", "bench", (), 0))


def main() -> None:
    """Serve until standard input ends."""
    lines = Lines()
    setup = lines.first()
    slab = Slab(setup["bytes"], setup["pieces"], seed=2)
    options = {**setup["options"], "peer": setup.get("peer", str(TARGET)), "secret": base64.b64decode(setup["secret"])}
    transport = make_transport(setup["transport"], options)
    transport.register([slab.region])
    for op in transport.capabilities.ops:
        transport.permit(STAMPS[op].transfer, INITIATOR, op, slab.descriptors, STAMPS[op])
    lines.write({"metadata": base64.b64encode(transport.metadata()).decode()})
    descriptor = transport.fileno()
    waited = [0] if descriptor is None else [0, descriptor]
    try:
        while True:
            ready = select.select(waited, [], [], transport.idle_poll_s)[0]
            transport.poll()
            for line in lines.read() if 0 in ready else []:
                if "metadata" in line:
                    transport.connect(info(INITIATOR), base64.b64decode(line["metadata"]))
                    lines.write({})
                elif "fill" in line:
                    slab.fill(line["fill"])
                    lines.write({})
                else:
                    lines.write({"matches": slab.matches(line["check"])})
    except EOFError:
        transport.close()


if __name__ == "__main__":
    main()
