"""Channel options of both sides, and the channel factory.

Without `ClientTls` a channel is plaintext, which is for loopback and for networks that are trusted otherwise.

Keepalive alone notices a cut network but not a frozen process: that needs `ping_timeout_ms`. Both sides ping, and the
server allows it, or clients would be sent away with "too many pings".
"""

import grpc

from outrider.rpc.tls import ClientTls

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message either side sends or takes; a long prompt or a block of features fits with room."""

KEEPALIVE_TIME_MS = 10_000
"""Silence after which a ping is sent."""
PING_TIMEOUT_MS = 5_000
"""A ping unanswered for so long ends the connection, frozen peer or cut network alike."""

CONNECT_TIMEOUT_MS = 3_000
"""How long one attempt to connect may take."""

HANDSHAKE_TIMEOUT_MS = 20_000
"""How long a new connection may take until it can be used; gRPC's own two minutes hold too much for the idle."""

Options = list[tuple[str, int]]


def common_options(max_message_bytes: int) -> Options:
    """Return the options that both sides need."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int) -> Options:
    """Return a server's options."""
    return [
        *common_options(max_message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.so_reuseport", 0),  # a second process on the same port must fail, not share it
    ]


def client_options(max_message_bytes: int) -> Options:
    """Return a client's options."""
    return [
        *common_options(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt may take: a busy peer needs longer; a refused attempt is repeated sooner all the same.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def channel(address: str, max_message_bytes: int = MAX_MESSAGE_BYTES, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """Open a channel; it connects with its first call. The caller closes it, after the streams on it.

    Closing a channel does not find calls whose reads happen inside other coroutines, and leaves those waiting.

    Args:
        address: host:port or unix:path.
        max_message_bytes: largest message to send or take.
        tls: how to check the server, and which certificate to show; None: plaintext.
    """
    options = client_options(max_message_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=[*options, *tls.options()])
