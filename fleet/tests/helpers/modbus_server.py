"""A Modbus TCP server of pymodbus in this process, and the registers of a CDU that a test sets."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pymodbus.constants import ExcCodes
from pymodbus.server import ModbusTcpServer
from pymodbus.simulator import DataType, SimData, SimDevice

from server_processes import find_free_port

NUM_REGISTERS = 64


@dataclass
class ModbusDevice:
    """Registers from 0 on, holding and input alike. `refused`: addresses that answer with an exception."""

    registers: list[int] = field(default_factory=lambda: [0] * NUM_REGISTERS)
    refused: set[int] = field(default_factory=set)
    port: int = 0

    @property
    def url(self) -> str:
        return f"modbus://127.0.0.1:{self.port}"

    def put(self, address: int, words: Sequence[int]) -> None:
        self.registers[address : address + len(words)] = words

    async def act(
        self, code: int, start: int, address: int, count: int, current: list[int], written: Sequence[int] | None
    ) -> ExcCodes | None:
        if address in self.refused:
            return ExcCodes.ILLEGAL_ADDRESS
        for index in range(len(current)):
            if 0 <= start + index < NUM_REGISTERS:
                current[index] = self.registers[start + index]
        return None


@contextlib.contextmanager
def run_modbus(device: ModbusDevice) -> Iterator[ModbusDevice]:
    """Serve the device as number 1."""
    device.port = device.port or find_free_port()
    loop, is_ready = asyncio.new_event_loop(), threading.Event()
    servers: list[ModbusTcpServer] = []

    async def serve() -> None:
        data = [SimData(0, count=NUM_REGISTERS, values=0, datatype=DataType.REGISTERS)]
        server = ModbusTcpServer(SimDevice(1, data, action=device.act), address=("127.0.0.1", device.port))
        servers.append(server)
        await server.serve_forever(background=True)
        is_ready.set()
        assert server.serving is not None
        with contextlib.suppress(asyncio.CancelledError):
            await server.serving

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert is_ready.wait(10)
    try:
        yield device
    finally:
        asyncio.run_coroutine_threadsafe(servers[0].shutdown(), loop).result(10)  # type: ignore[no-untyped-call]
        thread.join(10)
        loop.close()
