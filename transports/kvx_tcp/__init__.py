"""One-sided READ and WRITE over plain TCP, between registered host memory of two processes."""
