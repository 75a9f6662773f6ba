"""A small inference engine for the Llama architecture: numpy, float32, paged KV cache. It knows nothing of kvx."""
