"""What every server and client shares: `transport`, `server` and `streams`."""

from outrider.rpc.server import RpcServer, serve_until_terminated
from outrider.rpc.streams import Broken, Ended, Malformed, Stream, client_stream, server_stream
from outrider.rpc.transport import MAX_MESSAGE_BYTES, channel
from outrider.status import error_of_call, rpc_errors

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Broken",
    "Ended",
    "Malformed",
    "RpcServer",
    "Stream",
    "channel",
    "client_stream",
    "error_of_call",
    "rpc_errors",
    "serve_until_terminated",
    "server_stream",
]
