"""What hosts do to find out what the network between them is like; each function is called in a process of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection

from hivenb.engine.process.child import end_with

PORT = 4000

#: Bytes of a datagram, which is one packet.
SIZE = 1000

#: Bytes of datagrams that wait until a busy machine reads them; root may have more than is usual (SO_RCVBUFFORCE).
_WAITING, _FORCE = 2**23, 33


def echo(enter: Callable[[], None], connection: Connection, address: str) -> None:
    """Send each datagram back to whom it comes from; ends with its parent, also with one that is killed."""
    end_with(parent_process().pid)
    enter()
    with _datagrams() as own:
        own.bind((address, PORT))
        connection.send("ready")
        while True:
            content, sender = own.recvfrom(2 * SIZE)
            own.sendto(content, sender)


def round_trips(
    enter: Callable[[], None], connection: Connection, address: str, count: int, pause: float, patience: float
) -> None:
    """Tell the seconds after which datagrams are back; of those that are."""
    enter()
    sent, back = {}, {}
    with _datagrams() as own:
        for number in range(count):
            sent[number] = time.monotonic()
            own.sendto(number.to_bytes(4, "big").ljust(SIZE), (address, PORT))
            own.settimeout(pause)
            _note_answers(own, back)
        end = time.monotonic() + patience
        while len(back) < count and (left := end - time.monotonic()) > 0:
            own.settimeout(left)
            _note_answers(own, back)
    connection.send([at - sent[number] for number, at in back.items()])


def _datagrams() -> socket.socket:
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, _FORCE, _WAITING)
    return own


def _note_answers(own: socket.socket, back: dict[int, float]) -> None:
    try:
        content = own.recv(2 * SIZE)
    except TimeoutError:
        return
    back[int.from_bytes(content[:4], "big")] = time.monotonic()


def serve_stream(enter: Callable[[], None], connection: Connection, address: str) -> None:
    """Take one stream, and tell how many bytes a second come after the first; sends one byte at its end."""
    enter()
    with socket.create_server((address, PORT)) as server:
        connection.send("ready")
        stream, _ = server.accept()
        with stream:
            count, began = 0, 0.0
            while content := stream.recv(2**16):
                began = began or time.monotonic()
                count += len(content)
            connection.send(count / (time.monotonic() - began))
            stream.sendall(b"!")


def send_stream(enter: Callable[[], None], connection: Connection, address: str, size: int, patience: float) -> None:
    """Send a stream of so many bytes; tells whether it was taken, or that nobody answers."""
    enter()
    try:
        with socket.create_connection((address, PORT), timeout=patience) as stream:
            stream.sendall(bytes(size))
            stream.shutdown(socket.SHUT_WR)
            connection.send("taken" if stream.recv(1) == b"!" else "lost")
    except TimeoutError:
        connection.send("no answer")
