"""The router: one HTTP address in front of any number of prefill and decode instances."""
