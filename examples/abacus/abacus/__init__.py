"""A made-up engine: whole numbers for weights, a paged cache, prefill in chunks, many requests per step. No kvx."""
