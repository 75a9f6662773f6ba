"""One-sided READ and WRITE through NIXL: its backends UCX and LIBFABRIC (EFA).

NIXL moves the bytes; a TCP connection of kvx's own beside it, the bell, carries what NIXL cannot
be trusted with: who is who, agents' metadata, the call to be awake, the word that a WRITE has
landed, and the proof that a peer is gone. NIXL's connections themselves are not authenticated and
not encrypted, and an introduced peer can reach every byte of a registered region.
"""
