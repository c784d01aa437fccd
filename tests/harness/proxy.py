"""A TCP proxy on loopback that hangs, is slow, truncates, corrupts or resets what goes through it."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator


class FaultProxy:
    """Forwards to `target`, as `fault` says at every moment, for connections that are open too:

    empty: as it is; `hangs`: nothing comes back; `slow`: a second before every piece of an answer;
    `truncates`: half of an answer's first long piece, then the end; `corrupts`: a bit of every long piece
    of an answer is flipped; `resets`: the connection is reset.
    """

    def __init__(self, target: int):
        self.fault = ""
        self._target = target
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self.fault == "resets":
            _reset(client)
            return
        try:
            server = socket.create_connection(("127.0.0.1", self._target), 5)
        except OSError:
            _reset(client)
            return
        self._open |= {client, server}
        back = threading.Thread(target=self._back, args=(server, client), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if self.fault == "resets":
                    _reset(client)
                    break
                server.sendall(data)
        for one in (server, client):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        back.join()
        for one in (server, client):
            self._open.discard(one)
            one.close()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                while self.fault == "hangs":
                    time.sleep(0.01)
                if self.fault == "slow":
                    time.sleep(1.0)
                elif self.fault == "resets":
                    _reset(client)
                    return
                elif self.fault == "truncates" and len(data) > 1000:
                    client.sendall(data[: len(data) // 2])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                elif self.fault == "corrupts" and len(data) > 1000:
                    spoilt = bytearray(data)
                    spoilt[len(data) // 2] ^= 0x10
                    data = bytes(spoilt)
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.fault = ""
        self._listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _reset(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@contextlib.contextmanager
def fault_proxy(target: int) -> Iterator[FaultProxy]:
    """One that runs until the end of the block."""
    proxy = FaultProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
