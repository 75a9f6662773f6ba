"""Program for tests: one rank in a process of its own, told what to do in lines of JSON."""

from __future__ import annotations

import base64
import json
import os
import select
import sys

import numpy as np

from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Layout, Op, Peer, Region, Stamp
from kvx_tcp.transport import TcpTransport


def main() -> None:
    name, nbytes = sys.argv[1], int(sys.argv[2])
    memory = np.full(nbytes, 2, dtype=np.uint8)
    transport = TcpTransport({"peer": name + "#0"})
    transport.register([Region(0, memory.ctypes.data, nbytes)])
    whole = Descriptors.of([(0, 0, nbytes)])
    print(base64.b64encode(transport.metadata()).decode(), flush=True)
    received = b""
    while True:
        ready = select.select([0, transport], [], [])[0]
        for completion in transport.poll():
            if isinstance(completion, OpDone | OpFailed):
                print(completion.op_id, isinstance(completion, OpDone), flush=True)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, received = (received + data).split(b"\n")
            for line in map(json.loads, lines):
                op = Op(line["op"])
                stamp = Stamp(line["transfer"], 7, 3)
                if line["do"] == "permit":
                    transport.permit(line["transfer"], None, op, whole, stamp)
                else:
                    info = InstanceInfo(line["to"], 0, 1, "127.0.0.1:1", Layout("m", "d", "v", (), 0))
                    transport.connect(info, base64.b64decode(line["metadata"]))
                    transport.post(line["id"], Peer(line["to"], 0), op, whole, whole, stamp)


if __name__ == "__main__":
    main()
