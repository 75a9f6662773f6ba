"""Programs that benches compare with; each runs as a process of its own."""
