"""kvx for SGLang: transfer backend `kvx`, loaded by its entry point in group `sglang.srt.plugins`."""
