"""One-sided READ and WRITE over plain TCP, between registered host memory of two processes.

A peer proves once per connection that it knows the shared secret; the frames after that are
neither encrypted nor authenticated, so the network between the hosts has to be trusted as much
as that of any RDMA transport. What a proven peer may touch is checked against the target's
permits, before a byte moves.
"""
