"""Baseline and program: the plainest fast copy between two processes, without any protocol.

Each process has one thread. The pieces are dealt out to the streams in runs of equal size; the
sockets do not block, and each call moves what fits, straight from and into the memory. The
receiver says with one byte that it has everything.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from kvx.bench.child import ANSWER_S, Lines
from kvx.bench.slab import Slab

_CALL_BYTES = 1 << 20
_CALL_VIEWS = 1000


class Stream:
    """One socket and the views that it has to move."""

    def __init__(self, sock: socket.socket, views: Sequence[memoryview]) -> None:
        self.sock = sock
        self._views = list(views)
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == len(self._views)

    def move(self, sending: bool) -> None:
        """One system call."""
        batch, room = [], _CALL_BYTES
        for view in self._views[self._at : self._at + _CALL_VIEWS]:
            batch.append(view[:room])
            room -= len(batch[-1])
            if not room:
                break
        try:
            count = self.sock.sendmsg(batch) if sending else self.sock.recvmsg_into(batch)[0]
        except BlockingIOError:
            return
        if not count:
            raise ConnectionResetError("the other end has closed")
        while count:
            head = self._views[self._at]
            if count < len(head):
                self._views[self._at] = head[count:]
                return
            count -= len(head)
            self._at += 1


def deal(views: Sequence[memoryview], streams: int) -> list[list[memoryview]]:
    """Shares of equal size, in order, one for each stream."""
    share = -(-sum(map(len, views)) // streams)
    dealt: list[list[memoryview]] = [[]]
    room = share
    for view in views:
        rest = view
        while len(rest):
            if not room:
                dealt.append([])
                room = share
            dealt[-1].append(rest[:room])
            rest = rest[len(dealt[-1][-1]) :]
            room -= len(dealt[-1][-1])
    return dealt


def move(socks: Sequence[socket.socket], views: Sequence[memoryview], sending: bool) -> None:
    """Move all views. Raises OSError, TimeoutError if nothing moves for `ANSWER_S`."""
    event = select.EPOLLOUT if sending else select.EPOLLIN
    with select.epoll() as epoll:
        streams = {}
        for sock, share in zip(socks, deal(views, len(socks)), strict=False):
            streams[sock.fileno()] = Stream(sock, share)
            epoll.register(sock.fileno(), event)
        while streams:
            ready = epoll.poll(ANSWER_S)
            if not ready:
                raise TimeoutError("nothing moves")
            for descriptor, _ in ready:
                stream = streams[descriptor]
                stream.move(sending)
                if stream.done:
                    epoll.unregister(descriptor)
                    del streams[descriptor]


def confirm(sock: socket.socket) -> None:
    """Wait for the receiver's byte."""
    if not select.select([sock], [], [], ANSWER_S)[0] or not sock.recv(1):
        raise ConnectionResetError("the other end does not answer")


def main() -> None:
    """Serve until standard input ends: b"w" on the first stream means receive, b"r" means send."""
    lines = Lines()
    setup = lines.first()
    slab = Slab(setup["bytes"], setup["pieces"], seed=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lines.write({"port": listener.getsockname()[1]})
        socks = [listener.accept()[0] for _ in range(setup["streams"])]
    for sock in socks:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sources: list[int | socket.socket] = [0, socks[0]]
    try:
        while True:
            ready = select.select(sources, [], [])[0]
            if socks[0] in ready:
                question = socks[0].recv(1)
                if not question:
                    return
                receiving = question == b"w"
                move(socks, slab.views, sending=not receiving)
                if receiving:
                    socks[0].send(b".")
            for line in lines.read() if 0 in ready else []:
                if "fill" in line:
                    slab.fill(line["fill"])
                    lines.write({})
                else:
                    lines.write({"matches": slab.matches(line["check"])})
    except (EOFError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
