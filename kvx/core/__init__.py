"""The protocol of kvx, free of I/O: values, wire format, planner, state machine, endpoint."""
