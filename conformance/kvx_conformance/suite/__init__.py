"""What anybody's transport, and an instance on it, is held to: cases, each of which tries to break one sentence."""
