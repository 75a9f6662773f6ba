"""A small real engine in numpy (`kvx_reference.engine`, free of kvx), and the adapter that joins it to kvx."""
