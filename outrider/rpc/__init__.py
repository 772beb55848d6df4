"""What every server and client shares: `transport`, `server`, `streams`, and who they trust: `tls`, `peers`."""

from outrider.rpc.peers import Callers, Names, peer_names
from outrider.rpc.server import RpcServer, serve_until_terminated
from outrider.rpc.streams import Broken, Ended, Malformed, Stream, client_stream, server_stream
from outrider.rpc.tls import ClientTls, ServerTls, client_tls
from outrider.rpc.transport import MAX_MESSAGE_BYTES, channel
from outrider.status import error_of_call, rpc_errors

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Broken",
    "Callers",
    "ClientTls",
    "Ended",
    "Malformed",
    "Names",
    "RpcServer",
    "ServerTls",
    "Stream",
    "channel",
    "client_stream",
    "client_tls",
    "error_of_call",
    "peer_names",
    "rpc_errors",
    "serve_until_terminated",
    "server_stream",
]
