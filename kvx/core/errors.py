"""Every exception that kvx raises. A failed transfer is not one of them: it is an `Outcome`."""

from __future__ import annotations


class KvxError(Exception):
    """Base of all errors of kvx."""


class LocalProtocolError(KvxError):
    """The caller of the core broke a rule of the protocol; nothing was changed."""


class RemoteProtocolError(KvxError):
    """A peer broke a rule of the protocol. Only the receive path raises it."""


class TransportError(KvxError):
    """A transport cannot do what it was asked to do."""


class LayoutMismatch(KvxError):
    """Two layouts cannot exchange blocks.

    `fact` names the property that differs, `producer` and `consumer` are its two values.
    """

    def __init__(self, fact: str, producer: object, consumer: object) -> None:
        super().__init__(f"{fact} differs: {producer!r} at the producer, {consumer!r} at the consumer")
        self.fact = fact
        self.producer = producer
        self.consumer = consumer


class PluginError(KvxError):
    """A plugin that was asked for by name is missing or broken."""


class ConfigError(KvxError):
    """The configuration cannot work; the text says what to change."""
